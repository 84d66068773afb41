"""Prompts of several turns as real conversations: turn n+1 is asked after the target's own answers.

All arms of a comparison must see the same context, so the answers are fixed before anything is measured:
plain decoding, greedy, writes them once, whatever temperature is measured later. Each turn then is a
prompt of its own. Answers are kept beside the run, so that a resumed run asks the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from spectune.records import Prompt

Answers = dict[str, list[str]]
"""Answers by the digest of the whole prompt, in the order of its turns; the last turn needs none."""

Ask = Callable[[Sequence[Prompt]], Sequence[str]]


def collect_answers(prompts: Sequence[Prompt], ask: Ask, known: Mapping[str, Sequence[str]]) -> Answers:
    """Answers to all turns but the last of every prompt; those in `known` are not asked again.

    `ask` returns one text a prompt, the answer to its last turn. A conversation ends where the target has
    nothing to say: what would follow an empty answer is no conversation.
    """
    answers = {
        prompt.digest: list(known.get(prompt.digest, ())) for prompt in prompts if len(prompt.turns) > 1
    }
    ended: set[str] = set()
    while True:
        waiting = [
            prompt
            for prompt in {prompt.digest: prompt for prompt in prompts}.values()
            if prompt.digest in answers
            and prompt.digest not in ended
            and len(answers[prompt.digest]) < len(prompt.turns) - 1
        ]
        if not waiting:
            return answers
        asked = [turn_of(prompt, answers[prompt.digest]) for prompt in waiting]
        for prompt, text in zip(waiting, ask(asked), strict=True):
            if text.strip():
                answers[prompt.digest].append(text)
            else:
                ended.add(prompt.digest)


def turn_of(prompt: Prompt, answers: Sequence[str]) -> Prompt:
    """The prompt that asks the turn after `answers`."""
    number = len(answers)
    suffix = f"#{number + 1}" if number else ""
    return replace(
        prompt,
        prompt_id=f"{prompt.prompt_id}{suffix}",
        turns=prompt.turns[: number + 1],
        answers=tuple(answers),
    )


def as_turns(prompts: Sequence[Prompt], answers: Mapping[str, Sequence[str]]) -> tuple[Prompt, ...]:
    """Every turn that can be asked as a prompt of its own, the turns of a conversation in their order."""
    expanded: list[Prompt] = []
    for prompt in prompts:
        own = list(answers.get(prompt.digest, ()))
        last = min(len(own) + 1, len(prompt.turns))
        expanded += [turn_of(prompt, own[:number]) for number in range(last)]
    return tuple(expanded)

"""Whether a prompt fits the context with its output and the tokens that are drafted beyond it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from spectune.records import Prompt

Encode = Callable[[Sequence[dict[str, str]]], Sequence[int]]


def fits(
    encode: Encode, *, limit: int, max_tokens: int, num_draft_tokens: int, context_tokens: int = 0
) -> Callable[[Prompt], str | None]:
    """A judge of prompts: why one does not fit, or None.

    Encoded prompt + context + output + drafts ≤ limit, all in the target's tokens. Lengths are those
    after encoding: text that was decoded from ids is often longer than the ids were. Of a conversation
    every turn and every answer must fit.
    """

    def judge(prompt: Prompt) -> str | None:
        output = min(max_tokens, prompt.max_tokens or max_tokens)
        messages = [{"role": "system", "content": prompt.system}] if prompt.system else []
        for turn in prompt.turns:
            messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": ""}]
        length = len(encode(messages[:-1])) + context_tokens + len(prompt.turns) * output + num_draft_tokens
        if length <= limit:
            return None
        return f"longer than the context of {limit} tokens with its output and {num_draft_tokens} drafts"

    return judge

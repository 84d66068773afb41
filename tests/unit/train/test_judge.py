"""Judging heads on a small target on disk: the numbers are those of live decoding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from spectune.draft.checkpoint import load_head
from spectune.draft.eagle3 import Eagle3Drafter
from spectune.engine.scheduler import Engine
from spectune.engine.target import Target
from spectune.engine.tokenizer import Tokenizer
from spectune.errors import CheckpointError, UsageError
from spectune.records import Prompt, Request, Sampling, SpecConfig
from spectune.train.judge import JudgePlan, judge
from tests.support.toys import head_config, head_tensors, save_head, save_target

TEMPLATE = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"


@pytest.fixture
def target_dir(tmp_path: Path) -> Path:
    """A target of printable ASCII that chats between angle brackets."""
    folder = save_target(tmp_path / "target")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def save_random_head(
    folder: Path, target_dir: Path, seed: int, *, own_embedding: bool = False, **keys: object
) -> Path:
    target = Target.load(target_dir, dtype="float32")
    layers = {"eagle_aux_hidden_state_layer_ids": list(target.aux_layer_ids)}
    config = head_config(target.config, 60, **layers, **keys)
    tensors = head_tensors(config, target.config, seed)
    if own_embedding:
        tensors["embed_tokens.weight"] = target.embed_weight.flip(0).clone()
    # rows near the target's own, so that a random head is right now and then
    rows = torch.arange(60) + tensors["d2t"]
    tensors["lm_head.weight"] = target.embed_weight[rows].clone()
    return save_head(folder, config, tensors)


def plan_for(target_dir: Path, heads: dict[str, Path], **changes: object) -> JudgePlan:
    prompts = tuple(
        Prompt(prompt_id=f"p{i}", category="ab"[i % 2], turns=(words,))
        for i, words in enumerate(["hello there", "why", "tell me a story", "one two three", "x"])
    )
    values: dict[str, object] = {
        "target": target_dir,
        "heads": tuple(heads.items()),
        "prompts": prompts,
        "max_tokens": 24,
        "num_tokens": 3,
        "dtype": "float32",
    }
    return JudgePlan(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "how",
    [{}, {"norm_before_residual": True}, {"own_embedding": True}, {"rope_theta": 77.0}],
    ids=["classic", "norm-before-residual", "own-embedding", "other-rotation"],
)
def test_judge_acceptance_length_is_that_of_live_decoding(
    how: dict[str, object], target_dir: Path, tmp_path: Path
) -> None:
    """Accepted drafts and rounds along the texts equal those of a real speculative run, text by text."""
    path = save_random_head(tmp_path / "head", target_dir, seed=1, **how)  # type: ignore[arg-type]
    plan = plan_for(target_dir, {"h": path})

    result = judge(plan)

    target, tokenizer = Target.load(target_dir, dtype="float32"), Tokenizer.from_dir(target_dir)
    drafter = Eagle3Drafter(load_head(path, target.config), target)
    requests = [
        Request(
            request_id=prompt.prompt_id,
            prompt_ids=tuple(tokenizer.encode_chat([{"role": "user", "content": prompt.turns[0]}])),
            category=prompt.category,
            sampling=Sampling(temperature=0.0, max_tokens=24),
        )
        for prompt in plan.prompts
    ]
    block = Engine(target, tokenizer, drafter=drafter).generate(requests, SpecConfig.chain("eagle3", 3))
    live = {record.request_id: record for record in block.requests}
    looped = {text.prompt_id for text in result.texts if text.had_loop}
    steps = [step for name, record in live.items() if name not in looped for step in record.steps]
    overall = result.reports[0].overall
    assert overall.num_rounds == len(steps) > 0
    assert overall.acceptance_length is not None
    assert overall.acceptance_length.value == pytest.approx(
        1 + sum(s.num_accepted for s in steps) / len(steps)
    )


def test_judge_two_heads_on_the_same_texts_are_paired(target_dir: Path, tmp_path: Path) -> None:
    """A head against its own copy is exactly as good, and no winner is named."""
    path = save_random_head(tmp_path / "head", target_dir, seed=1)

    result = judge(plan_for(target_dir, {"one": path, "two": path}, temperatures=(0.0, 1.0)))

    assert [report.name for report in result.reports] == ["one", "two"]
    assert [(pair.ratio.value, pair.ratio.low) for pair in result.pairs] == [(1.0, 1.0)]
    assert "not beyond the noise" in result.verdict
    assert {text.temperature for text in result.texts} == {0.0, 1.0}
    json.dumps(result.to_dict(), allow_nan=False)


def test_judge_head_of_another_vocabulary_is_refused(target_dir: Path, tmp_path: Path) -> None:
    """Before anything is decoded the mismatch is named with both sizes."""
    path = save_random_head(tmp_path / "head", target_dir, seed=1)
    data = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(data | {"vocab_size": 50}))

    with pytest.raises(CheckpointError, match="vocab_size 50 differs"):
        judge(plan_for(target_dir, {"h": path}))


def test_judge_without_prompts_or_heads_is_refused(target_dir: Path, tmp_path: Path) -> None:
    """Nothing to judge is a usage error."""
    path = save_random_head(tmp_path / "head", target_dir, seed=1)

    with pytest.raises(UsageError, match="no prompt"):
        plan_for(target_dir, {"h": path}, prompts=())
    with pytest.raises(UsageError, match="no head"):
        plan_for(target_dir, {})


def test_judge_asks_the_whole_conversation(target_dir: Path, tmp_path: Path) -> None:
    """A prompt with a system message and an answered turn is asked with both, as a sweep asks it."""
    head = save_random_head(tmp_path / "head", target_dir, seed=1)
    prompt = Prompt(prompt_id="p", category="a", system="be brief", turns=("hi", "why"), answers=("hello",))

    (asked,) = judge(plan_for(target_dir, {"h": head}, prompts=(prompt,))).texts

    # one token a character: <be brief><hi><hello><why>
    assert asked.num_prompt_tokens == len("<be brief><hi><hello><why>")

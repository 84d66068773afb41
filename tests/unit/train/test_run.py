"""`pipeline.run` from end to end on a small target on disk: what it leaves, and what it refuses beforehand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from spectune.draft.checkpoint import load_head
from spectune.engine.checkpoint import TargetConfig
from spectune.errors import CheckpointError, StoreError, UsageError
from spectune.train import pipeline
from spectune.train.corpus import read_corpus
from spectune.train.plan import TrainEvent, TrainPlan
from tests.support.toys import head_config, head_tensors, save_head, save_target

TEMPLATE = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"
REFUSES_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system here') }}{% endif %}"


@pytest.fixture
def target_dir(tmp_path: Path) -> Path:
    folder = save_target(tmp_path / "target")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder


def plan_for(target_dir: Path, output_dir: Path, **changes: object) -> TrainPlan:
    plan = TrainPlan(
        target=target_dir, output_dir=output_dir, num_tokens=150, max_answer_tokens=8, max_prompt_tokens=64,
        generate_batch_size=4, draft_vocab_size=40, ttt_steps=2, epochs=1, batch_tokens=64, holdout_every=4,
        dtype="float32",
    )  # fmt: skip
    return replace(plan, **changes)


def write_prompts(path: Path, *rows: dict[str, object]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_run_learns_from_the_users_prompts_and_leaves_a_head_without_folders(
    target_dir: Path, tmp_path: Path
) -> None:
    """Three prompts of a file are asked first; the head loads, names no folder, and a second run changes nothing."""
    traffic = write_prompts(
        tmp_path / "traffic.jsonl", *({"prompt": f"my own question number {i}"} for i in range(3))
    )
    events: list[TrainEvent] = []
    plan = plan_for(target_dir, tmp_path / "run", prompts=traffic)

    result = pipeline.run(plan, events.append)

    rows = read_corpus(tmp_path / "run" / "corpus.jsonl")
    assert {row.prompt for row in rows[:3]} == {f"my own question number {i}" for i in range(3)}
    assert [row.source for row in rows].count("user") == 3
    config = TargetConfig.from_dir(target_dir)
    assert load_head(result.head_dir, config).config.draft_vocab_size == 40
    text = (result.head_dir / "config.json").read_text()
    assert str(tmp_path) not in text
    assert json.loads(text)["spectune"]["plan"]["prompts"] == "traffic.jsonl"
    said = [event.message for event in events]
    assert any("3 of 3 prompts used; 3 are asked first" in message for message in said)
    assert any("GB of features to come" in message for message in said)
    before = (result.head_dir / "model.safetensors").read_bytes()
    assert (pipeline.run(plan).head_dir / "model.safetensors").read_bytes() == before


def test_run_with_other_prompts_in_the_same_folder_is_refused(target_dir: Path, tmp_path: Path) -> None:
    """A corpus that asked one file is not continued with another."""
    one = write_prompts(tmp_path / "one.jsonl", {"prompt": "is this the first file of prompts"})
    two = write_prompts(tmp_path / "two.jsonl", {"prompt": "is this the second file of prompts"})
    pipeline.run(plan_for(target_dir, tmp_path / "run", prompts=one))

    with pytest.raises(StoreError, match="other prompts"):
        pipeline.run(plan_for(target_dir, tmp_path / "run", prompts=two))


def test_run_on_prompts_that_measure_is_refused_before_anything_is_decoded(
    target_dir: Path, tmp_path: Path
) -> None:
    """Prompts of the built-in workload would be learnt and then judge the head."""
    events: list[TrainEvent] = []

    with pytest.raises(UsageError, match="among those that measure"):
        pipeline.run(plan_for(target_dir, tmp_path / "run", prompts="chat"), events.append)

    assert not (tmp_path / "run" / "corpus.jsonl").exists()


def test_run_names_the_prompt_that_the_template_refuses(target_dir: Path, tmp_path: Path) -> None:
    """A template without system messages: the prompt that has one is named before anything is decoded."""
    (target_dir / "chat_template.jinja").write_text(REFUSES_SYSTEM + TEMPLATE, encoding="utf-8")
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "why is it so"}]
    traffic = write_prompts(tmp_path / "traffic.jsonl", {"messages": messages})

    with pytest.raises(CheckpointError, match=r"no system here.*'why is it so'"):
        pipeline.run(plan_for(target_dir, tmp_path / "run", prompts=traffic))

    assert not (tmp_path / "run" / "corpus.jsonl").exists()


def test_run_from_a_head_of_another_rotation_is_refused_before_anything_is_decoded(
    target_dir: Path, tmp_path: Path
) -> None:
    """A head with a rope base of its own would be another head from its first step on."""
    target = TargetConfig.from_dir(target_dir)
    config = head_config(target, 60, eagle_aux_hidden_state_layer_ids=[2, 4, 5], rope_theta=12345.0)
    head = save_head(tmp_path / "head", config, head_tensors(config, target))

    with pytest.raises(CheckpointError, match="rope_theta is 12345"):
        pipeline.run(plan_for(target_dir, tmp_path / "run", init_from=head))

    assert not (tmp_path / "run" / "corpus.jsonl").exists()


def test_run_on_a_shallow_target_is_refused(tmp_path: Path) -> None:
    """Four layers have no three different streams 2, L//2, L-3."""
    folder = save_target(tmp_path / "shallow", num_hidden_layers=4)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")

    with pytest.raises(CheckpointError, match="4 layers"):
        pipeline.run(plan_for(folder, tmp_path / "run"))


def test_run_with_prompts_shorter_than_the_template_is_refused(target_dir: Path, tmp_path: Path) -> None:
    """Two characters of frame and six of words need eight tokens."""
    with pytest.raises(UsageError, match="max-prompt-tokens 7 leaves no room"):
        pipeline.run(plan_for(target_dir, tmp_path / "run", max_prompt_tokens=7))


def test_run_json_that_is_damaged_is_named(target_dir: Path, tmp_path: Path) -> None:
    """An empty run.json, as a kill may leave it, is told with what to do."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("")

    with pytest.raises(StoreError, match=r"run\.json is damaged"):
        pipeline.run(plan_for(target_dir, tmp_path / "run"))

"""`spectune train`: flags are the settings of a plan; judging and exporting heads from end to end."""

from __future__ import annotations

import inspect
import json
from dataclasses import fields
from pathlib import Path

import pytest

from spectune.cli.train import eagle3
from spectune.cli.train_eval import evaluate
from spectune.cli.train_export import export
from spectune.draft.checkpoint import load_head
from spectune.engine.checkpoint import TargetConfig
from spectune.errors import UsageError
from spectune.train.plan import TrainPlan
from tests.support.toys import head_config, head_tensors, save_head, save_target


def test_train_defaults_are_those_of_the_plan() -> None:
    """A flag that is not given changes nothing; --num-tokens-target is the plan's num_tokens."""
    planned = {field.name: field.default for field in fields(TrainPlan)}
    planned["num_tokens_target"] = planned["num_tokens"]
    flags = {name: flag.default for name, flag in inspect.signature(eagle3).parameters.items()}
    shared = (flags.keys() & planned.keys()) - {"output_dir", "apart_from"}

    assert {"num_tokens_target", "ttt_steps", "draft_vocab_size", "epochs", "lr", "seed"} <= shared
    assert {name: flags[name] for name in shared} == {name: planned[name] for name in shared}


@pytest.fixture
def toy(tmp_path: Path) -> tuple[Path, Path]:
    """A target that chats between angle brackets, and a random head for it."""
    target_dir = save_target(tmp_path / "target")
    (target_dir / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m['content'] }}>{% endfor %}", encoding="utf-8"
    )
    target = TargetConfig.from_dir(target_dir)
    config = head_config(target, 60, eagle_aux_hidden_state_layer_ids=[2, 4, 5])
    return target_dir, save_head(tmp_path / "head", config, head_tensors(config, target))


def test_eval_tells_every_cut_and_a_verdict(
    toy: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One head, two prompts: lengths by category and place, calibration, and eval.json on disk."""
    target_dir, head = toy
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "hello you", "category": "a"}\n{"prompt": "why not", "category": "b"}\n')

    evaluate(
        heads=[str(head)], model=str(target_dir), workload=str(prompts), num_prompts=None, max_tokens=8,
        num_tokens=2, temperature=None, seed=0, device="cpu", output_dir=tmp_path / "out", as_json=False,
    )  # fmt: skip

    text = capsys.readouterr().out
    assert "chain of 2" in text
    assert "category a:" in text
    assert " accepted " in next(line for line in text.splitlines() if "category a:" in line)
    assert "place in output 0-31:" in text
    assert text.splitlines()[-1].startswith("verdict: ")
    saved = json.loads((tmp_path / "out" / "eval.json").read_text())
    assert {asked["category"] for asked in saved["texts"]} == {"a", "b"}
    assert saved["settings"]["num_prompts"] == 2
    assert list(saved["settings"]["heads"]) == [str(head)]
    assert "acceptance length" in (tmp_path / "out" / "eval.html").read_text()


def test_eval_of_a_folder_that_is_no_head_is_refused(toy: tuple[Path, Path], tmp_path: Path) -> None:
    """A name that is neither a folder nor a shipped head is named."""
    with pytest.raises(UsageError, match="nowhere is no folder of a draft head"):
        evaluate(heads=["nowhere"], model=str(toy[0]))


def test_export_writes_the_layout_and_keeps_what_is_there(toy: tuple[Path, Path], tmp_path: Path) -> None:
    """The Speculators folder reads back as the same head; a folder that holds files is not touched."""
    target_dir, head = toy
    out = tmp_path / "out"

    export(str(head), out, "speculators", str(target_dir), "toy/target", as_json=False)

    target = TargetConfig.from_dir(target_dir)
    same, first = load_head(out, target), load_head(head, target)
    assert same.draft_to_target is not None
    assert first.draft_to_target is not None
    assert same.draft_to_target.tolist() == first.draft_to_target.tolist()
    with pytest.raises(UsageError, match="is not empty"):
        export(str(head), out, "classic", str(target_dir), None, as_json=False)

"""What SGLang's own tools wrote and what its users typed, read as records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spectune.errors import UsageError
from spectune.records import SpecConfig, Status
from spectune.store.sglang_bench import (
    read_bench_speculative,
    read_command,
    read_command_file,
    read_sglang_bench,
)

INFO = {
    "served_model_name": "org/target",
    "speculative_algorithm": "EAGLE3",
    "speculative_draft_model_path": "org/head",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
    "speculative_adaptive": False,
}


def row(**changes: Any) -> dict[str, Any]:
    """A result of bench_serving: 4 requests, 400 tokens in 2 s."""
    values: dict[str, Any] = {
        "backend": "sglang", "dataset_name": "random", "request_rate": "inf", "max_concurrency": 2,
        "server_info": INFO, "duration": 2.0, "completed": 4, "total_input_tokens": 100,
        "total_output_tokens": 400, "accept_length": 2.17, "errors": ["", "", "", ""],
    }  # fmt: skip
    for name, mean in (("ttft", 50.0), ("tpot", 3.4), ("itl", 8.7), ("e2e_latency", 390.0)):
        values |= {f"{statistic}_{name}_ms": mean for statistic in ("mean", "median", "std")}
        values |= {f"p{percent}_{name}_ms": mean * 2 for percent in (90, 95, 99)}
    return {**values, **changes}


def written(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(f"{json.dumps(one)}\n" for one in rows), encoding="utf-8")
    return path


def test_result_of_bench_serving_keeps_counts_and_durations(tmp_path: Path) -> None:
    """Seconds inside, the gap between chunks under a name that is not ITL, the config as it resolved."""
    (point,) = read_sglang_bench(written(tmp_path / "r.jsonl", row()))

    assert point.config == SpecConfig.chain("eagle3", 3, draft_model="org/head")
    assert point.model == "org/target"
    told = point.measurement
    assert told is not None
    assert told.output_throughput == 200.0
    assert told.tpot_s is not None
    assert told.tpot_s.mean == pytest.approx(0.0034)
    assert told.inter_chunk_s is not None
    assert told.inter_chunk_s.mean == pytest.approx(0.0087)
    assert told.tpot_s.percentile(99) == pytest.approx(0.0068)
    assert told.request_rate is None


def test_acceptance_length_of_the_file_is_a_setting_with_a_caution(tmp_path: Path) -> None:
    """It counts since the server's start: no SpecCounts are made of it."""
    (point,) = read_sglang_bench(written(tmp_path / "r.jsonl", row()))

    assert ("cumulative_acceptance_length", 2.17) in point.settings
    assert point.measurement is not None
    assert point.measurement.spec is None
    assert any("since its start" in text for text in point.cautions)


def test_plain_server_is_off(tmp_path: Path) -> None:
    """No algorithm in what the server resolved is plain decoding."""
    info = {**dict.fromkeys(INFO), "served_model_name": "org/target"}
    (point,) = read_sglang_bench(written(tmp_path / "r.jsonl", row(server_info=info, accept_length=None)))

    assert point.config == SpecConfig.off()
    assert point.cautions == ()


def test_file_without_server_info_does_not_guess(tmp_path: Path) -> None:
    """Another backend of the bench keeps no /server_info: the configuration is unknown, not off."""
    (point,) = read_sglang_bench(written(tmp_path / "r.jsonl", row(server_info=None)))

    assert point.config is None
    assert any("not known" in text for text in point.cautions)


def test_failed_requests_give_no_durations(tmp_path: Path) -> None:
    """2 of 4 failed: the status says so with the first error."""
    errors = ["", "", "HTTP 500: declared", "HTTP 500: declared"]
    (point,) = read_sglang_bench(written(tmp_path / "r.jsonl", row(completed=2, errors=errors)))

    assert point.status is Status.FAILED
    assert point.reason == "2 of 4 requests failed; first: HTTP 500: declared"
    assert point.measurement is not None
    assert point.measurement.tpot_s is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no result object"),
        ("{not json", "cannot be read"),
        ("[1]", "holds no result object"),
        ('{"duration": 1}', "completed is None"),
    ],
)
def test_file_that_is_no_result_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    """The file and what is missing are named."""
    file = tmp_path / "r.jsonl"
    file.write_text(text, encoding="utf-8")

    with pytest.raises(UsageError, match=message):
        read_sglang_bench(file)


def test_rows_of_bench_speculative_are_leads_and_not_measurements(tmp_path: Path) -> None:
    """A tree, and the row of zeros that is plain decoding; neither has a time of a request."""
    tree = {
        "batch_size": 4, "steps": 5, "topk": 4, "num_draft_tokens": 16, "acc_length": 3.1,
        "step_time": 0.02, "speed": 155.0, "completion_tokens": 512.0,
    }  # fmt: skip
    plain = {**tree, "steps": 0, "topk": 0, "num_draft_tokens": 0, "acc_length": 1.0}
    points = read_bench_speculative(written(tmp_path / "o.jsonl", tree, plain))

    assert points[0].config == SpecConfig(method="eagle", num_steps=5, topk=4, num_draft_tokens=16)
    assert points[1].config == SpecConfig.off()
    assert all(point.measurement is None and point.status is Status.SUSPECT for point in points)
    assert "20 ms at batch size 4" in str(points[0].reason)


def test_two_spellings_of_a_command_are_equal() -> None:
    """Alias, underscore, equals sign, order and program: one set of settings."""
    first = read_command(
        "python -m sglang.launch_server --model-path org/t --tp 2 --speculative-algorithm EAGLE3 "
        "--speculative-draft-model-path org/h --speculative-num-steps 3 --speculative-eagle-topk 1 "
        "--speculative-num-draft-tokens 4"
    )
    second = read_command(
        "sglang serve --speculative_num_steps=3 --speculative-eagle-topk=1 --speculative-num-draft-tokens=4 "
        "--speculative-draft-model org/h --speculative-algorithm EAGLE3 --tensor-parallel-size=2 --model org/t"
    )

    assert first == second
    assert first.fingerprint == second.fingerprint
    assert first.config == SpecConfig.chain("eagle3", 3, draft_model="org/h")
    assert first.model == "org/t"


def test_steps_alone_are_completed_to_a_chain() -> None:
    """num_steps 2 means topk 1 and 3 verified tokens."""
    found = read_command("--speculative-algorithm NGRAM --speculative-num-steps 2")

    assert found.config == SpecConfig.chain("ngram", 2)


def test_chain_with_another_number_of_tokens_is_what_sglang_runs() -> None:
    """For topk 1 SGLang verifies one token more than it drafts, whatever was said."""
    found = read_command(
        "--speculative-algorithm NGRAM --speculative-num-steps 3 --speculative-eagle-topk 1 "
        "--speculative-num-draft-tokens 9"
    )

    assert found.config == SpecConfig.chain("ngram", 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "--speculative-algorithm EAGLE3 --speculative-num-steps 3",
            "without --speculative-draft-model-path",
        ),
        (
            "--speculative-algorithm NGRAM --speculative-num-draft-tokens 4",
            "--speculative-num-steps is not there",
        ),
        (
            "--speculative-algorithm NGRAM --speculative-num-steps 1 --speculative-eagle-topk 2 "
            "--speculative-num-draft-tokens 9",
            "drafts 2",
        ),
    ],
)
def test_command_that_sglang_would_not_run_is_refused(text: str, message: str) -> None:
    """Before any start, with the flag that is missing or the number that does not fit."""
    with pytest.raises(UsageError, match=message):
        read_command(text)


def test_command_in_a_script_is_found(tmp_path: Path) -> None:
    """Comments and continued lines, as people keep them; nothing was measured, and it says so."""
    script = tmp_path / "serve.sh"
    script.write_text(
        "#!/bin/sh\npython -m sglang.launch_server --model org/t \\\n  --speculative-algorithm NGRAM "
        "--speculative-num-steps 2\n",
        encoding="utf-8",
    )

    (point,) = read_command_file(script)

    assert (point.model, point.config) == ("org/t", SpecConfig.chain("ngram", 2))
    assert point.measurement is None
    assert "nothing was measured" in str(point.reason)

"""Files that vLLM's own benchmark wrote, read as our records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spectune.errors import UsageError
from spectune.metrics.served import vllm_fields
from spectune.policy.imported import imported_rows
from spectune.records import ImportedPoint, SpecConfig, SpecCounts, Status
from spectune.store.vllm_bench import FIELDS, read_vllm_bench

FOLDER = Path(__file__).parent / "vllm_bench_0.32.0"
SWEEP = FOLDER / "sweep"
K3 = SWEEP / "SERVE--k3-BENCH--max_concurrency=4"
DETAILED: dict[str, Any] = json.loads((FOLDER / "detailed.json").read_text())
TOLD: dict[str, Any] = json.loads((FOLDER / "fields.json").read_text())

# The peak counts stream events, the concurrency everybody within a second; the rest is bookkeeping.
NOT_TAKEN = {"max_output_tokens_per_s", "max_concurrent_requests", "rtfx", "endpoint_type", "tokenizer_id"}


def one(path: Path) -> ImportedPoint:
    (point,) = read_vllm_bench(path)
    return point


def written(tmp_path: Path, changes: dict[str, Any], *, without: tuple[str, ...] = ()) -> Path:
    """The detailed file with some entries changed or left out."""
    row = {key: value for key, value in {**DETAILED, **changes}.items() if key not in without}
    file = tmp_path / "result.json"
    file.write_text(json.dumps(row), encoding="utf-8")
    return file


def test_every_figure_comes_back_under_its_name_and_in_its_unit() -> None:
    """Read into seconds and counts, written again in vLLM's names: the same values as in vLLM's file."""
    (row,) = imported_rows([one(FOLDER / "detailed.json")])

    scalars = {key: value for key, value in DETAILED.items() if not isinstance(value, list)}
    assert {} == {
        key: (value, row.get(key, "absent"))
        for key, value in scalars.items()
        if key not in NOT_TAKEN and row.get(key, "absent") != (value if isinstance(value, str) or value is None
                                                               else pytest.approx(value, rel=1e-12))
    }  # fmt: skip
    key = "spec_decode_per_position_acceptance_rates"
    assert pytest.approx(DETAILED[key]) == row[key]


def test_every_name_of_ours_is_one_that_vllm_writes() -> None:
    """No field under vLLM's name that vLLM does not have."""
    point = one(FOLDER / "detailed.json")
    assert point.measurement is not None
    names = {*TOLD["fields"]} | {
        f"{statistic}_{metric}_ms"
        for metric in TOLD["latency_metrics"]
        for statistic in ("mean", "median", "std", "p50", "p90", "p95", "p99")
    }

    assert set() == set(vllm_fields(point.measurement)) - names


def test_known_fields_are_those_of_the_source_that_wrote_them() -> None:
    """What the reader takes for a measured field or bookkeeping is the list of that version."""
    measured = {name for name in TOLD["fields"] if name.startswith(("spec_decode", "diffusion"))}

    assert set(TOLD["fields"]) - measured | {"run_number"} == FIELDS


def test_run_file_and_sweep_directory_give_the_same_record() -> None:
    """The same measurement is the same record, whichever way it was handed over."""
    alone = one(K3 / "run=1.json")
    of_directory = read_vllm_bench(SWEEP)
    of_combination = read_vllm_bench(K3)
    of_summary = read_vllm_bench(K3 / "summary.json")

    assert 8 == len(of_directory)
    assert alone in of_directory
    assert [alone] == of_combination[1:]
    assert of_combination == of_summary
    assert alone.source != of_summary[1].source


def test_result_file_and_sweep_run_of_the_same_numbers_agree(tmp_path: Path) -> None:
    """A plain result lacks what the sweep added to it; its measurement is the same."""
    row = json.loads((K3 / "run=0.json").read_text())
    for added in ("run_number", "_benchmark_name", "speculative_config"):
        del row[added]
    file = tmp_path / "plain.json"
    file.write_text(json.dumps(row))

    assert one(file).measurement == one(K3 / "run=0.json").measurement


def test_sweep_says_how_each_arm_speculated() -> None:
    """The settings of the sweep name method and draft length; the arm without them counted no drafts."""
    points = read_vllm_bench(SWEEP)

    assert [SpecConfig.chain("ngram", 3)] * 4 + [SpecConfig.off()] * 4 == [point.config for point in points]
    assert [0, 1] * 4 == [point.run_number for point in points]
    assert "taken as plain decoding" in " ".join(points[-1].cautions)


def test_counts_of_speculation_are_the_files() -> None:
    """Counts come back whole from the rates by position."""
    point = one(FOLDER / "detailed.json")

    assert point.measurement is not None
    assert point.measurement.spec == SpecCounts(
        num_drafts=152, num_draft_tokens=456, num_accepted_tokens=238, accepted_per_position=(124, 77, 37)
    )


def test_peak_below_the_mean_is_left_out_with_the_reason() -> None:
    """168 tokens/s at best and 706 on average cannot both be true."""
    point = one(FOLDER / "detailed.json")

    assert point.measurement is not None
    assert point.measurement.peak_output_tokens_per_s is None
    assert any("peak of 168 tokens/s counts stream events" in text for text in point.cautions)
    assert 4 == point.measurement.max_in_flight


def test_peak_of_one_token_events_is_taken(tmp_path: Path) -> None:
    """Where every event was one token the peak is one, if it is not below the mean."""
    changes = {"itls": [[0.01]] * 16, "output_lens": [2] * 16, "total_output_tokens": 32, "duration": 1.0}

    point = one(written(tmp_path, {**changes, "max_output_tokens_per_s": 32.0}))

    assert point.measurement is not None
    assert 32.0 == point.measurement.peak_output_tokens_per_s


def test_zeros_of_a_run_without_success_become_unknown(tmp_path: Path) -> None:
    """vLLM writes 0 ms and 0 tokens/s where nothing succeeded; here it is a failed point without figures."""
    zeros = {key: 0.0 for key in DETAILED if key.endswith("_ms")}
    changes = {**zeros, "completed": 0, "failed": 16, "total_output_tokens": 0, "errors": ["Not Found"] * 16}

    point = one(written(tmp_path, changes))

    assert Status.FAILED is point.status
    assert "16 of 16 requests failed; first: Not Found" == point.reason
    assert point.measurement is not None
    assert (None, None) == (point.measurement.tpot_s, point.measurement.output_throughput)


def test_two_failures_in_a_hundred_leave_no_latency(tmp_path: Path) -> None:
    """A point below 99% success has counts only."""
    point = one(written(tmp_path, {"num_prompts": 100, "completed": 98, "failed": 2}))

    assert Status.FAILED is point.status
    assert point.measurement is not None
    assert point.measurement.ttft_s is None


@pytest.mark.parametrize(
    ("entry", "config"),
    [
        ({"speculative_config": '{"method": "eagle3", "model": "head", "num_speculative_tokens": 2}'},
         SpecConfig.chain("eagle3", 2, draft_model="head")),
        ({"speculative_config.method": "mtp", "speculative_config.num_speculative_tokens": 1},
         SpecConfig.chain("mtp", 1)),
        ({"speculative-config.num_speculative_tokens": 3}, SpecConfig.chain("unknown", 3)),
        ({"spec_method": "ngram", "spec_tokens": "4"}, SpecConfig.chain("ngram", 4)),
        ({"speculative_config": None}, SpecConfig.off()),
        ({}, SpecConfig.chain("unknown", 3)),
    ],
    ids=["json", "dotted", "dotted with dash", "metadata", "null", "counters only"],
)  # fmt: skip
def test_speculative_settings_are_read_in_every_spelling(
    tmp_path: Path, entry: dict[str, Any], config: SpecConfig
) -> None:
    """Sweep parameters and metadata name the configuration in several ways."""
    assert config == one(written(tmp_path, entry)).config


def test_own_metadata_and_sweep_parameters_are_settings(tmp_path: Path) -> None:
    """What is no field of the benchmark is kept as it is."""
    settings = dict(one(written(tmp_path, {"gpu": "H200", "max_num_seqs": 16})).settings)

    assert {"gpu": "H200", "max_num_seqs": 16} == settings


def test_several_results_in_one_file_are_several_points(tmp_path: Path) -> None:
    """vLLM appends results as one object a line."""
    file = tmp_path / "appended.json"
    line = json.dumps(DETAILED)
    file.write_text(f"{line}\n{line}\n", encoding="utf-8")

    assert 2 == len(read_vllm_bench(file))


def test_failed_runs_are_points_and_warm_ups_are_not(tmp_path: Path) -> None:
    """A sweep that went on after an error keeps the error with its settings."""
    folder = tmp_path / "sweep" / "SERVE--k3"
    folder.mkdir(parents=True)
    (folder / "run=0.json").write_text(json.dumps({**DETAILED, "run_number": 0}))
    (folder / "warmup.json").write_text(json.dumps(DETAILED))
    (folder / "run=1.failure.json").write_text(
        json.dumps(
            {
                "run_number": 1,
                "error_type": "RuntimeError",
                "error": "server died",
                "serve_overrides": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
                "bench_overrides": {"max_concurrency": 4},
            }
        )
    )

    good, bad = read_vllm_bench(tmp_path / "sweep")

    assert (Status.OK, Status.FAILED) == (good.status, bad.status)
    assert (SpecConfig.chain("ngram", 3), "RuntimeError: server died", None) == (
        bad.config,
        bad.reason,
        bad.measurement,
    )


@pytest.mark.parametrize(
    ("changes", "without", "error"),
    [
        ({}, ("duration",), "duration is None"),
        ({}, ("total_output_tokens",), "total_output_tokens is None"),
        ({"duration": 0.0}, (), "duration of 0.0 s is not positive"),
        ({"completed": "many"}, (), "completed is 'many'"),
        ({"spec_decode_acceptance_length": 1.57}, (), "acceptance length 1.57 is not 1"),
        ({}, ("spec_decode_draft_tokens",), "spec_decode_draft_tokens is None"),
        ({"request_rate": "fast"}, (), "cannot be true: could not convert"),
        ({"speculative_config": "{"}, (), "speculative_config is not JSON"),
        ({"speculative_config": "[1]"}, (), "speculative_config is not an object"),
        ({"spec_tokens": "four"}, (), "the speculative settings cannot be read"),
    ],
)
def test_files_that_cannot_be_used_are_named_with_the_key(
    tmp_path: Path, changes: dict[str, Any], without: tuple[str, ...], error: str
) -> None:
    """Which file, which key, which value."""
    with pytest.raises(UsageError, match=rf"result\.json.*{error}"):
        read_vllm_bench(written(tmp_path, changes, without=without))


@pytest.mark.parametrize("text", ["", "{not json", "[]", "[1]", "3"])
def test_what_is_no_result_is_a_usage_error(tmp_path: Path, text: str) -> None:
    """Any other file is refused by name."""
    file = tmp_path / "other.json"
    file.write_text(text, encoding="utf-8")

    with pytest.raises(UsageError, match=r"other\.json"):
        read_vllm_bench(file)


def test_empty_directory_is_a_usage_error(tmp_path: Path) -> None:
    """What is expected there is said."""
    with pytest.raises(UsageError, match="holds no result of vllm bench"):
        read_vllm_bench(tmp_path)

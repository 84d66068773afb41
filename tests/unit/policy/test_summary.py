"""A hand-made run directory from disk to summary, JSON and CSV."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import asdict, replace

import pytest

from spectune.errors import StoreError
from spectune.policy import export
from spectune.policy.summary import summarize
from spectune.records import Point, PointOutcome, RoundTimes, Sampling, Status
from spectune.store import RunStore

CATEGORIES = ("chat", "code")
NUM_BLOCKS = 8


@pytest.fixture
def points(make):
    """Off and two chains at batch 1."""
    configs = (make.chain(3), make.chain(5), make.off)
    return [
        Point(config=config, cell=make.cell(), workload_hash="w", sampling=Sampling(max_tokens=8))
        for config in configs
    ]


@pytest.fixture
def store(tmp_path, make, points):
    """An empty run of those points."""
    return RunStore.create(
        tmp_path / "run",
        {
            "schema_version": 1,
            "fingerprint": asdict(make.fingerprint()),
            "provenance": {"python": "3.11"},
            "workload": {
                "name": "made",
                "digest": "w",
                "num_prompts": 8,
                "categories": {"chat": 4, "code": 4},
            },
            "points": [{"point_id": point.point_id, **point.canonical} for point in points],
            "pruned": [["eagle3 D=2 k=2 N=9", "needs 8 drafted nodes, drafts 6"]],
        },
    )


def fill(make, store, point, tpots, *, accepted=(1, 2), status=Status.OK, reason=None):
    """One point with blocks of chat and code in turn; `tpots` by category."""
    drafted = point.config.num_steps
    for index in range(NUM_BLOCKS):
        category = CATEGORIES[index % 2]
        steps = make.steps((0, 0) if point.config.is_off else accepted, drafted)
        tpot_s = tpots[index % 2] * (1 + 0.001 * index)
        store.append_block(
            point.point_id,
            index,
            make.block(tpot_s=tpot_s, name=f"p{index}-0", category=category, steps=steps),
        )
    store.append_outcome(PointOutcome(point=point, status=status, reason=reason, peak_memory_bytes=7))


def test_summary_of_a_clear_run_speculates_and_emits(make, store, points):
    """K=3 at 2x in every category: speculate, with policy, commands, categories and off first."""
    for point, tpot in zip(points, (1.0, 1.5, 2.0), strict=True):
        fill(make, store, point, (tpot, tpot))

    told = summarize(store)

    cell = told.cells[0]
    assert (told.outcome, cell.decision.chosen) == ("speculate", make.chain(3))
    assert [arm.config.label for arm in cell.arms] == ["off", "eagle3 K=3", "eagle3 K=5"]
    assert cell.arms[1].speedup is not None
    assert cell.arms[1].speedup.value == pytest.approx(2.0)
    assert cell.arms[1].peak_memory_bytes == 7
    assert [(c.scope, c.arms[1].speedup_basis) for c in told.categories] == [
        ("chat", "paired requests"),
        ("code", "paired requests"),
    ]
    assert told.policy is not None
    assert set(told.commands) == {"vllm", "sglang"}
    assert told.pruned == (("eagle3 D=2 k=2 N=9", "needs 8 drafted nodes, drafts 6"),)
    assert told.failures == ()


def test_summary_sees_a_category_that_loses_behind_a_mean_that_gains(make, store, points):
    """Code runs at 4x and chat at 0.8x: the answer is that it depends on the workload."""
    fill(make, store, points[0], (2.5, 0.5))
    fill(make, store, points[1], (2.6, 0.6))
    fill(make, store, points[2], (2.0, 2.0))

    told = summarize(store)

    assert told.outcome == "depends on workload"
    assert "gains in code" in told.verdict
    assert "loses in chat" in told.verdict
    assert [category.decision.verdict for category in told.categories] == ["off", "on"]


def test_summary_keeps_going_past_failed_damaged_and_missing_points(make, store, points):
    """An out-of-memory point and a damaged file are failures with reasons; off alone is no data."""
    fill(make, store, points[2], (2.0, 2.0))
    store.append_outcome(PointOutcome(point=points[0], status=Status.OOM, reason="CUDA out of memory"))
    fill(make, store, points[1], (1.0, 1.0))
    store.block_file(points[1].point_id).write_bytes(b"not gzip")

    told = summarize(store)

    assert told.outcome == "no data"
    assert [(failure.status, failure.label) for failure in told.failures] == [
        (Status.OOM, "eagle3 K=3 @ batch 1, context 0, T=0"),
        (Status.FAILED, "eagle3 K=5 @ batch 1, context 0, T=0"),
    ]
    assert "CUDA out of memory" in told.failures[0].reason
    assert "is damaged" in told.failures[1].reason
    assert told.cells[0].arm(make.chain(3)).status is Status.OOM


def test_summary_of_an_unfinished_run_says_what_is_missing(make, store, points):
    """A run that was interrupted is told as far as it got."""
    fill(make, store, points[2], (2.0, 2.0))
    fill(make, store, points[0], (1.0, 1.0))

    told = summarize(store)

    assert told.outcome == "speculate"
    assert "1 of 3 points are not finished: resume the run" in told.cautions
    assert told.cells[0].arm(make.chain(5)).reason == "not finished: resume the run"


def test_summary_of_an_empty_run_has_no_data(store):
    """Nothing measured gives no policy, no commands and no numbers."""
    told = summarize(store)

    assert (told.outcome, told.policy, told.commands) == ("no data", None, {})
    assert told.verdict.startswith("No data to decide on")


def test_summary_predicts_from_the_surface(make, store, points):
    """Calibrated rounds of 2.5 s plain and 3.0 s speculative at acceptance length 2.5 predict 1.2 s."""
    fill(make, store, points[2], (2.0, 2.0))
    fill(make, store, points[0], (1.0, 1.0))
    times = {"draft_s": 0.5, "other_s": 0.0, "num_rounds": 9}
    store.write_surface(
        {
            ("off", make.cell()): RoundTimes(draft_s=0.0, verify_s=2.5, other_s=0.0, num_rounds=9),
            ("eagle3 K=3", make.cell()): RoundTimes(verify_s=2.5, **times),
        }
    )

    prediction = summarize(store).cells[0].arm(make.chain(3)).prediction

    assert prediction is not None
    assert prediction.predicted_tpot_s == pytest.approx(3.0 / 2.5)
    assert prediction.predicted_speedup == pytest.approx(2.5 * 2.5 / 3.0)


def test_summary_carries_the_doubts_of_the_measurement(make, store, points):
    """Cautions stored beside a point reach its arm and the run."""
    fill(make, store, points[2], (2.0, 2.0))
    fill(make, store, points[0], (1.0, 1.0))
    store.write_cautions({points[0].point_id: ["rounds slowed down by 8% over the point"]})

    told = summarize(store)

    assert told.cells[0].arm(make.chain(3)).cautions == ("rounds slowed down by 8% over the point",)
    assert any("slowed down by 8%" in caution for caution in told.cautions)


def test_summary_tells_doubts_of_the_run_and_of_points_once_each(make, store, points):
    """What the manifest doubts and what a point doubts stand side by side, neither twice."""
    fill(make, store, points[2], (2.0, 2.0))
    fill(make, store, points[0], (1.0, 1.0))
    store.update_manifest({"cautions": ["8 prompts for 24 requests of a cell"]})
    store.write_cautions({points[0].point_id: ["rounds slowed down by 8% over the point"]})

    told = "\n".join(summarize(store).cautions)

    assert told.count("8 prompts for 24 requests of a cell") == 1
    assert told.count("rounds slowed down by 8% over the point") == 1


def test_export_is_strict_json_with_both_vocabularies(make, store, points):
    """Ours in seconds and fractions, vLLM's in milliseconds and percent over drafting steps."""
    for point, tpot in zip(points, (1.0, 1.5, 2.0), strict=True):
        fill(make, store, point, (tpot, tpot))

    data = export.to_dict(summarize(store))
    text = json.dumps(data, allow_nan=False)
    row = next(r for r in data["results"] if r["config"] == "eagle3 K=3" and r["scope"] == "all")

    assert "NaN" not in text
    assert row["acceptance_length"] == 2.5
    assert row["draft_acceptance_rate"] == 0.5
    assert row["spec_decode_acceptance_rate"] == 50.0
    assert row["spec_decode_acceptance_length"] == 2.5
    assert row["spec_decode_per_position_acceptance_rates"] == pytest.approx([1.0, 0.5, 0.0])
    assert row["mean_tpot_ms"] == pytest.approx(2.0 / 5 * 1000)
    assert row["is_chosen"] is True
    assert set(data["definitions"]) >= {"speedup", "acceptance_length", "mean_itl_ms"}
    assert data["provenance"] == {"python": "3.11"}


def test_export_rows_carry_what_readers_of_vllm_files_look_for(make, store, points):
    """8 requests of 10 prompt and 6 output tokens in 80 s: 0.1 requests, 0.6 output and 1.6 tokens a second;
    steps that accept 1 and 2 of 3 drafts keep (1, 0.5, 0) given the draft before."""
    for point in points:
        fill(make, store, point, (1.0, 1.0))

    row = next(
        r for r in export.rows(summarize(store)) if r["config"] == "eagle3 K=3" and r["scope"] == "all"
    )

    expected = {
        "backend": "reference",
        "label": "eagle3 K=3",
        "model_id": "org/target",
        "request_rate": "inf",
        "max_concurrency": 1,
        "completed": 8,
        "failed": 0,
        "total_input_tokens": 80,
        "total_output_tokens": 48,
        "duration": pytest.approx(80.0),
        "request_throughput": pytest.approx(0.1),
        "output_throughput": pytest.approx(0.6),
        "total_token_throughput": pytest.approx(1.6),
        "spec_decode_num_drafts": 16,
        "spec_decode_draft_tokens": 48,
        "spec_decode_accepted_tokens": 24,
        "spec_decode_conditional_acceptance_rates": [1.0, 0.5, 0.0],
        "spec_decode_acceptance_length_per_request": 2.5,
    }
    assert {name: row[name] for name in expected} == expected
    spreads = [f"{name}_{key}_ms" for key in ("ttft", "tpot", "itl", "e2el")
               for name in ("mean", "median", "std", "p50", "p90", "p99")]  # fmt: skip
    assert [name for name in (*spreads, "max_output_tokens_per_s") if name not in row] == []


def test_export_csv_has_acceptance_latency_and_memory_of_every_category(make, store, points):
    """Each row stands for an arm, a batch size, a context and a category, and holds its numbers."""
    for point in points:
        fill(make, store, point, (1.0, 1.0))

    table = list(csv.DictReader(io.StringIO(export.to_csv(summarize(store)))))

    assert {(row["scope"], row["batch_size"], row["context_tokens"]) for row in table} == {
        (scope, "1", "0") for scope in ("all", "chat", "code")
    }
    (row,) = (row for row in table if (row["config"], row["scope"]) == ("eagle3 K=3", "code"))
    assert [row[f"survival_{j}"] for j in (1, 2, 3)] == ["1.0", "0.5", "0.0"]
    assert [row[f"conditional_acceptance_{j}"] for j in (1, 2, 3)] == ["1.0", "0.5", "0.0"]
    assert (row["mean_ttft_ms"], row["peak_memory_bytes"]) == ("1000.0", "7")
    assert all(row[f"{name}_tpot_ms"] for name in ("mean", "p50", "p90", "p99"))


def test_export_leaves_unknown_values_null_and_empty(make, store, points):
    """Acceptance of plain decoding is null with a reason in JSON and an empty cell in CSV."""
    fill(make, store, points[2], (2.0, 2.0))
    told = summarize(store)

    row = export.rows(told)[0]
    cells = next(csv.DictReader(io.StringIO(export.to_csv(told))))

    assert (row["acceptance_length"], row["acceptance_reason"]) == (None, "no draft steps observed")
    assert row["spec_decode_acceptance_length"] is None
    assert (cells["acceptance_length"], cells["speedup"]) == ("", "")
    assert cells["config"] == "off"


def test_export_refuses_a_number_that_is_not_finite(make, store, points):
    """A NaN is an error with the name of its field, never a token that readers choke on."""
    fill(make, store, points[2], (2.0, 2.0))
    told = replace(summarize(store), workload={"share": float("nan")})

    with pytest.raises(StoreError, match="share"):
        export.to_dict(told)


def test_export_of_an_empty_run_is_a_csv_header(store):
    """Nothing measured still gives files that open."""
    told = summarize(store)

    assert "run,all,1,0,0.0,off" in export.to_csv(told)
    assert export.to_dict(told)["outcome"] == "no data"


def test_summary_of_random_weights_says_so_first(make, tmp_path):
    """A model that was never trained has real times and meaningless acceptance."""
    fingerprint = make.fingerprint(settings={"load_format": "dummy"})
    run = RunStore.create(tmp_path / "dummy", {"schema_version": 1, "fingerprint": asdict(fingerprint)})

    cautions = summarize(run).cautions

    assert "random weights (--load-format dummy)" in cautions[0]

"""One load on one server: durations, rates and their invariants, with values made by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spectune.errors import UsageError
from spectune.metrics.goodput import Promises
from spectune.metrics.latency import tpot_contradiction
from spectune.metrics.served import (
    max_in_flight,
    measure_served,
    peak_output_throughput,
    spread,
    vllm_fields,
    window,
)
from spectune.records import FailureKind, ServedMeasurement, SpecCounts
from spectune.store import dump_strict
from tests.support.served import failed, served


def speculative(sent_s: float = 0.0, *, steps: int = 30, tokens: int = 4, step_s: float = 0.01) -> object:
    """One token, then `tokens` in every step of 10 ms."""
    chunks = tuple(sent_s + step_s * (i + 1) for i in range(steps + 1))
    return served(
        sent_s=sent_s, chunks=chunks, num_tokens=1 + steps * tokens, chunk_tokens=(1,) + (tokens,) * steps
    )


def test_time_per_token_is_not_the_gap_between_events() -> None:
    """Four tokens in each 10 ms event: 2.5 ms a token, and the gap has its own name."""
    told = measure_served([speculative()])

    assert pytest.approx(0.0025) == told.tpot_s.mean
    assert pytest.approx(0.010) == told.inter_chunk_s.mean
    decoded = 120 / 0.30
    assert tpot_contradiction(told.tpot_s.mean, decoded) is None
    assert tpot_contradiction(told.inter_chunk_s.mean, decoded) is not None


def test_n_events_have_n_minus_one_gaps_and_the_first_token_is_none_of_them() -> None:
    """Five events at 1, 2, 4, 7 and 11 s: gaps 1, 2, 3 and 4; the time to the first stands alone."""
    told = measure_served([served(chunks=(1.0, 2.0, 4.0, 7.0, 11.0))])

    assert (2.5, 2.5) == (told.inter_chunk_s.mean, told.inter_chunk_s.median)
    assert 1.0 == told.ttft_s.mean
    assert measure_served([served(chunks=(1.0,), num_tokens=1)]).inter_chunk_s is None


def test_peak_weighs_events_by_their_tokens() -> None:
    """Counting events would put the peak at a quarter of the mean."""
    requests = [speculative(sent_s=0.1 * i, steps=300) for i in range(4)]

    told = measure_served(requests)

    assert told.peak_output_tokens_per_s >= told.output_throughput > 4 * 300 / told.duration_s


@settings(deadline=None)  # a busy machine is not a failure
@given(
    st.lists(
        st.tuples(st.floats(0, 50), st.lists(st.tuples(st.floats(0.001, 3), st.integers(1, 6)), min_size=1)),
        min_size=1,
        max_size=8,
    )
)
def test_peak_is_never_below_the_mean(shape: list[tuple[float, list[tuple[float, int]]]]) -> None:
    """Buckets tile the window, so no load whatever can have a peak below its mean."""
    requests = []
    for sent_s, events in shape:
        times = tuple(float(at) for at in sent_s + np.cumsum([gap for gap, _ in events]))
        weights = tuple(tokens for _, tokens in events)
        requests.append(served(sent_s=sent_s, chunks=times, num_tokens=sum(weights), chunk_tokens=weights))

    start_s, duration_s = window(requests)
    peak = peak_output_throughput(requests, start_s, duration_s)

    assert peak >= sum(request.num_output_tokens for request in requests) / duration_s * (1 - 1e-12)


def test_peak_is_unknown_where_events_have_unknown_weights() -> None:
    """It is left out, not estimated from the number of events."""
    assert measure_served([served()]).peak_output_tokens_per_s is None


def test_record_refuses_a_peak_below_its_mean() -> None:
    """Such a row cannot be written."""
    with pytest.raises(ValueError, match="peak of 100 tokens/s is below the mean of 384"):
        ServedMeasurement(
            num_requests=1, completed=1, failed=0, duration_s=1.0, total_input_tokens=1,
            total_output_tokens=384, peak_output_tokens_per_s=100.0,
        )  # fmt: skip


def test_scheduled_latency_holds_the_wait_for_the_clients_own_gate() -> None:
    """10 requests/s, half a second each, one at a time, eight of them: 0.5 s of service, 1.9 s for the user."""
    requests = [
        served(scheduled_s=0.1 * i, sent_s=0.5 * i, chunks=(0.5 * i + 0.2, 0.5 * (i + 1))) for i in range(8)
    ]

    told = measure_served(requests, max_concurrency=1)

    assert pytest.approx(0.5) == told.e2e_s.mean
    assert pytest.approx(1.9) == told.scheduled_e2e_s.mean
    assert pytest.approx(1.4) == told.dispatch_delay_s.mean
    assert 1 == told.max_in_flight
    assert pytest.approx(2 / 4.0) == measure_served(requests, promises=Promises(e2el_s=0.95)).goodput_per_s


def test_failures_enter_no_latency_and_no_throughput() -> None:
    """One failure in two hundred: the window holds it, the numbers do not."""
    good = [served(f"r{i}", sent_s=i, chunks=(i + 0.5, i + 1.0)) for i in range(200)]

    told = measure_served([*good, failed(ended_s=400.0)])

    assert (200, 1, 201) == (told.completed, told.failed, told.num_requests)
    assert 0.5 == told.ttft_s.mean
    assert 400.0 == told.duration_s
    assert 600 / 400 == told.output_throughput


def test_below_99_percent_success_there_are_no_durations() -> None:
    """What failed might have been the slow part."""
    told = measure_served([*(served(f"r{i}") for i in range(98)), failed(), failed()])

    assert (None, None, None, None) == (told.ttft_s, told.tpot_s, told.e2e_s, told.inter_chunk_s)
    assert 98 == told.completed


def test_all_failed_gives_nothing_but_counts() -> None:
    """20 of 20 connections refused: no division by zero, strict JSON with nulls."""
    told = measure_served([failed(f"f{i}", kind=FailureKind.CONNECTION) for i in range(20)])

    fields = vllm_fields(told)
    assert (0, 20) == (fields["completed"], fields["failed"])
    assert {None} == {
        fields[name] for name in ("output_throughput", "mean_ttft_ms", "p99_tpot_ms", "request_throughput")
    }
    assert json.loads(dump_strict(fields))["mean_e2el_ms"] is None


def test_unknown_token_counts_make_no_throughput() -> None:
    """A sum over some of the requests would be too small."""
    told = measure_served([served(), served(num_tokens=None)])

    assert (None, None) == (told.total_output_tokens, told.output_throughput)
    assert 2 == told.completed


def test_no_requests_are_a_usage_error() -> None:
    """There is nothing to measure."""
    with pytest.raises(UsageError, match="no requests"):
        measure_served([])


@settings(deadline=None)  # a busy machine is not a failure
@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=40))
def test_spread_is_that_of_numpy(values: list[float]) -> None:
    """vLLM's figures are numpy's: population deviation and linear percentiles."""
    told = spread(values, (50.0, 90.0, 99.0))

    assert np.mean(values) == pytest.approx(told.mean)
    assert np.median(values) == pytest.approx(told.median)
    assert np.std(values) == pytest.approx(told.std, rel=1e-6, abs=1e-9)
    assert [np.percentile(values, q) for q in (50, 90, 99)] == pytest.approx(
        [told.percentile(q) for q in (50.0, 90.0, 99.0)]
    )
    assert told.percentile(75.0) is None


def test_requests_in_flight_are_counted_at_one_moment() -> None:
    """Three overlap in pairs; one that starts as another ends is not with it."""
    requests = [
        served(sent_s=0.0, chunks=(1.0, 2.0)),
        served(sent_s=1.5, chunks=(2.5, 3.0)),
        served(sent_s=2.0, chunks=(3.5, 4.0)),
    ]

    assert 2 == max_in_flight(requests)


def test_vllm_names_carry_vllm_units() -> None:
    """Milliseconds, percent, acceptance over drafting steps; a closed loop has an infinite rate."""
    spec = SpecCounts(
        num_drafts=152, num_draft_tokens=456, num_accepted_tokens=238, accepted_per_position=(124, 77, 37)
    )
    fields = vllm_fields(measure_served([served(chunks=(0.5, 1.0, 1.5))], max_concurrency=4, spec=spec))

    assert ("inf", 4, 1.5) == (fields["request_rate"], fields["max_concurrency"], fields["duration"])
    assert (500.0, 500.0, 500.0, 1500.0) == tuple(
        fields[f"mean_{m}_ms"] for m in ("ttft", "tpot", "itl", "e2el")
    )
    assert pytest.approx(52.19298245614035) == fields["spec_decode_acceptance_rate"]
    assert pytest.approx(2.5657894736842106) == fields["spec_decode_acceptance_length"]
    assert (
        pytest.approx([124 / 152, 77 / 152, 37 / 152]) == fields["spec_decode_per_position_acceptance_rates"]
    )


def test_speculation_that_drafted_nothing_has_no_acceptance_fields() -> None:
    """As in vLLM's file: the fields are absent, not 0 or 1."""
    nothing = SpecCounts(num_drafts=0, num_draft_tokens=0, num_accepted_tokens=0)
    fields = vllm_fields(measure_served([served()], spec=nothing))

    assert [] == [name for name in fields if name.startswith("spec_decode")]

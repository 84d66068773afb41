"""Throughput of requests and time per token of decode rounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spectune.errors import UsageError
from spectune.metrics.throughput import (
    chunk_tokens,
    output_throughput,
    peak_throughput,
    reached_batch,
    round_tpot,
    steady_duration,
)
from spectune.records import RequestRecord, RoundRecord, StepRecord


def decode_round(
    batch: int, emitted: int, *, kind: str = "decode", scale: float = 1.0, stolen_s: float = 0.0
) -> RoundRecord:
    """A round of 10 ms times `scale`: 2 ms draft, 7 ms verify, 1 ms rest."""
    return RoundRecord(
        kind=kind,
        batch_size=batch,
        kv_tokens=100,
        config="eagle3 K=3",
        start_s=0.0,
        draft_s=0.002 * scale,
        verify_s=0.007 * scale,
        other_s=0.001 * scale,
        num_emitted=emitted,
        stolen_s=stolen_s,
    )


def streamed(emitted: list[int], chunk_s: tuple[float, ...], *, error: str | None = None) -> RequestRecord:
    """A request whose steps emit these counts, each of 8 drafts at most."""
    steps = tuple(
        StepRecord(num_proposed=8, num_verified=8, num_accepted=n - 1, num_emitted=n) for n in emitted
    )
    return RequestRecord(
        request_id="r",
        category="chat",
        num_prompt_tokens=3,
        output_ids=tuple(range(1 + sum(emitted))),
        arrival_s=0.0,
        first_token_s=chunk_s[0],
        finish_s=chunk_s[-1],
        finish_reason="length",
        chunk_s=chunk_s,
        steps=steps,
        error=error,
    )


def test_round_tpot_takes_seconds_of_full_rounds_and_tokens_of_all() -> None:
    """Full rounds of 10 and 20 ms emit 8 and 6 of batch 4, two quick ones in the tail 1 each of batch 1:
    15 ms a round, 16 tokens of 10 sequences, 9.375 ms a token. Prefill counts for neither."""
    rounds = [
        decode_round(4, 4, kind="prefill", scale=50),
        decode_round(4, 8),
        decode_round(4, 6, scale=2),
        decode_round(1, 1, scale=0.1),
        decode_round(1, 1, scale=0.1),
    ]

    totals = round_tpot(rounds, 4)

    assert totals is not None
    assert (totals.num_rounds, totals.sequences, totals.num_emitted) == (2, 10, 16)
    assert totals.draft_s == pytest.approx(0.003)
    assert totals.verify_s == pytest.approx(0.0105)
    assert totals.other_s == pytest.approx(0.0015)
    assert totals.duration_s == pytest.approx(0.030)
    assert totals.tokens_per_sequence == pytest.approx(1.6)
    assert totals.round_tpot_s == pytest.approx(0.009375)


def test_rounds_that_the_hypervisor_cut_into_give_tokens_and_no_seconds() -> None:
    """Two rounds of 10 ms and one of 90 ms, of which 80 were stolen: 10 ms a round, 2 tokens a round."""
    rounds = [decode_round(1, 1), decode_round(1, 2), decode_round(1, 3, scale=9, stolen_s=0.08)]

    totals = round_tpot(rounds, 1)

    assert totals is not None
    assert (totals.total_s, totals.tokens_per_sequence) == (pytest.approx(0.01), 2.0)


def test_rounds_that_were_all_cut_into_are_all_that_is_known() -> None:
    """Rounds of 20 and 40 ms, both stolen from: 30 ms."""
    rounds = [decode_round(1, 1, scale=2, stolen_s=0.01), decode_round(1, 1, scale=4, stolen_s=0.01)]

    totals = round_tpot(rounds, 1)

    assert totals is not None
    assert totals.total_s == pytest.approx(0.03)


def test_long_rounds_weigh_what_they_would_if_none_were_cut() -> None:
    """Of a thousand rounds of 10 ms and a thousand of 30 ms, cut at random 20 times a second, 819 and 549
    stay whole; the mean is still 20 ms, not the 18 ms of those that stayed."""
    short = [decode_round(1, 1)] * 819 + [decode_round(1, 1, scale=2, stolen_s=0.01)] * 181
    long = [decode_round(1, 1, scale=3)] * 549 + [decode_round(1, 1, scale=4, stolen_s=0.01)] * 451

    totals = round_tpot([*short, *long], 1)

    assert totals is not None
    assert totals.total_s == pytest.approx(0.020, rel=0.01)


def test_a_long_round_that_was_not_marked_weighs_no_more_than_the_others() -> None:
    """30 whole rounds of 10 ms, one of 300 ms whose cut was counted a round late, 69 cut ones: the plain mean
    of the 31, 19.4 ms."""
    rounds = [decode_round(1, 1)] * 30 + [decode_round(1, 1, scale=30)]
    rounds += [decode_round(1, 1, scale=5, stolen_s=0.01)] * 69

    totals = round_tpot(rounds, 1)

    assert totals is not None
    assert totals.total_s == pytest.approx(0.6 / 31)


def test_steady_seconds_are_those_of_the_middle_half_of_the_rounds() -> None:
    """Eight rounds of 10 ms, one stretched to 100 ms and one cut to 1 ms: 10 ms a round, all their tokens."""
    rounds = [decode_round(1, 2, scale=scale) for scale in (1, 10, 1, 1, 0.1, 1, 1, 1)]

    totals = round_tpot(rounds, 1, is_steady=True)

    assert totals is not None
    assert totals.num_rounds == 4
    assert totals.total_s == pytest.approx(0.010)
    assert totals.tokens_per_sequence == pytest.approx(2.0)
    assert round_tpot(rounds, 1).total_s == pytest.approx((6 * 0.010 + 0.100 + 0.001) / 8)  # type: ignore[union-attr]


def test_steady_duration_straightens_full_rounds_and_keeps_all_else() -> None:
    """0.5 s of a block: prefill and gaps 0.37 s, a tail round 0.01 s, and full rounds of 10, 10, 10 and 90 ms
    whose middle half takes 10 ms: 0.37 + 0.01 + 4 · 0.01 = 0.42 s."""
    rounds = [
        decode_round(4, 4, kind="prefill", scale=20),
        *(decode_round(4, 4, scale=scale) for scale in (1, 1, 1, 9)),
        decode_round(1, 1),
    ]

    assert steady_duration(rounds, 4, 0.5) == pytest.approx(0.42)
    assert steady_duration((), 4, 0.5) == 0.5


def test_round_tpot_is_not_flattered_by_sequences_that_finish_first() -> None:
    """Two sequences have 6 tokens to go: one gets 3 a round, the other 1. While both run a round gives 2
    tokens a sequence; over their whole outputs it gives 12 in 8, as a server that refills slots sees."""
    totals = round_tpot([*[decode_round(2, 4)] * 2, *[decode_round(1, 1)] * 4], 2)

    assert totals is not None
    assert totals.tokens_per_sequence == pytest.approx(1.5)


def test_round_tpot_without_a_full_round_is_absent() -> None:
    """A batch that was never reached has no time per token."""
    assert round_tpot([decode_round(3, 3)], 4) is None


def test_reached_batch_is_weighted_by_time() -> None:
    """10 ms at batch 4 and 30 ms at batch 2 are 2.5 on average; prefill does not count."""
    rounds = [decode_round(4, 4), decode_round(2, 2, scale=3), decode_round(9, 0, kind="prefill")]

    assert reached_batch(rounds) == pytest.approx(2.5)
    assert reached_batch([]) is None


def test_output_throughput_counts_tokens_of_successes() -> None:
    """5 tokens succeeded and 5 failed in 2 s: 2.5 tokens/s."""
    requests = [streamed([4], (1.0, 2.0)), streamed([4], (1.0, 2.0), error="reset")]

    assert output_throughput(requests, 2.0) == pytest.approx(2.5)
    assert output_throughput(requests[1:], 2.0) is None


def test_output_throughput_without_time_is_refused() -> None:
    """Tokens over no time are not a rate."""
    with pytest.raises(UsageError, match="duration"):
        output_throughput([], 0.0)


def test_peak_throughput_weighs_chunks_by_their_tokens() -> None:
    """Three chunks of 1, 4 and 4 tokens in 2 s peak at 8 tokens/s; counting chunks would say 2."""
    request = streamed([4, 4], (0.5, 1.5, 2.0))

    assert chunk_tokens(request) == (1, 4, 4)
    assert peak_throughput([request]) == pytest.approx(8.0)


def test_peak_throughput_with_unknown_weights_is_omitted() -> None:
    """Chunks that do not pair up with steps have no known token counts: no peak is printed."""
    assert peak_throughput([streamed([4, 4], (0.5, 2.0))]) is None
    assert peak_throughput([]) is None


@given(
    st.lists(st.tuples(st.integers(1, 9), st.floats(0.001, 3.0, allow_nan=False)), min_size=1, max_size=20)
)
def test_peak_throughput_is_never_below_the_mean(events: list[tuple[int, float]]) -> None:
    """Over the same span the peak bucket holds at least the average."""
    times = [0.1]
    for _, gap in events:
        times.append(times[-1] + gap)
    request = streamed([tokens for tokens, _ in events], tuple(times))

    peak = peak_throughput([request])

    assert peak is not None
    assert peak >= request.num_output_tokens / times[-1] * (1 - 1e-9)

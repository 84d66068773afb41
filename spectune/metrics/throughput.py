"""Throughput of requests, and time per token of decode rounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from spectune.errors import UsageError
from spectune.metrics.latency import is_success
from spectune.records import RequestRecord, RoundRecord, RoundTimes
from spectune.stats import percentile


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTotals:
    """Decode rounds: mean seconds of a full-batch round by part, and what a sequence gets from one.

    `sequences` is Σ batch size and `num_emitted` Σ emitted over all decode rounds, the draining tail
    included; `tokens_per_sequence` = emitted / sequences.
    """

    num_rounds: int
    sequences: int
    num_emitted: int
    draft_s: float
    verify_s: float
    other_s: float
    tokens_per_sequence: float

    @property
    def total_s(self) -> float:
        """Mean seconds of one round."""
        return self.draft_s + self.verify_s + self.other_s

    @property
    def duration_s(self) -> float:
        """Seconds of all full-batch rounds together."""
        return self.total_s * self.num_rounds

    @property
    def round_tpot_s(self) -> float:
        """Mean round seconds / tokens per sequence and round."""
        return self.total_s / self.tokens_per_sequence


def round_tpot(
    rounds: Sequence[RoundRecord], batch_size: int, *, is_steady: bool = False
) -> RoundTotals | None:
    """Time per token at the load asked for: a round of at least `batch_size` sequences, and what it gives.

    Seconds come from full rounds alone, so arms are compared at the load that was asked for. Tokens
    come from all decode rounds: the first sequences to finish are the fast ones, and a window that
    ends with them would count too many tokens a round (a server refills their slots with new work).
    Rounds that the hypervisor cut into give no seconds (`mean_times`).
    None where no round was full or none emitted a token.

    Args:
        is_steady: seconds of the middle half of the full rounds by duration (an interquartile mean), so
            that rounds which other work on the machine stretched do not speak; neither does a slowdown
            of fewer than a quarter of the rounds.
    """
    decode = [r for r in rounds if r.kind == "decode"]
    full = [r for r in decode if r.batch_size >= batch_size]
    emitted = sum(r.num_emitted for r in decode)
    if not full or emitted == 0:
        return None
    times = mean_times(_middle_half(uncut(full)) if is_steady else full)
    sequences = sum(r.batch_size for r in decode)
    return RoundTotals(
        num_rounds=times.num_rounds,
        sequences=sequences,
        num_emitted=emitted,
        draft_s=times.draft_s,
        verify_s=times.verify_s,
        other_s=times.other_s,
        tokens_per_sequence=emitted / sequences,
    )


def mean_times(rounds: Sequence[RoundRecord]) -> RoundTimes:
    """Mean seconds of at least one round, as if the hypervisor had cut into none.

    Rounds that it cut into are left out, unless it cut into all. A longer round is cut into more often, so
    each of the others stands for exp(rate of cuts x its seconds) of its length. Beyond the 90th percentile
    of the seconds this is no more: a cut that the counter showed a round late leaves a long round unmarked.
    """
    rate, whole = _cut_rate(rounds), uncut(rounds)
    usual_s = percentile([r.total_s for r in whole], 90) or 0.0
    weights = [math.exp(rate * min(r.total_s, usual_s)) for r in whole]
    total = math.fsum(weights)
    return RoundTimes(
        draft_s=math.fsum(w * r.draft_s for w, r in zip(weights, whole, strict=True)) / total,
        verify_s=math.fsum(w * r.verify_s for w, r in zip(weights, whole, strict=True)) / total,
        other_s=math.fsum(w * r.other_s for w, r in zip(weights, whole, strict=True)) / total,
        num_rounds=len(whole),
    )


def uncut(rounds: Sequence[RoundRecord]) -> list[RoundRecord]:
    """Those that the hypervisor did not cut into; all of them where it cut into every one."""
    return [r for r in rounds if r.stolen_s <= 0] or list(rounds)


def _cut_rate(rounds: Sequence[RoundRecord]) -> float:
    """Cuts per second of undisturbed decoding: rounds with a cut over what was seen without one, half a
    round for each that was cut; at most one a round, 0 where no round is left to tell."""
    uncut_s = [r.total_s for r in rounds if r.stolen_s <= 0]
    num_cut, seen_s = len(rounds) - len(uncut_s), math.fsum(uncut_s)
    if not num_cut or seen_s <= 0:
        return 0.0
    mean_s = seen_s / len(uncut_s)
    return min(num_cut / (seen_s + 0.5 * num_cut * mean_s), 1 / mean_s)


def steady_duration(rounds: Sequence[RoundRecord], batch_size: int, duration_s: float) -> float:
    """`duration_s` with each full decode round counted at their interquartile mean.

    Prefill, the draining tail and everything between rounds stay as they were measured.
    """
    full = [r for r in rounds if r.kind == "decode" and r.batch_size >= batch_size]
    if not full:
        return duration_s
    middle = _middle_half(uncut(full))
    typical_s = math.fsum(r.total_s for r in middle) / len(middle)
    return duration_s - math.fsum(r.total_s for r in full) + typical_s * len(full)


def _middle_half(rounds: Sequence[RoundRecord]) -> list[RoundRecord]:
    """Without the quarter of shortest and the quarter of longest rounds."""
    ordered = sorted(rounds, key=lambda turn: turn.total_s)
    cut = len(ordered) // 4
    return ordered[cut : len(ordered) - cut]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTotals:
    """Decode time of whole requests, for engines that tell no rounds: sums over successful requests.

    `seconds` is Σ (last token - first token), `num_tokens` Σ (output tokens - 1), `num_steps` the steps
    that gave them.
    """

    num_requests: int
    num_steps: int
    num_tokens: int
    seconds: float

    @property
    def step_s(self) -> float:
        """Mean seconds of a step of one sequence: the time of a round at the load of the requests."""
        return self.seconds / self.num_steps

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens that a step emits."""
        return self.num_tokens / self.num_steps

    @property
    def tpot_s(self) -> float:
        """Σ seconds / Σ tokens."""
        return self.seconds / self.num_tokens


def request_totals(requests: Sequence[RequestRecord]) -> RequestTotals | None:
    """Pooled decode time of requests that were all decoded at the same load; None if nothing was decoded.

    Only whole requests count: a window cut out of a load ends with the fast ones and holds too many
    tokens for its seconds.
    """
    whole = [r for r in requests if is_success(r) and r.tpot_s is not None and r.broken_identity() is None]
    steps = sum(len(r.steps) for r in whole)
    if steps == 0:
        return None
    return RequestTotals(
        num_requests=len(whole),
        num_steps=steps,
        num_tokens=sum(r.num_output_tokens - 1 for r in whole),
        seconds=math.fsum((r.finish_s or 0.0) - (r.first_token_s or 0.0) for r in whole),
    )


def reached_batch(rounds: Sequence[RoundRecord]) -> float | None:
    """Mean batch size of decode rounds weighted by their time; None without any.

    What a random moment of decoding sees, the draining tail included.
    """
    decode = [r for r in rounds if r.kind == "decode"]
    seconds = math.fsum(r.total_s for r in decode)
    if not decode or seconds <= 0:
        return None
    return math.fsum(r.batch_size * r.total_s for r in decode) / seconds


def output_throughput(requests: Sequence[RequestRecord], duration_s: float) -> float | None:
    """Σ output tokens of successful requests / duration, tokens/s; None if none succeeded."""
    if not duration_s > 0:
        raise UsageError(f"duration of {duration_s} s is not positive")
    succeeded = [request for request in requests if is_success(request)]
    if not succeeded:
        return None
    return sum(request.num_output_tokens for request in succeeded) / duration_s


def chunk_tokens(request: RequestRecord) -> tuple[int, ...] | None:
    """Tokens in each stream chunk: one for the first, then what each step emitted.

    None where chunks and steps do not pair up: weights are not guessed.
    """
    weights = (1, *(step.num_emitted for step in request.steps))
    if len(request.chunk_s) != len(weights) or sum(weights) != request.num_output_tokens:
        return None
    return weights


def peak_throughput(requests: Sequence[RequestRecord], *, bucket_s: float = 1.0) -> float | None:
    """Most tokens/s in equal buckets of about `bucket_s` between first arrival and last chunk.

    Every chunk weighs its tokens, and the buckets tile the span, so the peak is never below the mean
    of the same span. None where the tokens of a chunk are unknown.
    """
    events: list[tuple[float, int]] = []
    succeeded = [request for request in requests if is_success(request)]
    for request in succeeded:
        weights = chunk_tokens(request)
        if weights is None:
            return None
        events.extend(zip(request.chunk_s, weights, strict=True))
    if not events:
        return None
    start = min(request.arrival_s for request in succeeded)
    span = max(time for time, _ in events) - start
    if span <= 0:
        return None
    num_buckets = max(1, math.floor(span / bucket_s))
    buckets = [0] * num_buckets
    for time, tokens in events:
        buckets[min(num_buckets - 1, int((time - start) / span * num_buckets))] += tokens
    return max(buckets) * num_buckets / span

"""Timed rounds in, a time surface out; a shape in, its seconds out, or a refusal.

Per batch size and part of the round `T = a[bucket] + g·tokens + k·kv_tokens`, fitted by weighted least
squares with non-negative terms (relative errors). Nothing is interpolated across a bucket edge and nothing
extrapolated: a shape outside of what was timed is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spectune.errors import UsageError
from spectune.records import RoundTimes, SpecConfig
from spectune.stats import median, percentile, ratio_interval
from spectune.store.surface import HeldOut, Line, SurfacePoint

ROW_TILE = 6
"""Rows that a compiled pass multiplies at once: the first bucket edges."""

SPIKE = 1.5
"""A round so many times the median of its shape was disturbed and is left out."""

KV_MARGIN = 2.0
"""How far beyond the timed contexts, as a factor, a prediction may go."""

OFF, CHAIN, TREE = "off", "chain", "tree"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One timed round at the full batch. `turn` numbers the pass over all shapes that it belongs to.

    `width` is the number of tokens that were verified for a sequence; None where it is not known
    (drafters that may find nothing).
    """

    batch_size: int
    config: SpecConfig
    width: int | None
    kv_tokens: float
    commit_tokens: float
    draft_s: float
    verify_s: float
    other_s: float
    turn: int
    stolen_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.draft_s + self.verify_s + self.other_s


def bucket_of(rows: int) -> int:
    """Number of the bucket of a pass of `rows` tokens: tiles of six up to 24, then doubling."""
    if rows <= 4 * ROW_TILE:
        return (rows - 1) // ROW_TILE
    return 4 + math.ceil(math.log2(rows / (4 * ROW_TILE)) - 1e-9) - 1


def without_spikes(samples: Sequence[Sample]) -> list[Sample]:
    """Rounds that the hypervisor did not cut into, where a shape has any, and of these those that took no
    more than SPIKE times the median of their shape."""
    kept = []
    for all_rounds in _by_shape(samples).values():
        own = [sample for sample in all_rounds if sample.stolen_s <= 0] or all_rounds
        limit = SPIKE * (median([sample.total_s for sample in own]) or 0.0)
        kept += [sample for sample in own if sample.total_s <= limit]
    return kept


def points_of(samples: Sequence[Sample]) -> tuple[SurfacePoint, ...]:
    """One point a shape: means of its undisturbed rounds."""
    points = []
    for (batch_size, config), own in _by_shape(without_spikes(samples)).items():
        totals = [math.log(sample.total_s) for sample in own]
        interval = ratio_interval(totals)
        half = None if interval.high is None else interval.high / interval.value - 1
        points.append(
            SurfacePoint(
                batch_size=batch_size,
                config=config,
                kv_tokens=_mean(sample.kv_tokens for sample in own),
                commit_tokens=_mean(sample.commit_tokens for sample in own),
                num_rounds=len(own),
                draft_s=_mean(sample.draft_s for sample in own),
                verify_s=_mean(sample.verify_s for sample in own),
                other_s=_mean(sample.other_s for sample in own),
                half_width=half,
            )
        )
    return tuple(points)


def fit_lines(samples: Sequence[Sample]) -> tuple[Line, ...]:
    """All lines that the samples can carry."""
    clean = without_spikes(samples)
    lines: list[Line] = []
    for batch_size in sorted({sample.batch_size for sample in clean}):
        own = [sample for sample in clean if sample.batch_size == batch_size]
        lines.append(_verify_line(batch_size, [sample for sample in own if sample.width is not None]))
        for family in sorted({draft_family(sample.config) for sample in own}):
            drafts = [sample for sample in own if draft_family(sample.config) == family]
            lines.append(_draft_line(batch_size, family, drafts))
        for family in sorted({other_family(sample.config) for sample in own}):
            others = [sample for sample in own if other_family(sample.config) == family]
            lines.append(_other_line(batch_size, family, others))
    return tuple(lines)


def draft_family(config: SpecConfig) -> str:
    """Drafts of one family cost the same but for their depth."""
    return OFF if config.is_off else f"{config.method} k={config.topk}"


def other_family(config: SpecConfig) -> str:
    if config.is_off:
        return OFF
    return f"{config.method} {TREE if config.is_tree else CHAIN}"


class Costs:
    """Seconds of rounds from the lines of a surface."""

    def __init__(self, lines: Iterable[Line]) -> None:
        self._lines = {(line.part, line.family, line.batch_size): line for line in lines}

    def refusal(self, config: SpecConfig, batch_size: int, kv_tokens: float) -> str | None:
        """Why a round of this shape cannot be told, or None."""
        try:
            self.round_times(config, batch_size, kv_tokens, 1.0)
        except UsageError as error:
            return error.message
        return None

    def round_times(
        self,
        config: SpecConfig,
        batch_size: int,
        kv_tokens: float,
        commit_tokens: float,
        widths: Mapping[int, float] | None = None,
    ) -> RoundTimes:
        """Mean seconds of a full round. Raises UsageError outside of what was timed.

        Args:
            kv_tokens: cached tokens of the whole batch.
            commit_tokens: what the sequence that keeps most keeps of a round, its own token included.
            widths: probability of each number of verified tokens per sequence, where it varies.
        """
        shares = widths or {config.num_draft_tokens: 1.0}
        verify, other = self._verify(config, batch_size), self._other(config, batch_size)
        draft = self._line("draft", draft_family(config), batch_size)
        draft_s = _base(draft, config.num_steps) + draft.commit_s * commit_tokens
        return RoundTimes(
            draft_s=draft_s,
            verify_s=math.fsum(share * _seconds(verify, n, kv_tokens) for n, share in shares.items()),
            other_s=_base(other, config.num_draft_tokens, is_loose=True) + other.commit_s * commit_tokens,
            num_rounds=0,
        )

    def _verify(self, config: SpecConfig, batch_size: int) -> Line:
        """The method's own line where a step is known as a whole only."""
        own = self._lines.get(("verify", config.method, batch_size))
        return own or self._line("verify", "target", batch_size)

    def _other(self, config: SpecConfig, batch_size: int) -> Line:
        return self._line("other", other_family(config), batch_size)

    def _line(self, part: str, family: str, batch_size: int) -> Line:
        line = self._lines.get((part, family, batch_size))
        if line is None:
            sizes = sorted({size for _, known, size in self._lines if known == family})
            what = f"batch sizes {', '.join(map(str, sizes))}" if sizes else "no such draft"
            raise UsageError(
                f"{part} time of {family} at batch {batch_size} was not profiled: {what}",
                hint="profile again with this shape",
            )
        return line


def _seconds(line: Line, tokens: int, kv_tokens: float) -> float:
    low, high = line.kv_range
    if not low / KV_MARGIN <= kv_tokens <= high * KV_MARGIN:
        raise UsageError(
            f"{kv_tokens:.0f} cached tokens at batch {line.batch_size} lie outside the profiled "
            f"{low:.0f} to {high:.0f}",
            hint="profile with the --context that is asked for",
        )
    bucket = bucket_of(tokens * line.batch_size)
    return _base(line, tokens) + line.kv_s.get(bucket, 0.0) * kv_tokens


def _base(line: Line, tokens: int, *, is_loose: bool = False) -> float:
    """Seconds at a token count; between two timed ones of one bucket on the straight line."""
    known = line.base_s
    if tokens in known:
        return known[tokens]
    below = max((n for n in known if n < tokens), default=None)
    above = min((n for n in known if n > tokens), default=None)
    if is_loose and (below is None or above is None):
        return known[below if below is not None else above]  # type: ignore[index]  # one of them is there
    if below is None or above is None:
        raise UsageError(
            f"{line.part} of {tokens} tokens at batch {line.batch_size} lies outside the profiled "
            f"{min(known)} to {max(known)}"
        )
    if not is_loose and line.buckets[below] != line.buckets[above]:
        raise UsageError(
            f"{line.part} of {tokens} tokens at batch {line.batch_size} lies in another bucket than the "
            f"profiled {below} and {above}"
        )
    share = (tokens - below) / (above - below)
    return known[below] * (1 - share) + known[above] * share


def _verify_line(batch_size: int, samples: Sequence[Sample]) -> Line:
    """One level a width, one slope over cached tokens a bucket."""
    widths = sorted({sample.width for sample in samples if sample.width is not None})
    buckets = {width: bucket_of(width * batch_size) for width in widths}
    numbers = sorted(set(buckets.values()))
    kv = [sample.kv_tokens for sample in samples]
    middle = _mean(kv)  # levels are fitted there: a slope that nobody could see moves nothing
    features = np.zeros((len(samples), len(widths) + len(numbers)))
    for row, sample in enumerate(samples):
        assert sample.width is not None
        features[row, widths.index(sample.width)] = 1.0
        features[row, len(widths) + numbers.index(buckets[sample.width])] = sample.kv_tokens - middle
    found = _least_squares(features, samples, "verify_s")
    slopes = {number: float(found[len(widths) + i]) for i, number in enumerate(numbers)}
    # weights are read whatever is cached; and texts that only grew a little tell drift as a slope
    most = 1.0 if max(kv) >= 2 * min(kv) else 0.5
    for i, width in enumerate(widths):
        slopes[buckets[width]] = min(slopes[buckets[width]], most * max(0.0, float(found[i])) / middle)
    return Line(
        part="verify",
        family="target",
        batch_size=batch_size,
        base_s={width: float(found[i]) - slopes[buckets[width]] * middle for i, width in enumerate(widths)},
        buckets=buckets,
        kv_s=slopes,
        kv_range=(min(kv), max(kv)),
    )


def _draft_line(batch_size: int, family: str, samples: Sequence[Sample]) -> Line:
    """Every level of a draft costs the same, and so does every token that the head reads afterwards."""
    depths = sorted({sample.config.num_steps for sample in samples})
    columns = [np.ones(len(samples))]
    if len(depths) > 1:
        columns.append(np.array([sample.config.num_steps - depths[0] for sample in samples], float))
    commits = np.array([sample.commit_tokens for sample in samples])
    if np.ptp(commits) > 0:
        columns.append(commits)
    found = _least_squares(np.stack(columns, 1), samples, "draft_s")
    slope = float(found[1]) if len(depths) > 1 else 0.0
    return Line(
        part="draft",
        family=family,
        batch_size=batch_size,
        base_s={depth: float(found[0]) + slope * (depth - depths[0]) for depth in depths},
        buckets=dict.fromkeys(depths, 0),
        commit_s=float(found[-1]) if np.ptp(commits) > 0 else 0.0,
    )


def _other_line(batch_size: int, family: str, samples: Sequence[Sample]) -> Line:
    """What a tree keeps has to be moved in the cache, so kept tokens count."""
    widths = sorted({sample.config.num_draft_tokens for sample in samples})
    columns = [np.ones(len(samples))]
    if len(widths) > 1:
        columns.append(np.array([sample.config.num_draft_tokens - widths[0] for sample in samples], float))
    commits = np.array([sample.commit_tokens for sample in samples])
    if np.ptp(commits) > 0:
        columns.append(commits)
    found = _least_squares(np.stack(columns, 1), samples, "other_s")
    slope = float(found[1]) if len(widths) > 1 else 0.0
    return Line(
        part="other",
        family=family,
        batch_size=batch_size,
        base_s={width: float(found[0]) + slope * (width - widths[0]) for width in widths},
        buckets=dict.fromkeys(widths, 0),
        commit_s=float(found[-1]) if np.ptp(commits) > 0 else 0.0,
    )


def _least_squares(features: NDArray[Any], samples: Sequence[Sample], part: str) -> NDArray[Any]:
    """Non-negative coefficients with the least errors, relative to the mean of a sample's shape.

    Relative to each sample itself, quick rounds would count more than slow ones and means come out low.
    """
    from scipy.optimize import nnls

    target = np.array([getattr(sample, part) for sample in samples], float)
    means = {key: _mean(getattr(sample, part) for sample in own) for key, own in _by_shape(samples).items()}
    weights = 1.0 / np.maximum([means[sample.batch_size, sample.config] for sample in samples], 1e-9)
    scale = np.maximum(np.abs(features).max(0), 1e-12)
    found, _ = nnls(features / scale * weights[:, None], target * weights)
    coefficients: NDArray[Any] = found / scale
    return coefficients


def held_out(samples: Sequence[Sample]) -> HeldOut:
    """Each shape told by the others; where no other shape can tell it, its later rounds by its earlier ones."""
    shapes = _by_shape(without_spikes(samples))
    errors = []
    for key, own in shapes.items():
        if key[1].is_off or any(sample.width is None for sample in own):
            continue
        others = [s for s in samples if s.batch_size == key[0] and s.config != key[1]]
        error = _error(others, own)
        if error is None:
            turns = sorted({sample.turn for sample in own})
            late = set(turns[len(turns) // 2 :])
            early = [s for s in samples if s.batch_size == key[0] and s.turn not in late]
            error = _error(early, [sample for sample in own if sample.turn in late])
        if error is not None:
            errors.append(error)
    if not errors:
        return HeldOut(num_points=0, median=None, p95=None, rms=None)
    sizes = [abs(error) for error in errors]
    return HeldOut(
        num_points=len(errors),
        median=median(sizes),
        p95=percentile(sizes, 95),
        rms=math.sqrt(math.fsum(error * error for error in errors) / len(errors)),
    )


def _error(known: Sequence[Sample], asked: Sequence[Sample]) -> float | None:
    """Told seconds over timed ones - 1; None where `known` cannot tell them."""
    if not known or not asked:
        return None
    first = asked[0]
    try:
        told = Costs(fit_lines(known)).round_times(
            first.config,
            first.batch_size,
            _mean(sample.kv_tokens for sample in asked),
            _mean(sample.commit_tokens for sample in asked),
        )
    except (UsageError, ValueError):
        return None
    return told.total_s / _mean(sample.total_s for sample in asked) - 1


def _by_shape(samples: Iterable[Sample]) -> dict[tuple[int, SpecConfig], list[Sample]]:
    found: dict[tuple[int, SpecConfig], list[Sample]] = {}
    for sample in samples:
        found.setdefault((sample.batch_size, sample.config), []).append(sample)
    return found


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return math.fsum(listed) / len(listed)

"""Acceptance of a trace and times of a surface in, what every configuration would do in every cell out.

Nothing of it was measured: the trace is one plain run, the times come from forced acceptance on other
prompts. The interval carries both errors: acceptance over other prompts like the traced ones, and times
over shapes that the surface was not fitted to.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spectune.errors import SpectuneError, UsageError
from spectune.metrics.acceptance import conditional_acceptance
from spectune.records import Cell, Interval, RoundTimes, SpecConfig
from spectune.replay.rounds import ReplayCounts, by_request
from spectune.replay.widths import mean_largest, verified_widths
from spectune.stats.moments import t_quantile
from spectune.store.surface import TimeSurface
from spectune.store.trace_file import Trace
from spectune.theory import cost, speedup, waterfall
from spectune.tune.surface import Costs

ALL = "all"
LEVEL = 0.95

Refused = tuple[tuple[str, str], ...]
Traces = Mapping[tuple[int, float], Trace]
"""By (context tokens, temperature)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What one configuration is expected to do in one cell, for one category or all of them.

    `tokens_per_step` is what a sequence gets of a round, cuts at the end of texts included; it divides
    the round time. `acceptance_error` and `time_error` are standard errors of logarithms.
    """

    config: SpecConfig
    cell: Cell
    category: str
    times: RoundTimes
    tokens_per_step: float
    num_steps: int
    acceptance_length: float | None
    survival: tuple[float, ...]
    zero_accept_share: float | None
    acceptance_error: float
    time_error: float
    tpot_s: Interval
    throughput_per_s: Interval
    speedup: Interval | None  # None for plain decoding
    break_even_acceptance_length: float | None
    limit: str | None  # what makes it slower than plain decoding; None if nothing does
    request_tpot_s: tuple[float, ...] = ()  # of each traced request, by its own acceptance
    mean_output_tokens: float | None = None

    @property
    def conditional_acceptance(self) -> tuple[float | None, ...]:
        """The rates to compare between different lengths: survival falls with K by itself."""
        return conditional_acceptance(self.survival)

    def waterfall(self, plain: Forecast, measured: float | None = None) -> tuple[tuple[str, float], ...]:
        """Logarithmic gains of acceptance, verify, draft and other, and what a measurement leaves over."""
        return waterfall.waterfall(
            tau=max(1.0, self.tokens_per_step / plain.tokens_per_step),
            plain_s=plain.times.total_s,
            draft_s=self.times.draft_s,
            verify_s=self.times.verify_s,
            other_s=self.times.other_s,
            plain_other_s=plain.times.other_s + plain.times.draft_s,
            measured_speedup=measured,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecasts:
    """All forecasts, and what could not be told with the reason."""

    rows: tuple[Forecast, ...]
    refused: Refused = ()

    def of(self, cell: Cell, category: str = ALL) -> tuple[Forecast, ...]:
        """Fastest first, the smaller configuration among equals."""
        own = [row for row in self.rows if row.cell == cell and row.category == category]
        return tuple(sorted(own, key=lambda row: (row.tpot_s.value, row.config.size)))

    def find(self, config: SpecConfig, cell: Cell, category: str = ALL) -> Forecast | None:
        return next((row for row in self.of(cell, category) if row.config == config), None)

    @property
    def categories(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.category for row in self.rows))


def forecast(
    surface: TimeSurface,
    traces: Traces,
    configs: Sequence[SpecConfig],
    cells: Iterable[Cell],
    *,
    requests: Collection[str] | None = None,
) -> Forecasts:
    """Every configuration in every cell and category, plain decoding included.

    `requests` restricts the acceptance to some of the traced requests, by their ids.
    Raises UsageError where plain decoding itself cannot be told: then no speedup can.
    """
    rows: list[Forecast] = []
    refused: dict[str, str] = {}
    costs = Costs(surface.lines)
    seen: dict[int, _Replayed] = {}
    asked = tuple(dict.fromkeys((SpecConfig.off(), *configs)))
    for cell in cells:
        trace = traces.get((cell.context_tokens, cell.temperature))
        if trace is None:
            raise UsageError(f"no trace of context {cell.context_tokens}, T={cell.temperature:g}")
        if id(trace) not in seen:
            seen[id(trace)] = _Replayed(trace, asked, requests)
        replayed = seen[id(trace)]
        refused.update({f"{config.label}": reason for config, reason in replayed.refused})
        plain: dict[str, Forecast] = {}
        for index, config in enumerate(replayed.configs):
            try:
                times = replayed.times(index, cell, costs)
            except SpectuneError as error:
                if config.is_off:
                    raise
                refused[f"{config.label} @ {cell.label}"] = error.message
                continue
            for category in replayed.categories:
                told = replayed.forecast(index, cell, category, times, surface.time_error, plain)
                if told is None:
                    continue
                if config.is_off:
                    plain[category] = told
                rows.append(told)
    return Forecasts(rows=tuple(rows), refused=tuple(refused.items()))


class _Replayed:
    """One trace replayed for all configurations that it can answer."""

    def __init__(
        self, trace: Trace, configs: Sequence[SpecConfig], requests: Collection[str] | None = None
    ) -> None:
        self._trace = trace
        self.refused: list[tuple[SpecConfig, str]] = []
        kept = []
        for config in configs:
            try:
                if not config.is_off:
                    trace.drafter_of(config)
                kept.append(config)
            except UsageError as error:
                self.refused.append((config, error.message))
        if trace.num_positions == 0:
            raise UsageError("the trace holds no position", hint="trace more or longer outputs")
        self.configs = tuple(kept)
        self._counts: ReplayCounts = by_request(trace, kept)
        self._names = np.array(trace.categories)
        ids = trace.request_ids
        self._used = np.array([requests is None or name in requests for name in ids], bool)
        if not self._used.any():
            raise UsageError("the trace holds none of the requests", hint="trace the prompts that are asked")
        self.categories = (ALL, *sorted(set(trace.categories)))
        outputs = np.maximum(trace.num_outputs.astype(float) - 1, 0) * self._used
        # a sequence grows from its prompt to its end: the mean of what its steps read
        middle = trace.num_prompt_tokens + (trace.num_outputs.astype(float)) / 2
        self._context = float((middle * outputs).sum() / outputs.sum())
        self._widths: dict[tuple[SpecConfig, int], dict[int, float]] = {}

    def times(self, index: int, cell: Cell, costs: Costs) -> RoundTimes:
        """Mean full round of a configuration."""
        config = self.configs[index]
        accepted = self._counts.histogram[index, self._used].sum(0)
        return costs.round_times(
            config,
            cell.batch_size,
            self._context * cell.batch_size,
            1.0 + mean_largest(accepted, cell.batch_size),
            self._verified(config, cell.batch_size),
        )

    def _verified(self, config: SpecConfig, batch_size: int) -> dict[int, float]:
        key = (config, batch_size)
        if key not in self._widths:
            self._widths[key] = verified_widths(self._trace, config, batch_size)
        return self._widths[key]

    def forecast(
        self,
        index: int,
        cell: Cell,
        category: str,
        times: RoundTimes,
        time_error: float,
        plain: Mapping[str, Forecast],
    ) -> Forecast | None:
        """None where the category made no step."""
        config = self.configs[index]
        own = self._used if category == ALL else self._used & (self._names == category)
        steps = self._counts.num_steps[index, own]
        emitted = self._counts.num_emitted[index, own]
        if not steps.sum():
            return None
        per_step = float(emitted.sum() / steps.sum())
        error = 0.0 if config.is_off else ratio_error(emitted, steps)
        drafted = int(self._counts.num_draft_steps[index, own].sum())
        accepted = int(self._counts.num_accepted[index, own].sum())
        tau = 1 + accepted / int(steps.sum()) if drafted else None
        histogram = self._counts.histogram[index, own].sum(0)
        tpot_s = times.total_s / per_step
        degrees = max(1, int((steps > 0).sum()) - 1)
        whole = math.hypot(error, time_error)
        interval = _around(tpot_s, whole, degrees)
        off = plain.get(category)
        is_told = off is not None and not config.is_off
        parts = (times.draft_s, times.verify_s, times.other_s)
        plain_s = off.times.total_s if off is not None else None
        made = steps > 0
        return Forecast(
            config=config,
            request_tpot_s=tuple((times.total_s * steps[made] / emitted[made]).tolist()),
            mean_output_tokens=float(self._trace.num_outputs[own].mean()),
            cell=cell,
            category=category,
            times=times,
            tokens_per_step=per_step,
            num_steps=int(steps.sum()),
            acceptance_length=tau,
            survival=_survival(histogram, config) if drafted else (),
            zero_accept_share=_zero_share(histogram, int(steps.sum()), drafted),
            acceptance_error=error,
            time_error=time_error,
            tpot_s=interval,
            throughput_per_s=_around(
                cost.throughput(cell.batch_size, max(1.0, per_step), times.total_s), whole, degrees
            ),
            speedup=_around(off.tpot_s.value / tpot_s, math.hypot(whole, time_error), degrees)
            if off is not None and is_told
            else None,
            break_even_acceptance_length=speedup.break_even_acceptance_length(plain_s, *parts)
            if plain_s and is_told
            else None,
            limit=speedup.slowdown_cause(max(1.0, per_step), plain_s, *parts)
            if plain_s and is_told
            else None,
        )


def ratio_error(numerators: NDArray[np.integer], denominators: NDArray[np.integer]) -> float:
    """Standard error of log(Σ n / Σ d) with the request as the unit: √(R/(R-1) · Σ (n - r·d)²) / Σ n.

    Steps of one request are alike, so counting steps as independent would claim too much.
    """
    used = denominators > 0
    n, d = numerators[used].astype(float), denominators[used].astype(float)
    if len(n) < 2:
        return 1.0
    residuals = n - n.sum() / d.sum() * d
    return float(math.sqrt(len(n) / (len(n) - 1) * (residuals**2).sum()) / n.sum())


def _around(value: float, log_error: float, degrees: int) -> Interval:
    half = t_quantile(0.5 + LEVEL / 2, degrees) * log_error
    return Interval(
        value=value, low=value * math.exp(-half), high=value * math.exp(half), n=degrees + 1, level=LEVEL
    )


def _survival(histogram: NDArray[np.integer], config: SpecConfig) -> tuple[float, ...]:
    steps = int(histogram.sum())
    at_least = histogram[::-1].cumsum()[::-1][1:]
    padded = np.zeros(config.max_accepted)
    padded[: min(len(at_least), config.max_accepted)] = at_least[: config.max_accepted]
    return tuple(float(count) / steps for count in padded)


def _zero_share(histogram: NDArray[np.integer], steps: int, drafted: int) -> float | None:
    """Share of drafting steps that keep nothing."""
    return (int(histogram[0]) - (steps - drafted)) / drafted if drafted else None

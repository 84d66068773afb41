"""The records of a race: its rules, what was expected, where everybody stood, who won."""

from __future__ import annotations

from dataclasses import dataclass

from spectune.records import Cell, Interval, SpecConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceRules:
    """When a race ends.

    epsilon: how much better a challenger may still be when it leaves. tie: finalists that close to the
    fastest are as good, and the smallest is taken. level: two-sided confidence of a comparison.
    """

    epsilon: float = 0.02
    tie: float = 0.005
    max_stages: int = 8
    level: float = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Guess:
    """What was expected of a finalist before anything ran: speed over plain decoding and its log error.

    `gain` is tokens a step over plain decoding's, replayed over all traced prompts; the standard error of
    its logarithm is that of other prompts. None where nothing was replayed.
    """

    speedup: float
    error: float
    gain: float | None = None
    gain_error: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Challenger:
    """A finalist at the end of a stage. `speedup` is over plain decoding, `against` over the incumbent:
    measured round times, and what rounds yield by the trace where there is one."""

    config: SpecConfig
    expected: float | None
    speedup: Interval | None
    against: Interval | None
    estimate: float  # measurement and expectation together, over plain decoding
    status: str  # incumbent, racing, settled, halved, failed
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    number: int
    num_blocks: int
    challengers: tuple[Challenger, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceResult:
    """`winner` is what to run: plain decoding unless another beats it by more than the noise."""

    cell: Cell
    winner: SpecConfig
    fastest: SpecConfig
    reason: str
    stages: tuple[Stage, ...]
    end: str  # settled, budget, stages, nothing to compare
    seconds: float
    tpot_s: float | None = None
    speedup: Interval | None = None
    failed: tuple[tuple[str, str], ...] = ()

    @property
    def unsettled(self) -> tuple[Challenger, ...]:
        """Challengers that may still be better by more than ε."""
        last = self.stages[-1].challengers if self.stages else ()
        return tuple(one for one in last if one.status == "racing")

"""A chooser without a table: it learns what a round costs and gives, and runs the best goodput.

Goodput of a configuration at a batch size is (1 + accepted drafts) / seconds of a round. Seconds come
from a calibrated surface and are kept current from the clock between rounds; accepted drafts from the
engine's moving mean, carried over to other configurations by their measured ratio. Configurations that
were not run for long are looked at again, as often as a budget of lost time allows.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence

from spectune.policy.comparison import CellComparison
from spectune.records import Cell, Clock, RoundTimes, SpecConfig

BUDGET = 0.005
"""Share of the time that may be lost by looking at others than the best."""

TIME_WEIGHT = 0.1
"""Weight of the newest round in the moving mean of seconds."""

MAX_FACTOR = 4.0
"""Gaps longer than this many usual rounds are not rounds: a prompt was prefilled between."""

RATIO_WEIGHT = 0.05
"""Weight of the newest round in live acceptance over the measured one: single rounds accept by chance."""

MARGIN = 1.02
"""Another configuration has to be better by this factor before it replaces the running one."""


class LearningChooser:
    """Satisfies `records.Chooser`; one for one engine and one run.

    Args:
        surface: calibrated round times by (configuration label, cell); only labels of `configs` are used.
        accepted: measured drafts accepted a round, by configuration label (acceptance length - 1).
        configs: candidates; off is always one.
        clock: seconds; read once a round.
    """

    def __init__(
        self,
        surface: Mapping[tuple[str, Cell], RoundTimes],
        accepted: Mapping[str, float],
        configs: Sequence[SpecConfig],
        *,
        clock: Clock,
        budget: float = BUDGET,
    ) -> None:
        self._configs = tuple(dict.fromkeys((SpecConfig.off(), *configs)))
        self._seconds: dict[str, dict[int, float]] = {config.label: {} for config in self._configs}
        for (label, cell), times in surface.items():
            if label in self._seconds:
                self._seconds[label][cell.batch_size] = times.total_s
        self._accepted = dict(accepted)
        self._clock, self._budget = clock, budget
        self._ratio = 1.0  # live acceptance over the measured one
        self._last: tuple[SpecConfig, int, int, float] | None = None  # config, batch, context, time
        self._was_off = False  # the round before the last
        self._lost = 0.0  # plain rounds' worth of time spent on looking
        self._num_rounds = 0
        self._held: dict[
            int, SpecConfig
        ] = {}  # the choice at each batch size, until another is clearly better
        self._looked: dict[tuple[str, int], int] = {}

    def choose(self, *, batch_size: int, context_tokens: int, acceptance_ema: float | None) -> SpecConfig:
        """The configuration to run next."""
        now_s = self._clock()
        self._learn(batch_size, context_tokens, acceptance_ema, now_s)
        best = self._best(batch_size)
        chosen = self._look(best, batch_size) or best
        self._num_rounds += 1
        self._looked[chosen.label, batch_size] = self._num_rounds
        self._was_off = self._last is not None and self._last[0].is_off
        self._last = (chosen, batch_size, context_tokens, now_s)
        return chosen

    def goodput(self, config: SpecConfig, batch_size: int) -> float | None:
        """Tokens a second of one sequence; None where nothing is known of the configuration's time."""
        seconds = self._round_s(config, batch_size)
        if seconds is None or (not config.is_off and config.label not in self._accepted):
            return None
        accepted = 0.0 if config.is_off else self._accepted[config.label] * self._ratio
        return (1 + min(accepted, config.max_accepted if not config.is_off else 0)) / seconds

    def _best(self, batch_size: int) -> SpecConfig:
        known = [(self.goodput(config, batch_size), config) for config in self._configs]
        scored = [(value, config) for value, config in known if value is not None]
        if not scored:
            return SpecConfig.off()
        value, best = max(scored, key=lambda pair: (pair[0], [-part for part in pair[1].size]))
        running = self._held.get(batch_size, best)
        held = self.goodput(running, batch_size)
        if held is None or value >= MARGIN * held:
            self._held[batch_size] = best
            return best
        return running

    def _look(self, best: SpecConfig, batch_size: int) -> SpecConfig | None:
        """Another configuration for one round, if the budget allows: the one longest not seen."""
        others = [
            config
            for config in self._configs
            if config != best and self.goodput(config, batch_size) is not None
        ]
        if not others:
            return None
        other = min(others, key=lambda config: self._looked.get((config.label, batch_size), 0))
        top, low = self.goodput(best, batch_size), self.goodput(other, batch_size)
        assert top is not None
        assert low is not None
        loss = max(0.0, top / low - 1)
        if self._lost + loss > self._budget * (self._num_rounds + 1):
            return None
        self._lost += loss
        return other

    def _learn(self, batch_size: int, context_tokens: int, ema: float | None, now_s: float) -> None:
        last = self._last
        if last is None:
            return
        config, batch, context, started_s = last
        usual = self._round_s(config, batch)
        seconds = now_s - started_s
        grew = context_tokens - context
        is_clean = batch_size <= batch and 0 <= grew <= config.num_steps + 1
        # the first drafts after off take in the text since then, which later ones do not
        is_clean = is_clean and (config.is_off or not self._was_off)
        if is_clean and seconds > 0 and (usual is None or seconds < MAX_FACTOR * usual):
            own = self._seconds[config.label]
            before = own.get(batch, usual if usual is not None else seconds)
            own[batch] = (1 - TIME_WEIGHT) * before + TIME_WEIGHT * seconds
        measured = self._accepted.get(config.label)
        if not config.is_off and ema is not None and measured:
            self._ratio += RATIO_WEIGHT * (ema / measured - self._ratio)

    def _round_s(self, config: SpecConfig, batch_size: int) -> float | None:
        """Seconds of a round: known, or linear between known batch sizes, or of the nearest."""
        own = self._seconds[config.label]
        if batch_size in own or not own:
            return own.get(batch_size)
        sizes = sorted(own)
        right = bisect.bisect_left(sizes, batch_size)
        if right in (0, len(sizes)):
            return own[sizes[min(right, len(sizes) - 1)]]
        low, high = sizes[right - 1], sizes[right]
        share = (batch_size - low) / (high - low)
        return own[low] + share * (own[high] - own[low])


def measured_accepted(cells: Iterable[CellComparison]) -> dict[str, float]:
    """Drafts accepted a round by configuration label, from the smallest measured batch."""
    found: dict[str, float] = {}
    for cell in sorted(cells, key=lambda cell: -cell.cell.batch_size):
        for arm in cell.arms:
            length = None if arm.acceptance is None else arm.acceptance.acceptance_length
            if length is not None and not arm.config.is_off:
                found[arm.config.label] = length - 1
    return found

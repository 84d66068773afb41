"""A policy in, the configuration of the engine's next round out."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from spectune.policy.deadband import patience_of
from spectune.policy.file import config_of
from spectune.policy.table import cells_that_hold, choose
from spectune.records import SpecConfig

PROBE_BUDGET = 0.005
"""Share of the time that looking at the other choice may cost."""

PROBE_ROUNDS = 5
"""Rounds of one look: enough for the engine's moving mean to follow."""

WEIGHT = 0.02
"""Of the newest value in the slow mean of accepted drafts: about a hundred rounds are remembered."""

MIN_ROUNDS = 100
"""Speculating rounds before the acceptance of the moment says anything: single rounds accept by chance."""


class PolicyChooser:
    """Runs a policy inside an engine; satisfies `records.Chooser`.

    A new choice replaces the running one only after the policy's deadband has passed, so that a batch
    size that flickers across an edge does not flicker the engine.

    Args:
        category, temperature: of the requests, where all of them share one.
        patience: rounds that any switch waits, in place of the policy's deadband.
        uses_acceptance: rest where the drafts of the moment are not worth their rounds (fewer are accepted,
            in a slow mean, than the cell's own break-even). Looks now and then cost no more than
            PROBE_BUDGET of the time, and end the rest when they find acceptance.
    """

    def __init__(
        self,
        policy: Mapping[str, Any],
        *,
        category: str | None = None,
        temperature: float | None = None,
        patience: int | None = None,
        uses_acceptance: bool = True,
    ) -> None:
        self._policy = policy
        self._category, self._temperature = category, temperature
        self._patience = patience
        self._deadband = patience_of(policy)
        self._uses_acceptance = uses_acceptance
        self._known: dict[tuple[int, int], tuple[SpecConfig, float | None]] = {}
        self._ranges = _Ranges(policy)
        self._running: SpecConfig | None = None
        self._asked = 0
        self._ran: SpecConfig | None = None  # what the last choice was
        self._mean_of: SpecConfig | None = None
        self._mean: float | None = None  # slow mean of the drafts that it accepted
        self._num_drafted = 0  # rounds behind it
        self._rounds_poor: int | None = None  # of the present rest; None where nothing rests

    @property
    def largest(self) -> SpecConfig:
        """The configuration that an engine has to make room for."""
        configs = [config_of(cell["config"]) for cell in self._policy["cells"]]
        return max((*configs, SpecConfig.off()), key=lambda config: config.size)

    def choose(self, *, batch_size: int, context_tokens: int, acceptance_ema: float | None) -> SpecConfig:
        """The configuration to run next."""
        self._ran = self._next(batch_size, context_tokens, acceptance_ema)
        return self._ran

    def _next(self, batch_size: int, context_tokens: int, acceptance_ema: float | None) -> SpecConfig:
        wanted, needed = self._wanted(batch_size, context_tokens)
        self._remember(acceptance_ema)
        if self._is_poor(wanted, needed, acceptance_ema):
            assert needed is not None
            if self._is_look(needed):
                return wanted
            wanted = SpecConfig.off()
        if self._running is None or wanted == self._running:
            self._running, self._asked = wanted, 0
            return wanted
        self._asked += 1
        if self._asked >= self._rounds_to_wait(self._running, wanted):
            self._running, self._asked = wanted, 0
        return self._running

    def _rounds_to_wait(self, running: SpecConfig, wanted: SpecConfig) -> int:
        if self._patience is not None:
            return self._patience
        return self._deadband.get((running.label, wanted.label), 1)

    def _wanted(self, batch_size: int, context_tokens: int) -> tuple[SpecConfig, float | None]:
        """The table's configuration, and the drafts it has to accept there."""
        key = (self._ranges.batch(batch_size), self._ranges.context(context_tokens))
        if key not in self._known:
            place = (self._policy, batch_size, context_tokens, self._category, self._temperature)
            config = choose(*place)
            own = (cell for cell in cells_that_hold(*place) if config_of(cell["config"]) == config)
            self._known[key] = (config, next(own, {}).get("break_even_accepted"))
        return self._known[key]

    def _remember(self, accepted: float | None) -> None:
        """The engine's mean is of the configuration that drafted last; another one starts anew."""
        if accepted is None or self._ran is None or self._ran.is_off:
            return
        if self._ran != self._mean_of:
            self._mean_of, self._mean, self._num_drafted, self._rounds_poor = self._ran, None, 0, None
        self._num_drafted += 1
        self._mean = accepted if self._mean is None else (1 - WEIGHT) * self._mean + WEIGHT * accepted

    def _is_poor(self, wanted: SpecConfig, needed: float | None, accepted: float | None) -> bool:
        """Whether the drafts of the moment are not worth their rounds."""
        if not self._uses_acceptance or wanted.is_off or needed is None or self._mean is None:
            return False
        if wanted != self._mean_of:
            return False
        if self._rounds_poor is None:
            if self._num_drafted < MIN_ROUNDS or self._mean >= needed:
                return False
            self._rounds_poor = 0
        elif accepted is not None and accepted >= needed and self._ran == wanted:  # a look found acceptance
            self._rounds_poor, self._mean, self._num_drafted = None, accepted, MIN_ROUNDS // 2
            return False
        return True

    def _is_look(self, needed: float) -> bool:
        """Whether it is time to look again: each look loses `needed` plain rounds a round at most."""
        assert self._rounds_poor is not None
        self._rounds_poor += 1
        pause = PROBE_ROUNDS * math.ceil(max(needed, 1.0) / PROBE_BUDGET)
        if self._rounds_poor <= pause:
            return False
        if self._rounds_poor >= pause + PROBE_ROUNDS:
            self._rounds_poor = 0
        return True


class _Ranges:
    """Which of a policy's ranges a value lies in, so that each is looked up once."""

    def __init__(self, policy: Mapping[str, Any]) -> None:
        self._batches = _starts(cell["batch"] for cell in policy["cells"])
        self._contexts = _starts(cell["context_tokens"] or [0, None] for cell in policy["cells"])

    def batch(self, value: int) -> int:
        return _index(self._batches, value)

    def context(self, value: int) -> int:
        return _index(self._contexts, value)


def _starts(ranges: Iterable[Sequence[float | None]]) -> list[float]:
    found: set[float] = set()
    for low, high in ranges:
        found.add(low or 0)
        if high is not None:
            found.add(high + 1)
    return sorted(found)


def _index(starts: Sequence[float], value: int) -> int:
    return bisect.bisect_right(starts, value)

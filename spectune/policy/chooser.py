"""A policy in, the configuration of the engine's next round out."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from spectune.policy.deadband import patience_of
from spectune.policy.file import config_of
from spectune.policy.table import choose
from spectune.records import SpecConfig

PROBE_BUDGET = 0.005
"""Share of the time that looking at the other choice may cost."""

PROBE_ROUNDS = 5
"""Rounds of one look: enough for a moving mean to follow."""


class PolicyChooser:
    """Runs a policy inside an engine; satisfies `records.Chooser`.

    A new choice replaces the running one only after the policy's deadband has passed, so that a batch
    size that flickers across an edge does not flicker the engine.

    Args:
        category, temperature: of the requests, where all of them share one.
        patience: rounds that any switch waits, in place of the policy's deadband.
        break_even: drafts that a round has to accept, by configuration label, for it to be worth its time.
            Where the live estimate falls below, rounds are off, but for a probe now and then that costs
            no more than PROBE_BUDGET of the time; the probe's acceptance turns speculation on again.
    """

    def __init__(
        self,
        policy: Mapping[str, Any],
        *,
        category: str | None = None,
        temperature: float | None = None,
        patience: int | None = None,
        break_even: Mapping[str, float] | None = None,
    ) -> None:
        self._policy = policy
        self._category, self._temperature = category, temperature
        self._patience = patience
        self._deadband = patience_of(policy)
        self._break_even = dict(break_even or {})
        self._known: dict[tuple[int, int], SpecConfig] = {}
        self._ranges = _Ranges(policy)
        self._running: SpecConfig | None = None
        self._asked = 0
        self._rounds_poor = 0

    @property
    def largest(self) -> SpecConfig:
        """The configuration that an engine has to make room for."""
        configs = [config_of(cell["config"]) for cell in self._policy["cells"]]
        return max((*configs, SpecConfig.off()), key=lambda config: config.size)

    def choose(self, *, batch_size: int, context_tokens: int, acceptance_ema: float | None) -> SpecConfig:
        """The configuration to run next."""
        wanted = self._wanted(batch_size, context_tokens)
        if self._is_poor(wanted, acceptance_ema):
            if self._is_look(wanted):
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

    def _wanted(self, batch_size: int, context_tokens: int) -> SpecConfig:
        key = (self._ranges.batch(batch_size), self._ranges.context(context_tokens))
        if key not in self._known:
            self._known[key] = choose(
                self._policy, batch_size, context_tokens, self._category, self._temperature
            )
        return self._known[key]

    def _is_poor(self, wanted: SpecConfig, accepted: float | None) -> bool:
        """Whether the drafts of the moment are not worth their rounds."""
        needed = self._break_even.get(wanted.label)
        is_poor = needed is not None and accepted is not None and accepted < needed
        if not is_poor:
            self._rounds_poor = 0
        return is_poor

    def _is_look(self, wanted: SpecConfig) -> bool:
        """Whether it is time to look again: each look loses `needed` plain rounds a round at most."""
        self._rounds_poor += 1
        pause = PROBE_ROUNDS * math.ceil(max(self._break_even[wanted.label], 1.0) / PROBE_BUDGET)
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

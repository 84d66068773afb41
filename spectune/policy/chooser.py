"""A policy in, the configuration of the engine's next round out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spectune.policy.table import choose
from spectune.records import SpecConfig


class PolicyChooser:
    """Runs a policy inside an engine; satisfies `records.Chooser`.

    A new choice replaces the running one only after `patience` rounds in a row have asked for it, so
    that a batch size that flickers across an edge does not flicker the engine. The acceptance of the
    moment is accepted and not used: the table is measured, not estimated.
    """

    def __init__(
        self,
        policy: Mapping[str, Any],
        *,
        category: str | None = None,
        temperature: float | None = None,
        patience: int = 1,
    ) -> None:
        self._policy = policy
        self._category = category
        self._temperature = temperature
        self._patience = patience
        self._known: dict[tuple[int, int], SpecConfig] = {}
        self._running: SpecConfig | None = None
        self._asked = 0

    def choose(self, *, batch_size: int, context_tokens: int, acceptance_ema: float | None) -> SpecConfig:
        """The configuration to run next."""
        wanted = self._wanted(batch_size, context_tokens)
        if self._running is None or wanted == self._running:
            self._running, self._asked = wanted, 0
            return wanted
        self._asked += 1
        if self._asked >= self._patience:
            self._running, self._asked = wanted, 0
        return self._running

    def _wanted(self, batch_size: int, context_tokens: int) -> SpecConfig:
        key = (batch_size, context_tokens)
        if key not in self._known:
            self._known[key] = choose(
                self._policy, batch_size, context_tokens, self._category, self._temperature
            )
        return self._known[key]

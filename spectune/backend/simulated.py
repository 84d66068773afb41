"""A backend with declared costs and a virtual clock (signatures first)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from spectune.backend.truth import SimulatedTruth, load_truth
from spectune.records import Capabilities, Fingerprint, Launch, Point, Prompt, Session


class SimulatedBackend:
    """Declared, not measured: every number follows from `truth` and `seed`."""

    def __init__(
        self,
        *,
        truth: SimulatedTruth | str | Path | None = None,
        seed: int = 0,
        failing: Mapping[str, str] | None = None,
    ) -> None:
        self.truth = truth if isinstance(truth, SimulatedTruth) else load_truth(truth)
        self.seed = seed
        self.failing = dict(failing or {})

    def capabilities(self) -> Capabilities:
        raise NotImplementedError

    def plan(self, points: Sequence[Point]) -> list[Launch]:
        raise NotImplementedError

    def open(self, launch: Launch) -> AbstractContextManager[Session]:
        raise NotImplementedError

    def fingerprint(self) -> Fingerprint:
        raise NotImplementedError

    def encode(self, prompt: Prompt, context_text: str, context_tokens: int) -> tuple[int, ...]:
        raise NotImplementedError

"""What is told as the best so far."""

from __future__ import annotations

from dataclasses import replace

from spectune.measure.cell import Best
from spectune.measure.progress import SilentProgress
from spectune.records import Cell, Point, Sampling, SpecConfig

K3 = SpecConfig.chain("eagle3", 3)
POINT = Point(
    config=K3,
    cell=Cell(batch_size=1, context_tokens=0, temperature=0.0),
    workload_hash="w",
    sampling=Sampling(max_tokens=8),
)


class Told(SilentProgress):
    """Keeps what it hears."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[tuple[str, float]] = []

    def best(self, label: str, speedup: float) -> None:
        self.heard.append((label, speedup))


def test_only_a_faster_candidate_is_told() -> None:
    """1.2, then 1.1, then 1.3: the first and the last."""
    best, told = Best(), Told()

    for speedup in (1.2, 1.1, 1.3):
        best.tell(POINT, speedup, told)

    assert told.heard == [(POINT.label, 1.2), (POINT.label, 1.3)]


def test_arms_and_loads_that_decide_nothing_are_never_the_best() -> None:
    """A server on standby, one as in production, and requests by the clock cannot be chosen."""
    best, told = Best(), Told()
    chain = SpecConfig.chain
    clocked = replace(POINT.cell, request_rate=2.0, arrivals="poisson", burstiness=1.0)

    best.tell(replace(POINT, config=chain("eagle3", 3, options=(("standby", True),))), 2.7, told)
    best.tell(replace(POINT, config=chain("eagle3", 3, options=(("production", True),))), 2.5, told)
    best.tell(replace(POINT, cell=clocked), 1.8, told)
    best.tell(POINT, 1.1, told)

    assert told.heard == [(POINT.label, 1.1)]

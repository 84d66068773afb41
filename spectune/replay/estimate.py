"""Smaller chains from the steps of one live run with the largest K: an estimate, as a rule biased low.

For servers that report only per-step counts. A chain of K < K_max stands at other positions than the
run did: K_max crosses an easy stretch in few steps, the smaller chain would take more of them there, so
easy text weighs too little and the estimate is low. Where agreement comes only in runs shorter than
K_max it can be high instead. Replay of a trace along the server's own tokens is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spectune.errors import MetricMissing, UsageError
from spectune.metrics.acceptance import survival
from spectune.records import StepRecord

LABEL = "estimated from one run with the largest K, biased (low where text has easy and hard stretches)"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainEstimate:
    """Acceptance of a chain of K as one run with a larger chain suggests it."""

    num_tokens: int
    acceptance_length: float
    survival: tuple[float, ...]
    num_steps: int  # of the run that it comes from
    label: str


def chain_estimates(steps: Sequence[StepRecord], max_tokens: int) -> tuple[ChainEstimate, ...]:
    """K = 1 .. K_max from the steps of a chain of K_max; the last one is the run's own measurement.

    Raises MetricMissing where nothing was drafted, UsageError for steps of a longer chain.
    """
    if (longest := max((step.num_verified for step in steps), default=0)) > max_tokens:
        raise UsageError(f"a step verified {longest} drafts, more than a chain of {max_tokens} has")
    shares = survival(steps, max_tokens)
    if not shares:
        raise MetricMissing("no draft steps observed", hint="run with a drafter first")
    return estimates_of(shares, num_steps=len(steps))


def estimates_of(shares: Sequence[float], *, num_steps: int) -> tuple[ChainEstimate, ...]:
    """The same from the survival of a chain of K_max by position, each share of all its steps."""
    return tuple(
        ChainEstimate(
            num_tokens=k,
            acceptance_length=1 + sum(shares[:k]),
            survival=tuple(shares[:k]),
            num_steps=num_steps,
            label=LABEL if k < len(shares) else "measured",
        )
        for k in range(1, len(shares) + 1)
    )

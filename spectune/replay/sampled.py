"""Chains whose drafts are sampled: expected steps for every K, from one sample of plain decoding.

With y an ordinary sample of the target, a draft drawn from q and the p/q rule, the drafts that spell y
are accepted with independent probabilities r = min(1, q(y)/p(y)) given y, for P(accept and token = y) =
min(p, q). So P(at least j accepted | y) = r_1 ... r_j, and a backward programme over positions gives the
expected number of steps without drawing a single draft. The text is not the one that a sampled run
would emit under the same seed: equal in law, not token by token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spectune.errors import MetricMissing
from spectune.records import SpecConfig
from spectune.store.trace_file import Trace

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledChain:
    """Expected steps and accepted drafts of each request with a chain of K sampled drafts."""

    num_tokens: int
    num_steps: Floats  # [R]
    num_accepted: Floats  # [R]

    @property
    def acceptance_length(self) -> float | None:
        """1 + Σ accepted / Σ steps; None without a step."""
        steps = float(self.num_steps.sum())
        return 1 + float(self.num_accepted.sum()) / steps if steps else None


def expected_steps(accept: Floats, num_tokens: int) -> tuple[float, float]:
    """Expected (steps, accepted drafts) from the first position of one text.

    Args:
        accept: [P, D] min(1, q/p) of the text's tokens at depths 1..D after each position, 0 past the
            end of the text; D >= num_tokens.
        num_tokens: K of the chain.

    V(t) = 1 + Σ_a P(A = a) V(t + a + 1), V = 0 past the end; accepted likewise with a in place of 1.
    """
    positions = accept.shape[0]
    at_least = np.concatenate([np.ones((positions, 1)), np.cumprod(accept[:, :num_tokens], 1)], 1)
    exactly = at_least.copy()
    exactly[:, :-1] -= at_least[:, 1:]  # [P, K+1]
    gains = exactly @ np.arange(num_tokens + 1)
    steps, accepted = (np.zeros(positions + num_tokens + 1) for _ in range(2))
    for t in range(positions - 1, -1, -1):
        after = slice(t + 1, t + num_tokens + 2)
        steps[t] = 1 + exactly[t] @ steps[after]
        accepted[t] = gains[t] + exactly[t] @ accepted[after]
    return float(steps[0]), float(accepted[0])


def sampled_chain(trace: Trace, num_tokens: int, method: str = "eagle3") -> SampledChain:
    """The chain of K sampled drafts along a trace at T > 0.

    Raises MetricMissing for a trace without draft probabilities (greedy, or another drafter).
    """
    drafter = trace.drafter_of(SpecConfig.chain(method, num_tokens))
    if drafter.sampled is None:
        raise MetricMissing(
            f"the trace holds no draft probabilities of {method}", hint="trace at --temperature above 0"
        )
    sampled = drafter.sampled.astype(np.float64)
    steps, accepted, first = np.zeros(trace.num_requests), np.zeros(trace.num_requests), 0
    for request, outputs in enumerate(trace.num_outputs):
        last = first + max(0, int(outputs) - 1)
        if last > first:
            steps[request], accepted[request] = expected_steps(sampled[first:last], num_tokens)
        first = last
    return SampledChain(num_tokens=num_tokens, num_steps=steps, num_accepted=accepted)

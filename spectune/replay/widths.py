"""What a batch sees of its rows: the most that one of them keeps, and how many drafts a round verifies.

A round is as wide as its widest row. Rows of a batch are taken as independent draws of the steps that a
configuration makes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from spectune.records import SpecConfig
from spectune.replay.accepted import accepted_counts
from spectune.replay.rounds import visited
from spectune.store.trace_file import Trace


def largest_of(histogram: NDArray[np.integer], batch_size: int) -> NDArray[np.float64]:
    """P(largest of `batch_size` draws = a) from counts [A] of a = 0 .. A-1: F(a)^B - F(a-1)^B."""
    total = int(histogram.sum())
    if total == 0:
        return np.ones(1)
    at_most = (histogram.cumsum() / total) ** batch_size
    shares: NDArray[np.float64] = np.diff(at_most, prepend=0.0)
    return shares


def mean_largest(histogram: NDArray[np.integer], batch_size: int) -> float:
    """E[largest of `batch_size` draws]."""
    shares = largest_of(histogram, batch_size)
    return float(shares @ np.arange(len(shares)))


def verified_widths(trace: Trace, config: SpecConfig, batch_size: int) -> dict[int, float]:
    """Probability of each number of tokens, root included, that a round verifies for every row."""
    if config.is_off:
        return {1: 1.0}
    drafted = trace.drafter_of(config).drafted
    if drafted is None:
        return {config.num_draft_tokens: 1.0}
    hits = visited(trace, accepted_counts(trace, [config]))[0]
    counts = np.bincount(np.minimum(drafted[hits], config.num_steps), minlength=1)
    shares = largest_of(counts, batch_size)
    return {drafts + 1: float(share) for drafts, share in enumerate(shares) if share > 0}

"""One run with the largest K: an estimate for the smaller ones, and what is wrong with it."""

from __future__ import annotations

import pytest

from spectune.errors import MetricMissing, UsageError
from spectune.records import SpecConfig, StepRecord
from spectune.replay.accepted import accepted_counts
from spectune.replay.estimate import LABEL, chain_estimates
from spectune.replay.rounds import replay, visited
from tests.support.traces import chain_drafter, toy_trace


def steps(accepted: list[int], num_verified: int) -> list[StepRecord]:
    return [
        StepRecord(num_proposed=num_verified, num_verified=num_verified, num_accepted=a, num_emitted=a + 1)
        for a in accepted
    ]


def test_smaller_chains_are_read_off_the_survival_of_the_largest() -> None:
    """Accepted 0, 1, 3: survival 2/3, 1/3, 1/3; K = 1 gives 1 2/3, K = 3 what was measured, 2 1/3."""
    found = chain_estimates(steps([0, 1, 3], 3), 3)

    assert [5 / 3, 2.0, 7 / 3] == pytest.approx([estimate.acceptance_length for estimate in found])
    assert [LABEL, LABEL, "measured"] == [estimate.label for estimate in found]


def estimate_and_exact(path: list[int]) -> tuple[float, float]:
    """Acceptance length of K = 2: read off a run of K = 6, and replayed."""
    trace = toy_trace([len(path) + 1], chain_drafter(path))
    counts = accepted_counts(trace, [SpecConfig.chain("eagle3", 6)])
    taken = counts[0][visited(trace, counts)[0]].tolist()
    exact = replay(trace, [SpecConfig.chain("eagle3", 2)]).acceptance_length(0)
    assert exact is not None
    return chain_estimates(steps(taken, 6), 6)[1].acceptance_length, exact


def test_the_estimate_is_low_where_text_has_easy_and_hard_stretches() -> None:
    """21 easy positions, 21 hard: K = 6 makes 3 steps in the easy part, K = 2 makes 7; both 21 in the hard."""
    path = [min(21 - i, 8) for i in range(1, 22)] + [0] * 21

    estimate, exact = estimate_and_exact(path)

    assert 1 + 2 * 3 / 24 == pytest.approx(estimate, abs=0.1)
    assert 1 + 2 * 7 / 28 == pytest.approx(exact, abs=0.1)
    assert estimate < exact


def test_the_estimate_can_be_high_where_agreement_only_comes_in_short_runs() -> None:
    """Runs of 3 right drafts: K = 6 always keeps 2 of the first 2; K = 2 is left with none after each."""
    estimate, exact = estimate_and_exact([3, 2, 1, 0] * 30)

    assert 3.0 == pytest.approx(estimate)
    assert 2.0 == pytest.approx(exact)


def test_nothing_drafted_is_no_estimate() -> None:
    """Without a draft step there is nothing to read off."""
    with pytest.raises(MetricMissing):
        chain_estimates(steps([0, 0], 0), 3)


def test_steps_of_a_longer_chain_are_refused() -> None:
    """Four verified drafts are not a chain of three."""
    with pytest.raises(UsageError, match="4 drafts"):
        chain_estimates(steps([1], 4), 3)

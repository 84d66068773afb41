"""A simulated trace: its acceptance is the declared one, for chains and for trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from spectune.backend.simulated import SimulatedBackend
from spectune.backend.truth import SimulatedTruth
from spectune.records import Request, Sampling, SpecConfig
from spectune.replay.rounds import replay
from spectune.store.trace_file import Trace

DECLARED = (0.6, 0.5, 0.4)
TRUTH = SimulatedTruth(
    hazards={"eagle3": {"default": DECLARED}, "ngram": {"default": (0.5,)}},
    proposal_rate={"eagle3": 1.0, "ngram": 0.4},
)


def tree(num_steps: int, topk: int, num_draft_tokens: int) -> SpecConfig:
    return SpecConfig(method="eagle3", num_steps=num_steps, topk=topk, num_draft_tokens=num_draft_tokens)


CONFIGS = [
    *(SpecConfig.chain("eagle3", k) for k in (1, 3)),
    tree(2, 2, 4),
    tree(3, 4, 8),
    tree(2, 4, 8),
    SpecConfig.chain("ngram", 2),
]


@pytest.fixture(scope="module")
def trace() -> Trace:
    """200 texts of 64 tokens."""
    sampling = Sampling(max_tokens=64, ignore_eos=True)
    requests = [
        Request(request_id=f"p{i}-0", prompt_ids=(1, 2, 3), category="chat", sampling=sampling)
        for i in range(200)
    ]
    return SimulatedBackend(truth=TRUTH).record_trace(requests, CONFIGS, {}, parts_dir=Path("unused"))


@pytest.mark.parametrize("config", CONFIGS[:-1], ids=lambda config: config.label)
def test_replayed_acceptance_is_the_declared_one(trace: Trace, config: SpecConfig) -> None:
    """Tokens a step from the declared probabilities of each depth, cuts at the end of texts apart."""
    survival, tau = 1.0, 1.0
    for hazard in TRUTH.acceptance(config, "chat", 0.0):
        survival *= hazard
        tau += survival

    counts = replay(trace, [config])

    assert counts.acceptance_length(0) == pytest.approx(tau, rel=0.025)


def test_a_look_up_that_finds_nothing_drafts_nothing(trace: Trace) -> None:
    """Four steps of ten have a draft, as declared."""
    counts = replay(trace, [CONFIGS[-1]])

    assert counts.num_draft_steps[0, 0] / counts.num_steps[0, 0] == pytest.approx(0.4, abs=0.02)


def test_a_larger_tree_accepts_at_least_what_a_smaller_one_does(trace: Trace) -> None:
    """Position by position, as in a real trace."""
    from spectune.replay.accepted import accepted_counts

    small, large = accepted_counts(trace, [tree(3, 4, 6), tree(3, 4, 8)])

    assert (large >= small).all()

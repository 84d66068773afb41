"""Floors from published hardware numbers, and rows that cannot be true."""

from __future__ import annotations

import pytest

from spectune.theory.roofline import (
    critical_tokens,
    experts_read,
    floor_compute_s,
    floor_round_s,
    floor_tpot,
    mbu,
    physics_violation,
)


def test_floor_round_of_a_70b_model_bounds_its_throughput() -> None:
    """70.6 GB at 4.8 TB/s are 68 passes/s: 272 tokens/s at batch 4, so a claimed 1700 is impossible."""
    floor_s = floor_round_s(70.6e9, 0, 4.8e12)

    assert 1 / floor_s == pytest.approx(68, abs=0.05)
    assert physics_violation(round_s=4 / 1700, floor_s=floor_s) == (
        "round time 2.353 ms is under the 14.708 ms that reading its bytes takes"
    )
    assert physics_violation(round_s=4 / 200, floor_s=floor_s) is None


def test_floor_tpot_divides_by_the_tokens_of_a_round() -> None:
    """10 GB of weights and 2 GB of cache at 1 TB/s: 12 ms a round, 4.8 ms a token at length 2.5."""
    assert floor_round_s(10e9, 2e9, 1e12) == pytest.approx(0.012)
    assert floor_tpot(10e9, 2e9, 1e12, 2.5) == pytest.approx(0.0048)


def test_floor_compute_counts_two_operations_per_parameter() -> None:
    """8e9 parameters, 100 tokens, 1e15 operations/s: 1.6 ms."""
    assert floor_compute_s(8e9, 100, 1e15) == pytest.approx(0.0016)


def test_mbu_of_a_published_single_stream() -> None:
    """15.0 GB read 158.34 times a second of 3.35 TB/s is 71%."""
    assert mbu(15.0e9, 1 / 158.34, 3.35e12) == pytest.approx(0.71, abs=0.005)


@pytest.mark.parametrize(
    ("flops", "bandwidth", "tokens"),
    [(989e12, 3.35e12, 295), (989e12, 4.8e12, 206), (312e12, 2.039e12, 153)],
    ids=["H100", "H200", "A100"],
)
def test_critical_tokens_of_known_gpus(flops: float, bandwidth: float, tokens: float) -> None:
    """Tokens in a pass from which bf16 arithmetic is the limit."""
    assert critical_tokens(flops, bandwidth, 2) == pytest.approx(tokens, abs=0.5)


@pytest.mark.parametrize(
    ("tokens", "experts"), [(1, 8), (2, 15.8), (4, 30.5), (8, 57.4), (16, 102), (64, 222)]
)
def test_experts_read_grows_with_verified_tokens(tokens: int, experts: float) -> None:
    """Distinct experts of 256 with 8 a token."""
    assert experts_read(tokens, 256, 8) == pytest.approx(experts, abs=0.5)


@pytest.mark.parametrize(("mean", "peak"), [(410.61, 113.0), (414.75, 111.0)])
def test_physics_violation_of_a_peak_below_the_mean(mean: float, peak: float) -> None:
    """Buckets that count chunks print a peak below the average, which cannot be."""
    assert physics_violation(peak_per_s=peak, mean_per_s=mean) == (
        f"peak throughput {peak:.2f} tokens/s is below the mean {mean:.2f}"
    )


@pytest.mark.parametrize(
    ("length", "num_steps", "num_draft_tokens", "is_possible"),
    [(4.0, 3, 4, True), (4.01, 3, 4, False), (6.1, 8, 6, False), (6.0, 8, 6, True), (0.9, 3, 4, False)],
    ids=["full-chain", "above-depth", "above-nodes", "full-tree", "below-one"],
)
def test_physics_violation_of_an_acceptance_length(
    length: float, num_steps: int, num_draft_tokens: int, is_possible: bool
) -> None:
    """A length lies between 1 and min(N, D+1)."""
    reason = physics_violation(
        acceptance_length=length, num_steps=num_steps, num_draft_tokens=num_draft_tokens
    )

    assert (reason is None) == is_possible


def test_physics_violation_of_plain_decoding_is_more_than_one_token() -> None:
    """Without drafts a step yields exactly one token."""
    assert physics_violation(acceptance_length=1.0, num_steps=0, num_draft_tokens=1) is None
    assert physics_violation(acceptance_length=1.2, num_steps=0, num_draft_tokens=1) == (
        "acceptance length 1.2 is above min(N, D+1) = 1"
    )


def test_physics_violation_of_nothing_known_is_none() -> None:
    """What was not observed is not checked."""
    assert physics_violation() is None
    assert physics_violation(round_s=0.0) == "round time 0 s is not positive"

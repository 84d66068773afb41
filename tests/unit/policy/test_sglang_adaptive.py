"""SGLang's adaptive policy, evaluated by hand; its own class is compared in tests/real."""

from __future__ import annotations

from typing import Any

import pytest

from spectune.errors import UsageError
from spectune.policy.sglang_adaptive import AdaptivePolicy, captured_sizes, check_adaptive, pad


def policy(document: dict[str, Any], initial_steps: int, captured: list[int] | None = None) -> AdaptivePolicy:
    return AdaptivePolicy(document, initial_steps=initial_steps, captured=captured)


@pytest.mark.parametrize(("batch", "depth"), [(1, 5), (4, 5), (8, 5), (9, 2), (32, 2), (33, 0), (500, 0)])
def test_one_depth_a_key_is_a_policy_by_batch_size(batch: int, depth: int) -> None:
    """The largest key that is not above the batch decides."""
    found = policy(
        {"1": {"candidate_steps": [5]}, "9": {"candidate_steps": [2]}, "33": {"candidate_steps": [0]}}, 5
    )

    assert found.steps(batch) == depth


def test_batch_below_every_key_takes_the_first() -> None:
    """Keys need not start at 1."""
    assert policy({"4": {"candidate_steps": [3]}, "8": {"candidate_steps": [1]}}, 3).steps(1) == 3


def test_batch_is_padded_to_its_graph_before_the_lookup() -> None:
    """9 runs in the graph of 10, so a key of 10 decides for it; above all graphs nothing is padded."""
    found = policy({"1": {"candidate_steps": [3]}, "10": {"candidate_steps": [0]}}, 3, [8, 10])

    assert [found.steps(batch) for batch in (8, 9, 10, 11)] == [3, 0, 0, 0]
    assert pad(11, [8, 10]) == 11


def test_first_batches_only_warm_up() -> None:
    """10 batches decide nothing, then every 5th decides: the first switch is at the 15th."""
    found = policy({"1": {"candidate_steps": [1, 3]}}, 1)

    switches = [found.observe(1, [1]) for _ in range(15)]

    assert switches == [None] * 14 + [3]


def test_full_acceptance_climbs_and_none_falls() -> None:
    """Without warm-up and smoothing: 1 accepted of 1 goes up to 3, 0 of 3 goes down to 1."""
    knobs = {"warmup_batches": 0, "update_interval": 1, "ema_alpha": 1.0}
    found = policy({"1": {"candidate_steps": [1, 3]}, **knobs}, 1)

    assert found.observe(2, [1, 1]) == 3
    assert found.observe(2, [0, 0]) == 1


@pytest.mark.parametrize(("mean", "depth"), [(2.25, 3), (2.26, 4), (1.75, 2), (1.8, 3)])
def test_hysteresis_moves_the_thresholds(mean: float, depth: int) -> None:
    """At depth 3 of 2, 3, 4: up above 2.5 + up, down at or below 1.5 + down."""
    knobs = {"warmup_batches": 0, "update_interval": 1, "ema_alpha": 1.0}
    knobs |= {"up_hysteresis": -0.25, "down_hysteresis": 0.25}
    found = policy({"1": {"candidate_steps": [2, 3, 4]}, **knobs}, 3)

    found.observe(100, [round(mean * 100)] + [0] * 99)

    assert found.steps(100) == depth


def test_off_is_left_at_the_next_decision() -> None:
    """Nothing is learnt while nothing is drafted, so the next depth is tried each time."""
    knobs = {"warmup_batches": 0, "update_interval": 2, "ema_alpha": 1.0}
    found = policy({"1": {"candidate_steps": [0, 2]}, **knobs}, 0)

    assert [found.observe(1, [0]) for _ in range(2)] == [None, 2]


def test_key_of_off_alone_stays_off() -> None:
    """There is nothing to try."""
    found = policy({"1": {"candidate_steps": [0]}}, 0)

    assert [found.observe(1, [0]) for _ in range(40)] == [None] * 40


def test_keys_learn_apart() -> None:
    """What batches of 8 accept says nothing of batches of 1."""
    knobs = {"warmup_batches": 0, "update_interval": 1, "ema_alpha": 1.0}
    found = policy({"1": {"candidate_steps": [1, 3]}, "8": {"candidate_steps": [1, 3]}, **knobs}, 3)

    found.observe(8, [0] * 8)

    assert (found.steps(1), found.steps(8)) == (3, 1)


def test_captured_sizes_end_at_the_limit() -> None:
    """1 to 8 one by one, then every 2nd, 4th, 8th; the limit itself is always one."""
    assert captured_sizes(11) == [1, 2, 3, 4, 5, 6, 7, 8, 10, 11]
    assert captured_sizes(33)[-3:] == [30, 32, 33]
    assert captured_sizes(2) == [1, 2]


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ({}, "no batch size"),
        ({"ema_alpha": 0.2}, "no batch size"),
        ({"1": {"candidate_steps": []}}, "not a list of depths"),
        ({"1": {"candidate_steps": [-1]}}, "not a list of depths"),
        ({"1": {}}, "not a list of depths"),
        ({"1": {"candidate_steps": [3], "up_hysterese": 0.1}}, "no knob up_hysterese"),
        ({"one": {"candidate_steps": [3]}}, "neither a batch size nor a knob"),
    ],
)
def test_file_that_sglang_refuses_or_ignores_is_refused(document: dict[str, Any], text: str) -> None:
    """A misspelt knob would be ignored in silence there."""
    with pytest.raises(UsageError, match=text):
        check_adaptive(document)

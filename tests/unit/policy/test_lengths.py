"""Acceptance by prompt length: which bucket, pooled over what, and beyond which context."""

from __future__ import annotations

from typing import Any

import pytest

from spectune.policy.lengths import acceptance_by_length, bucket_of


@pytest.mark.parametrize(
    ("length", "bucket"),
    [
        (0, (0, 127)),
        (127, (0, 127)),
        (128, (128, 255)),
        (255, (128, 255)),
        (256, (256, 511)),
        (2295, (2048, 4095)),
        (16000, (8192, 16383)),
    ],
)
def test_buckets_double(length: int, bucket: tuple[int, int]) -> None:
    """Every prompt has one bucket; the edges belong to the longer side."""
    assert bucket == bucket_of(length)


def arm(make: Any, config: Any, requests: dict[str, tuple[int, list[int]]]) -> Any:
    """Blocks of one request: name -> (prompt tokens, accepted of each step at K=3)."""
    blocks = {}
    for index, (name, (length, accepted)) in enumerate(requests.items()):
        block = make.block(steps=make.steps(accepted, 0 if config.is_off else 3))
        own = make.request(
            make.steps(accepted, 0 if config.is_off else 3), name=name, num_prompt_tokens=length
        )
        blocks[0, index] = type(block)(requests=(own,), rounds=block.rounds, duration_s=1.0)
    return make.arm_data(config, blocks)


def test_decay_with_context_is_visible_by_bucket(make: Any) -> None:
    """Short prompts accept 2 of 3 a step, long ones nothing: 3.0 and 1.0, where the whole would be 2.0."""
    data = arm(
        make,
        make.chain(3),
        {"a-0": (100, [2, 2]), "b-0": (120, [2, 2]), "c-0": (3000, [0, 0, 0]), "d-0": (3500, [0])},
    )

    short, long = acceptance_by_length([data])

    assert (short.low, short.high, short.num_requests, short.num_steps) == (0, 127, 2, 4)
    assert (long.low, long.high, long.num_requests, long.num_steps) == (2048, 4095, 2, 4)
    assert short.acceptance_length.value == pytest.approx(3.0)
    assert long.acceptance_length.value == pytest.approx(1.0)


def test_bucket_beyond_the_heads_context_is_marked(make: Any) -> None:
    """A head of 2048 tokens: prompt and output of 2040 + 9 reach beyond it, 2000 + 9 do not."""
    data = arm(make, make.chain(3), {"a-0": (100, [3, 3]), "b-0": (2040, [3, 3])})
    inside = arm(make, make.chain(3), {"b-0": (2000, [3, 3])})

    assert [b.is_beyond_head for b in acceptance_by_length([data], head_context=2048)] == [False, True]
    assert [b.is_beyond_head for b in acceptance_by_length([inside], head_context=2048)] == [False]
    assert not any(b.is_beyond_head for b in acceptance_by_length([data]))


def test_plain_decoding_and_probes_have_no_acceptance(make: Any) -> None:
    """Neither off nor an arm that only explains others stands in the table."""
    probe = make.chain(3, options=(("production", True),))

    assert acceptance_by_length([arm(make, make.off, {"a-0": (5, [0])})]) == ()
    assert acceptance_by_length([arm(make, probe, {"a-0": (5, [1])})]) == ()


def test_repeats_of_a_prompt_are_one_prompt_in_the_interval(make: Any) -> None:
    """The same prompt in two starts does not make the interval narrower: n counts prompts."""
    data = arm(make, make.chain(3), {"a-0": (5, [1, 2]), "a-1": (5, [1, 2]), "b-0": (6, [0, 3])})

    (bucket,) = acceptance_by_length([data])

    assert bucket.num_requests == 3
    assert bucket.acceptance_length.n == 2


def test_steps_without_any_draft_have_no_length(make: Any) -> None:
    """Nothing proposed: unknown, where an engine would say 1."""
    block = make.block(steps=make.steps([0, 0], 0))
    data = make.arm_data(make.chain(3), {(0, 0): block})

    (bucket,) = acceptance_by_length([data])

    assert bucket.acceptance_length is None

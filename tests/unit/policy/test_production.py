"""What a prefix cache and chunked prefill change, told from an arm and its twin."""

from __future__ import annotations

from typing import Any

import pytest

from spectune.policy.production import production_notes, without_production
from spectune.policy.summary import compare_cell
from spectune.records import BlockResult, Cell, LoadRecord, SpecConfig

CELL = Cell(batch_size=2, context_tokens=0, temperature=0.0)
K3 = SpecConfig.chain("eagle3", 3)
TWIN = SpecConfig.chain("eagle3", 3, options=(("production", True),))


def arm(
    make: Any, config: SpecConfig, accepted: list[int], tpot_s: float, ttft_s: float, hits: float | None
) -> Any:
    """Four prompts of the same steps; `tpot_s` a token, the first after `ttft_s`."""
    drafted = 0 if config.is_off else 3
    blocks = {}
    for index in range(4):
        steps = make.steps(accepted, drafted)
        tokens = sum(step.num_emitted for step in steps)
        own = make.request(steps, name=f"p{index}-0", first_token_s=ttft_s, finish_s=ttft_s + tpot_s * tokens)
        load = LoadRecord(concurrency=2, prefix_hit_rate=hits)
        blocks[0, index] = BlockResult(requests=(own,), rounds=(), duration_s=1.0, load=load)
    return type(make.arm_data(config, {}))(
        config=config, cell=CELL, blocks=blocks, point_ids=("id",), has_boots=True
    )


def notes(make: Any, twin_accepted: list[int], *, tpot_s: float = 0.02) -> tuple[str, ...]:
    arms = [
        arm(make, make.off, [0] * 6, 0.03, 0.2, None),
        arm(make, K3, [1, 1, 1], 0.02, 0.2, None),
        arm(make, TWIN, twin_accepted, tpot_s, 0.05, 0.9),
    ]
    cell = compare_cell(CELL, arms, {}, None)[0]
    assert [one.config for one in cell.arms] == [make.off, K3]  # the twin is no candidate
    return production_notes(cell, arms)


def test_twin_belongs_to_the_arm_without_the_option() -> None:
    """Its label says what it is, and taking the option away gives the measured arm."""
    assert without_production(TWIN) == K3
    assert TWIN.label == "eagle3 K=3 as in production"
    assert TWIN.is_probe
    assert not K3.is_probe


def test_equal_acceptance_is_told_with_cache_and_first_token(make: Any) -> None:
    """90% cached, 200 ms become 50 ms, a token takes as long as before."""
    (note,) = notes(make, [1, 1, 1])

    assert note.startswith(
        "eagle3 K=3 as in production (prefix cache, 90% of the prompt tokens from the cache"
    )
    assert "first token after 50 instead of 200 ms" in note
    assert "time per token 1.00x" in note
    assert note.endswith("acceptance length +0.0%")


@pytest.mark.parametrize(
    ("accepted", "change", "is_told"),
    [([1, 1, 0, 1, 1, 1], "-8.3%", True), ([1] * 29 + [0], "-1.7%", False)],
    ids=["above 2%", "below 2%"],
)
def test_acceptance_that_moves_with_the_cache_is_named(
    make: Any, accepted: list[int], change: str, *, is_told: bool
) -> None:
    """2.0 tokens a step without the cache; 1.83 and 1.97 with it: only the first is a matter of the cache."""
    (note,) = notes(make, accepted)

    assert f"acceptance length {change}" in note
    assert is_told == ("acceptance depends on cache state" in note)

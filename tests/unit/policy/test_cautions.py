"""Doubts of many arms become one sentence where they are the same doubt."""

from __future__ import annotations

from dataclasses import replace

from spectune.measure.divergence import Divergence
from spectune.policy.cautions import run_cautions
from spectune.policy.comparison import ArmSummary, CellComparison, Decision, Spread
from spectune.records import Cell, Gap, SpecConfig, Status


def diverging(num_differing: int, token: int, gap: float) -> str:
    """The caution that measuring writes."""
    gaps = (("r", token, Gap(value=gap, tolerance=0.5)),)
    return Divergence(num_differing=num_differing, num_shared=32, earliest=token, gaps=gaps).text


def arm(num_tokens: int, *cautions: str) -> ArmSummary:
    config = SpecConfig.chain("eagle3", num_tokens)
    return ArmSummary(config=config, scope="all", status=Status.OK, cautions=cautions)


def cautions_of(*arms: ArmSummary) -> tuple[str, ...]:
    off = Decision(verdict="off", chosen=SpecConfig.off(), reason="test")
    cell = Cell(batch_size=1, context_tokens=0, temperature=0.0)
    compared = CellComparison(cell=cell, scope="all", arms=arms, decision=off)
    return run_cautions([compared], [], is_simulated=False, num_missing=0, num_points=2, notes=())


def test_near_ties_of_all_arms_of_a_cell_are_one_sentence() -> None:
    """The range of shares and the earliest difference stand for the arms."""
    found = cautions_of(arm(1, diverging(8, 3, 0.125)), arm(3, diverging(16, 1, 0.0625)))

    assert found == (
        "at batch 1, 25% to 50% of the outputs of 2 arms differ from plain decoding, the earliest at token "
        "1, where the two best tokens are 0.0625 apart: near ties under rounding (limit 0.5), each arm's "
        "own in cautions.json",
    )


def test_a_difference_that_is_no_near_tie_keeps_its_own_sentence() -> None:
    """What may be a lossy engine is never folded away."""
    (found,) = cautions_of(arm(1, diverging(8, 3, 2.0)))

    assert found.startswith("eagle3 K=1 at batch 1: 8 of 32 outputs differ")
    assert "no near tie" in found


def test_drift_of_all_arms_is_one_sentence() -> None:
    """A machine that was not steady is told once, with each arm's change of its rounds."""
    tail = "than those of the first third: the machine was not steady"

    found = cautions_of(
        arm(1, f"rounds of the last third are 13% slower {tail}"),
        arm(2, "something else"),
        arm(3, f"rounds of the last third are 11% faster {tail}"),
    )

    assert found == (
        "eagle3 K=2 at batch 1: something else",
        "the machine was not steady, time of a round in the last third against the first: eagle3 K=1 at batch 1 "
        "+13%, eagle3 K=3 at batch 1 -11%",
    )


def test_rounds_that_the_hypervisor_cut_into_are_one_sentence() -> None:
    """Arms are named with their counts; one without a whole round keeps its own sentence."""
    took = "the hypervisor took CPU for others during"

    found = cautions_of(
        arm(1, f"{took} 12 of 60 full rounds: times are those of the other 48"),
        arm(2, f"{took} 60 of 60 full rounds: none is left to tell"),
        arm(3, f"{took} 20 of 50 full rounds: times are those of the other 30"),
    )

    assert found == (
        f"eagle3 K=2 at batch 1: {took} 60 of 60 full rounds: none is left to tell",
        f"{took} rounds, which therefore are not timed: eagle3 K=1 at batch 1 12 of 60, eagle3 K=3 at batch 1 "
        "20 of 50",
    )


def test_arms_that_decode_other_lengths_are_named() -> None:
    """914 tokens on the mean where plain decoding wrote 338: other stretches of text; 350 for 338 is not."""

    def of_length(one: ArmSummary, mean: float) -> ArmSummary:
        return replace(one, output_lengths=Spread(n=8, mean=mean, p50=mean, p90=mean, p99=mean))

    plain = of_length(replace(arm(1), config=SpecConfig.off()), 338.0)

    found = cautions_of(plain, of_length(arm(1), 350.0), of_length(arm(3), 914.0))

    (text,) = [text for text in found if "output lengths" in text]
    assert "eagle3 K=3 at batch 1 (914 for 338)" in text
    assert "K=1" not in text

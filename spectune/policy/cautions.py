"""A run's comparisons in, the doubts a reader must know out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from spectune.policy.comparison import ArmSummary, CellComparison
from spectune.policy.decide import POOLED_BASIS, is_clear_loss
from spectune.policy.verdict import place_names
from spectune.records import Cell, Status

RESIDUAL_LIMIT = 0.10
LENGTH_LIMIT = 0.10
"""Relative difference of mean output lengths from which on arms did different work."""

# The words of measure.cautions and measure.divergence, which this stack does not import; tests hold them together.
DRIFT = re.compile(
    r"(?P<what>rounds|steps) of the last third are (?P<percent>\d+)% (?P<how>slower|faster) than those of the first "
    r"third: the (?P<who>machine|server) was not steady"
)
CUT_ROUNDS = re.compile(
    r"the hypervisor took CPU for others during (?P<cut>\d+) of (?P<full>\d+) full rounds: times are those of the "
    r"other \d+"
)
NEAR_TIE = re.compile(
    r"(?P<differing>\d+) of (?P<shared>\d+) outputs differ from plain decoding, the earliest at token "
    r"(?P<token>\d+), where the two best tokens are (?P<gap>\S+) apart: a near tie \(limit (?P<limit>\S+)\)"
)


def run_cautions(
    cells: Sequence[CellComparison],
    categories: Sequence[CellComparison],
    *,
    is_simulated: bool,
    num_missing: int,
    num_points: int,
    notes: Sequence[str],
) -> tuple[str, ...]:
    """One sentence a doubt, the most damaging first."""
    found: list[str] = []
    if is_simulated:
        found.append("simulated run: every number follows from declared costs, nothing was measured")
    if num_missing:
        found.append(f"{num_missing} of {num_points} points are not finished: resume the run")
    found += notes
    places = place_names([cell.cell for cell in cells])
    found += _of_arms(cells, places)
    found += _output_lengths(cells, places)
    found += _residuals(cells, places)
    found += _losing_categories(cells, categories, places)
    if any(arm.speedup_basis == POOLED_BASIS for category in categories for arm in category.arms):
        found.append(
            "categories without blocks of their own show the pooled round time over what their own "
            "steps emit: no interval"
        )
    return tuple(dict.fromkeys(found))


def _of_arms(cells: Sequence[CellComparison], places: Mapping[Cell, str]) -> list[str]:
    """One sentence a doubt and cell, with all the arms that share it; one in all cells for drift, and one for
    rounds that were cut into."""
    found = []
    drifts: dict[str, list[str]] = {}
    cuts: list[str] = []
    for cell in cells:
        sharing: dict[str, list[str]] = {}
        near_ties: list[re.Match[str]] = []
        for arm in cell.arms:
            for text in _arm_cautions(arm):
                if near_tie := NEAR_TIE.fullmatch(text):
                    near_ties.append(near_tie)
                elif drift := DRIFT.fullmatch(text):
                    change = f"{'+' if drift['how'] == 'slower' else '-'}{drift['percent']}%"
                    what = drift["what"].removesuffix("s")
                    head = f"the {drift['who']} was not steady, time of a {what} in the last third against the first"
                    drifts.setdefault(head, []).append(f"{arm.config.label} at {places[cell.cell]} {change}")
                elif cut := CUT_ROUNDS.fullmatch(text):
                    cuts.append(f"{arm.config.label} at {places[cell.cell]} {cut['cut']} of {cut['full']}")
                else:
                    sharing.setdefault(text, []).append(arm.config.label)
        if near_ties:
            found.append(f"at {places[cell.cell]}, {_near_ties(near_ties)}")
        found += [f"{', '.join(labels)} at {places[cell.cell]}: {text}" for text, labels in sharing.items()]
    if cuts:
        found.append(
            f"the hypervisor took CPU for others during rounds, which therefore are not timed: {', '.join(cuts)}"
        )
    return found + [f"{head}: {', '.join(arms)}" for head, arms in drifts.items()]


def _near_ties(found: Sequence[re.Match[str]]) -> str:
    """All arms whose outputs leave plain decoding's at near ties, in one sentence."""
    shares = sorted(int(match["differing"]) / int(match["shared"]) for match in found)
    share = f"{shares[0]:.0%}" if shares[0] == shares[-1] else f"{shares[0]:.0%} to {shares[-1]:.0%}"
    first = min(found, key=lambda match: int(match["token"]))
    return (
        f"{share} of the outputs of {len(found)} arms differ from plain decoding, the earliest at token "
        f"{first['token']}, where the two best tokens are {first['gap']} apart: near ties under rounding "
        f"(limit {first['limit']}), each arm's own in cautions.json"
    )


def _arm_cautions(arm: ArmSummary) -> list[str]:
    found = list(arm.cautions)
    if arm.status is not Status.OK:
        return [*found, f"{arm.status}: {arm.reason}"]
    length = None if arm.acceptance is None else arm.acceptance.acceptance_length
    if not arm.config.is_off and arm.acceptance is not None and length is None:
        found.append(f"acceptance length unknown: {arm.acceptance.reason}")
    if arm.speedup is not None and arm.speedup.low is None:
        found.append(f"one block only, so the speedup of {arm.speedup.value:.2f}x has no interval")
    return found


def _output_lengths(cells: Sequence[CellComparison], places: Mapping[Cell, str]) -> list[str]:
    """Arms whose answers are longer or shorter than plain decoding's, in one sentence."""
    far = []
    for cell in cells:
        plain = next((arm.output_lengths for arm in cell.arms if arm.config.is_off), None)
        for arm in cell.arms:
            own = arm.output_lengths
            if plain is None or own is None or arm.config.is_off or arm.status is not Status.OK:
                continue
            change = own.mean / plain.mean - 1
            if abs(change) > LENGTH_LIMIT:
                far.append(f"{arm.config.label} at {places[cell.cell]} ({own.mean:.0f} for {plain.mean:.0f})")
    if not far:
        return []
    return [
        f"mean output lengths differ by more than {LENGTH_LIMIT:.0%} from plain decoding's: {', '.join(far)}; "
        "times per token are of different stretches of text"
    ]


def _residuals(cells: Sequence[CellComparison], places: Mapping[Cell, str]) -> list[str]:
    """All arms whose measurement is far from the prediction, in one sentence."""
    far = [
        f"{arm.config.label} at {places[cell.cell]} ({arm.prediction.residual_fraction:+.0%})"
        for cell in cells
        for arm in cell.arms
        if arm.prediction is not None
        and arm.prediction.residual_fraction is not None
        and abs(arm.prediction.residual_fraction) > RESIDUAL_LIMIT
    ]
    if not far:
        return []
    return [
        f"measured time per token is more than {RESIDUAL_LIMIT:.0%} off the predicted one: {', '.join(far)}"
    ]


def _losing_categories(
    cells: Sequence[CellComparison], categories: Sequence[CellComparison], places: Mapping[Cell, str]
) -> list[str]:
    """Categories that the configuration chosen over all of them slows down."""
    found = []
    chosen = {cell.cell: cell.decision for cell in cells if cell.decision.verdict == "on"}
    for category in categories:
        decision = chosen.get(category.cell)
        if decision is None:
            continue
        for arm in category.arms:
            if arm.config == decision.chosen and is_clear_loss(arm) and arm.speedup is not None:
                found.append(
                    f"{decision.chosen.label}, chosen at {places[category.cell]}, slows {category.scope} down to "
                    f"{arm.speedup.value:.2f}x"
                )
    return found

"""Popular claims about speculative decoding held against runs of this machine: writes a table.

    spectune sweep --method eagle3 --num-tokens 1,2,3 --topk 1,2 --num-draft-tokens 8 --batch-size 1,2,4,8,16 -o runs/a
    spectune trace --method eagle3 --num-prompts 64 --max-tokens 64 -o runs/t0        # and T=1.0, T=1.3, synthetic
    python tests/bench/claims.py --run runs/a --traces runs/t0 runs/t1 runs/t13 --synthetic runs/synth \
        --head reports/head/eval-workload.json --output reports/claims

Every number is computed here from those files or from a formula that is named; what this hardware cannot
test is said to be so. A claim is confirmed or refuted for this target, head and machine only.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from spectune.policy.comparison import ArmSummary, CellComparison, RunSummary
from spectune.policy.summary import summarize
from spectune.records import SpecConfig
from spectune.replay.summary import summarize_trace
from spectune.store import RunStore
from spectune.store.trace_file import read_trace
from spectune.theory.speedup import expected_tokens, ideal_speedup

CHAINS = tuple(SpecConfig.chain("eagle3", k, draft_model="smollm2-135m-eagle3") for k in range(1, 9))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    claim: str
    here: str
    verdict: str  # confirmed, bounded, refuted, not testable here
    run: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    run: RunStore
    summary: RunSummary
    traces: Mapping[float, dict[str, Any]]
    synthetic: dict[str, Any] | None
    head: dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--traces", type=Path, nargs="+", required=True)
    parser.add_argument("--synthetic", type=Path)
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    store = RunStore.open(arguments.run)
    traces = [accepted(path) for path in arguments.traces]
    evidence = Evidence(
        run=store,
        summary=summarize(store),
        traces={one["temperature"]: one for one in traces},
        synthetic=None if arguments.synthetic is None else accepted(arguments.synthetic),
        head=json.loads(arguments.head.read_text())["reports"][0],
    )
    rows = list(claims(evidence))
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "claims.json").write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    table = ["| claim | here | verdict | behind it |", "| --- | --- | --- | --- |"]
    table += [f"| {row.claim} | {row.here} | **{row.verdict}** | {row.run} |" for row in rows]
    (arguments.output / "table.md").write_text("\n".join(table) + "\n")
    print("\n".join(table))


def accepted(folder: Path) -> dict[str, Any]:
    """Acceptance of chains and trees along a trace, by label and category."""
    trace = read_trace(folder / "trace.npz")
    trees = [
        SpecConfig(method="eagle3", num_steps=d, topk=k, num_draft_tokens=n, draft_model=c.draft_model)
        for c in CHAINS[:1]
        for k in (2, 4)
        for n in (8, 16, 32)
        for d in range(2, 9)
        if n - 1 <= k + (d - 1) * k * k and d <= n - 1
    ]
    told = summarize_trace(trace, [*CHAINS, *trees])
    return {
        "temperature": float(trace.sampling["temperature"]),
        "num_requests": trace.num_requests,
        "rows": {row["label"]: row for row in told["configs"]},
    }


def claims(found: Evidence) -> Iterator[Row]:
    yield from of_speed(found)
    yield from of_acceptance(found)
    yield from of_rules(found)
    yield from untested()


# Speed ---------------------------------------------------------------------------------------------


def cell_of(found: Evidence, batch_size: int) -> CellComparison:
    return next(cell for cell in found.summary.cells if cell.cell.batch_size == batch_size)


def best_arm(cell: CellComparison) -> ArmSummary:
    return max(
        (arm for arm in cell.arms if arm.speedup is not None and not arm.config.is_off),
        key=lambda arm: arm.speedup.value if arm.speedup else 0.0,
    )


def round_cost(cell: CellComparison, num_tokens: int) -> float:
    """Round of a chain over a plain one: the least-squares line through the measured chains."""
    plain = next(arm.rounds for arm in cell.arms if arm.config.is_off)
    assert plain is not None
    points = [
        (arm.config.num_steps, arm.rounds.total_s / plain.total_s)
        for arm in cell.arms
        if arm.config.is_chain and arm.rounds is not None
    ]
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    return mean_y + slope * (num_tokens - mean_x)


def of_speed(found: Evidence) -> Iterator[Row]:
    name = f"`{found.run.path.name}`"
    alone, four = cell_of(found, 1), cell_of(found, 4)
    predicted = {
        (cell.cell.batch_size, alpha): expected_tokens(alpha, 5) / round_cost(cell, 5)
        for cell in (alone, four)
        for alpha in (0.8, 0.6)
    }
    yield Row(
        claim="α = 0.8 with K = 5 gives 2.0 to 2.5x, α = 0.6 gives 1.3 to 1.5x",
        here=(
            f"with the round times measured here they would give {predicted[1, 0.8]:.2f}x and "
            f"{predicted[1, 0.6]:.2f}x alone, {predicted[4, 0.8]:.2f}x and {predicted[4, 0.6]:.2f}x at batch 4; "
            f"the head reaches α = {best_alpha(found):.2f}"
        ),
        verdict="bounded",
        run=f"{name}, formula of Leviathan et al. (2023) over the measured rounds (K = 5 extrapolated)",
    )
    best = best_arm(alone)
    assert best.speedup is not None
    yield Row(
        claim="at batch 16 or less time per token falls by 60 to 75%",
        here=f"alone by {1 - 1 / best.speedup.value:.0%} ({best.config.label}, {text(best.speedup)}), at batch "
        f"4 by {1 - 1 / speed(best_arm(four)):.0%}",
        verdict="refuted",
        run=name,
    )
    yield break_even(found, name)
    saved = 1 - 1 / best.speedup.value
    yield Row(
        claim="2x faster is half the cost, 3x two thirds less",
        here=f"arithmetic, 1 - 1/S: 50% and 67%; the best of this machine, {best.speedup.value:.2f}x, saves {saved:.0%}",
        verdict="confirmed",
        run=f"formula; {name}",
    )
    yield short_answers(found, alone, best, name)


def break_even(found: Evidence, name: str) -> Row:
    cells = sorted(found.summary.cells, key=lambda cell: cell.cell.batch_size)
    on = [cell for cell in cells if cell.decision.verdict == "on"]
    off = [cell for cell in cells if cell.decision.verdict == "off"]
    told = ", ".join(
        f"batch {cell.cell.batch_size} {text(best_arm(cell).speedup)} ({best_arm(cell).config.label})"
        for cell in cells
    )
    last = max((cell.cell.batch_size for cell in on), default=0)
    first = min((cell.cell.batch_size for cell in off if cell.cell.batch_size > last), default=None)
    return Row(
        claim="switch off at batch 64 (one text) or 32 (another)",
        here=f"speculation pays up to batch {last} and no longer at {first}; best of each: {told}",
        verdict="refuted",
        run=name,
    )


def short_answers(found: Evidence, alone: CellComparison, best: ArmSummary, name: str) -> Row:
    """Tokens after which the draft's share of the prefill has been won back."""
    points = [
        o.point
        for o in found.run.outcomes().values()
        if o.point.cell == alone.cell and o.point.config == best.config
    ]
    rounds = [
        turn
        for point in points
        for block in found.run.blocks(point.point_id).values()
        for turn in block.rounds
        if turn.kind == "prefill"
    ]
    prefill_s = sum(turn.draft_s for turn in rounds) / len(rounds)
    plain = next(arm.rounds for arm in alone.arms if arm.config.is_off)
    assert plain is not None
    assert best.rounds is not None
    gained_s = plain.round_tpot_s - best.rounds.round_tpot_s
    early, late = (found.head["by_position"][key]["acceptance_length"]["value"] for key in ("0-31", "64-127"))
    tokens = prefill_s / gained_s
    return Row(
        claim="answers under 20 tokens gain less than 1.3x or lose",
        here=f"the draft's prefill is won back after {tokens:.0f} tokens (mean prompt of the run), acceptance is "
        f"{early:.2f} in the first 32 tokens and {late:.2f} after 64: short answers accept as well",
        verdict="confirmed" if tokens >= 4 else "bounded",
        run=f"{name}; reports/head",
    )


# Acceptance ----------------------------------------------------------------------------------------


def length(trace: Mapping[str, Any], label: str, category: str | None = None) -> float:
    row = trace["rows"][label]
    return float((row if category is None else row["by_category"][category])["acceptance_length"])


def best_alpha(found: Evidence) -> float:
    return float(found.traces[0.0]["rows"]["eagle3 K=1"]["acceptance_length"]) - 1


def of_acceptance(found: Evidence) -> Iterator[Row]:
    cold = found.traces[0.0]
    trees = {label: length(cold, label) for label in cold["rows"] if "N=" in label}
    top = max(trees, key=lambda label: trees[label])
    pairs = []
    for nodes, chain in ((8, "eagle3 K=7"),):
        own = {label: value for label, value in trees.items() if label.endswith(f"N={nodes}")}
        best = max(own, key=lambda label: own[label])
        pairs.append(
            f"{best} {own[best]:.2f} against {chain} {length(cold, chain):.2f} at {nodes} verified tokens"
        )
    yield Row(
        claim="a tree keeps tokens per step at 3.5 to 4.8",
        here=f"{pairs[0]}; the best traced tree, {top}, {trees[top]:.2f}",
        verdict="refuted",
        run=trace_name(cold),
    )
    yield Row(
        claim="trees accept more than chains of equal verification",
        here=pairs[0],
        verdict="confirmed"
        if max(v for k, v in trees.items() if k.endswith("N=8")) > length(cold, "eagle3 K=7")
        else "refuted",
        run=trace_name(cold),
    )
    shares = {
        category: length(cold, "eagle3 K=1", category) - 1
        for category in cold["rows"]["eagle3 K=1"]["by_category"]
    }
    order = ", ".join(
        f"{name} {value:.2f}" for name, value in sorted(shares.items(), key=lambda pair: -pair[1])
    )
    yield Row(
        claim="code, JSON and translation accept α > 0.85, chat 0.65 to 0.75, creative below 0.3 when hot",
        here=f"first draft accepted at T = 0: {order}; nothing comes near, and translation is the worst of all",
        verdict="refuted",
        run=trace_name(cold),
    )
    by_temperature = {t: length(trace, "eagle3 K=3") for t, trace in sorted(found.traces.items())}
    told = ", ".join(f"T = {t:g}: {value:.2f}" for t, value in by_temperature.items())
    hottest = max(by_temperature)
    creative = length(found.traces[hottest], "eagle3 K=1", "creative") - 1
    yield Row(
        claim="above T = 1 acceptance falls to where nothing is gained",
        here=f"acceptance length of K = 3 at {told}; creative prompts accept {creative:.2f} of their first drafts at T = {hottest:g}",
        verdict="confirmed" if by_temperature[hottest] < 0.9 * by_temperature[0.0] else "refuted",
        run=", ".join(trace_name(trace) for _, trace in sorted(found.traces.items())),
    )
    low, high = found.head["calibration"][0], found.head["calibration"][-1]
    yield Row(
        claim="draft confidence is calibrated: below 0.05 about 0.04 is accepted, above 0.95 about 0.98",
        here=f"lowest tenth: {low['confidence']:.2f} said, {low['accepted']:.2f} accepted ({low['num_drafts']:,} drafts); "
        f"highest: {high['confidence']:.2f} said, {high['accepted']:.2f} accepted ({high['num_drafts']:,}); mean gap "
        f"{found.head['calibration_error']:.3f}",
        verdict="confirmed",
        run="reports/head (an EAGLE-3 head, not EAGLE-2)",
    )
    if found.synthetic is not None:
        made, real = length(found.synthetic, "eagle3 K=1") - 1, best_alpha(found)
        yield Row(
            claim="synthetic data shows α 0.85 where real traffic gives 0.55",
            here=f"first draft accepted: {made:.2f} on synthetic prompts, {real:.2f} on real ones",
            verdict="confirmed" if made > real + 0.1 else "bounded" if made > real else "refuted",
            run=f"{trace_name(found.synthetic)}, synthetic; {trace_name(cold)}",
        )


def of_rules(found: Evidence) -> Iterator[Row]:
    cold = found.traces[0.0]
    name = f"`{found.run.path.name}`"
    lengths = {k: length(cold, f"eagle3 K={k}") for k in range(1, 9)}
    alone = cell_of(found, 1)
    best = best_arm(alone)
    yield Row(
        claim="K of 4 to 7 is typical, beyond 7 little is gained",
        here=f"acceptance length K = 1: {lengths[1]:.2f}, 2: {lengths[2]:.2f}, 3: {lengths[3]:.2f}, 4: {lengths[4]:.2f}, "
        f"7: {lengths[7]:.2f}, 8: {lengths[8]:.2f}; fastest alone: {best.config.label}. Little is gained beyond 3 already",
        verdict="bounded",
        run=f"{trace_name(cold)}; {name}",
    )
    yield Row(
        claim="acceptance length over 4: try K 6 to 7; under 3: K 3 to 4, or train the head",
        here=f"length {lengths[7]:.2f}, under 3: the fastest chain alone is {best.config.label} at {text(best.speedup)}",
        verdict="confirmed" if best.config.num_steps in (3, 4) else "refuted",
        run=f"{trace_name(cold)}; {name}",
    )
    alpha = best_alpha(found)
    gains = {
        a: max(expected_tokens(a, k) / round_cost(alone, k) for k in range(1, 8))
        for a in (alpha, alpha + 0.1)
    }
    speeds = [speed(arm) for arm in alone.arms if arm.config.is_chain and arm.speedup is not None]
    yield Row(
        claim="α > 0.80: tune inference; α < 0.70: improve the head",
        here=f"α = {alpha:.2f}: choosing among K = 1 to 3 moves the speedup by {max(speeds) / min(speeds) - 1:.0%}, 0.1 more α "
        f"would move it by {gains[alpha + 0.1] / gains[alpha] - 1:.0%} at the measured round times",
        verdict="confirmed" if gains[alpha + 0.1] / gains[alpha] > max(speeds) / min(speeds) else "refuted",
        run=f"{name}, formula over its rounds",
    )
    ideal = {
        (a, c): max(ideal_speedup(a, k, c) for k in range(1, 9))
        for a in (0.8, 0.6)
        for c in (0.1, 0.2, 1 / 3, 7 / 13)
    }
    yield Row(
        claim="a draft model is best at 10 to 20% of the target; above a third it nets nothing; 7B for 13B gives about 0",
        here=f"ideal speedup at best K by cost ratio: c = 0.1: {ideal[0.8, 0.1]:.2f}x (α 0.8) and {ideal[0.6, 0.1]:.2f}x (α 0.6); "
        f"0.2: {ideal[0.8, 0.2]:.2f}x and {ideal[0.6, 0.2]:.2f}x; 1/3: {ideal[0.8, 1 / 3]:.2f}x and {ideal[0.6, 1 / 3]:.2f}x; 7/13: "
        f"{ideal[0.8, 7 / 13]:.2f}x and {ideal[0.6, 7 / 13]:.2f}x, with verification as cheap as a plain step",
        verdict="bounded",
        run="formula of Leviathan et al. (2023), theorem 3.8",
    )
    shares = [length(cold, "eagle3 K=1", c) - 1 for c in cold["rows"]["eagle3 K=1"]["by_category"]]
    yield Row(
        claim="measure α on your own traffic: the match decides, not the draft's skill",
        here=f"one head, one target: α from {min(shares):.2f} to {max(shares):.2f} by category",
        verdict="confirmed",
        run=trace_name(cold),
    )


def untested() -> Iterator[Row]:
    for claim, why in (
        ("EAGLE-3 on Llama-3.1-70B and H200: 3.6x throughput", "needs that machine"),
        (
            "EAGLE-3 over EAGLE-2: α 0.68 to 0.78, decoding 30 to 50% faster",
            "needs an EAGLE-2 head of the same target",
        ),
        ("vLLM, GPT-OSS-20B: 1.55x at concurrency 1, 1.05x at 64", "needs that machine"),
        (
            "at batch 128 and more throughput falls by 10 to 15%",
            "two cores are full at batch 16: it falls there already",
        ),
    ):
        yield Row(claim=claim, here=why, verdict="not testable here", run="-")


def trace_name(trace: Mapping[str, Any]) -> str:
    return f"trace of {trace['num_requests']} prompts at T = {trace['temperature']:g}"


def speed(arm: ArmSummary) -> float:
    return 1.0 if arm.speedup is None else arm.speedup.value


def text(speedup: Any) -> str:
    if speedup is None or speedup.low is None:
        return "-" if speedup is None else f"{speedup.value:.2f}x"
    return f"{speedup.value:.2f}x ({speedup.low:.2f} to {speedup.high:.2f})"


if __name__ == "__main__":
    main()

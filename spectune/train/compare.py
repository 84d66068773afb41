"""Acceptance of several heads on the same texts of one target: pooled counts, cuts, paired differences.

In: what each head drafts along each text. Out: plain numbers, every rate with its counts; nothing is
averaged over texts. Draft j counts as reached where the first j - 1 were accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from spectune.records import Acceptance, AskedText, ConfidenceBin, HeadReport, Interval, Pair
from spectune.stats import hierarchical_ratio_interval
from spectune.train.evaluate import Round, TextMatches, rounds_by_hops

CONTEXT_EDGES = (128, 256, 512)
POSITION_EDGES = (32, 64, 128)
NUM_BINS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadText:
    """A head along one text: rounds by draft-vocabulary slice (the whole one first), and raw counts.

    roots: for the root at each answer token, how many drafts have a token to match, and how many of the
    first ones match.
    """

    text: AskedText
    rounds: tuple[tuple[Round, ...], ...]
    reached: tuple[int, ...]
    accepted: tuple[int, ...]
    bins: tuple[tuple[int, float, int], ...]
    num_covered: int
    num_tokens: int
    roots: tuple[tuple[int, int], ...] = ()


def head_text(text: AskedText, found: TextMatches) -> HeadText:
    """Counts of one head along one text."""
    whole, depth = found.matches[0], found.matches.shape[2]
    survived = whole.long().cumprod(dim=1).bool()
    reached, accepted = [], []
    bins = [[0.0, 0.0, 0.0] for _ in range(NUM_BINS)]  # drafts, summed confidence, right ones
    for j in range(depth):
        open_ = found.inside[:, j] & (survived[:, j - 1] if j else True)
        reached.append(int(open_.sum()))
        accepted.append(int(survived[:, j].sum()))
        for sure, right in zip(found.confidence[open_, j].tolist(), whole[open_, j].tolist(), strict=True):
            cell = bins[min(NUM_BINS - 1, int(sure * NUM_BINS))]
            cell[0] += 1
            cell[1] += sure
            cell[2] += right
    return HeadText(
        text=text,
        rounds=tuple(tuple(rounds_by_hops(matches)) for matches in found.matches),
        reached=tuple(reached),
        accepted=tuple(accepted),
        bins=tuple((int(count), sure, int(right)) for count, sure, right in bins),
        num_covered=int(found.covered.sum()),
        num_tokens=int(found.inside[:, 0].sum()),
        roots=tuple(zip(found.inside.sum(1).tolist(), survived.sum(1).tolist(), strict=True)),
    )


def report_of(name: str, texts: Sequence[HeadText], slices: Sequence[int] = ()) -> HeadReport:
    """The report of one head; texts in which the target looped count only in `with_loops`."""
    clean = [one for one in texts if not one.text.had_loop]

    def cut(label: Callable[[HeadText], str]) -> dict[str, Acceptance]:
        labels = sorted({label(one) for one in clean})
        return {key: acceptance([one for one in clean if label(one) == key]) for key in labels}

    cells = [
        (sum(one.bins[i][0] for one in clean), sum(one.bins[i][1] for one in clean),
         sum(one.bins[i][2] for one in clean))
        for i in range(NUM_BINS)
    ]  # fmt: skip
    drafts = sum(count for count, _, _ in cells)
    gap = sum(abs(sure - right) for _, sure, right in cells)
    tokens = sum(one.num_tokens for one in clean)
    return HeadReport(
        name=name,
        overall=acceptance(clean),
        with_loops=acceptance(texts),
        by_category=cut(lambda one: one.text.category),
        by_temperature=cut(lambda one: f"{one.text.temperature:g}"),
        by_context=by_place(clean, CONTEXT_EDGES, lambda one, root: one.text.num_prompt_tokens + root),
        by_position=by_place(clean, POSITION_EDGES, lambda one, root: root),
        calibration=tuple(
            ConfidenceBin(confidence=sure / count, accepted=right / count, num_drafts=count)
            for count, sure, right in cells
            if count
        ),
        calibration_error=gap / drafts if drafts else None,
        coverage=sum(one.num_covered for one in clean) / tokens if tokens else None,
        by_draft_vocab={str(size): acceptance(clean, which=i + 1) for i, size in enumerate(slices)},
    )


def acceptance(texts: Sequence[HeadText], *, which: int = 0) -> Acceptance:
    """Pooled acceptance; `which` picks the draft-vocabulary slice (conditional of the whole one only)."""
    steps = [[(1.0 + one.accepted, 1.0) for one in text.rounds[which]] for text in texts]
    num_rounds = sum(map(len, steps))
    conditional: list[float | None] = []
    if which == 0 and texts:
        for j in range(len(texts[0].reached)):
            reached = sum(text.reached[j] for text in texts)
            conditional.append(sum(text.accepted[j] for text in texts) / reached if reached else None)
    return Acceptance(
        acceptance_length=hierarchical_ratio_interval([[step for step in steps if step]])
        if num_rounds
        else None,
        conditional=tuple(conditional),
        num_rounds=num_rounds,
        num_texts=len(texts),
    )


def by_place(
    texts: Sequence[HeadText], edges: Sequence[int], place: Callable[[HeadText, int], int]
) -> dict[str, Acceptance]:
    """Rounds parted by where their root lies: below the first edge, between two, from the last on.

    place: where a root lies, from its number among the answer's tokens.
    """
    bounds = [0, *edges]
    found: dict[str, Acceptance] = {}
    for low, high in zip(bounds, [*edges, None], strict=True):
        label = f"{low}+" if high is None else f"{low}-{high - 1}"

        def holds(text: HeadText, root: int, low: int = low, high: int | None = high) -> bool:
            return place(text, root) >= low and (high is None or place(text, root) < high)

        steps = [
            [(1.0 + root.accepted, 1.0) for root in text.rounds[0] if holds(text, root.position)]
            for text in texts
        ]
        steps = [step for step in steps if step]
        roots = [chain for text in texts for root, chain in enumerate(text.roots) if holds(text, root)]
        depth = len(texts[0].reached) if texts else 0
        if steps:
            found[label] = Acceptance(
                acceptance_length=hierarchical_ratio_interval([steps]),
                conditional=tuple(_conditional(roots, draft) for draft in range(depth)) if roots else (),
                num_rounds=sum(map(len, steps)),
                num_texts=len(steps),
            )
    return found


def _conditional(roots: Sequence[tuple[int, int]], draft: int) -> float | None:
    """Share of roots whose draft number `draft` (from 0) matches, of those that reach it."""
    reached = [matched for inside, matched in roots if inside > draft and matched >= draft]
    return sum(matched > draft for matched in reached) / len(reached) if reached else None


def paired(
    head: str,
    texts: Sequence[HeadText],
    base: str,
    base_texts: Sequence[HeadText],
    *,
    num_resamples: int = 2000,
) -> Pair | None:
    """Ratio of pooled acceptance lengths; both heads are resampled together, text by text.

    Looping texts are left out. None without two texts.
    """
    import numpy as np

    rows = []
    for one, other in zip(texts, base_texts, strict=True):
        if not one.text.had_loop and one.rounds[0] and other.rounds[0]:
            rows.append(
                [value for side in (one, other) for value in (
                    sum(1 + root.accepted for root in side.rounds[0]), len(side.rounds[0]))]
            )  # fmt: skip
    if len(rows) < 2:
        return None
    counts = np.asarray(rows, dtype=float)
    picks = np.random.default_rng(0).integers(len(rows), size=(num_resamples, len(rows)))
    sums = counts[picks].sum(axis=1)
    ratios = (sums[:, 0] / sums[:, 1]) / (sums[:, 2] / sums[:, 3])
    total = counts.sum(axis=0)
    low, high = np.quantile(ratios, [0.025, 0.975])
    value = float((total[0] / total[1]) / (total[2] / total[3]))
    return Pair(
        head=head,
        base=base,
        ratio=Interval(value=value, low=float(low), high=float(high), n=len(rows), level=0.95),
    )


def verdict(reports: Sequence[HeadReport], pairs: Sequence[Pair]) -> str:
    """One sentence: which head to take, or what is known of the only one."""
    usable = [report for report in reports if report.overall.acceptance_length is not None]
    if not usable:
        return "no text without a loop: nothing can be said of these heads"
    best = max(usable, key=lambda report: report.overall.acceptance_length.value)  # type: ignore[union-attr]
    length = best.overall.acceptance_length
    assert length is not None
    depth = len(best.overall.conditional)
    if len(usable) == 1:
        first = best.overall.conditional[0] if best.overall.conditional else None
        if first is not None and first < 0.12:
            return (
                f"{best.name} drafts almost nothing right ({first:.0%} at the first position): check its layer ids, "
                f"vocabulary map and target"
            )
        return f"{best.name}: {length.value:.2f} tokens a round with a chain of {depth}"
    against = [pair for pair in pairs if pair.head == best.name or pair.base == best.name]
    says = f"{length.value:.2f} tokens a round with a chain of {depth}"
    if not against:
        return f"{best.name} is ahead with {says}, on too few texts for a comparison"
    closest = min((lead_of(pair, best.name) for pair in against), key=lambda lead: lead[1])
    other, value, low, high = closest
    by = f"{value:.3f} times {other} ({low:.3f} to {high:.3f})"
    if all(_is_clear(pair, best.name) for pair in against):
        return f"{best.name} is the best: {says}, {by}"
    return (
        f"{best.name} is ahead with {says}, {by}, but not beyond the noise of these "
        f"{best.overall.num_texts} texts"
    )


def lead_of(pair: Pair, best: str) -> tuple[str, float, float, float]:
    """The other head of a pair, and the acceptance length of `best` over it with its interval."""
    ratio = pair.ratio
    low, high = ratio.low or ratio.value, ratio.high or ratio.value
    if pair.head == best:
        return pair.base, ratio.value, low, high
    return pair.head, 1 / ratio.value, 1 / high, 1 / low


def _is_clear(pair: Pair, best: str) -> bool:
    low, high = pair.ratio.low, pair.ratio.high
    if low is None or high is None:
        return False
    return low > 1.0 if pair.head == best else high < 1.0

"""What to do next, each sentence with the numbers behind it.

Popular rules are stated only where this run confirms or refutes them; the measured optimum wins.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from spectune.policy.comparison import Acceptance, ArmSummary, CellComparison, Prediction, Rounds
from spectune.policy.decide import is_clear_loss, ratio_text
from spectune.policy.verdict import place_names
from spectune.records import Fingerprint, Status

LONG_LENGTH = 4.0
SHORT_LENGTH = 3.0
GOOD_ALPHA = 0.80
POOR_ALPHA = 0.70
SAME_LENGTH = 0.02
LOW_COVERAGE = 0.5
COSTLY_TOKEN = 0.10
OFF_RULES = (32, 64)
MIN_REQUESTS = 4  # of a category, before anything is said about it


def advise(
    cells: Sequence[CellComparison],
    categories: Sequence[CellComparison],
    fingerprint: Fingerprint | None,
) -> tuple[str, ...]:
    """Sentences in the order of what they are worth; none without its number."""
    found: list[str] = []
    for rule, says_both_ends in _CELL_RULES:
        told = [sentence for cell in cells for sentence in rule(cell)]
        found += [told[0], told[-1]] if told and says_both_ends else told[:1]
    found += _by_load(cells)
    found += _by_category(categories)
    found += _by_temperature(cells)
    found += _mixture_of_experts(cells, fingerprint)
    return tuple(dict.fromkeys(_shorten(sentence, cells) for sentence in found))


def _shorten(sentence: str, cells: Sequence[CellComparison]) -> str:
    """Cells named by what differs between them."""
    for cell, place in place_names([item.cell for item in cells]).items():
        sentence = sentence.replace(cell.label, place)
    return sentence


def _candidates(cell: CellComparison) -> list[ArmSummary]:
    return [
        arm
        for arm in cell.arms
        if not arm.config.is_off and arm.status is Status.OK and arm.speedup is not None
    ]


def _leader(cell: CellComparison) -> ArmSummary | None:
    """The chosen arm, or the best candidate where off was chosen."""
    arms = _candidates(cell)
    if cell.decision.verdict == "on":
        return next((arm for arm in arms if arm.config == cell.decision.chosen), None)
    return max(arms, key=_speed, default=None)


def _speed(arm: ArmSummary) -> float:
    return 0.0 if arm.speedup is None else arm.speedup.value


def _length(arm: ArmSummary) -> float | None:
    return None if arm.acceptance is None else arm.acceptance.acceptance_length


def _plain_rounds(cell: CellComparison) -> Rounds | None:
    return next((arm.rounds for arm in cell.arms if arm.config.is_off), None)


def _deepest(cell: CellComparison) -> int:
    return max((arm.config.num_steps for arm in _candidates(cell)), default=0)


# Rules of one cell --------------------------------------------------------------------------------


def _losing(cell: CellComparison) -> Iterator[str]:
    """Why the best candidate loses: its dearest part, break-even tokens a step, zero-accept share."""
    leader = _leader(cell)
    plain = _plain_rounds(cell)
    if leader is None or plain is None or cell.decision.verdict != "off" or not is_clear_loss(leader):
        return
    rounds, length = leader.rounds, _length(leader)
    needed = cell.break_even(leader)
    if rounds is None or needed is None or length is None or leader.acceptance is None:
        return
    zero = leader.acceptance.zero_accept_share
    share = "" if zero is None else f"; {zero:.0%} of the steps with a draft accept nothing"
    yield (
        f"{leader.config.label} at {cell.cell.label} loses: {_dearest(leader, rounds, plain)}; break-even at "
        f"{needed:.2f} tokens a step, emitted {rounds.tokens_per_sequence:.2f} (acceptance length {length:.2f}){share}."
    )


def _dearest(leader: ArmSummary, rounds: Rounds, plain: Rounds) -> str:
    """The part that makes a round too expensive; the whole round where a server tells no parts."""
    if rounds.parts is None or plain.parts is None:
        return f"a step takes {rounds.total_s / plain.total_s:.2f} of a plain one"
    names = ("draft", "verification", "overhead")
    excess = {name: own - base for name, own, base in zip(names, rounds.parts, plain.parts, strict=True)}
    excess["draft"] = rounds.parts[0]
    part = max(excess, key=lambda name: excess[name])
    step = rounds.parts[0] / leader.config.num_steps / plain.total_s
    return (
        f"{part} too expensive, {excess[part] / plain.total_s:.2f} of a plain step a round "
        f"(one draft step costs {step:.2f})"
    )


def _longer(cell: CellComparison) -> Iterator[str]:
    """Acceptance above 4 with the deepest chain best: sweep deeper."""
    leader = _leader(cell)
    length = None if leader is None else _length(leader)
    if leader is None or length is None or cell.decision.verdict != "on" or not leader.config.is_chain:
        return
    depth = leader.config.num_steps
    if length > LONG_LENGTH and depth == _deepest(cell):
        yield (
            f"Acceptance length {length:.2f} at {leader.config.label} ({cell.cell.label}) and no deeper chain was "
            f"measured: sweep --num-tokens {depth},{depth + 1},{depth + 2}."
        )


def _shorter(cell: CellComparison) -> Iterator[str]:
    """The rule "below 3 take K 3 to 4", held against the measured optimum."""
    leader = _leader(cell)
    if leader is None or not leader.config.is_chain:
        return
    chains = [
        arm for arm in _candidates(cell) if arm.config.is_chain and arm.config.method == leader.config.method
    ]
    deepest = max(chains, key=lambda arm: arm.config.num_steps, default=leader)
    length, depth = _length(deepest), leader.config.num_steps
    # A short chain cannot accept much: only one deeper than the rule's 4 says how long acceptance is.
    if deepest.config.num_steps <= 4 or length is None or length >= SHORT_LENGTH:
        return
    agrees = "agrees with" if 3 <= depth <= 4 else "contradicts"
    yield (
        f"{deepest.config.label} accepts {length:.2f} tokens a step at {cell.cell.label}, below {SHORT_LENGTH:g}; "
        f"the best depth there is {depth}, which {agrees} the rule of 3 to 4."
    )


def _head_or_inference(cell: CellComparison) -> Iterator[str]:
    """Alpha above 0.80: tune inference; below 0.70: the head is the lever."""
    leader = _leader(cell)
    if leader is None or leader.config.method != "eagle3" or leader.acceptance is None:
        return
    alpha = leader.acceptance.alpha
    if alpha is None or cell.cell.batch_size != 1:
        return
    where = (
        f"{leader.config.label} at {cell.cell.label} accepts {alpha:.2f} of its drafts given the ones before"
    )
    if alpha > GOOD_ALPHA:
        yield f"{where}, above {GOOD_ALPHA:g}: the head is good, tune depth and load."
    elif alpha < POOR_ALPHA:
        yield f"{where}, below {POOR_ALPHA:g}: training the head on your own traffic gains more than settings."


def _idle_depth(cell: CellComparison) -> Iterator[str]:
    """A deeper chain that accepts no more and runs slower."""
    chains = sorted(
        (arm for arm in _candidates(cell) if arm.config.is_chain),
        key=lambda arm: (arm.config.method, arm.config.num_steps),
    )
    for arm, deeper in itertools.pairwise(chains):
        short, long = _length(arm), _length(deeper)
        if arm.config.method != deeper.config.method or short is None or long is None:
            continue
        if long - short < SAME_LENGTH * short and _speed(deeper) < _speed(arm):
            yield (
                f"{deeper.config.label} accepts as much as {arm.config.label} ({long:.2f} against {short:.2f}) and runs "
                f"at {_speed(deeper) / _speed(arm):.2f} of its speed at {cell.cell.label}: depth beyond "
                f"{arm.config.num_steps} is idle."
            )
            return


def _tree_or_chain(cell: CellComparison) -> Iterator[str]:
    """A tree against a chain that verifies as many tokens."""
    arms = _candidates(cell)
    for tree in (arm for arm in arms if arm.config.is_tree):
        chain = next(
            (
                arm
                for arm in arms
                if arm.config.is_chain
                and arm.config.method == tree.config.method
                and arm.config.num_draft_tokens == tree.config.num_draft_tokens
            ),
            None,
        )
        lengths = _length(tree), None if chain is None else _length(chain)
        if chain is not None and lengths[0] is not None and lengths[1] is not None:
            yield (
                f"At {tree.config.num_draft_tokens} verified tokens ({cell.cell.label}) the tree "
                f"{tree.config.label} accepts {lengths[0]:.2f} at {_speed(tree):.2f}x, the chain "
                f"{chain.config.label} {lengths[1]:.2f} at {_speed(chain):.2f}x."
            )
            return


def _coverage(cell: CellComparison) -> Iterator[str]:
    """A high acceptance rate means little where little is drafted."""
    for arm in _candidates(cell):
        told: Acceptance | None = arm.acceptance
        if told is None or told.proposed_per_step is None or told.draft_acceptance_rate is None:
            continue
        if told.proposed_per_step < LOW_COVERAGE:
            yield (
                f"{arm.config.label} at {cell.cell.label} accepts {told.draft_acceptance_rate:.0%} of what it drafts "
                f"but drafts {told.proposed_per_step:.2f} tokens a step: acceptance length "
                f"{told.acceptance_length:.2f}."
            )


def _verify_growth(cell: CellComparison) -> Iterator[str]:
    """What each further verified token really costs."""
    leader = _leader(cell)
    plain = _plain_rounds(cell)
    if leader is None or leader.rounds is None or plain is None:
        return
    verify_s, plain_s = leader.rounds.verify_s, plain.verify_s
    if verify_s is None or not plain_s:
        return
    per_token = (verify_s / plain_s - 1) / (leader.config.num_draft_tokens - 1)
    if per_token > COSTLY_TOKEN:
        yield (
            f"Verification is not free: each token that {leader.config.label} verifies beyond the first adds "
            f"{per_token:.0%} of a plain step at {cell.cell.label}."
        )


def _theory_share(cell: CellComparison) -> Iterator[str]:
    """The ideal formula beside the measurement, and what separates them."""
    leader = _leader(cell)
    prediction: Prediction | None = None if leader is None else leader.prediction
    if leader is None or leader.speedup is None or prediction is None or prediction.ideal_speedup is None:
        return
    parts = dict(prediction.waterfall)
    worst = min(("verify", "draft", "other", "residual"), key=lambda name: parts.get(name, 0.0))
    if parts.get(worst, 0.0) < 0:
        yield (
            f"{leader.config.label} reaches {leader.speedup.value / prediction.ideal_speedup:.0%} of the ideal "
            f"{prediction.ideal_speedup:.2f}x at {cell.cell.label}; the largest loss is {worst}."
        )


Rule = Callable[[CellComparison], Iterator[str]]

_CELL_RULES: tuple[tuple[Rule, bool], ...] = (
    (_losing, True),
    (_longer, False),
    (_shorter, False),
    (_head_or_inference, False),
    (_idle_depth, False),
    (_tree_or_chain, True),
    (_coverage, False),
    (_verify_growth, True),
    (_theory_share, True),
)
"""Rules in the order of their worth; those that change with the load speak for the first and last cell."""


# Rules over cells ---------------------------------------------------------------------------------


def _by_load(cells: Sequence[CellComparison]) -> list[str]:
    """Where speculation stops paying, beside the rules of thumb."""
    found = []
    for conditions in {(cell.cell.context_tokens, cell.cell.temperature): None for cell in cells}:
        row = sorted(
            (cell for cell in cells if (cell.cell.context_tokens, cell.cell.temperature) == conditions),
            key=lambda cell: cell.cell.batch_size,
        )
        on = [cell for cell in row if cell.decision.verdict == "on"]
        off = [cell for cell in row if cell.decision.verdict == "off"]
        later = [cell for cell in off if on and cell.cell.batch_size > on[-1].cell.batch_size]
        if on and later and on[-1].decision.speedup is not None:
            found.append(
                f"Break-even lies between {on[-1].cell.label} ({ratio_text(on[-1].decision.speedup)}) and "
                f"{later[0].cell.label}; rules of thumb say {OFF_RULES[0]} or {OFF_RULES[1]}."
            )
    return found


def _by_category(categories: Sequence[CellComparison]) -> list[str]:
    """The span of the categories in one cell."""
    found = []
    for cell in dict.fromkeys(category.cell for category in categories):
        best = {
            category.scope: leader
            for category in categories
            if category.cell == cell
            and (leader := _leader(category)) is not None
            and leader.num_requests >= MIN_REQUESTS
        }
        if len(best) < 2:
            continue
        top = max(best, key=lambda name: _speed(best[name]))
        low = min(best, key=lambda name: _speed(best[name]))
        found.append(
            f"At {cell.label} {top} gains most ({_told(best[top])}) and {low} least ({_told(best[low])})."
        )
    return found


def _told(arm: ArmSummary) -> str:
    assert arm.speedup is not None
    length = _length(arm)
    accepted = "" if length is None else f", acceptance length {length:.2f}"
    return f"{arm.config.label} {ratio_text(arm.speedup)}{accepted}"


def _by_temperature(cells: Sequence[CellComparison]) -> list[str]:
    """Acceptance of one configuration over temperatures."""
    found = []
    lengths: dict[tuple[int, int, str], dict[float, float]] = {}
    for cell in cells:
        for arm in _candidates(cell):
            if (length := _length(arm)) is not None:
                key = (cell.cell.batch_size, cell.cell.context_tokens, arm.config.label)
                lengths.setdefault(key, {})[cell.cell.temperature] = length
    for (batch, context, label), by_temperature in lengths.items():
        if len(by_temperature) > 1:
            parts = ", ".join(f"{length:.2f} at T={t:g}" for t, length in sorted(by_temperature.items()))
            found.append(f"Acceptance length of {label} at batch {batch}, context {context}: {parts}.")
    return found[:3]


def _mixture_of_experts(cells: Sequence[CellComparison], fingerprint: Fingerprint | None) -> list[str]:
    """Only where the fingerprint says that the target has experts."""
    experts = 0 if fingerprint is None else int(fingerprint.settings.get("num_experts", 0))
    if experts < 2 or not cells:
        return []
    return [
        f"The target has {experts} experts a layer: verifying several tokens reads more of them, so deeper drafts "
        "can lose at equal acceptance length; the choice here is by measured time."
    ]

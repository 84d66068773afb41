"""Calibrated times and acceptance in, the predicted time per token beside the measured one out.

Never circular: round times come from other prompts, acceptance from one half of the blocks, the
measurement from the other half; both halves hold the same categories.
"""

from __future__ import annotations

from dataclasses import replace

from spectune.metrics import acceptance as accept
from spectune.policy.arms import ALL, ArmData, BlockKey, floor_round_s, pool_rounds
from spectune.policy.comparison import Prediction
from spectune.policy.speedup import MIN_CATEGORY_BLOCKS, is_direct
from spectune.records import Fingerprint, RoundTimes
from spectune.theory import cost, speedup, waterfall

NO_CALIBRATION = "no calibrated round times of this arm"
NO_PLAIN_CALIBRATION = "no calibrated round times of plain decoding"
ONE_BLOCK = "one block only: acceptance and measurement need a block each"
MIXED_BLOCKS = "blocks mix categories, so the time of one is not measured alone"
FEW_BLOCKS = f"fewer than {MIN_CATEGORY_BLOCKS} blocks of this category to measure its time on"


def halves(data: ArmData) -> tuple[ArmData, ArmData]:
    """Two halves of the arm by block index, all repeats of an index in one of them.

    Blocks of the same categories take turns, and which half starts takes turns too, so that the halves
    are alike in what they hold and, within one block a kind, equally large.
    """
    categories: dict[int, set[str]] = {}
    for (_, index), block in data.blocks.items():
        categories.setdefault(index, set()).update(request.category for request in block.requests)
    alike: dict[frozenset[str], list[int]] = {}
    for index in sorted(categories):
        alike.setdefault(frozenset(categories[index]), []).append(index)
    first = {index for turn, own in enumerate(alike.values()) for index in own[turn % 2 :: 2]}
    early: list[BlockKey] = [key for key in data.blocks if key[1] in first]
    late: list[BlockKey] = [key for key in data.blocks if key[1] not in first]
    return data.only(early), data.only(late)


def predict(
    arm: ArmData,
    off: ArmData | None,
    times: RoundTimes | None,
    plain: RoundTimes | None,
    *,
    scope: str = ALL,
    fingerprint: Fingerprint | None = None,
) -> Prediction:
    """Theory beside measurement for one arm; `reason` says what is missing.

    Args:
        times, plain: calibrated rounds of the arm and of plain decoding in the same cell.
    """
    if times is None or times.total_s <= 0:
        return _nothing(NO_CALIBRATION)
    if plain is None or plain.total_s <= 0:
        return _nothing(NO_PLAIN_CALIBRATION)
    early, late = halves(arm)
    if not early.requests_of(scope) or not late.requests_of(scope):
        return _nothing(ONE_BLOCK)
    tau = _tau(early, scope)
    if tau is None:
        return _nothing(accept.NO_DRAFTS)
    direct = off is not None and is_direct(off, arm, scope)
    measured = _measured(late.of_scope(scope)) if direct else None
    predicted = cost.predicted_tpot(times.total_s, tau)
    floor, share = _floor(arm, fingerprint, tau, measured)
    told = replace(
        _nothing(None if direct else FEW_BLOCKS if arm.of_scope(scope).blocks else MIXED_BLOCKS),
        predicted_tpot_s=predicted,
        measured_tpot_s=measured,
        residual_fraction=None if measured is None else measured / predicted - 1,
        floor_tpot_s=floor,
        floor_share=share,
    )
    if arm.config.is_off:
        return told
    plain_measured = None if off is None or not direct else _measured(halves(off)[1].of_scope(scope))
    parts = (times.draft_s, times.verify_s, times.other_s)
    return replace(
        told,
        predicted_speedup=speedup.general_speedup(tau, plain.total_s, *parts),
        ideal_speedup=_ideal(early, scope, times, plain),
        draft_cost_ratio=times.draft_s / arm.config.num_steps / plain.total_s,
        break_even_acceptance_length=speedup.break_even_acceptance_length(plain.total_s, *parts),
        waterfall=waterfall.waterfall(
            tau=tau,
            plain_s=plain.total_s,
            draft_s=times.draft_s,
            verify_s=times.verify_s,
            other_s=times.other_s,
            plain_other_s=plain.other_s,
            measured_speedup=plain_measured / measured if plain_measured and measured else None,
        ),
    )


def _nothing(reason: str | None) -> Prediction:
    return Prediction(
        predicted_tpot_s=None,
        measured_tpot_s=None,
        residual_fraction=None,
        predicted_speedup=None,
        ideal_speedup=None,
        draft_cost_ratio=None,
        break_even_acceptance_length=None,
        floor_tpot_s=None,
        floor_share=None,
        reason=reason,
    )


def _tau(early: ArmData, scope: str) -> float | None:
    """Acceptance length of one half; 1 for plain decoding."""
    if early.config.is_off:
        return 1.0
    return accept.emitted_per_step(accept.pooled_steps(early.requests_of(scope)))


def _measured(late: ArmData) -> float | None:
    rounds = pool_rounds(late)
    return None if rounds is None else rounds.round_tpot_s


def _ideal(early: ArmData, scope: str, times: RoundTimes, plain: RoundTimes) -> float | None:
    """Theorem 3.8 for chains; a tree has no γ in it."""
    if not early.config.is_chain:
        return None
    depth = early.config.num_steps
    alpha = accept.censored_alpha(accept.pooled_steps(early.requests_of(scope)), depth)
    if alpha is None:
        return None
    return speedup.ideal_speedup(alpha, depth, times.draft_s / depth / plain.total_s)


def _floor(
    arm: ArmData, fingerprint: Fingerprint | None, tau: float, measured: float | None
) -> tuple[float | None, float | None]:
    round_floor = floor_round_s(arm, fingerprint)
    if round_floor is None:
        return None, None
    floor = round_floor / tau
    if measured is not None and floor > measured:
        return None, None  # the bandwidth was measured too low: it bounds nothing
    return floor, None if measured is None else floor / measured

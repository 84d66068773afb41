"""Where a speedup goes: an exact split of its logarithm into acceptance and costs."""

from __future__ import annotations

import math

from spectune.theory.checks import check_not_negative, check_positive, check_tau

PARTS = ("acceptance", "verify", "draft", "other", "residual")


def waterfall(
    *,
    tau: float,
    plain_s: float,
    draft_s: float,
    verify_s: float,
    other_s: float,
    plain_other_s: float = 0.0,
    measured_speedup: float | None = None,
) -> tuple[tuple[str, float], ...]:
    """(part, log gain) whose sum is the log of the measured speedup exactly.

    log S = log τ - log(T_R / T_0) + residual, T_R = T_D + T_V + T_oh. The time term is shared out in
    proportion to what each part adds to a plain round, so no order of the parts matters: the excess of
    verification over the plain pass, the draft, the excess of the rest over plain's own rest
    (`plain_other_s`, contained in `plain_s`). Without a measurement the residual is 0.
    """
    check_tau(tau)
    check_positive("plain round time", plain_s)
    for name, seconds in (("draft", draft_s), ("verify", verify_s), ("other", other_s)):
        check_not_negative(f"{name} time", seconds)
    slowdown = (draft_s + verify_s + other_s) / plain_s
    check_positive("round time", slowdown)
    scale = _log_over_excess(slowdown)
    gains = (
        math.log(tau),
        -scale * (verify_s - (plain_s - plain_other_s)) / plain_s,
        -scale * draft_s / plain_s,
        -scale * (other_s - plain_other_s) / plain_s,
    )
    if measured_speedup is None:
        residual = 0.0
    else:
        check_positive("measured speedup", measured_speedup)
        residual = math.log(measured_speedup) - math.fsum(gains)
    return tuple(zip(PARTS, (*gains, residual), strict=True))


def change(
    *,
    tau_before: float,
    tau_after: float,
    before_s: tuple[float, float, float],
    after_s: tuple[float, float, float],
    measured_gain: float | None = None,
) -> tuple[tuple[str, float], ...]:
    """(part, log gain) of one speculating engine against an earlier one, in the parts of `waterfall`.

    log gain = log(τ_after / τ_before) - log(T_after / T_before) + residual; the time term is shared out
    in proportion to what each part adds to the earlier round. Negative is slower.

    Args:
        before_s, after_s: (draft, verify, other) seconds of a round.
        measured_gain: earlier / later time per token; the residual is what the parts do not explain.
    """
    for name, tau in (("earlier", tau_before), ("later", tau_after)):
        check_positive(f"{name} tokens per round", tau)
    for name, seconds in zip(("draft", "verify", "other") * 2, (*before_s, *after_s), strict=True):
        check_not_negative(f"{name} time", seconds)
    total = math.fsum(before_s)
    check_positive("earlier round time", total)
    slowdown = math.fsum(after_s) / total
    check_positive("later round time", slowdown)
    scale = _log_over_excess(slowdown) / total
    draft, verify, other = (-scale * (b - a) for a, b in zip(before_s, after_s, strict=True))
    gains = (math.log(tau_after / tau_before), verify, draft, other)
    residual = 0.0 if measured_gain is None else math.log(measured_gain) - math.fsum(gains)
    return tuple(zip(PARTS, (*gains, residual), strict=True))


def _log_over_excess(slowdown: float) -> float:
    """log(x) / (x - 1), 1 at x = 1."""
    excess = slowdown - 1
    return math.log1p(excess) / excess if abs(excess) > 1e-12 else 1.0

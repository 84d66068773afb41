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


def _log_over_excess(slowdown: float) -> float:
    """log(x) / (x - 1), 1 at x = 1."""
    excess = slowdown - 1
    return math.log1p(excess) / excess if abs(excess) > 1e-12 else 1.0

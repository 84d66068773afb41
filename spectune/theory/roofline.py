"""Floors that no engine can beat, how close a round comes to them, and rows that cannot be true."""

from __future__ import annotations

from spectune.theory.checks import check_count, check_not_negative, check_positive, check_tau


def floor_round_s(weight_bytes: float, kv_bytes: float, bandwidth: float) -> float:
    """(weights + keys and values read) / bandwidth: least seconds of one round.

    `weight_bytes` are read once a round whatever the batch; `kv_bytes` are those of all sequences;
    `bandwidth` in bytes/s, measured or peak.
    """
    check_not_negative("weight bytes", weight_bytes)
    check_not_negative("kv bytes", kv_bytes)
    check_positive("bandwidth", bandwidth)
    return (weight_bytes + kv_bytes) / bandwidth


def floor_tpot(weight_bytes: float, kv_bytes: float, bandwidth: float, tau: float = 1.0) -> float:
    """floor_round_s / τ: least seconds per token of a sequence. Draft bytes may be added to the weights."""
    check_tau(tau)
    return floor_round_s(weight_bytes, kv_bytes, bandwidth) / tau


def floor_compute_s(active_parameters: float, tokens: float, flops_per_s: float) -> float:
    """2 · parameters · tokens / FLOP/s: least seconds of the arithmetic of one round (attention left out)."""
    check_positive("arithmetic rate", flops_per_s)
    return 2 * active_parameters * tokens / flops_per_s


def mbu(bytes_read: float, seconds: float, bandwidth: float) -> float:
    """bytes / (seconds · peak bandwidth): memory bandwidth utilisation, 0..1."""
    check_positive("seconds", seconds)
    return floor_round_s(bytes_read, 0, bandwidth) / seconds


def critical_tokens(flops_per_s: float, bandwidth: float, bytes_per_parameter: float) -> float:
    """F · b / (2 · BW): tokens in one pass from which arithmetic, not memory, is the limit."""
    check_positive("bandwidth", bandwidth)
    return flops_per_s * bytes_per_parameter / (2 * bandwidth)


def experts_read(tokens: int, num_experts: int, experts_per_token: int) -> float:
    """E · (1 - (1 - k/E)^t): expected distinct experts of one layer that t tokens touch.

    Routing taken as uniform and independent. Why verification is not flat for mixtures of experts.
    """
    check_count("tokens", tokens)
    check_positive("number of experts", num_experts)
    return num_experts * (1 - (1 - experts_per_token / num_experts) ** tokens)


def physics_violation(
    *,
    round_s: float | None = None,
    floor_s: float | None = None,
    acceptance_length: float | None = None,
    num_steps: int | None = None,
    num_draft_tokens: int | None = None,
    peak_per_s: float | None = None,
    mean_per_s: float | None = None,
    floor_tolerance: float = 0.02,
) -> str | None:
    """Why a row cannot be true, or None. What is None is not checked.

    A round faster than its bytes can be read (the bandwidth is measured too, hence the tolerance), an
    acceptance length below 1 or above min(N, D+1), a peak throughput below the mean.
    """
    if round_s is not None and not round_s > 0:
        return f"round time {round_s:g} s is not positive"
    if round_s is not None and floor_s is not None and round_s < floor_s * (1 - floor_tolerance):
        return (
            f"round time {round_s * 1e3:.3f} ms is under the {floor_s * 1e3:.3f} ms "
            "that reading its bytes takes"
        )
    if acceptance_length is not None and (
        reason := _impossible_length(acceptance_length, num_steps, num_draft_tokens)
    ):
        return reason
    if peak_per_s is not None and mean_per_s is not None and peak_per_s < mean_per_s * (1 - 1e-9):
        return f"peak throughput {peak_per_s:.2f} tokens/s is below the mean {mean_per_s:.2f}"
    return None


def _impossible_length(
    acceptance_length: float, num_steps: int | None, num_draft_tokens: int | None
) -> str | None:
    if not acceptance_length >= 1:
        return f"acceptance length {acceptance_length:g} is below 1"
    limits = [num_draft_tokens] if num_draft_tokens is not None else []
    limits += [num_steps + 1] if num_steps is not None else []
    if limits and acceptance_length > min(limits) * (1 + 1e-9):
        return f"acceptance length {acceptance_length:g} is above min(N, D+1) = {min(limits)}"
    return None

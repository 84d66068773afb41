"""Time per token, throughput and money. Prices are always the user's."""

from __future__ import annotations

from collections.abc import Sequence

from spectune.errors import UsageError
from spectune.theory.checks import check_not_negative, check_positive, check_tau


def predicted_tpot(round_s: float, tau: float) -> float:
    """T_R / τ: seconds per output token of one sequence."""
    check_positive("round time", round_s)
    check_tau(tau)
    return round_s / tau


def throughput(batch: int, tau: float, round_s: float) -> float:
    """B · τ / T_R: output tokens per second of the whole batch."""
    check_positive("batch size", batch)
    return batch / predicted_tpot(round_s, tau)


def usd_per_mtok(
    usd_per_gpu_hour: float, tokens_per_s: float, num_gpus: int = 1, utilisation: float = 1.0
) -> float:
    """price · gpus · 10⁶ / (3600 · tokens/s · utilisation): dollars per million output tokens.

    `tokens_per_s` is what the whole deployment reaches within its latency goals.
    """
    check_not_negative("price per GPU hour", usd_per_gpu_hour)
    check_positive("throughput", tokens_per_s)
    check_positive("number of GPUs", num_gpus)
    if not 0 < utilisation <= 1:
        raise UsageError(f"utilisation {utilisation:g} is not in (0, 1]")
    return usd_per_gpu_hour * num_gpus * 1e6 / (3600 * tokens_per_s * utilisation)


def saving_per_mtok(plain_usd_per_mtok: float, speedup: float) -> float:
    """c_0 · (1 - 1/S): dollars saved per million tokens; negative if speculation is slower.

    `speedup` is the throughput gain at equal latency goals and equal memory.
    """
    check_not_negative("cost per million tokens", plain_usd_per_mtok)
    check_positive("speedup", speedup)
    return plain_usd_per_mtok * (1 - 1 / speedup)


def breakeven_gpu_hours(training_gpu_hours: float, speedup: float) -> float | None:
    """H_train / (1 - 1/S): plain serving GPU hours after which a trained head has paid for itself.

    No price in it: training and serving hours cost the same. None if S <= 1, it never pays.
    """
    check_not_negative("training GPU hours", training_gpu_hours)
    check_positive("speedup", speedup)
    return training_gpu_hours / (1 - 1 / speedup) if speedup > 1 else None


def weighted_gain(cells: Sequence[tuple[float, float]]) -> float:
    """Σ w / Σ (w / S) over (plain time share, speedup) of the load cells: the fleet's speedup.

    The shares are of plain decoding time, so the times add up; a mean of speedups would overstate.
    """
    for share, speedup in cells:
        check_not_negative("time share", share)
        check_positive("speedup", speedup)
    total = sum(share for share, _ in cells)
    check_positive("sum of time shares", total)
    return total / sum(share / speedup for share, speedup in cells)


def latency_under_load(fixed_s: float, per_request_s: float, requests_per_s: float) -> float | None:
    """C1 / (1 - λ·C2): seconds of a request in an open loop, batch by Little's law; None if saturated."""
    check_positive("latency without load", fixed_s)
    check_not_negative("time per request", per_request_s)
    check_not_negative("request rate", requests_per_s)
    load = requests_per_s * per_request_s
    return fixed_s / (1 - load) if load < 1 else None

"""What follows from the rounds measured on a device: bandwidth shares, speedups, where a speedup goes."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spectune.store.gpu_run import Device, GpuDocument, RoundRow
from spectune.theory.roofline import floor_round_s, mbu, physics_violation
from spectune.theory.speedup import general_speedup
from spectune.theory.waterfall import waterfall

DRIFT_LIMIT = 0.05
"""Last third of the rounds over the first: beyond this the shape had not settled."""

DEFINITIONS = {
    "round_s": "median seconds of a whole round of the batch: draft, verification and all the rest",
    "other_share": "median of what is neither draft nor verification, over the median round",
    "mbu": "bytes of weights and keys and values that a plain round reads / (round_s · bandwidth of the "
    "data sheet)",
    "read_share": "the same over the bandwidth that sums over a large buffer reached on this device",
    "acceptance_length": "1 + accepted drafts / steps; forced where forced_length is given",
    "speedup": "output tokens a second over plain decoding's at the same model, batch and context, taken "
    "in turn in one run",
    "predicted_speedup": "acceptance length · plain round / (draft + verify + other), of medians",
    "forced_length": "acceptance length that was forced: costs are real, what was accepted is not",
    "peak_memory_bytes": "peak of the device's allocator during the rounds",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFacts:
    """A measured row and what follows from it; None where a part of it is missing."""

    row: RoundRow
    other_share: float | None
    mbu: float | None
    read_share: float | None
    speedup: float | None
    predicted_speedup: float | None
    waterfall: tuple[tuple[str, float], ...]
    impossible: str | None
    unsettled: bool

    @property
    def label(self) -> str:
        """Configuration, and the acceptance length where it was forced."""
        forced = self.row.forced_length
        text = "plain passes alone" if self.row.is_pass_alone else self.row.config.label
        return text if forced is None else f"{text}, AL {forced:g}"


def facts_of(document: GpuDocument) -> list[RoundFacts]:
    """Facts of every row, in the order in which they were measured."""
    plain = {
        row.shape: row
        for row in document.rounds.values()
        if row.config.is_off and row.status == "ok" and not row.is_pass_alone
    }
    return [_facts(row, plain.get(row.shape), document.device) for row in document.rounds.values()]


def _facts(row: RoundRow, plain: RoundRow | None, device: Device) -> RoundFacts:
    is_ok = row.status == "ok" and row.round_s is not None
    read = (row.weight_bytes or 0) + (row.kv_bytes or 0)
    counts = is_ok and row.config.is_off and row.weight_bytes is not None
    speedup = predicted = None
    parts: tuple[tuple[str, float], ...] = ()
    if is_ok and not row.config.is_off and plain is not None:
        speedup, predicted, parts = _against(row, plain)
    return RoundFacts(
        row=row,
        other_share=row.other_s / row.round_s if is_ok and row.other_s is not None and row.round_s else None,
        mbu=_share(read, row.round_s, device.sheet_bandwidth_bytes_per_s) if counts else None,
        read_share=_share(read, row.round_s, device.read_bandwidth_bytes_per_s) if counts else None,
        speedup=speedup,
        predicted_speedup=predicted,
        waterfall=parts,
        impossible=_impossible(row, read, device) if is_ok else None,
        unsettled=row.drift is not None and abs(row.drift - 1) > DRIFT_LIMIT,
    )


def _against(
    row: RoundRow, plain: RoundRow
) -> tuple[float | None, float | None, tuple[tuple[str, float], ...]]:
    """Measured and predicted speedup over the plain row, and the split of the measured one."""
    speedup = None
    if row.tokens_per_s is not None and plain.tokens_per_s:
        speedup = row.tokens_per_s / plain.tokens_per_s
    times = (row.draft_s, row.verify_s, row.other_s)
    if row.acceptance_length is None or plain.round_s is None or None in times:
        return speedup, None, ()
    draft_s, verify_s, other_s = (part or 0.0 for part in times)
    predicted = general_speedup(row.acceptance_length, plain.round_s, draft_s, verify_s, other_s)
    parts = waterfall(
        tau=row.acceptance_length,
        plain_s=plain.round_s,
        draft_s=draft_s,
        verify_s=verify_s,
        other_s=other_s,
        plain_other_s=min(plain.other_s or 0.0, plain.round_s),
        measured_speedup=speedup,
    )
    return speedup, predicted, parts


def _share(read: float, seconds: float | None, bandwidth: float | None) -> float | None:
    return None if seconds is None or bandwidth is None else mbu(read, seconds, bandwidth)


def _impossible(row: RoundRow, read: float, device: Device) -> str | None:
    """Why a row cannot be true. The floor is the data sheet's: what was read by sums may be beaten."""
    bandwidth = device.sheet_bandwidth_bytes_per_s
    has_floor = bandwidth is not None and row.weight_bytes is not None
    floor_s = floor_round_s(read, 0, bandwidth) if has_floor and bandwidth is not None else None
    return physics_violation(
        round_s=row.round_s,
        floor_s=floor_s,
        acceptance_length=row.acceptance_length,
        num_steps=None if row.config.is_off else row.config.num_steps,
        num_draft_tokens=None if row.config.is_off else row.config.num_draft_tokens,
    )


def break_even(facts: Sequence[RoundFacts]) -> list[tuple[str, str, int, int | None, bool]]:
    """(model, label, context, largest batch that gains, whether a batch beyond it loses) by crossover row.

    None where no batch gains. Read off the measured batches, from the smallest up to the first that loses.
    """
    found: dict[tuple[str, str, int], list[RoundFacts]] = {}
    for one in facts:
        if one.row.part == "crossover" and one.speedup is not None and one.impossible is None:
            found.setdefault((one.row.model, one.label, one.row.context_tokens), []).append(one)
    rows = []
    for (model, label, context), ones in sorted(found.items()):
        last, loses = None, False
        for one in sorted(ones, key=lambda one: one.row.batch_size):
            if one.speedup is not None and one.speedup <= 1:
                loses = True
                break
            last = one.row.batch_size
        rows.append((model, label, context, last, loses))
    return rows


def summary_rows(document: GpuDocument) -> list[dict[str, Any]]:
    """One flat row a measurement, for summary.json and summary.csv."""
    rows = []
    for one in facts_of(document):
        row = one.row
        rows.append(
            {
                "part": row.part,
                "model": row.model,
                "weights": row.weights,
                "dtype": row.dtype,
                "kernels": row.kernels,
                "config": row.config.label,
                "batch_size": row.batch_size,
                "context_tokens": row.context_tokens,
                "is_pass_alone": row.is_pass_alone,
                "is_rehearsal": document.is_rehearsal,
                "status": row.status if one.impossible is None else "suspect",
                "reason": row.reason or one.impossible,
                "num_rounds": row.num_rounds,
                "round_s": row.round_s,
                "draft_s": row.draft_s,
                "verify_s": row.verify_s,
                "other_s": row.other_s,
                "other_share": one.other_share,
                "forced_length": row.forced_length,
                "acceptance_length": row.acceptance_length,
                "tokens_per_s": row.tokens_per_s,
                "speedup": one.speedup,
                "predicted_speedup": one.predicted_speedup,
                "mbu": one.mbu,
                "read_share": one.read_share,
                "peak_memory_bytes": row.peak_memory_bytes,
                "is_settled": not one.unsettled,
            }
        )
    return rows


def to_csv(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as CSV; absent values are empty cells."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(rows[0]) if rows else ["part"], lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: "" if value is None else value for name, value in row.items()} for row in rows)
    return stream.getvalue()

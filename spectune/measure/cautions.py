"""All doubts about a measurement, as one enum with its texts; they inform, they decide nothing."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spectune.measure.divergence import Divergence
from spectune.metrics.acceptance import acceptance_length, pooled_steps
from spectune.metrics.latency import is_success
from spectune.metrics.throughput import mean_times, request_totals
from spectune.records import BlockResult, Point, Prompt, RoundRecord

DRIFT_LIMIT = 0.10
MIN_FULL_ROUNDS = 30
INEFFECTIVE_LENGTH = 1.05
CUT_LIMIT = 0.10
"""Share of full rounds that the hypervisor may cut into before it is worth a word."""
MIN_THIRD = 4
"""Requests of a third from which on a change of their steps says something."""


class Doubt(enum.StrEnum):
    DRIFT = "drift"
    FEW_ROUNDS = "few full-batch rounds"
    SOME_FAILED = "some requests failed"
    INEFFECTIVE = "draft ineffective"
    OUTPUT_DIFFERS = "output differs from plain decoding"
    PROMPTS_REUSED = "prompts reused"
    FIRST_TURN_ONLY = "first turn only"
    BUSY_MACHINE = "machine busy with other work"
    CUT_ROUNDS = "rounds cut into by the hypervisor"
    SERVER = "what the server says does not fit"
    EOS_NOT_IGNORED = "answers ended although they were to go on"
    CALIBRATED_ON_MEASURED = "calibrated on measured prompts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Caution:
    doubt: Doubt
    text: str


def point_cautions(
    point: Point, blocks: Mapping[int, BlockResult], divergence: Divergence | None = None
) -> tuple[Caution, ...]:
    """Doubts about one point; `divergence` is how its outputs differ from plain decoding."""
    is_load = any(block.load is not None for block in blocks.values())
    found = (
        *_load_notes(blocks),
        _load_drift(blocks) if is_load else _drift(point, blocks),
        None if is_load else _few_rounds(point, blocks),
        None if is_load else _cut_rounds(point, blocks),
        _some_failed(blocks),
        _ineffective(point, blocks),
        _eos_not_ignored(point, blocks),
        None if divergence is None else Caution(doubt=Doubt.OUTPUT_DIFFERS, text=divergence.text),
    )
    return tuple(caution for caution in found if caution is not None)


def workload_cautions(
    prompts: Sequence[Prompt], num_needed: int, *, has_calibration: bool
) -> tuple[Caution, ...]:
    """Doubts about the prompts of a run: `num_needed` is the most requests that a cell asks for."""
    found = []
    num_prompts = len(prompts)
    if num_needed > num_prompts:
        found.append(
            Caution(
                doubt=Doubt.PROMPTS_REUSED,
                text=f"{num_prompts} prompts for {num_needed} requests of a cell: prompts are asked again, "
                "so the interval says less about other prompts than its width suggests",
            )
        )
    if num_longer := sum(len(prompt.turns) > 1 for prompt in prompts):
        found.append(
            Caution(
                doubt=Doubt.FIRST_TURN_ONLY,
                text=f"{num_longer} of {num_prompts} prompts have several turns: only the first is asked",
            )
        )
    if not has_calibration:
        found.append(
            Caution(
                doubt=Doubt.CALIBRATED_ON_MEASURED,
                text="the workload has no calibration prompts: times were calibrated on measured prompts",
            )
        )
    return tuple(found)


def _drift(point: Point, blocks: Mapping[int, BlockResult]) -> Caution | None:
    """Mean full-batch round seconds of the last third of the blocks against the first third."""
    means = [mean for block in _ordered(blocks) if (mean := _mean_round_s(point, block)) is not None]
    third = len(means) // 3
    if third == 0:
        return None
    first, last = math.fsum(means[:third]) / third, math.fsum(means[-third:]) / third
    change = last / first - 1
    if abs(change) <= DRIFT_LIMIT:
        return None
    how = "slower" if change > 0 else "faster"
    return Caution(
        doubt=Doubt.DRIFT,
        text=f"rounds of the last third are {abs(change):.0%} {how} than those of the first third: "
        "the machine was not steady",
    )


def _load_drift(blocks: Mapping[int, BlockResult]) -> Caution | None:
    """Seconds of a step, last third of the requests against the first third in order of sending.

    The step, not the token: it does not depend on what the prompts let the draft guess.
    """
    requests = [request for block in blocks.values() for request in block.requests]
    ordered = sorted(requests, key=lambda request: request.arrival_s)
    third = len(ordered) // 3
    first, last = request_totals(ordered[:third]), request_totals(ordered[len(ordered) - third :])
    if third < MIN_THIRD or first is None or last is None:
        return None
    change = last.step_s / first.step_s - 1
    if abs(change) <= DRIFT_LIMIT:
        return None
    return Caution(
        doubt=Doubt.DRIFT,
        text=f"steps of the last third are {abs(change):.0%} {'slower' if change > 0 else 'faster'} than those "
        "of the first third: the server was not steady",
    )


def _load_notes(blocks: Mapping[int, BlockResult]) -> tuple[Caution, ...]:
    """What the session noted; every block of a load carries the same notes."""
    texts = dict.fromkeys(note for block in blocks.values() if block.load for note in block.load.notes)
    return tuple(Caution(doubt=Doubt.SERVER, text=text) for text in texts)


def _few_rounds(point: Point, blocks: Mapping[int, BlockResult]) -> Caution | None:
    count = sum(len(_full_rounds(point, block)) for block in blocks.values())
    if count >= MIN_FULL_ROUNDS:
        return None
    return Caution(
        doubt=Doubt.FEW_ROUNDS,
        text=f"only {count} rounds ran with the full batch of {point.cell.batch_size}, "
        "longer outputs or more prompts give more",
    )


def _cut_rounds(point: Point, blocks: Mapping[int, BlockResult]) -> Caution | None:
    full = [turn for block in blocks.values() for turn in _full_rounds(point, block)]
    num_cut = sum(turn.stolen_s > 0 for turn in full)
    if num_cut <= CUT_LIMIT * len(full):
        return None
    if num_cut == len(full):
        left = "none is left to tell how long a round takes, so times and speedups are the machine's, not the engine's"
    else:
        left = f"times are those of the other {len(full) - num_cut}"
    return Caution(
        doubt=Doubt.CUT_ROUNDS,
        text=f"the hypervisor took CPU for others during {num_cut} of {len(full)} full rounds: {left}",
    )


def _some_failed(blocks: Mapping[int, BlockResult]) -> Caution | None:
    requests = [request for block in blocks.values() for request in block.requests]
    failed = sum(not is_success(request) for request in requests)
    if failed == 0:
        return None
    return Caution(
        doubt=Doubt.SOME_FAILED, text=f"{failed} of {len(requests)} requests failed and are left out"
    )


def _ineffective(point: Point, blocks: Mapping[int, BlockResult]) -> Caution | None:
    requests = [request for block in blocks.values() for request in block.requests]
    length = acceptance_length(pooled_steps(requests))
    is_quiet = point.config.is_off or point.config.is_standby
    if is_quiet or length is None or length >= INEFFECTIVE_LENGTH:
        return None
    return Caution(
        doubt=Doubt.INEFFECTIVE,
        text=f"acceptance length {length:.2f}: the draft is hardly ever accepted, "
        "check that draft and target belong together",
    )


def _eos_not_ignored(point: Point, blocks: Mapping[int, BlockResult]) -> Caution | None:
    """Whether every answer came as long as it was asked for."""
    if not point.sampling.ignore_eos or point.sampling.stop:
        return None
    requests = [request for block in blocks.values() for request in block.requests if is_success(request)]
    early = [request for request in requests if request.finish_reason != "length"]
    if not early:
        return None
    return Caution(
        doubt=Doubt.EOS_NOT_IGNORED,
        text=f"--ignore-eos was asked, {len(early)} of {len(requests)} answers ended by themselves "
        f"({early[0].finish_reason}): the engine does not honour it, so arms may have decoded different lengths",
    )


def _ordered(blocks: Mapping[int, BlockResult]) -> list[BlockResult]:
    return [blocks[index] for index in sorted(blocks)]


def _full_rounds(point: Point, block: BlockResult) -> list[RoundRecord]:
    size = point.cell.batch_size
    return [turn for turn in block.rounds if turn.kind == "decode" and turn.batch_size >= size]


def _mean_round_s(point: Point, block: BlockResult) -> float | None:
    full = _full_rounds(point, block)
    return mean_times(full).total_s if full else None

"""The range of the output that two arms share: what acceptance is compared over.

Where two texts part (a near tie, an earlier end), what follows are two different texts, and their
acceptance differs for no reason of the engine. A step counts if it could not have reached the parting,
whatever it accepted: chosen by where it stands, never by what it did.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spectune.metrics.latency import is_success
from spectune.records import RequestRecord, StepRecord

Records = Mapping[str, RequestRecord]


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """Two arms over their common range, step by step, prompt by prompt.

    `share` is common output tokens / output tokens of the shorter texts; `agreement` the share of
    requests whose texts are equal as far as both go.
    """

    base: Mapping[str, tuple[StepRecord, ...]]
    head: Mapping[str, tuple[StepRecord, ...]]
    num_requests: int
    num_agreeing: int
    num_common_tokens: int
    num_tokens: int

    @property
    def share(self) -> float:
        return self.num_common_tokens / self.num_tokens if self.num_tokens else 0.0

    @property
    def agreement(self) -> float:
        return self.num_agreeing / self.num_requests if self.num_requests else 0.0

    @property
    def base_steps(self) -> tuple[StepRecord, ...]:
        return tuple(step for steps in self.base.values() for step in steps)

    @property
    def head_steps(self) -> tuple[StepRecord, ...]:
        return tuple(step for steps in self.head.values() for step in steps)


def common_range(base: Records, head: Records, reach: int) -> Common:
    """Compare the requests that both arms answered.

    Args:
        reach: most drafts that a step of either arm can accept.
    """
    names = [name for name, record in base.items() if name in head and _is_sound(record, head[name])]
    ours: dict[str, tuple[StepRecord, ...]] = {}
    theirs: dict[str, tuple[StepRecord, ...]] = {}
    agreeing = common = total = 0
    for name in names:
        one, other = base[name], head[name]
        shorter = min(one.num_output_tokens, other.num_output_tokens)
        parting = _parting(one.output_ids, other.output_ids)
        if one.output_ids == other.output_ids:
            ours[name], theirs[name] = one.steps, other.steps
        else:
            ours[name] = steps_before(one.steps, parting, reach)
            theirs[name] = steps_before(other.steps, parting, reach)
        agreeing += parting == shorter
        common += parting
        total += shorter
    return Common(
        base=ours,
        head=theirs,
        num_requests=len(names),
        num_agreeing=agreeing,
        num_common_tokens=common,
        num_tokens=total,
    )


def steps_before(steps: Sequence[StepRecord], parting: int, reach: int) -> tuple[StepRecord, ...]:
    """Steps that stand so early that even reach + 1 tokens end before output index `parting`."""
    kept = []
    position = 1
    for step in steps:
        if position + reach + 1 > parting:
            break
        kept.append(step)
        position += step.num_emitted
    return tuple(kept)


def by_request(records: Sequence[RequestRecord]) -> dict[str, RequestRecord]:
    """Records by request id; of several the last one."""
    return {record.request_id: record for record in records}


def _is_sound(one: RequestRecord, other: RequestRecord) -> bool:
    return all(is_success(record) and record.broken_identity() is None for record in (one, other))


def _parting(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))

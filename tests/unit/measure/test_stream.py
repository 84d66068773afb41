"""A server's load cut into one block a request, judged by what the server ran."""

from __future__ import annotations

from typing import Any

import pytest

from spectune.measure.cautions import Doubt, point_cautions
from spectune.measure.judge import judge_point
from spectune.measure.stream import split_by_block
from spectune.policy.cautions import DRIFT
from spectune.records import (
    BlockResult,
    Cell,
    LoadRecord,
    Point,
    Request,
    RequestRecord,
    Sampling,
    SpecConfig,
    Status,
    StepRecord,
)

PLAIN = StepRecord(num_proposed=0, num_verified=0, num_accepted=0, num_emitted=1)
POINT = Point(
    config=SpecConfig.off(),
    cell=Cell(batch_size=4, context_tokens=0, temperature=0.0),
    workload_hash="w",
    sampling=Sampling(),
)


def record(name: str, *, held_s: float = 2.0, arrival_s: float = 0.0, steps: int = 2) -> RequestRecord:
    return RequestRecord(
        request_id=name,
        category="chat",
        num_prompt_tokens=3,
        output_ids=tuple(range(steps + 1)),
        arrival_s=arrival_s,
        first_token_s=arrival_s + 0.1,
        finish_s=arrival_s + held_s,
        finish_reason="length",
        steps=(PLAIN,) * steps,
    )


def load_of(*records: RequestRecord, duration_s: float = 1.0, **load: Any) -> BlockResult:
    return BlockResult(
        requests=records, rounds=(), duration_s=duration_s, load=LoadRecord(concurrency=4, **load)
    )


def test_split_gives_each_request_its_share_of_the_seconds() -> None:
    """Requests that held their slots for 1 s and 3 s share 2 s as 0.5 and 1.5; both carry the load."""
    asked = [
        Request(request_id=name, prompt_ids=(1,), category="chat", sampling=Sampling()) for name in ("a", "b")
    ]
    whole = load_of(record("a", held_s=1.0), record("b", held_s=3.0), duration_s=2.0, reached=4.0)

    parts = split_by_block({5: (asked[0],), 7: (asked[1],)}, whole)

    assert {index: part.duration_s for index, part in parts.items()} == {5: 0.5, 7: 1.5}
    assert [part.requests[0].request_id for part in parts.values()] == ["a", "b"]
    assert all(part.load == whole.load for part in parts.values())


@pytest.mark.parametrize(("reached", "status"), [(3.6, Status.OK), (3.5, Status.CAPPED), (None, Status.OK)])
def test_judge_by_what_the_server_ran(reached: float | None, status: Status) -> None:
    """Nine tenths of the requested concurrency are enough; less is another load; unknown is not judged."""
    outcome = judge_point(POINT, {0: load_of(record("a"), reached=reached)})

    assert outcome.status is status
    assert outcome.reached_batch == reached


def test_cautions_of_a_load_are_its_notes() -> None:
    """What the session noted is told once, however many blocks carry it; rounds are not missed."""
    blocks = {i: load_of(record(str(i)), notes=("other traffic",)) for i in range(3)}

    found = point_cautions(POINT, blocks)

    assert [(caution.doubt, caution.text) for caution in found] == [(Doubt.SERVER, "other traffic")]


@pytest.mark.parametrize(("slow", "is_said"), [(1.0, False), (1.3, True)])
def test_cautions_steps_of_the_last_third_against_the_first(slow: float, is_said: bool) -> None:
    """Steps that take 30% longer at the end than at the start: the server was not steady."""
    blocks = {
        i: load_of(record(str(i), arrival_s=float(i), held_s=0.1 + 2.0 * (slow if i >= 8 else 1.0)))
        for i in range(12)
    }

    found = point_cautions(POINT, blocks)

    assert [caution.doubt for caution in found] == ([Doubt.DRIFT] if is_said else [])
    assert all(DRIFT.fullmatch(caution.text) for caution in found)

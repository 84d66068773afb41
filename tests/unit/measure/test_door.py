"""Failures of an engine: what they mean, and that the next block meets a fresh engine."""

from __future__ import annotations

import contextlib

import pytest

from spectune.errors import EngineFailure, InfeasibleConfig, OutOfMemory
from spectune.measure.door import Door, explain_failure
from spectune.records import (
    BlockResult,
    Cell,
    Launch,
    Point,
    Request,
    RequestRecord,
    Sampling,
    SpecConfig,
    Status,
)

POINT = Point(
    config=SpecConfig.off(),
    cell=Cell(batch_size=1, context_tokens=0, temperature=0.0),
    workload_hash="w",
    sampling=Sampling(),
)


class OutOfMemoryError(RuntimeError):
    """Named as torch names it."""


class Engine:
    """A backend whose session answers with what it was given."""

    def __init__(self, answer):
        self.answer = answer
        self.closed = 0

    @contextlib.contextmanager
    def open(self, launch):
        try:
            yield self
        finally:
            self.closed += 1

    def run(self, point, requests):
        if isinstance(self.answer, BaseException):
            raise self.answer
        return BlockResult(requests=tuple(map(record, self.answer)), rounds=(), duration_s=1.0)


def record(name):
    return RequestRecord(
        request_id=name,
        category="chat",
        num_prompt_tokens=1,
        output_ids=(1,),
        arrival_s=0.0,
        first_token_s=0.1,
        finish_s=0.1,
        finish_reason="stop",
    )


def requests(*names):
    return [Request(request_id=n, prompt_ids=(1,), category="chat", sampling=Sampling()) for n in names]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        pytest.param(MemoryError(), Status.OOM, id="python"),
        pytest.param(OutOfMemory("did not fit"), Status.OOM, id="ours"),
        pytest.param(OutOfMemoryError("CUDA out of memory"), Status.OOM, id="torch-by-name"),
        pytest.param(RuntimeError("DefaultCPUAllocator: can't allocate memory"), Status.OOM, id="torch-cpu"),
        pytest.param(InfeasibleConfig("no such tree"), Status.INFEASIBLE, id="infeasible"),
        pytest.param(EngineFailure("died"), Status.FAILED, id="engine"),
        pytest.param(ValueError("out of memory lane"), Status.FAILED, id="any-other"),
    ],
)
def test_explain_failure_tells_memory_from_the_rest(error, status):
    """The kind of exception, or its name where the engine is not imported here, decides."""
    assert explain_failure(error).status is status


def test_explain_failure_keeps_one_line_and_the_traceback():
    """The reason is short and names unexpected kinds; the details hold everything."""
    failed = explain_failure(KeyError("slot"))

    assert failed.reason == "KeyError: 'slot'"
    assert "KeyError" in failed.details
    assert explain_failure(EngineFailure("died\nlong story")).reason == "died"
    assert explain_failure(MemoryError()).reason == "MemoryError"


def test_door_failure_closes_the_engine_and_the_next_block_opens_another():
    """Nobody knows what a failure left behind, so generation 2 answers."""
    engine = Engine(ValueError("broken"))
    with Door(engine, Launch(points=(POINT,))) as door:
        with pytest.raises(ValueError, match="broken"):
            door.run(POINT, requests("a"))
        closed_by_failure = engine.closed
        engine.answer = ["a"]

        block = door.run(POINT, requests("a"))

        assert [r.request_id for r in block.requests] == ["a"]
        assert (closed_by_failure, door.generation) == (1, 2)
    assert engine.closed == 2


def test_door_interrupt_closes_the_engine():
    """Ctrl-C inside a block leaves no engine behind."""
    engine = Engine(KeyboardInterrupt())

    with pytest.raises(KeyboardInterrupt), Door(engine, Launch(points=(POINT,))) as door:
        door.run(POINT, requests("a"))

    assert engine.closed == 1


def test_door_request_without_a_record_is_a_failed_request():
    """An engine that answers two of three has one failure, in the order asked."""
    with Door(Engine(["c", "a"]), Launch(points=(POINT,))) as door:
        block = door.run(POINT, requests("a", "b", "c"))

    assert [(r.request_id, r.error is None) for r in block.requests] == [
        ("a", True),
        ("b", False),
        ("c", True),
    ]


@pytest.mark.parametrize("answer", [["a", "z"], ["a", "a"]], ids=["stranger", "twice"])
def test_door_record_that_was_not_asked_for_is_an_engine_failure(answer):
    """Nonsense is not counted."""
    with Door(Engine(answer), Launch(points=(POINT,))) as door, pytest.raises(EngineFailure):
        door.run(POINT, requests("a"))

"""An engine held open for a launch: opened when first needed, opened anew after a failure."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from spectune.errors import EngineFailure, InfeasibleConfig, OutOfMemory, SpectuneError
from spectune.records import (
    Backend,
    BlockResult,
    Gap,
    Launch,
    LoadSession,
    Point,
    Request,
    RequestRecord,
    Session,
    Status,
)

_MEMORY_WORDS = ("out of memory", "can't allocate memory", "cannot allocate memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """What an exception means for a point. Holds text only, so that the memory it pins is freed."""

    status: Status
    reason: str
    details: str


def explain_failure(error: Exception) -> Failed:
    """Out of memory, infeasible or failed, with the reason in one line and the traceback."""
    status = Status.FAILED
    if is_out_of_memory(error):
        status = Status.OOM
    elif isinstance(error, InfeasibleConfig):
        status = Status.INFEASIBLE
    text = str(error).strip().splitlines()
    first = text[0] if text else ""
    if not isinstance(error, SpectuneError) or not first:
        first = f"{type(error).__name__}: {first}".rstrip(": ")
    return Failed(status=status, reason=first, details="".join(traceback.format_exception(error)))


def is_out_of_memory(error: Exception) -> bool:
    """Also for engines that are not imported here: torch.OutOfMemoryError is known by its name."""
    if isinstance(error, (MemoryError, OutOfMemory)):
        return True
    if any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in _MEMORY_WORDS)


class Door:
    """Runs blocks on one launch. `generation` counts the starts: a new one is cold again."""

    def __init__(self, backend: Backend, launch: Launch, *, opened: Callable[[], None] | None = None) -> None:
        self._backend = backend
        self._launch = launch
        self._opened = opened
        self._stack = contextlib.ExitStack()
        self._session: Session | None = None
        self._refusal: Failed | None = None
        self.generation = 0

    def __enter__(self) -> Door:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._session = None
        self._stack.__exit__(kind, error, trace)

    @property
    def is_open(self) -> bool:
        return self._session is not None

    def open(self) -> Session:
        """The session; an engine that did not start is not started again."""
        if self._refusal is not None:
            raise EngineFailure(f"the engine did not start: {self._refusal.reason}")
        if self._session is None:
            try:
                self._session = self._stack.enter_context(self._backend.open(self._launch))
            except Exception as error:
                self._refusal = explain_failure(error)
                raise
            self.generation += 1
            if self._opened is not None:
                self._opened()
        return self._session

    def run(self, point: Point, requests: Sequence[Request]) -> BlockResult:
        """One block, its records in the order of the requests. After an exception the engine is
        closed, because nobody knows what the failure left in its memory."""
        session = self.open()
        try:
            return _complete(session.run(point, requests), requests)
        except Exception:
            self._close_failed()
            raise

    def stream(self, point: Point, requests: Sequence[Request], fillers: Sequence[Request]) -> BlockResult:
        """All requests of a point at its load; see `run` and `LoadSession.stream`."""
        session = self.open()
        try:
            if not isinstance(session, LoadSession):
                raise EngineFailure("the engine cannot keep a load up")
            return _complete(session.stream(point, requests, fillers), requests)
        except Exception:
            self._close_failed()
            raise

    def gap(self, request: Request, output_ids: Sequence[int], index: int) -> Gap | None:
        """See `Session.gap`; None where the engine is closed."""
        return None if self._session is None else self._session.gap(request, output_ids, index)

    def _close_failed(self) -> None:
        self._session = None
        stack, self._stack = self._stack, contextlib.ExitStack()
        # The failure that matters is on its way up; a dead engine may fail again while it closes.
        with contextlib.suppress(Exception):
            stack.close()


def _complete(block: BlockResult, requests: Sequence[Request]) -> BlockResult:
    """A request without a record is a failed request; a record that nobody asked for is nonsense."""
    by_id = {record.request_id: record for record in block.requests}
    asked = {request.request_id for request in requests}
    if strangers := sorted(set(by_id) - asked):
        raise EngineFailure(f"the engine returned request {strangers[0]}, which was not asked for")
    if len(by_id) != len(block.requests):
        raise EngineFailure("the engine returned a request twice")
    return BlockResult(
        requests=tuple(by_id.get(request.request_id, _missing(request)) for request in requests),
        rounds=block.rounds,
        duration_s=block.duration_s,
        peak_memory_bytes=block.peak_memory_bytes,
        load=block.load,
    )


def _missing(request: Request) -> RequestRecord:
    return RequestRecord(
        request_id=request.request_id,
        category=request.category,
        num_prompt_tokens=len(request.prompt_ids),
        output_ids=(),
        arrival_s=0.0,
        first_token_s=None,
        finish_s=None,
        finish_reason=None,
        error="the engine returned nothing for this request",
    )

"""Requests out over HTTP, what happened to each of them in. Plain function outside, asyncio inside.

Every event is stamped when its bytes arrive. A request is never repeated: a retry would hide a
failure. Waiting inside this client is recorded as waiting (scheduled against sent).
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from spectune.backend.answer import Answer, AnswerFailure, error_message, shorten
from spectune.backend.payload import ClientOptions, Dialect, Endpoint, request_body, sampling_fields
from spectune.backend.sse import EventDecoder
from spectune.errors import UsageError
from spectune.records import Clock, FailureKind, Request, ServedRequest
from spectune.workload.arrivals import ClosedLoop, Load, OpenLoop

__all__ = ["ClientOptions", "Dialect", "Endpoint", "run_requests", "sampling_fields", "server_root"]

KEEPALIVE_S = 4.0
"""Servers drop idle connections after 5 s; one that is used at that moment would look like a failure."""

PREPARED = 32
"""Connections made ready where nothing limits the requests in flight; more are made as they are needed."""

LOOPBACK = ("localhost", "127.0.0.1", "::1")

Done = Callable[[ServedRequest], None]


def run_requests(
    base_url: str,
    served_model: str,
    requests: Sequence[Request],
    load: Load,
    options: ClientOptions | None = None,
    *,
    on_done: Done | None = None,
    clock: Clock = time.perf_counter,
) -> list[ServedRequest]:
    """All requests under `load`, in the order in which they were given; failures are records too.

    Args:
        base_url: the server, with or without /v1.
        served_model: the name that the server answers to (`server_api.served_models`).
        on_done: called with each record as it ends; what it raises ends the run and drops the rest.
        clock: seconds; one clock for all requests of a run.
    """
    sender = _Sender(
        root=server_root(base_url),
        served_model=served_model,
        options=options or ClientOptions(),
        on_done=on_done,
        clock=clock,
    )
    return asyncio.run(sender.run(requests, load))


def server_root(base_url: str) -> str:
    """The address without a trailing /v1 or slash; UsageError for what is none."""
    try:
        url = httpx.URL(base_url)
    except httpx.InvalidURL as error:
        raise UsageError(
            f"{base_url} is not an address: {error}", hint="such as http://127.0.0.1:8000"
        ) from error
    if url.scheme not in ("http", "https") or not url.host:
        raise UsageError(f"{base_url} is not an address of a server", hint="such as http://127.0.0.1:8000")
    return base_url.rstrip("/").removesuffix("/v1").rstrip("/")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sender:
    root: str
    served_model: str
    options: ClientOptions
    on_done: Done | None
    clock: Clock

    async def run(self, requests: Sequence[Request], load: Load) -> list[ServedRequest]:
        async with AsyncExitStack() as stack:
            lanes = _Lanes(self, stack)
            await lanes.prepare(min(len(requests), _most_in_flight(load) or PREPARED))
            send = _Send(self, lanes)
            if isinstance(load, ClosedLoop):
                return await _closed(requests, load, send, self.clock)
            return await _open(requests, load, send, self.clock)


def _most_in_flight(load: Load) -> int | None:
    return load.concurrency if isinstance(load, ClosedLoop) else load.max_concurrency


class _Lanes:
    """Connections, each a client of its own, used again when free; there is never one too few.

    One shared pool would make requests wait for each other: it searches all its connections at every
    request, which at 128 in flight takes longer than a fast server's answer.
    """

    def __init__(self, sender: _Sender, stack: AsyncExitStack) -> None:
        self._sender = sender
        self._stack = stack
        self._free: list[httpx.AsyncClient] = []
        self._is_local = httpx.URL(sender.root).host in LOOPBACK
        # One context for all lanes: making one takes longer than many an answer.
        self._verify = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if httpx.URL(sender.root).scheme == "https":
            self._verify = ssl.create_default_context()

    async def prepare(self, count: int) -> None:
        """Make `count` lanes before the clock starts."""
        while len(self._free) < count:
            self._free.append(await self._stack.enter_async_context(self._new()))

    @asynccontextmanager
    async def lane(self) -> AsyncIterator[httpx.AsyncClient]:
        """A connection for one request."""
        http = self._free.pop() if self._free else await self._stack.enter_async_context(self._new())
        try:
            yield http
        finally:
            self._free.append(http)

    def _new(self) -> httpx.AsyncClient:
        options = self._sender.options
        timeout = httpx.Timeout(options.silence_timeout_s, connect=options.connect_timeout_s)
        return httpx.AsyncClient(
            limits=httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=KEEPALIVE_S),
            timeout=timeout,
            headers={"Accept-Encoding": "identity", **options.headers},
            trust_env=not self._is_local,
            verify=self._verify,
        )


@dataclass(frozen=True, slots=True)
class _Send:
    """Sends one request and tells what became of it."""

    sender: _Sender
    lanes: _Lanes

    async def __call__(self, request: Request, scheduled_s: float) -> ServedRequest:
        async with self.lanes.lane() as http:
            served = await self._send(http, request, scheduled_s)
        if self.sender.on_done is not None:
            self.sender.on_done(served)
        return served

    async def _send(self, http: httpx.AsyncClient, request: Request, scheduled_s: float) -> ServedRequest:
        sender = self.sender
        content = json.dumps(request_body(request, sender.served_model, sender.options)).encode()
        answer = Answer()
        sent_s = sender.clock()
        try:
            async with asyncio.timeout(sender.options.timeout_s):
                is_streamed = await self._exchange(http, content, answer)
            return answer.build(
                request,
                scheduled_s=scheduled_s,
                sent_s=sent_s,
                ended_s=sender.clock(),
                is_streamed=is_streamed,
            )
        except (AnswerFailure, httpx.HTTPError, TimeoutError, UnicodeDecodeError) as error:
            kind, reason = explain(error, sender.options, has_output=bool(answer.chunk_s))
            return ServedRequest(
                request_id=request.request_id,
                category=request.category,
                scheduled_s=scheduled_s,
                sent_s=sent_s,
                ended_s=sender.clock(),
                text="".join(answer.text),
                failure=kind,
                error=reason,
            )

    async def _exchange(self, http: httpx.AsyncClient, content: bytes, answer: Answer) -> bool:
        """Send and read to the end; whether the answer was a stream."""
        url = self.sender.root + self.sender.options.endpoint.path
        headers = {"Content-Type": "application/json"}
        async with http.stream("POST", url, content=content, headers=headers) as response:
            if response.status_code != httpx.codes.OK:
                raise _refusal(response.status_code, await response.aread(), url, self.sender.served_model)
            if response.headers.get("content-type", "").startswith("application/json"):
                body = await response.aread()
                answer.take_text(body.decode(), self.sender.clock())
                return False
            await self._read_stream(response, answer)
            return True

    async def _read_stream(self, response: httpx.Response, answer: Answer) -> None:
        decoder = EventDecoder()
        async for data in response.aiter_bytes():
            now_s = self.sender.clock()
            for event in decoder.feed(data):
                if event.name == "error":
                    raise AnswerFailure(FailureKind.ERROR_IN_STREAM, _message(event.data))
                answer.take_text(event.data, now_s)
        if (last := decoder.close()) is not None:
            answer.take_text(last.data, self.sender.clock())


async def _closed(
    requests: Sequence[Request], load: ClosedLoop, send: _Send, clock: Clock
) -> list[ServedRequest]:
    """`concurrency` users in turn; a request is scheduled when its user is free."""
    todo = iter(enumerate(requests))
    done: dict[int, ServedRequest] = {}

    async def user(own: Iterator[tuple[int, Request]]) -> None:
        for index, request in own:
            done[index] = await send(request, clock())

    await _together([user(todo) for _ in range(min(load.concurrency, len(requests)))])
    return [done[index] for index in range(len(requests))]


async def _open(
    requests: Sequence[Request], load: OpenLoop, send: _Send, clock: Clock
) -> list[ServedRequest]:
    """Each request at its arrival, whatever became of the ones before it."""
    if len(load.arrivals_s) < len(requests):
        raise ValueError(f"{len(load.arrivals_s)} arrivals for {len(requests)} requests")
    gate = asyncio.Semaphore(load.max_concurrency or max(1, len(requests)))
    start_s = clock()

    async def arrive(request: Request, scheduled_s: float) -> ServedRequest:
        await asyncio.sleep(max(0.0, scheduled_s - clock()))
        async with gate:
            return await send(request, scheduled_s)

    return await _together(
        [
            arrive(request, start_s + at)
            for request, at in zip(requests, load.arrivals_s[: len(requests)], strict=True)
        ]
    )


async def _together(parts: Sequence[Awaitable[Any]]) -> list[Any]:
    """All parts at once; if one raises, the others are cancelled before the error goes on."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def explain(error: Exception, options: ClientOptions, *, has_output: bool) -> tuple[FailureKind, str]:
    """Kind and reason of what went wrong with one request."""
    if isinstance(error, AnswerFailure):
        return error.kind, error.reason
    if isinstance(error, UnicodeDecodeError):
        return FailureKind.MALFORMED, f"not UTF-8: {error.reason} at byte {error.start}"
    if isinstance(error, httpx.ConnectTimeout):
        return FailureKind.TIMEOUT, f"no connection within {options.connect_timeout_s:g} s"
    if isinstance(error, httpx.TimeoutException):
        return FailureKind.TIMEOUT, f"nothing received for {options.silence_timeout_s:g} s"
    if isinstance(error, TimeoutError):
        return FailureKind.TIMEOUT, f"no complete answer within {options.timeout_s:g} s"
    if isinstance(error, httpx.ConnectError):
        return FailureKind.CONNECTION, f"no connection: {error}"
    detail = str(error) or type(error).__name__
    if isinstance(error, httpx.RemoteProtocolError) and has_output:
        return FailureKind.TRUNCATED, f"the stream broke off: {detail}"
    return FailureKind.RESET, f"the connection was lost: {detail}"


def _refusal(status: int, body: bytes, url: str, served_model: str) -> AnswerFailure:
    message = _message(body.decode(errors="replace"))
    if status == httpx.codes.NOT_FOUND:
        return AnswerFailure(
            FailureKind.NOT_FOUND, f"HTTP 404 from {url} for model {served_model}: {message}"
        )
    return AnswerFailure(FailureKind.HTTP, f"HTTP {status}: {message}")


def _message(text: str) -> str:
    try:
        body = json.loads(text)
    except ValueError:
        return shorten(text)
    found = error_message(body) if isinstance(body, dict) else None
    return found or shorten(text)

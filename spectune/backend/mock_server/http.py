"""Just enough HTTP/1.1 for a mock: requests with a body in, plain and chunked answers out."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 500: "Internal Server Error", 503: "Unavailable"}


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRequest:
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class HttpAnswer:
    """The answer to one request on a connection."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.is_closing = False

    async def send(self, status: int, body: bytes, content_type: str = "application/json") -> None:
        """A whole answer."""
        head = f"HTTP/1.1 {status} {REASONS[status]}\r\nContent-Type: {content_type}\r\n"
        self._writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await self._writer.drain()

    async def send_json(self, status: int, value: Any) -> None:
        await self.send(status, json.dumps(value).encode())

    def start_stream(self) -> None:
        """The head of an event stream."""
        self._writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )

    async def write(self, data: bytes) -> None:
        """One piece of the stream, sent on its own."""
        self._writer.write(b"%x\r\n%b\r\n" % (len(data), data))
        await self._writer.drain()

    async def end_stream(self) -> None:
        self._writer.write(b"0\r\n\r\n")
        await self._writer.drain()

    def reset(self) -> None:
        """Drop the connection so that the other side sees a reset, not an end."""
        sock = self._writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()
        self.is_closing = True

    def cut(self) -> None:
        """Close the connection in the middle of the answer."""
        self._writer.close()
        self.is_closing = True


Handler = Callable[[HttpRequest, HttpAnswer], Awaitable[None]]


async def serve(handler: Handler, host: str, port: int) -> asyncio.Server:
    """A listening server; port 0 takes a free one. OSError where the port is taken."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (request := await _read(reader)) is not None:
                answer = HttpAnswer(writer)
                await handler(request, answer)
                if answer.is_closing:
                    return
        except (ConnectionError, asyncio.IncompleteReadError, TimeoutError):
            pass  # the client has gone: nobody is left to be told
        finally:
            writer.close()

    return await asyncio.start_server(connected, host, port, backlog=1024)


async def _read(reader: asyncio.StreamReader) -> HttpRequest | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.split("\r\n")
    method, path, _ = first.split(" ", 2)
    headers = {
        name.strip().lower(): value.strip() for name, _, value in (s.partition(":") for s in lines if s)
    }
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return HttpRequest(method=method, path=path.partition("?")[0], headers=headers, body=body)

"""Server-sent events from bytes as they arrive: the same events however the network cut them.

Lines end with LF, CRLF or CR and with nothing else: U+2028 inside a JSON string is text. A line is
decoded only when it is whole, so no character is ever split. (WHATWG HTML, section 9.2.6)
"""

from __future__ import annotations

from dataclasses import dataclass, field

BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event: its data lines joined by newlines. `name` is "message" where none was given."""

    data: str
    name: str = "message"


@dataclass(slots=True)
class EventDecoder:
    """Bytes in, whole events out; comments and unknown fields are dropped.

    `feed` raises UnicodeDecodeError for a line that is not UTF-8.
    """

    _buffer: bytearray = field(default_factory=bytearray)
    _searched: int = 0  # bytes of the buffer that hold no line end
    _data: list[str] = field(default_factory=list)
    _name: str = ""
    _skip_lf: bool = False
    _is_first_line: bool = True

    def feed(self, data: bytes) -> list[Event]:
        """The events that `data` completes."""
        self._buffer += data
        events = []
        while (line := self._next_line()) is not None:
            event = self._take(line)
            if event is not None:
                events.append(event)
        return events

    def close(self) -> Event | None:
        """The last event of a stream that ended without the empty line after it, or None.

        Only whole lines count: half a line is a truncated stream, not an event.
        """
        return self._dispatch()

    def _next_line(self) -> bytes | None:
        if self._skip_lf and self._buffer:
            # The LF of a CRLF whose CR came last time.
            if self._buffer[0] == 0x0A:
                del self._buffer[0]
            self._skip_lf = False
        feed = self._buffer.find(b"\n", self._searched)
        back = self._buffer.find(b"\r", self._searched, feed if feed >= 0 else len(self._buffer))
        end = back if back >= 0 else feed
        if end < 0:
            self._searched = len(self._buffer)
            return None
        line = bytes(self._buffer[:end])
        self._skip_lf = self._buffer[end] == 0x0D
        del self._buffer[: end + 1]
        self._searched = 0
        return line

    def _take(self, line: bytes) -> Event | None:
        if self._is_first_line:
            line = line.removeprefix(BOM)
            self._is_first_line = False
        if not line:
            return self._dispatch()
        name, _, value = line.decode().partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "event":
            self._name = value
        return None

    def _dispatch(self) -> Event | None:
        event = Event(data="\n".join(self._data), name=self._name or "message") if self._data else None
        self._data, self._name = [], ""
        return event

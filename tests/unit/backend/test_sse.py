"""Server-sent events: framing does not depend on how bytes were cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spectune.backend.sse import Event, EventDecoder

STREAM = (
    '\ufeff: ping\r\n\r\ndata: {"a": "漢字 😀 a\u2028b\u2029c"}\r\n\r\n'
    "event: error\ndata: first\ndata:second\nid: 7\nretry: 10\n\n"
    "data: cr only\r\rdata\n\nunknown: x\n\ndata: [DONE]\n\n"
).encode()
EVENTS = [
    Event(data='{"a": "漢字 😀 a\u2028b\u2029c"}'),
    Event(data="first\nsecond", name="error"),
    Event(data="cr only"),
    Event(data=""),
    Event(data="[DONE]"),
]


def decode(pieces: list[bytes]) -> list[Event]:
    decoder = EventDecoder()
    return [event for piece in pieces for event in decoder.feed(piece)]


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def test_stream_in_one_piece_gives_its_events() -> None:
    """Comments, line separators, CRLF, CR, several data lines and unknown fields are read as specified."""
    assert EVENTS == decode([STREAM])


def test_stream_byte_by_byte_gives_the_same_events() -> None:
    """A character of several bytes and a CRLF may be cut anywhere."""
    assert EVENTS == decode([bytes([byte]) for byte in STREAM])


@settings(deadline=None)  # a busy machine is not a failure
@given(st.lists(st.integers(min_value=0, max_value=10_000), max_size=30))
def test_any_cut_gives_the_same_events(places: list[int]) -> None:
    """The network decides where bytes are cut and never what they mean."""
    assert EVENTS == decode(cut(STREAM, places))


@settings(deadline=None)  # a busy machine is not a failure
@given(
    st.lists(st.text(st.characters(exclude_characters="\r\n", codec="utf-8")), min_size=1, max_size=5),
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.lists(st.integers(min_value=0, max_value=10_000), max_size=10),
)
def test_any_texts_come_back(texts: list[str], end: str, places: list[int]) -> None:
    """Whatever text a server puts into one data line arrives as it was, with any line end."""
    data = "".join(f"data: {text}{end}{end}" for text in texts).encode()

    assert [Event(data=text) for text in texts] == decode(cut(data, places))


@pytest.mark.parametrize(
    ("rest", "expected"),
    [(b"data: last\n", Event(data="last")), (b"data: half", None), (b"", None)],
    ids=["whole line", "half a line", "nothing"],
)
def test_end_of_stream_takes_whole_lines_only(rest: bytes, expected: Event | None) -> None:
    """A stream may end without the empty line, but half a line is no event."""
    decoder = EventDecoder()

    assert [] == decoder.feed(rest)
    assert expected == decoder.close()


def test_bytes_that_are_not_utf8_are_an_error() -> None:
    """Undecodable text is reported, not replaced."""
    with pytest.raises(UnicodeDecodeError):
        decode([b"data: \xff\n\n"])

"""The client's own ceiling, and what is said of a load that comes near it."""

from __future__ import annotations

import pytest

from spectune.backend.ceiling import ClientCeiling, ceiling_note, client_ceiling, client_share
from tests.support.served import served

CEILING = ClientCeiling(
    concurrency=4, requests_per_s=100.0, events_per_s=1000.0, num_requests=64, num_events=640
)


def load(num_requests: int, events_each: int) -> list[object]:
    """Requests that all run for one second."""
    times = tuple((i + 1) / events_each for i in range(events_each))
    return [served(f"r{i}", sent_s=0.0, chunks=times, num_tokens=events_each) for i in range(num_requests)]


def test_share_adds_what_requests_and_events_need() -> None:
    """20 of 100 requests and 200 of 1000 events a second are 40% of the client."""
    assert pytest.approx(0.4) == client_share(CEILING, load(20, 10))


@pytest.mark.parametrize(("num_requests", "is_told"), [(25, False), (26, True)], ids=["half", "above half"])
def test_load_above_half_of_the_ceiling_is_told(num_requests: int, *, is_told: bool) -> None:
    """Up to half of the ceiling nothing is said; above it the figures are in the sentence."""
    note = ceiling_note(CEILING, load(num_requests, 10))

    assert is_told == (note is not None)
    if note is not None:
        assert note.startswith(
            "this load took 52% of what the client itself can take at concurrency 4 (100 requests/s"
        )


def test_ceiling_counts_every_answer_and_event() -> None:
    """16 answers of one token, 4 of ten: 40 events, one a token, from a server in a process of its own."""
    ceiling = client_ceiling(2, num_requests=16, output_tokens=10)

    assert (2, 16, 40) == (ceiling.concurrency, ceiling.num_requests, ceiling.num_events)
    assert ceiling.requests_per_s > 0
    assert ceiling.events_per_s > 0

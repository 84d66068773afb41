"""Requests that arrive by the clock: which arrive, when, and what is said of a server that falls behind."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spectune.backend.mock_server import MockSettings, mock_thread
from spectune.backend.open_load import mean_in_flight, num_lead, open_queue, open_seconds, overload_note
from spectune.backend.server_session import Address, ServerSession
from spectune.records import BlockResult, Cell, Point, Request, Sampling, ServedRequest, SpecConfig
from tests.support.served import served

SAMPLING = Sampling(max_tokens=4, ignore_eos=True)


def point(
    rate: float, arrivals: str = "poisson", *, repeat: int = 0, config: SpecConfig | None = None
) -> Point:
    cell = Cell(batch_size=2, context_tokens=0, temperature=0.0, request_rate=rate, arrivals=arrivals)
    return Point(
        config=config or SpecConfig.off(), cell=cell, workload_hash="test", sampling=SAMPLING, repeat=repeat
    )


def requests(count: int, name: str = "r") -> list[Request]:
    return [
        Request(request_id=f"{name}-{i}", prompt_ids=(i + 1, len(name)), category="test", sampling=SAMPLING)
        for i in range(count)
    ]


def test_fillers_arrive_before_and_after_the_measured_requests() -> None:
    """Of 12 requests a quarter would be 3 fillers; 4 is the least. Four times as many wait behind them."""
    queue, load = open_queue(point(10.0), requests(12), requests(2, "f"))

    names = [request.request_id for request in queue]
    assert names[:4] == [f"filler-lead-{i}" for i in range(4)]
    assert names[4:16] == [f"r-{i}" for i in range(12)]
    assert all(name.startswith("filler-tail") for name in names[16:])
    assert (len(queue), len(load.arrivals_s), load.request_rate) == (64, 64, 10.0)


@pytest.mark.parametrize(("count", "lead"), [(1, 4), (16, 4), (40, 10), (1000, 32)])
def test_lead_is_a_quarter_within_limits(count: int, lead: int) -> None:
    """Never fewer than 4 and never more than 32."""
    assert lead == num_lead(count)


def test_arms_share_their_arrivals_and_repeats_do_not() -> None:
    """A fair comparison meets the same gaps; another repeat draws others."""
    own = open_queue(point(5.0), requests(8), requests(2, "f"))[1]
    arm = open_queue(point(5.0, config=SpecConfig.chain("ngram", 3)), requests(8), requests(2, "f"))[1]
    later = open_queue(point(5.0, repeat=1), requests(8), requests(2, "f"))[1]

    assert own.arrivals_s == arm.arrivals_s
    assert own.arrivals_s != later.arrivals_s


def test_constant_arrivals_are_a_grid() -> None:
    """Four requests a second come every 250 ms."""
    load = open_queue(point(4.0, "constant"), requests(2), [])[1]

    assert load.arrivals_s == (0.0, 0.25)


def test_trace_is_replayed_from_its_start_and_fills_what_it_has_left() -> None:
    """Its first arrivals are the measured requests', the rest holds the load; at twice its own rate of
    2 requests/s everything comes in half the time."""
    recorded = (0.0, 0.4, 1.0)
    queue, load = open_queue(point(2.0, "trace"), requests(2), requests(1, "f"), recorded)
    twice = open_queue(point(4.0, "trace"), requests(2), requests(1, "f"), recorded)[1]

    assert [request.request_id for request in queue] == ["r-0", "r-1", "filler-tail-0"]
    assert load.arrivals_s == recorded
    assert twice.arrivals_s == pytest.approx((0.0, 0.2, 0.5))


def test_requests_in_flight_follow_littles_law() -> None:
    """2 requests/s that each take 1.5 s are three in flight."""
    done = [served(f"r{i}", sent_s=i / 2, chunks=(i / 2 + 0.5, i / 2 + 1.5)) for i in range(4)]

    assert mean_in_flight(done, 2.0) == pytest.approx(3.0)
    assert open_seconds(done) == pytest.approx(3.0)


def one_by_one(service_s: float, count: int = 12) -> list[ServedRequest]:
    """Requests that arrive every second at a server that answers one after the other."""
    ends = [0.0]
    for i in range(count):
        ends.append(max(ends[-1], float(i)) + service_s)
    return [
        served(f"r{i}", sent_s=float(i), chunks=(end - 0.1, end), scheduled_s=float(i))
        for i, end in enumerate(ends[1:])
    ]


def test_requests_that_pile_up_are_told() -> None:
    """At 3 s a request three have ended when the twelfth arrives after 11 s: nine are in the system, one was
    at first. At 0.9 s there is never more than one."""
    slow, quick = one_by_one(3.0), one_by_one(0.9)

    note = overload_note(slow, slow, 1.0)

    assert note is not None
    assert note.startswith(
        "the server does not keep up with 1 requests/s: 1 requests were in it when the first"
    )
    assert "and 9 when the last did" in note
    assert overload_note(quick, quick, 1.0) is None
    assert overload_note(slow[:11], slow[:11], 1.0) is None  # too few to tell


def run_open(settings: MockSettings, rate: float, count: int = 12) -> BlockResult:
    with mock_thread(settings) as server:
        session = ServerSession(Address(url=server.url, served_model=server.model), is_plain=True)
        asked = point(rate)
        return session.stream(asked, requests(count), requests(2, "f"))


def test_stream_keeps_the_schedule_of_every_request() -> None:
    """What a user waits counts from the arrival; a closed loop has no schedule."""
    result = run_open(MockSettings(), 400.0)

    assert [record.num_output_tokens for record in result.requests] == [4] * 12
    scheduled = [record.scheduled_s for record in result.requests]
    assert None not in scheduled
    assert scheduled == sorted(scheduled)
    assert all(record.scheduled_ttft_s >= record.ttft_s for record in result.requests)


def test_stream_of_one_slot_does_not_keep_up() -> None:
    """Answers of 20 ms one after the other serve at most 50 of 400 requests/s: said, with in flight above
    one."""
    result = run_open(MockSettings(max_num_seqs=1, step_s=0.01), 400.0)

    assert result.load is not None
    assert any("does not keep up" in note for note in result.load.notes)
    assert result.load.max_in_flight is not None
    assert result.load.max_in_flight > 4


def test_cells_of_a_closed_loop_keep_their_identity() -> None:
    """The ids of points stored before there were request rates still belong to them."""
    closed = replace(point(1.0), cell=Cell(batch_size=4, context_tokens=0, temperature=0.0))

    assert closed.canonical["cell"] == {"batch_size": 4, "context_tokens": 0, "temperature": 0.0}
    assert point(2.0).cell.label == "2 requests/s (poisson), context 0, T=0"

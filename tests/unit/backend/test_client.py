"""The client over real sockets: loads, times, failures and what it never does."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import threading
from collections.abc import Iterator

import pytest

from spectune.backend.client import ClientOptions, Endpoint, run_requests, server_root
from spectune.backend.mock_server import MockServer, MockSettings, mock_process, mock_thread
from spectune.backend.mock_server.http import HttpAnswer, HttpRequest, serve
from spectune.errors import UsageError
from spectune.metrics.served import max_in_flight
from spectune.records import FailureKind
from spectune.workload.arrivals import ClosedLoop, OpenLoop
from tests.support.served import asked

ONE = ClosedLoop(concurrency=1)


@pytest.fixture(scope="module")
def server() -> Iterator[MockServer]:
    """A server without any delay that speculates three drafts a step."""
    with mock_thread(MockSettings(num_tokens=3, acceptance=(0.8, 0.6, 0.5))) as running:
        yield running


def test_answers_come_back_in_the_order_of_the_requests(server: MockServer) -> None:
    """Whoever ends first, the list is that of the requests, and every request has its own answer."""
    requests = [asked(i, max_tokens=3 + i % 5) for i in range(20)]

    records = run_requests(server.url, server.model, requests, ClosedLoop(concurrency=4))

    assert [request.request_id for request in requests] == [record.request_id for record in records]
    assert [3 + i % 5 for i in range(20)] == [record.num_output_tokens for record in records]
    assert [request.prompt_ids for request in requests] == [record.prompt_ids for record in records]


def test_closed_loop_keeps_its_concurrency(server: MockServer) -> None:
    """Never more requests in flight than users."""
    records = run_requests(server.url, server.model, [asked(i) for i in range(12)], ClosedLoop(concurrency=3))

    assert all(record.is_success for record in records)
    assert max_in_flight(records) <= 3


@pytest.mark.parametrize("endpoint", Endpoint)
@pytest.mark.parametrize("is_streaming", [True, False], ids=["stream", "body"])
def test_both_routes_streamed_or_not_give_the_same_answer(
    server: MockServer, endpoint: Endpoint, *, is_streaming: bool
) -> None:
    """Tokens, steps and text do not depend on how they were sent."""
    options = ClientOptions(endpoint=endpoint, is_streaming=is_streaming)

    record = run_requests(server.url, server.model, [asked(max_tokens=9)], ONE, options)[0]

    assert record.is_success
    assert 9 == record.num_output_tokens == len(record.output_ids or ())
    assert record.to_record().broken_identity() is None or not is_streaming
    assert 9 == 1 + sum(step.num_emitted for step in record.steps or ())
    assert is_streaming == (record.ttft_s is not None)


def test_chunks_weigh_their_tokens_and_fewer_chunks_than_tokens_arrive(server: MockServer) -> None:
    """Under speculation an event carries several tokens, and the weights account for each of them."""
    record = run_requests(server.url, server.model, [asked(max_tokens=40)], ONE)[0]

    assert 40 == sum(record.chunk_tokens or ())
    assert len(record.chunk_s) == len(record.chunk_tokens or ()) < 40
    assert [1, *(step.num_emitted for step in record.steps or ())] == list(record.chunk_tokens or ())


@pytest.mark.parametrize("quirk", ["ping", "crlf", "reasoning", "usage_in_every_chunk", "usage_with_finish"])
@pytest.mark.parametrize("endpoint", Endpoint)
def test_oddities_of_streams_change_nothing(quirk: str, endpoint: Endpoint) -> None:
    """Comments, line ends, reasoning and the place of the usage leave the record as it is."""
    options = ClientOptions(endpoint=endpoint)
    request = asked(max_tokens=8)
    with mock_thread(MockSettings()) as plain, mock_thread(MockSettings(quirks=frozenset({quirk}))) as odd:
        expected = run_requests(plain.url, plain.model, [request], ONE, options)[0]
        record = run_requests(odd.url, odd.model, [request], ONE, options)[0]

    assert record.is_success
    assert (expected.text, expected.num_output_tokens, len(expected.chunk_s)) == (
        record.text,
        record.num_output_tokens,
        len(record.chunk_s),
    )


def test_without_usage_and_ids_the_count_is_unknown() -> None:
    """The limit that was asked for is never taken for a count."""
    with mock_thread(MockSettings(quirks=frozenset({"no_usage", "no_token_ids"}))) as server:
        record = run_requests(server.url, server.model, [asked(max_tokens=8)], ONE)[0]

    assert record.is_success
    assert record.num_output_tokens is None


@pytest.mark.parametrize(
    ("fault", "kind", "reason"),
    [
        ("http_400", FailureKind.HTTP, "HTTP 400: declared failure http_400"),
        ("http_500", FailureKind.HTTP, "HTTP 500: declared failure http_500"),
        ("http_404", FailureKind.NOT_FOUND, "HTTP 404"),
        ("error_in_stream", FailureKind.ERROR_IN_STREAM, "declared failure in mid-stream"),
        ("empty", FailureKind.EMPTY, "no output received"),
        ("truncated", FailureKind.TRUNCATED, "no finish reason"),
        ("reset", FailureKind.RESET, "the connection was lost"),
        ("malformed", FailureKind.MALFORMED, "not JSON"),
        ("hang", FailureKind.TIMEOUT, "nothing received for 0.2 s"),
    ],
)
def test_every_failure_is_a_failure_with_its_reason(
    server: MockServer, fault: str, kind: FailureKind, reason: str
) -> None:
    """Nothing that is no complete answer is ever booked as a success, and its neighbours are unharmed."""
    silence_s = 0.2 if fault == "hang" else 60.0  # a busy machine may answer late
    options = ClientOptions(extra_body={"mock_fault": fault}, silence_timeout_s=silence_s)

    record = run_requests(server.url, server.model, [asked()], ONE, options)[0]
    after = run_requests(server.url, server.model, [asked()], ONE)[0]

    assert kind is record.failure
    assert reason in (record.error or "")
    assert (None, None) == (record.num_output_tokens, record.ttft_s)
    assert record.to_record().error == f"{kind}: {record.error}"
    assert after.is_success


def test_answer_that_takes_too_long_is_a_timeout() -> None:
    """A server that keeps talking without end is stopped by the limit for the whole answer."""
    with mock_thread(MockSettings(step_s=0.02)) as server:
        options = ClientOptions(timeout_s=0.2)
        record = run_requests(server.url, server.model, [asked(max_tokens=10_000)], ONE, options)[0]

    assert (FailureKind.TIMEOUT, "no complete answer within 0.2 s") == (record.failure, record.error)


def test_nobody_listening_is_a_connection_failure() -> None:
    """A server that is not there gives failures, fast, for every request."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        records = run_requests(url, "m", [asked(i) for i in range(3)], ClosedLoop(concurrency=2))

    assert [FailureKind.CONNECTION] * 3 == [record.failure for record in records]


def test_server_that_dies_in_mid_stream_fails_its_requests() -> None:
    """What was in flight is lost, what comes later finds nobody or is cut off; nothing hangs."""
    options = ClientOptions(extra_body={"mock_fault": "die"})
    with mock_process(MockSettings()) as server:
        records = run_requests(server.url, server.model, [asked(0), asked(1)], ONE, options)

    assert records[0].failure in (FailureKind.TRUNCATED, FailureKind.RESET)
    # a dying process may still let the kernel take the connection
    assert records[1].failure in (FailureKind.CONNECTION, FailureKind.RESET)


def test_wrong_model_name_is_told_with_the_name_and_the_servers_answer(server: MockServer) -> None:
    """A 404 says which name was asked for."""
    record = run_requests(server.url, "path/to/model", [asked()], ONE)[0]

    assert FailureKind.NOT_FOUND is record.failure
    assert "for model path/to/model: The model `path/to/model` does not exist." in (record.error or "")


def test_open_loop_schedules_by_the_clock_and_counts_its_own_waiting() -> None:
    """With a cap of one, every request keeps its arrival and is sent when the one before has ended."""
    arrivals = (0.0, 0.01, 0.02, 0.03)
    with mock_thread(MockSettings(prefill_s=0.03)) as server:
        load = OpenLoop(arrivals_s=arrivals, max_concurrency=1)
        records = run_requests(server.url, server.model, [asked(i, max_tokens=1) for i in range(4)], load)

    start_s = records[0].scheduled_s
    assert pytest.approx(list(arrivals)) == [record.scheduled_s - start_s for record in records]
    assert all(after.sent_s >= before.ended_s for before, after in itertools.pairwise(records))
    assert all(record.sent_s >= record.scheduled_s for record in records)
    assert (records[3].scheduled_e2e_s or 0) > (records[3].e2e_s or 0)


def test_open_loop_needs_an_arrival_for_each_request(server: MockServer) -> None:
    """Requests without an arrival are a bug of the caller, named before anything is sent."""
    with pytest.raises(ValueError, match="1 arrivals for 2 requests"):
        run_requests(server.url, server.model, [asked(0), asked(1)], OpenLoop(arrivals_s=(0.0,)))


def test_128_users_are_128_requests_in_flight() -> None:
    """No pool makes a request wait: the server answers nobody before all 128 have asked."""
    waiting: list[int] = []

    async def answer(request: HttpRequest, reply: HttpAnswer) -> None:
        waiting.append(1)
        while len(waiting) < 128:
            await asyncio.sleep(0.001)
        choice = {"index": 0, "text": "a", "finish_reason": "stop"}
        await reply.send_json(
            200, {"choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}
        )

    with listening(answer) as url:
        options = ClientOptions(is_streaming=False, silence_timeout_s=20)
        records = run_requests(url, "m", [asked(i) for i in range(128)], ClosedLoop(concurrency=128), options)

    assert all(record.is_success for record in records)
    assert 128 == max_in_flight(records)


def test_event_named_error_is_a_failure() -> None:
    """Some servers name the event instead of its object."""

    async def answer(request: HttpRequest, reply: HttpAnswer) -> None:
        reply.start_stream()
        await reply.write(b'event: error\ndata: {"message": "engine died"}\n\n')
        await reply.end_stream()

    with listening(answer) as url:
        record = run_requests(url, "m", [asked()], ONE)[0]

    assert FailureKind.ERROR_IN_STREAM is record.failure
    assert "engine died" in (record.error or "")


def test_callback_sees_every_record_and_may_stop_the_load(server: MockServer) -> None:
    """What the callback raises ends the run; only what ends at the same moment is still told."""
    seen = []

    def take(record: object) -> None:
        seen.append(record)
        if len(seen) >= 3:
            raise InterruptedError("enough")

    with pytest.raises(InterruptedError):
        run_requests(
            server.url, server.model, [asked(i) for i in range(50)], ClosedLoop(concurrency=2), on_done=take
        )

    assert 3 <= len(seen) <= 4


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://x", "", "http://h:80x"], ids=["no scheme", "ftp", "empty", "port"]
)
def test_what_is_no_address_is_a_usage_error(url: str) -> None:
    """A forgotten http:// is told at once."""
    with pytest.raises(UsageError, match="is not an address"):
        run_requests(url, "m", [asked()], ONE)


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_address_with_or_without_v1_is_the_same_server(url: str) -> None:
    """People paste either form."""
    assert "http://h:1" == server_root(url)


@contextlib.contextmanager
def listening(handler: object) -> Iterator[str]:
    """A server of this test's own on a free port."""
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(serve(handler, "127.0.0.1", 0))  # type: ignore[arg-type]
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        server.close()
        loop.close()

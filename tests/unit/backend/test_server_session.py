"""Load at a server: every measured request at full load, counters beside what the requests tell."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from spectune.backend.ceiling import ClientCeiling
from spectune.backend.client import ClientOptions
from spectune.backend.mock_server import Fault, MockServer, MockSettings, mock_thread
from spectune.backend.server_session import Address, ServerSession, ramp, tail
from spectune.errors import EngineFailure
from spectune.measure.judge import judge_point
from spectune.records import BlockResult, Cell, Gap, Point, Request, Sampling, SpecConfig, Status
from spectune.workload.arrivals import ClosedLoop

SAMPLING = Sampling(max_tokens=8, ignore_eos=True)


def point(concurrency: int, config: SpecConfig | None = None) -> Point:
    return Point(
        config=config or SpecConfig.off(),
        cell=Cell(batch_size=concurrency, context_tokens=0, temperature=0.0),
        workload_hash="test",
        sampling=SAMPLING,
    )


def requests(count: int, name: str = "r") -> list[Request]:
    """Prompts that share no beginning."""
    return [
        Request(
            request_id=f"{name}-{i}", prompt_ids=(i + 1, len(name), 3), category="test", sampling=SAMPLING
        )
        for i in range(count)
    ]


def session_at(server: MockServer, *, is_plain: bool = True, **options: Any) -> ServerSession:
    return ServerSession(Address(url=server.url, served_model=server.model), is_plain=is_plain, **options)


def stream(settings: MockSettings, concurrency: int, count: int = 6) -> BlockResult:
    config = SpecConfig.chain("ngram", settings.num_tokens) if settings.num_tokens else SpecConfig.off()
    with mock_thread(settings) as server:
        session = session_at(server, is_plain=config.is_off)
        return session.stream(point(concurrency, config), requests(count), requests(2, "filler"))


def test_stream_returns_the_measured_requests_and_no_filler() -> None:
    """What holds the load up is not in the result."""
    result = stream(MockSettings(), 3)

    assert [record.request_id for record in result.requests] == [f"r-{i}" for i in range(6)]
    assert [record.num_output_tokens for record in result.requests] == [8] * 6


def test_stream_counts_every_step_of_plain_decoding() -> None:
    """Each token after the first is a step without a draft."""
    result = stream(MockSettings(), 2)

    assert [len(record.steps) for record in result.requests] == [7] * 6
    assert {step.num_verified for record in result.requests for step in record.steps} == {0}


def test_stream_steps_run_at_the_load_asked_for() -> None:
    """The server drafts 3 tokens while three requests run and 1 while fewer do, so its drafts tell how
    many ran: nearly always three, where the same requests without fillers end alone.

    Between an end and the request that follows it one step finds two.
    """
    long = replace(SAMPLING, max_tokens=32)
    asked = [replace(request, sampling=long) for request in requests(4)]
    at = replace(point(3, SpecConfig.chain("ngram", 3)), sampling=long)
    schedule = ((1, 2, 1), (3, 3, 3))
    settings = MockSettings(num_tokens=3, acceptance=(0.0,), schedule=schedule, step_s=0.02)
    with mock_thread(settings) as server:
        session = session_at(server, is_plain=False)
        full = session.stream(at, asked, requests(2, "filler"))
        drained = session.run(at, asked)

    def alone(result: BlockResult) -> int:
        return sum(step.num_verified < 3 for record in result.requests for step in record.steps)

    assert alone(full) <= 2 * 7  # of 124 steps: two requests miss the third for one step after each end
    assert alone(drained) >= 31  # the fourth request runs alone


def test_stream_of_one_needs_no_filler() -> None:
    """One request after the other is at full load by itself."""
    assert ramp(requests(1), 1, 8) == []
    assert list(tail(requests(1), 1, 8)) == []


def test_ramp_ends_its_slots_one_after_the_other() -> None:
    """Slots are refilled in turn, as they are later, and not all at once."""
    assert [request.sampling.max_tokens for request in ramp(requests(1), 4, 32)] == [8, 16, 24, 32]
    assert len({request.request_id for request in ramp(requests(1), 4, 32)}) == 4


def test_run_counts_agree_with_the_servers_counters() -> None:
    """The per-request steps add up to the server's own counters, exactly."""
    settings = MockSettings(num_tokens=3, acceptance=(0.6,))
    config = SpecConfig.chain("ngram", 3)
    with mock_thread(settings) as server:
        result = session_at(server, is_plain=False).run(point(4, config), requests(8))

    steps = [step for record in result.requests for step in record.steps if step.num_verified]
    assert result.load is not None
    assert result.load.notes == ()
    assert result.load.num_drafts == len(steps)
    assert result.load.num_draft_tokens == 3 * len(steps)


def test_run_other_traffic_in_the_window_is_noted() -> None:
    """Counters that hold more than our requests tell of somebody else's."""
    settings = MockSettings(num_tokens=3)
    config = SpecConfig.chain("ngram", 3)
    with mock_thread(settings) as server:
        session = session_at(server, is_plain=False)
        own = session._ask

        def with_a_stranger(*arguments: Any, **more: Any) -> Any:
            own(requests(1, "stranger"), ClosedLoop(concurrency=1), measured=requests(1, "stranger"))
            return own(*arguments, **more)

        session._ask = with_a_stranger  # type: ignore[method-assign]
        result = session.run(point(1, config), requests(2))

    assert result.load is not None
    assert "other traffic was in the window" in result.load.notes[0]


def test_stream_warm_prefix_cache_is_noted_and_can_be_reset() -> None:
    """Prompts that the server knows already are cheaper than fresh ones: said, or emptied before."""
    long = [replace(request, prompt_ids=tuple(range(i, i + 64))) for i, request in enumerate(requests(2))]
    with mock_thread(MockSettings()) as server:
        warm, fresh = session_at(server), session_at(server, resets_cache=True)
        warm.stream(point(1), long, [])
        again = warm.stream(point(1), long, [])
        reset = fresh.stream(point(1), long, [])

    assert again.load is not None
    assert reset.load is not None
    assert (again.load.prefix_hit_rate or 0) > 0.5
    assert "came from the prefix cache" in again.load.notes[0]
    assert reset.load.prefix_hit_rate == pytest.approx(0.0)


def test_stream_dead_server_raises_what_ended_it() -> None:
    """Requests that lose their connection ask why; the answer is the failure, at the first of them."""

    def dead() -> None:
        raise EngineFailure("the server died under load: bang")

    with mock_thread(MockSettings(faults=(Fault(kind="reset", first=1),))) as server:
        session = session_at(server, check_alive=dead)
        with pytest.raises(EngineFailure, match="died under load: bang"):
            session.stream(point(1), requests(3), [])


def test_stream_error_in_a_200_stream_is_a_failed_request() -> None:
    """A server's error object makes a failed request with its words, and no latency."""
    faults = (Fault(kind="error_in_stream", first=1, is_once=True),)
    result = stream(MockSettings(faults=faults), 1, count=3)

    failed = [record for record in result.requests if record.error is not None]
    assert [record.request_id for record in failed] == ["r-1"]
    assert failed[0].tpot_s is None
    assert failed[0].output_ids == ()


def test_stream_wrong_name_stops_with_both_names() -> None:
    """A name that the server does not know ends the load at once, naming what it does serve."""
    with mock_thread(MockSettings(model="theirs")) as server:
        session = ServerSession(Address(url=server.url, served_model="ours"), is_plain=True)
        with pytest.raises(EngineFailure, match="does not serve ours, it serves theirs"):
            session.stream(point(1), requests(3), [])


def test_stream_seconds_add_up_to_the_time_of_the_slots() -> None:
    """Duration is slot time over slots: tokens over it is the throughput at full load."""
    result = stream(MockSettings(step_s=0.01), 2)

    held = sum((record.finish_s or 0) - record.arrival_s for record in result.requests)
    assert result.duration_s == pytest.approx(held / 2, rel=0.2)


def test_stream_tells_what_the_client_had_to_take() -> None:
    """The ceiling and the share of it stand in the record; above half there is a note."""
    told = ClientCeiling(
        concurrency=2, requests_per_s=1e6, events_per_s=1e6, num_requests=64, num_events=2048
    )
    slow = replace(told, events_per_s=10.0)
    with mock_thread(MockSettings(step_s=0.002)) as server:
        light = session_at(server, ceiling=lambda concurrency: told).stream(
            point(2), requests(6), requests(2, "filler")
        )
        heavy = session_at(server, ceiling=lambda concurrency: slow).stream(
            point(2), requests(6, "s"), requests(2, "filler")
        )

    assert light.load is not None
    assert heavy.load is not None
    assert (light.load.client_requests_per_s, light.load.client_events_per_s) == (1e6, 1e6)
    assert 0 < (light.load.client_share or 0) < 0.5
    assert light.load.notes == ()
    assert (heavy.load.client_share or 0) > 0.5
    assert "of what the client itself can take at concurrency 2" in heavy.load.notes[-1]
    assert light.load.max_in_flight == 2


def test_gap_of_a_server_comes_with_the_near_tie_of_its_number_format() -> None:
    """The text so far is a prompt of one more token; sampled choices and chats have no gap here."""
    [asked] = requests(1)
    sampled = replace(asked, sampling=replace(asked.sampling, temperature=1.0))
    with mock_thread(MockSettings(top_gap=0.4)) as server:
        session = session_at(server)
        exact = ServerSession(
            Address(url=server.url, served_model=server.model, near_tie=1e-3), is_plain=True
        )

        assert session.gap(asked, [7, 8, 9], 2) == Gap(value=pytest.approx(0.4), tolerance=0.5)
        assert exact.gap(asked, [7, 8, 9], 2) == Gap(value=pytest.approx(0.4), tolerance=1e-3)
        assert session.gap(sampled, [7, 8, 9], 2) is None
        assert session.gap(replace(asked, prompt_ids=()), [7, 8, 9], 2) is None


def test_engine_that_hangs_ends_the_load_after_two_requests() -> None:
    """Output, then silence, for ever: the load stops with what it waited for, not after every request."""
    with mock_thread(MockSettings()) as server:
        options = ClientOptions(extra_body={"mock_fault": "hang"}, silence_timeout_s=0.2)
        session = session_at(server, options=options)
        begin = time.monotonic()

        with pytest.raises(EngineFailure, match="2 requests in a row had no answer"):
            session.stream(point(1), requests(40), requests(2, "filler"))

    assert time.monotonic() - begin < 5.0  # forty of them would take eight seconds


def test_speculating_server_whose_requests_tell_no_acceptance_is_measured_by_time() -> None:
    """vLLM's default: speed counts, acceptance is what the counters say, and the requests are no contradiction."""
    result = stream(MockSettings(num_tokens=3, has_detailed_metrics=False), 2)

    assert result.load is not None
    assert not result.load.tells_steps
    (note,) = [note for note in result.load.notes if "tell no acceptance" in note]
    length = 1 + (result.load.num_accepted or 0) / (result.load.num_drafts or 1)
    assert f"{length:.2f} tokens a drafting step" in note
    assert not any("other traffic" in note for note in result.load.notes)
    outcome = judge_point(point(2, SpecConfig.chain("ngram", 3)), {0: result})
    assert outcome.status is Status.OK, outcome.reason

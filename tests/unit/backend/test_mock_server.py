"""The mock server does what it declares, and says that it is simulated."""

from __future__ import annotations

import json
import subprocess
import sys

import httpx
import pytest

from spectune.backend.client import run_requests
from spectune.backend.mock_server import Fault, MockSettings, mock_process, mock_thread
from spectune.errors import UsageError
from spectune.records import FailureKind, StepRecord
from spectune.workload.arrivals import ClosedLoop
from tests.support.served import asked

ONE = ClosedLoop(concurrency=1)


def texts(settings: MockSettings) -> list[str]:
    with mock_thread(settings) as server:
        return [
            record.text
            for record in run_requests(server.url, server.model, [asked(i) for i in range(5)], ONE)
        ]


def test_text_is_the_same_with_and_without_speculation() -> None:
    """A lossless engine's output does not depend on its drafts."""
    assert (
        texts(MockSettings())
        == texts(MockSettings(num_tokens=4))
        == texts(MockSettings(num_tokens=1, seed=9))
    )


def test_declared_acceptance_is_what_comes_out() -> None:
    """Conditional acceptance 0.8 then 0.5: survival 0.8 and 0.4 within three standard errors."""
    with mock_thread(MockSettings(num_tokens=2, acceptance=(0.8, 0.5))) as server:
        requests = [asked(i, max_tokens=200) for i in range(40)]
        records = run_requests(server.url, server.model, requests, ClosedLoop(concurrency=8))
    steps = [step for record in records for step in record.steps or () if step.cut is None]

    assert 3000 < len(steps)
    assert pytest.approx(0.8, abs=0.022) == sum(step.num_accepted >= 1 for step in steps) / len(steps)
    assert pytest.approx(0.4, abs=0.027) == sum(step.num_accepted >= 2 for step in steps) / len(steps)


@pytest.mark.parametrize(("acceptance", "expected"), [((1.0,), 4), ((0.0,), 1)], ids=["all", "none"])
def test_certain_acceptance_is_certain(acceptance: tuple[float, ...], expected: int) -> None:
    """Every step emits the whole block, or the target's own token alone."""
    with mock_thread(MockSettings(num_tokens=3, acceptance=acceptance)) as server:
        record = run_requests(server.url, server.model, [asked(max_tokens=13)], ONE)[0]

    assert {expected} == {step.num_emitted for step in record.steps or ()}


def test_schedule_switches_drafts_by_running_sequences() -> None:
    """One running sequence drafts, the declared range from two on does not."""
    settings = MockSettings(num_tokens=3, schedule=((1, 1, 3), (2, 99, 0)))

    assert [3, 0, 0] == [settings.drafts_for(running) for running in (1, 2, 40)]
    with mock_thread(settings) as server:
        record = run_requests(server.url, server.model, [asked(max_tokens=20)], ONE)[0]
    assert all(step.num_proposed == 3 for step in record.steps or ())


def test_answer_may_end_by_itself_inside_a_block() -> None:
    """The end mark cuts an accepted block: five tokens, the last of them the mark."""
    with mock_thread(MockSettings(num_tokens=3, acceptance=(1.0,), output_tokens=4)) as server:
        natural, forced = run_requests(
            server.url, server.model, [asked(0), asked(1, max_tokens=9, ignore_eos=True)], ONE
        )

    assert ("stop", 4) == (natural.finish_reason, natural.num_output_tokens)
    assert (
        StepRecord(num_proposed=3, num_verified=3, num_accepted=3, num_emitted=3, cut="eos"),
    ) == natural.steps
    assert ("length", 9) == (forced.finish_reason, forced.num_output_tokens)


def test_both_shapes_of_the_acceptance_histogram_are_the_same_request() -> None:
    """A dense list and a map without empty buckets give the same counts."""
    settings = MockSettings(num_tokens=3, acceptance=(0.6,))
    sparse = MockSettings(num_tokens=3, acceptance=(0.6,), quirks=frozenset({"sparse_histogram"}))
    counts = []
    for declared in (settings, sparse):
        with mock_thread(declared) as server:
            record = run_requests(server.url, server.model, [asked(max_tokens=50)], ONE)[0]
        counts.append(sorted((step.num_proposed, step.num_emitted) for step in record.steps or ()))

    assert counts[0] == counts[1]


def test_failure_hits_only_the_requests_it_is_declared_for() -> None:
    """reset@1 spoils the second request alone."""
    with mock_thread(MockSettings(faults=(Fault.parse("reset@1"),))) as server:
        records = run_requests(server.url, server.model, [asked(i) for i in range(3)], ONE)

    assert [None, FailureKind.RESET, None] == [record.failure for record in records]


@pytest.mark.parametrize(
    ("text", "hits"),
    [("hang", [True, True, True]), ("hang@1", [False, True, False]), ("hang@1+", [False, True, True])],
)
def test_failures_are_declared_in_words(text: str, hits: list[bool]) -> None:
    """All requests, one, or all from one on."""
    assert hits == [Fault.parse(text).hits(index) for index in range(3)]


@pytest.mark.parametrize("text", ["explode", "hang@", "hang@x", "hang@-1"])
def test_unknown_failures_are_usage_errors(text: str) -> None:
    """A typo is told before anything listens."""
    with pytest.raises(UsageError, match="--fail"):
        Fault.parse(text)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_tokens": -1},
        {"acceptance": (1.5,)},
        {"acceptance": ()},
        {"max_num_seqs": 0},
        {"output_tokens": 0},
        {"quirks": frozenset({"odd"})},
        {"step_s": -0.1},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_impossible_settings_are_usage_errors(changes: dict[str, object]) -> None:
    """What cannot be declared is refused with its value."""
    with pytest.raises(UsageError):
        MockSettings(**changes)  # type: ignore[arg-type]


def test_settings_survive_json_and_unknown_ones_are_refused() -> None:
    """A process of its own gets exactly what was declared."""
    settings = MockSettings(
        num_tokens=3,
        schedule=((1, 4, 2),),
        faults=(Fault.parse("die@2"),),
        quirks=frozenset({"ping", "crlf"}),
    )

    assert settings == MockSettings.from_dict(json.loads(json.dumps(settings.to_dict())))
    with pytest.raises(UsageError, match="no setting speed"):
        MockSettings.from_dict({"speed": 1})


def test_process_of_its_own_serves_and_ends() -> None:
    """The server is gone when the block is left."""
    with mock_process(MockSettings()) as server:
        assert run_requests(server.url, server.model, [asked()], ONE)[0].is_success

    assert FailureKind.CONNECTION is run_requests(server.url, server.model, [asked()], ONE)[0].failure


def test_taken_port_is_a_usage_error() -> None:
    """A port that somebody else has is named, and nothing is measured there."""
    with mock_thread(MockSettings()) as server:
        port = server.url.rpartition(":")[2]
        done = subprocess.run(
            [sys.executable, "-m", "spectune", "mock-server", "--port", port],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    assert 2 == done.returncode
    assert f"--port {port} cannot be used" in done.stderr


def test_bad_bodies_and_unknown_routes_are_answered_in_the_protocol() -> None:
    """400 for what is no request, 404 for a route that is none."""
    with mock_thread(MockSettings()) as server:
        bad = httpx.post(f"{server.url}/v1/completions", content=b"{}", trust_env=False)
        lost = httpx.get(f"{server.url}/nothing", trust_env=False)

    assert (400, 404) == (bad.status_code, lost.status_code)
    assert "bad request" in bad.json()["error"]["message"]

"""What a server tells about itself, against the mock server over sockets."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest

from spectune.backend import server_api
from spectune.backend.client import run_requests
from spectune.backend.mock_server import MockServer, MockSettings, mock_thread
from spectune.backend.prometheus import cache_hit_rate, spec_counts
from spectune.errors import EngineFailure, UsageError
from spectune.workload.arrivals import ClosedLoop
from tests.support.served import asked

NOWHERE = "http://127.0.0.1:9"


@pytest.fixture
def server() -> Iterator[MockServer]:
    """A fresh server that speculates two drafts a step."""
    with mock_thread(MockSettings(model="served-name", num_tokens=2)) as running:
        yield running


def test_server_that_lists_models_but_still_starts_is_not_ready() -> None:
    """Models are listed long before an engine can answer; health and a completion decide."""
    settings = MockSettings(start_delay_s=3600, quirks=frozenset({"models_before_health"}))
    with mock_thread(settings) as starting:
        assert ("mock-model",) == server_api.served_models(starting.url)
        assert not server_api.is_healthy(starting.url)
        assert not server_api.is_ready(starting.url, "mock-model")


def test_healthy_server_that_cannot_complete_is_not_ready() -> None:
    """Health alone does not make a server ready."""
    with mock_thread(
        MockSettings(faults=MockSettings.from_dict({"faults": [{"kind": "http_500"}]}).faults)
    ) as sick:
        assert server_api.is_healthy(sick.url)
        assert not server_api.is_ready(sick.url, sick.model)


def test_ready_server_is_ready_under_its_served_name_only(server: MockServer) -> None:
    """The probe asks under the name that the load will use."""
    assert server_api.is_ready(server.url, "served-name")
    assert not server_api.is_ready(server.url, "path/of/the/model")


def test_wrong_model_name_stops_with_both_names(server: MockServer) -> None:
    """The name that was asked for and the names that are served stand in one message."""
    with pytest.raises(UsageError, match=r"wrong is not served at http.*, which serves served-name"):
        server_api.check_served_model(server.url, "wrong")


def test_model_name_is_read_from_the_server(server: MockServer) -> None:
    """Nobody has to type a name where there is one."""
    assert "served-name" == server_api.check_served_model(server.url, None)
    assert "served-name" == server_api.check_served_model(server.url + "/v1", "served-name")


def test_version_says_that_the_mock_is_simulated(server: MockServer) -> None:
    """Nobody can take the mock for an engine."""
    version = server_api.engine_version(server.url)

    assert version["is_simulated"]
    assert version["version"].endswith("+simulated")


def test_counters_agree_with_what_requests_report(server: MockServer) -> None:
    """Drafts, drafted and accepted tokens of the window are those of its requests, cut tokens included."""
    before = server_api.scrape(server.url)
    records = run_requests(
        server.url, server.model, [asked(i, max_tokens=30) for i in range(6)], ClosedLoop(concurrency=2)
    )
    counts = spec_counts(before, server_api.scrape(server.url), model=server.model)

    steps = [step for record in records for step in record.steps or ()]
    assert counts is not None
    assert len(steps) == counts.num_drafts
    assert 2 * len(steps) == counts.num_draft_tokens
    assert sum(counts.accepted_per_position) == counts.num_accepted_tokens
    assert counts.num_accepted_tokens >= sum(step.num_accepted for step in steps)


def test_prefix_cache_is_seen_and_can_be_emptied(server: MockServer) -> None:
    """The same prompt again hits the cache, after a reset it does not."""
    load = ClosedLoop(concurrency=1)
    readings, cached = [server_api.scrape(server.url)], []
    for step in ("first", "again", "reset"):
        if step == "reset":
            assert server_api.reset_prefix_cache(server.url)
        cached.append(run_requests(server.url, server.model, [asked()], load)[0].num_cached_tokens)
        readings.append(server_api.scrape(server.url))
    rates = [cache_hit_rate(a, b) for a, b in pairwise(readings)]

    assert [0, 16, 0] == cached
    assert [0.0, 0.8, 0.0] == rates


def test_server_without_a_prefix_cache_keeps_nothing() -> None:
    """Switched off, the same prompt is computed again and no hit is counted."""
    load = ClosedLoop(concurrency=1)
    with mock_thread(MockSettings(has_prefix_cache=False)) as server:
        before = server_api.scrape(server.url)
        cached = [
            run_requests(server.url, server.model, [asked()], load)[0].num_cached_tokens for _ in range(2)
        ]
        rate = cache_hit_rate(before, server_api.scrape(server.url))

    assert [0, 0] == cached
    assert rate is None


@pytest.mark.parametrize(
    "ask",
    [server_api.engine_version, server_api.served_models, server_api.scrape, server_api.reset_prefix_cache],
)
def test_absent_server_is_named_with_its_address(ask: object) -> None:
    """An engine that does not answer is a failure with the address in it."""
    assert not server_api.is_healthy(NOWHERE)
    with pytest.raises(EngineFailure, match=r"http://127.0.0.1:9/"):
        ask(NOWHERE)  # type: ignore[operator]


def test_gap_of_the_two_best_tokens_is_read_from_log_probabilities() -> None:
    """A server whose two best tokens are 1.25 apart everywhere."""
    with mock_thread(MockSettings(top_gap=1.25)) as running:
        assert 1.25 == pytest.approx(server_api.next_gap(running.url, running.model, [5, 6, 7]))


def test_gap_is_unknown_where_a_server_tells_no_log_probabilities() -> None:
    """An error, or nobody there: no gap, and no failure of the run."""
    with mock_thread(
        MockSettings(faults=MockSettings.from_dict({"faults": [{"kind": "http_500"}]}).faults)
    ) as sick:
        assert server_api.next_gap(sick.url, sick.model, [5]) is None
    assert server_api.next_gap(NOWHERE, "any", [5]) is None

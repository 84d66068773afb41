"""SGLang's protocol, spoken by the mock server and read by the client: counts, times, oddities."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from spectune.backend import server_api
from spectune.backend.client import ClientOptions, Dialect, Endpoint, run_requests
from spectune.backend.mock_server import MockServer, MockSettings, mock_thread
from spectune.backend.prometheus import cache_hit_rate, grown
from spectune.backend.server_session import Address, ServerSession
from spectune.backend.server_words import SGLANG_WORDS
from spectune.backend.sglang_acceptance import mean_length_of
from spectune.backend.sglang_session import SglangSession
from spectune.metrics.acceptance import acceptance_length, draft_acceptance_rate
from spectune.records import Cell, Point, Request, ServedRequest, SpecConfig
from spectune.workload.arrivals import ClosedLoop
from tests.support.served import asked


@contextmanager
def sglang(**settings: Any) -> Iterator[MockServer]:
    with mock_thread(MockSettings(face="sglang", **settings)) as server:
        yield server


def ask(
    server: MockServer, requests: Sequence[Request], *, concurrency: int = 1, **options: Any
) -> list[ServedRequest]:
    load = ClosedLoop(concurrency=concurrency)
    return run_requests(
        server.url, server.model, requests, load, ClientOptions(dialect=Dialect.SGLANG, **options)
    )


def test_chain_gives_steps_that_add_up() -> None:
    """All right: 1 + 15 tokens are rounds of 4, 4, 4 and 3; the limit cut the target's own token of the last."""
    with sglang(num_tokens=3, acceptance=(1.0,)) as server:
        (served,) = ask(server, [asked(max_tokens=16)])

    assert served.is_success, served.error
    assert served.steps is not None
    assert len(served.steps) == 4
    assert 1 + sum(step.num_emitted for step in served.steps) == served.num_output_tokens == 16
    assert [step.num_accepted for step in served.steps] == [3] * 4
    assert acceptance_length(served.steps) == 4.0
    assert served.to_record().broken_identity() is None


def test_tree_is_verified_as_wide_as_it_is() -> None:
    """Depth 3 and 8 tokens: 7 drafted nodes a round, of which 3 are accepted."""
    with sglang(num_tokens=3, topk=2, num_draft_tokens=8, acceptance=(1.0,)) as server:
        (served,) = ask(server, [asked(max_tokens=17)])

    assert served.steps is not None
    assert {step.num_verified for step in served.steps} == {7}
    assert draft_acceptance_rate(served.steps) == pytest.approx(3 / 7)


def test_rounds_without_drafts_are_rounds() -> None:
    """Two requests at once switch the drafts off; every round counts, none accepts."""
    with sglang(num_tokens=3, schedule=((1, 8, 0),), acceptance=(1.0,)) as server:
        (served,) = ask(server, [asked(max_tokens=6)])

    assert served.steps is not None
    assert [step.num_accepted for step in served.steps] == [0] * 5
    assert acceptance_length(served.steps) == 1.0


def test_plain_server_tells_no_steps() -> None:
    """Without speculation there is no sglext, and nothing is made up."""
    with sglang() as server:
        (served,) = ask(server, [asked(max_tokens=6)])

    assert served.is_success
    assert (served.steps, served.steps_reason) == (None, None)


def test_end_token_is_no_stop_string() -> None:
    """matched_stop is the id of the end token there: the last round was cut by the end, not by a stop."""
    with sglang(num_tokens=3, acceptance=(1.0,), output_tokens=7) as server:
        (served,) = ask(server, [asked(max_tokens=16)])

    assert served.finish_reason == "stop"
    assert served.steps is not None
    assert {step.cut for step in served.steps} <= {None, "eos"}


def test_time_per_token_is_not_the_gap_between_chunks() -> None:
    """Rounds of 4 tokens: the gap between events is 4 tokens' time, time per token a quarter of it."""
    with sglang(num_tokens=3, acceptance=(1.0,), step_s=0.02) as server:
        (served,) = ask(server, [asked(max_tokens=41)])

    gaps = [b - a for a, b in zip(served.chunk_s, served.chunk_s[1:], strict=False)]
    assert served.tpot_s is not None
    assert served.tpot_s == pytest.approx(sum(gaps) / 40)
    assert sum(gaps) / len(gaps) == pytest.approx(4 * served.tpot_s)


@pytest.mark.parametrize("streams", [True, False])
def test_reasoning_counts_as_output(streams: bool) -> None:
    """reasoning_content with content null is text and the first token, and its tokens count."""
    with sglang(num_tokens=3, quirks=frozenset({"reasoning"})) as server:
        (served,) = ask(server, [asked(max_tokens=8)], endpoint=Endpoint.CHAT, is_streaming=streams)

    assert served.is_success, served.error
    assert served.num_output_tokens == 8
    assert served.text
    assert (served.first_token_s is not None) == streams


def test_top_k_of_all_tokens_is_minus_one_there() -> None:
    """0 is all tokens in vLLM and an error in SGLang; our 0 reaches it as -1."""
    with sglang() as server:
        body = {"model": server.model, "prompt": [1, 2], "max_tokens": 2, "top_k": 0}
        refused = httpx.post(f"{server.url}/v1/completions", json=body)
        (served,) = ask(server, [asked(max_tokens=2)])

    assert refused.status_code == 400
    assert served.is_success


def test_name_that_is_not_served_is_told_with_both_names() -> None:
    """404 names the route and the model that was asked for."""
    with sglang(model="served") as server:
        (served,) = run_requests(
            server.url, "other", [asked()], ClosedLoop(concurrency=1), ClientOptions(dialect=Dialect.SGLANG)
        )
        names = server_api.served_models(server.url)

    assert names == ("served",)
    assert "model other" in str(served.error)


def test_native_route_tells_the_same_counts() -> None:
    """/generate has in meta_info what the OpenAI route has in sglext."""
    with sglang(num_tokens=2, acceptance=(1.0,)) as server:
        body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 7, "ignore_eos": True}}
        told = httpx.post(f"{server.url}/generate", json=body).json()

    meta = told["meta_info"]
    assert len(told["output_ids"]) == meta["completion_tokens"] == 7
    assert (meta["spec_verify_ct"], meta["spec_correct_drafts_histogram"]) == (2, [0, 0, 2])
    assert meta["spec_accept_length"] == 3.5  # tokens / rounds, the prefill's token in it


def test_length_of_server_info_starts_anew_with_a_flush() -> None:
    """Cumulative before: nothing is said of a window unless the server was flushed at its start."""
    with sglang(num_tokens=3, acceptance=(1.0,)) as server:
        ask(server, [asked(max_tokens=9)])
        before = server_api.server_info(server.url)
        assert server_api.reset_prefix_cache(server.url, SGLANG_WORDS.reset_path)
        after = server_api.server_info(server.url)

    assert "avg_spec_accept_length" in before["internal_states"][0]
    assert mean_length_of(before, was_flushed=False) is None
    assert mean_length_of(after, was_flushed=True) is None  # nothing since


def test_counters_tell_queueing_and_cache() -> None:
    """Series under SGLang's names: one request at a time queues the other, a known prompt is cached."""
    same = asked(max_tokens=4)
    with sglang(max_num_seqs=1, step_s=0.01) as server:
        before = server_api.scrape(server.url)
        ask(server, [same, asked(1, max_tokens=4)], concurrency=2)
        ask(server, [same])
        after = server_api.scrape(server.url)

    assert (grown(before, after, SGLANG_WORDS.queue_s, model=server.model) or 0) > 0
    rate = cache_hit_rate(before, after, model=server.model, words=SGLANG_WORDS)
    assert rate == pytest.approx(16 / 60)  # one block of 16 of three prompts of 20 tokens


def test_session_measures_with_sglangs_words() -> None:
    """A whole block: every request has its steps, the reached load is the one that was asked for."""
    config = SpecConfig.chain("ngram", 3)
    cell = Cell(batch_size=2, context_tokens=0, temperature=0.0)
    requests = [asked(index, max_tokens=9) for index in range(4)]
    with sglang(num_tokens=3, acceptance=(1.0,)) as server:
        session = ServerSession(
            Address(url=server.url, served_model=server.model),
            is_plain=False,
            options=ClientOptions(dialect=Dialect.SGLANG),
            words=SGLANG_WORDS,
        )
        point = Point(config=config, cell=cell, workload_hash="x", sampling=requests[0].sampling)
        block = session.run(point, requests)

    assert [record.error for record in block.requests] == [None] * 4
    assert all(len(record.steps) == 2 for record in block.requests)
    assert block.load is not None
    assert block.load.reached == pytest.approx(2, rel=0.1)
    assert block.load.notes == ()


def test_server_that_tells_no_counts_gives_its_mean_as_a_note() -> None:
    """Without per-request counts there are no steps; the flushed mean stands as a sentence, nothing else."""
    cell = Cell(batch_size=1, context_tokens=0, temperature=0.0)
    requests = [asked(index, max_tokens=9) for index in range(2)]
    with sglang(num_tokens=3, acceptance=(1.0,), has_detailed_metrics=False) as server:
        session = SglangSession(
            Address(url=server.url, served_model=server.model),
            is_plain=False,
            options=ClientOptions(dialect=Dialect.SGLANG),
            words=SGLANG_WORDS,
            resets_cache=True,
        )
        point = Point(
            config=SpecConfig.chain("ngram", 3), cell=cell, workload_hash="x", sampling=requests[0].sampling
        )
        session.run(point, [asked(7, max_tokens=5)])  # warm-up, of before the flush
        block = session.stream(point, requests, [])
        steps = session.active_steps()

    assert block.load is not None
    assert all(record.steps == () for record in block.requests)
    assert any("its own mean is 4.00 tokens a round" in note for note in block.load.notes)
    assert steps == 3

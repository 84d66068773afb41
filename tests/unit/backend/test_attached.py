"""Servers that somebody else runs: what is found out about them, what they are asked, what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from spectune.backend import server_api
from spectune.backend.attached import AttachedBackend, read_facts
from spectune.backend.mock_server import MockServer, MockSettings, mock_thread
from spectune.backend.prometheus import parse_exposition
from spectune.backend.server_api import is_healthy
from spectune.errors import EngineFailure, UsageError
from spectune.records import (
    Backend,
    Cell,
    Converses,
    LoadSession,
    Point,
    Prompt,
    Request,
    Sampling,
    SpecConfig,
)
from tests.support.served_sweep import write_model

SAMPLING = Sampling(max_tokens=6, ignore_eos=True)
OFF = SpecConfig.off()


@pytest.fixture
def plain() -> Iterator[MockServer]:
    with mock_thread(MockSettings(model="ours")) as server:
        yield server


@pytest.fixture
def speculative() -> Iterator[MockServer]:
    with mock_thread(MockSettings(model="ours", num_tokens=3)) as server:
        yield server


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def point(config: SpecConfig, **open_loop: object) -> Point:
    cell = Cell(batch_size=2, context_tokens=0, temperature=0.0, **open_loop)  # type: ignore[arg-type]
    return Point(config=config, cell=cell, workload_hash="test", sampling=SAMPLING)


def requests(count: int, name: str = "r") -> list[Request]:
    return [
        Request(request_id=f"{name}-{i}", prompt_ids=(i + 1, len(name)), category="test", sampling=SAMPLING)
        for i in range(count)
    ]


def test_facts_are_read_from_the_server(plain: MockServer, speculative: MockServer) -> None:
    """Name, version and limit as it tells them; drafts as many as it counts positions for."""
    off, spec = read_facts(plain.url, None), read_facts(speculative.url + "/v1", "ours")

    assert (off.served_model, off.config, off.is_simulated) == ("ours", OFF, True)
    assert off.version == "mock 0.32.0+simulated"
    assert off.max_model_len == 32768
    assert (spec.config.method, spec.config.num_steps) == ("served", 3)


def test_arms_are_what_runs_there_and_each_is_asked_at_its_own_address(
    plain: MockServer, speculative: MockServer
) -> None:
    """Plain decoding at the baseline, drafts at the candidate; nothing is started and both live on."""
    backend = AttachedBackend(base_url=speculative.url, baseline_url=plain.url)
    off, candidate = backend.configs()

    assert isinstance(backend, Backend)
    with backend.open(backend.plan([point(off), point(candidate)])[0]) as session:
        slow, fast = session.run(point(off), requests(2)), session.run(point(candidate), requests(2))

    assert [len(record.steps) for record in slow.requests] == [5, 5]  # one a token after the first
    assert all(step.num_verified == 3 for record in fast.requests for step in record.steps)
    assert is_healthy(plain.url)
    assert is_healthy(speculative.url)


def test_load_at_a_rate_is_kept_up_at_a_running_server(plain: MockServer) -> None:
    """Arrivals by the clock work where nothing was started."""
    backend = AttachedBackend(base_url=plain.url)
    asked = point(OFF, request_rate=200.0, arrivals="constant")
    with backend.open(backend.plan([asked])[0]) as session:
        assert isinstance(session, LoadSession)
        result = session.stream(asked, requests(4), requests(1, "filler"))

    gaps = [
        (after.scheduled_s or 0) - (before.scheduled_s or 0)
        for before, after in zip(result.requests, result.requests[1:], strict=False)
    ]
    assert gaps == [pytest.approx(0.005)] * 3
    assert result.load is not None
    assert result.load.client_requests_per_s is not None


def test_candidate_without_a_baseline_has_nothing_to_compare_with(speculative: MockServer) -> None:
    """A point of plain decoding is refused with the flag that would give it a server."""
    backend = AttachedBackend(base_url=speculative.url)
    with (
        backend.open(backend.plan([point(OFF)])[0]) as session,
        pytest.raises(EngineFailure, match="nothing to compare with") as caught,
    ):
        session.run(point(OFF), requests(1))

    assert "--baseline-url" in str(caught.value.hint)


def test_baseline_that_speculates_is_refused(speculative: MockServer) -> None:
    """Speculation against speculation would be no speedup."""
    backend = AttachedBackend(base_url=speculative.url, baseline_url=speculative.url)

    with pytest.raises(UsageError, match="speculates"):
        _ = backend.baseline


def test_baseline_beside_a_server_that_does_not_speculate_is_refused(plain: MockServer) -> None:
    """Two plain servers: the second address would never be measured."""
    backend = AttachedBackend(base_url=plain.url, baseline_url=plain.url)

    with pytest.raises(UsageError, match="does not speculate"):
        _ = backend.baseline


@pytest.mark.parametrize("name", ["ours", "its-first-name"], ids=["asked name", "another served name"])
def test_speculation_is_seen_whatever_name_the_server_counts_under(
    name: str, speculative: MockServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM counts under its first served name, also where a request names the second one or an adapter."""
    text = f'vllm:spec_decode_num_drafts_total{{model_name="{name}",engine="0"}} 3\n' + "".join(
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{model_name="{name}",engine="0",position="{i}"}} 1\n'
        for i in range(3)
    )
    monkeypatch.setattr(server_api, "scrape", lambda url: parse_exposition(text))

    assert read_facts(speculative.url, None).config.num_steps == 3


def test_server_whose_counters_are_hidden_is_not_taken_for_a_plain_one(
    speculative: MockServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--disable-log-stats or a gateway: nobody knows whether it speculates."""
    monkeypatch.setattr(server_api, "scrape", lambda url: parse_exposition("gateway_requests_total 7\n"))

    with pytest.raises(EngineFailure, match="whether it speculates is not known"):
        read_facts(speculative.url, None)


def test_conversations_are_answered_by_the_running_server(plain: MockServer) -> None:
    """Its chat route answers a turn after the turns before it, with the ids that its template gave."""
    turns = Prompt(prompt_id="p", category="chat", turns=("first", "second"), answers=("reply",))
    backend = AttachedBackend(base_url=plain.url)
    with backend.open(backend.plan([point(OFF)])[0]) as session:
        assert isinstance(session, Converses)
        (answer,) = session.converse([turns], SAMPLING)

    assert answer.text.strip()
    # the mock writes "user: first\nassistant: reply\nuser: second", one id for four characters
    assert answer.prompt_ids is not None
    assert len(answer.prompt_ids) == -(-len("user: first\nassistant: reply\nuser: second") // 4)


def test_prompts_are_encoded_with_a_local_tokenizer_or_the_servers(plain: MockServer, model: Path) -> None:
    """A directory's tokenizer encodes here; without one the server is asked, and one that cannot says how."""
    prompt = Prompt(prompt_id="p", category="chat", turns=("abc",))

    assert len(AttachedBackend(base_url=plain.url, model=str(model)).encode(prompt, "", 0)) == 3
    with pytest.raises(UsageError, match="does not tokenize") as caught:
        AttachedBackend(base_url=plain.url).encode(prompt, "", 0)
    assert "--model" in str(caught.value.hint)


def test_template_needs_a_local_tokenizer(plain: MockServer, model: Path, tmp_path: Path) -> None:
    """A running server applies its own template; with the model's directory prompts are written here."""
    template = tmp_path / "own.jinja"
    template.write_text("<{{ messages[0].content }}>", encoding="utf-8")
    prompt = Prompt(prompt_id="p", category="chat", turns=("abc",))

    with pytest.raises(UsageError, match="a running server applies its own template"):
        AttachedBackend(base_url=plain.url, chat_template=template)
    own = AttachedBackend(base_url=plain.url, model=str(model), chat_template=template)
    assert len(own.encode(prompt, "", 0)) == len("<abc>")


def test_server_that_cannot_be_reached_is_a_usage_error() -> None:
    """The address is what the user can change."""
    with pytest.raises(UsageError, match=r"--base-url http://127\.0\.0\.1:9"):
        read_facts("http://127.0.0.1:9", None)


def test_fingerprint_says_what_is_not_told(speculative: MockServer) -> None:
    """Nothing is guessed of a machine that is somebody else's."""
    mark = AttachedBackend(base_url=speculative.url).fingerprint()

    assert mark.device == "unknown: the server does not tell"
    assert mark.settings["draft_sampling"] == "unknown: the server does not tell"
    assert mark.is_simulated

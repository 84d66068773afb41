"""A real vLLM server: what is declared elsewhere holds of the engine itself.

Needs an interpreter with vLLM: SPECTUNE_VLLM_PYTHON, or `spectune engines install vllm`. Skipped with
the reason where there is none.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from spectune.backend.environments import find_environment
from spectune.backend.processes import session_members
from spectune.backend.reference import ReferenceBackend
from spectune.backend.server import serve
from spectune.backend.server_api import engine_version
from spectune.backend.vllm import VllmBackend
from spectune.errors import EngineFailure, SpectuneError
from spectune.metrics.acceptance import acceptance_length, pooled_steps
from spectune.records import Cell, LoadSession, Point, Request, Sampling, SpecConfig
from spectune.workload import load_workload

pytestmark = [pytest.mark.vllm, pytest.mark.real_model, pytest.mark.slow]

HEAD = "smollm2-135m-eagle3"
SAMPLING = Sampling(max_tokens=24, ignore_eos=True)
EAGLE3 = SpecConfig.chain("eagle3", 3, draft_model=HEAD)


def point(config: SpecConfig, concurrency: int = 2) -> Point:
    cell = Cell(batch_size=concurrency, context_tokens=0, temperature=0.0)
    return Point(config=config, cell=cell, workload_hash="real", sampling=SAMPLING)


@pytest.fixture(scope="module")
def backend(default_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> VllmBackend:
    """The default target with the shipped head, on whatever vLLM this machine has."""
    python = os.environ.get("SPECTUNE_VLLM_PYTHON")
    try:
        find_environment("vllm", python)
    except SpectuneError as error:
        pytest.skip(f"no vLLM here: {error.message}; SPECTUNE_VLLM_PYTHON names an interpreter that has it")
    return VllmBackend(
        draft_model=HEAD, engine_python=python, log_dir=tmp_path_factory.mktemp("servers"), device="cpu"
    )


@pytest.fixture(scope="module")
def requests(backend: VllmBackend) -> list[Request]:
    prompts = load_workload(None, num_prompts=6).prompts
    return [
        Request(
            request_id=prompt.prompt_id,
            prompt_ids=backend.encode(prompt, "", 0),
            category=prompt.category,
            sampling=SAMPLING,
        )
        for prompt in prompts
    ]


@pytest.fixture(scope="module")
def eagle3(backend: VllmBackend) -> Iterator[LoadSession]:
    with backend.open(backend.plan([point(EAGLE3)])[0]) as session:
        assert isinstance(session, LoadSession)
        yield session


def test_steps_of_a_speculating_server_add_up(eagle3: LoadSession, requests: list[Request]) -> None:
    """1 + emitted is the number of output tokens for every request, and the server's own counters say
    the same of the same time."""
    result = eagle3.run(point(EAGLE3), requests)

    assert [record.error for record in result.requests] == [None] * 6
    assert [record.broken_identity() for record in result.requests] == [None] * 6
    assert result.load is not None
    assert result.load.notes == ()
    drafting = [step for record in result.requests for step in record.steps if step.num_verified]
    assert result.load.num_drafts == len(drafting)
    assert result.load.num_draft_tokens == sum(step.num_verified for step in drafting)
    length = acceptance_length(pooled_steps(result.requests))
    assert length is not None
    assert 1.0 < length <= 4.0


def test_load_is_reached_and_nothing_comes_from_a_cache(eagle3: LoadSession, requests: list[Request]) -> None:
    """All requests in flight run, none waits in a queue, and no prompt is known from before."""
    result = eagle3.stream(point(EAGLE3), requests[:4], requests[4:])

    assert result.load is not None
    assert result.load.reached == pytest.approx(2.0, rel=0.1)
    assert result.load.prefix_hit_rate in (None, 0.0)
    assert result.load.kv_capacity_tokens is not None
    assert [record.num_output_tokens for record in result.requests] == [24] * 4


def test_gap_of_the_two_best_tokens_is_the_reference_engines(
    eagle3: LoadSession, requests: list[Request]
) -> None:
    """After five tokens of each answer vLLM's log-probabilities and our own logits say the same gap, as far
    as bfloat16 goes; a speculating server tells it too, from its prefill."""
    texts = {record.request_id: record.output_ids for record in eagle3.run(point(EAGLE3), requests).requests}
    ours = ReferenceBackend(dtype="bfloat16")
    with ours.open(ours.plan([point(SpecConfig.off(), 1)])[0]) as engine:
        for request in requests:
            theirs = eagle3.gap(request, texts[request.request_id], 5)
            known = engine.gap(request, texts[request.request_id], 5)
            assert theirs is not None
            assert known is not None
            assert theirs.value == pytest.approx(known.value, abs=known.tolerance)


def test_standby_server_drafts_nothing(backend: VllmBackend, requests: list[Request]) -> None:
    """Launched for three drafts and scheduled to make none: no step verifies a draft, and acceptance is
    unknown, where vLLM itself would say 1."""
    standby = SpecConfig.chain("eagle3", 3, draft_model=HEAD, options=(("standby", True),))
    with backend.open(backend.plan([point(standby)])[0]) as session:
        result = session.run(point(standby), requests[:2])

    steps = pooled_steps(result.requests)
    assert len(steps) == 2 * 23
    assert sum(step.num_proposed for step in steps) == 0
    assert acceptance_length(steps) is None


def test_killed_worker_is_named_and_nothing_survives(backend: VllmBackend, requests: list[Request]) -> None:
    """A worker killed from outside ends the load with the server's death; no process is left over."""
    command = backend.command(backend.plan([point(SpecConfig.off())])[0], port=0, served_model="ours")
    assert command.served_model == "ours"
    sessions = []
    with backend.open(backend.plan([point(SpecConfig.off())])[0]) as session:
        server = session._check_alive.args[0]  # type: ignore[attr-defined]
        sessions.append(server.pid)
        assert engine_version(server.url)["version"] in backend.fingerprint().engine_version
        victim = next(member for member in server.members() if "Worker" in member.name)
        os.kill(victim.pid, signal.SIGKILL)
        with pytest.raises(EngineFailure, match="died under load"):
            session.run(point(SpecConfig.off()), requests)

    assert session_members(sessions[0]) == []


def test_refused_setting_is_told_with_vllms_words(backend: VllmBackend, tmp_path: Path) -> None:
    """A setting that vLLM refuses ends the start within seconds, quoting it."""
    good = backend.command(backend.plan([point(SpecConfig.off())])[0], port=18765, served_model="ours")
    bad = type(good)(
        argv=(*good.argv, "--no-such-flag"), port=18765, served_model="ours", environment=good.environment
    )

    with (
        pytest.raises(EngineFailure, match="unrecognized arguments: --no-such-flag"),
        serve(bad, log=tmp_path / "log"),
    ):
        pass


if sys.platform != "linux":
    pytest.skip("sessions of processes are read from /proc", allow_module_level=True)

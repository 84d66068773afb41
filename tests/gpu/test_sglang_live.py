"""A real SGLang server on a GPU: off, a chain, a tree, adaptive, and our engine's acceptance beside it.

Needs a CUDA device and an interpreter whose SGLang has its kernels: SPECTUNE_SGLANG_PYTHON, or
`spectune engines install sglang --device cuda`. Skipped with the reason where either is missing.
SPECTUNE_MODEL and SPECTUNE_HEAD name another pair than the default target and its shipped head.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from spectune.backend.environments import detect_device, find_environment
from spectune.backend.sglang import SglangBackend
from spectune.backend.sglang_command import forced_acceptance
from spectune.errors import SpectuneError
from spectune.metrics.acceptance import acceptance_length, pooled_steps
from spectune.records import BlockResult, Cell, Launch, Point, Request, Sampling, SpecConfig
from spectune.workload import load_workload

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

MODEL, HEAD = os.environ.get("SPECTUNE_MODEL"), os.environ.get("SPECTUNE_HEAD", "smollm2-135m-eagle3")
SAMPLING = Sampling(max_tokens=128, ignore_eos=True)
NUM_PROMPTS = 16
CHAIN = SpecConfig.chain("eagle3", 3, draft_model=HEAD)
TREE = SpecConfig(method="eagle3", num_steps=4, topk=4, num_draft_tokens=12, draft_model=HEAD)
SWITCHED = {"1": {"candidate_steps": [3]}, "3": {"candidate_steps": [0]}}


@pytest.fixture(scope="module")
def python() -> str:
    """An interpreter whose SGLang loads its kernels."""
    if detect_device() != "cuda":
        pytest.skip("no CUDA device")
    try:
        found = find_environment("sglang", os.environ.get("SPECTUNE_SGLANG_PYTHON")).python
    except SpectuneError as error:
        pytest.skip(f"{error.message}: {error.hint}")
    loads = subprocess.run([found, "-c", "import sgl_kernel"], capture_output=True, text=True, check=False)
    if loads.returncode != 0:
        pytest.skip(f"the kernels of SGLang do not load: {loads.stderr.strip().splitlines()[-1]}")
    return found


@pytest.fixture(scope="module")
def backend(python: str, tmp_path_factory: pytest.TempPathFactory) -> SglangBackend:
    return SglangBackend(
        model=MODEL,
        draft_model=HEAD,
        engine_python=python,
        max_num_seqs=8,
        log_dir=tmp_path_factory.mktemp("logs"),
    )


@pytest.fixture(scope="module")
def requests(backend: SglangBackend) -> list[Request]:
    """Prompts of every category, the same for every arm."""
    prompts = load_workload(None, num_prompts=NUM_PROMPTS, seed=0).prompts
    return [
        Request(
            request_id=prompt.prompt_id,
            prompt_ids=backend.encode(prompt, "", 0),
            prompt_text=prompt.turns[0],
            category=prompt.category,
            sampling=SAMPLING,
        )
        for prompt in prompts[:NUM_PROMPTS]
    ]


def point(config: SpecConfig, concurrency: int = 1) -> Point:
    cell = Cell(batch_size=concurrency, context_tokens=0, temperature=0.0)
    return Point(config=config, cell=cell, workload_hash="live", sampling=SAMPLING)


@pytest.fixture(scope="module")
def measured(backend: SglangBackend, requests: list[Request]) -> dict[str, BlockResult]:
    """One start for each arm, every prompt in each."""
    adaptive = SpecConfig.chain("eagle3", 3, draft_model=HEAD, options=(("adaptive", json.dumps(SWITCHED)),))
    found = {}
    for name, config, concurrency in (
        ("off", SpecConfig.off(), 1),
        ("chain", CHAIN, 1),
        ("tree", TREE, 1),
        ("adaptive below", adaptive, 1),
        ("adaptive above", adaptive, 4),
    ):
        own = point(config, concurrency)
        with backend.open(Launch(points=(own,))) as session:
            found[name] = session.run(own, requests)
    return found


@pytest.mark.parametrize("arm", ["off", "chain", "tree", "adaptive below", "adaptive above"])
def test_every_request_succeeds_and_its_counts_add_up(measured: dict[str, BlockResult], arm: str) -> None:
    """1 + what the rounds emitted are the tokens of the answer, for each request of each arm."""
    for record in measured[arm].requests:
        assert record.error is None, record.error
        assert record.broken_identity() is None


def test_tree_accepts_more_a_round_than_the_chain(measured: dict[str, BlockResult]) -> None:
    """A tree of depth 4 holds the chain of 3 in it."""
    chain, tree = (pooled_steps(measured[name].requests) for name in ("chain", "tree"))

    assert (acceptance_length(tree) or 0) > (acceptance_length(chain) or 0)


def test_adaptive_file_switches_off_above_its_edge(measured: dict[str, BlockResult]) -> None:
    """One request drafts 3; four at once run at 0 steps, except while fewer are left in flight."""
    below, above = (pooled_steps(measured[f"adaptive {side}"].requests) for side in ("below", "above"))

    assert (acceptance_length(below) or 0) > 1.2
    assert (acceptance_length(above) or 9) < 1 + 0.25 * ((acceptance_length(below) or 1) - 1)


def test_acceptance_is_that_of_our_engine(
    measured: dict[str, BlockResult], backend: SglangBackend, requests: list[Request]
) -> None:
    """The same head drafts the same chain: replayed along the server's own tokens, within 2%."""
    from spectune.backend.reference import ReferenceBackend

    reference = ReferenceBackend(model=MODEL, draft_model=HEAD, device="cuda")
    own = point(CHAIN)
    texts = {record.request_id: record.output_ids for record in measured["chain"].requests}
    with reference.open(Launch(points=(own,))) as session:
        replayed = session.replay(own, requests, texts)  # type: ignore[attr-defined]
    served = acceptance_length(pooled_steps(measured["chain"].requests))

    assert served == pytest.approx(acceptance_length(pooled_steps(replayed.requests)), rel=0.02)


def test_forced_acceptance_is_what_was_forced(
    backend: SglangBackend, requests: list[Request], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """For timing rounds alone: 2.5 tokens a round, whatever the head says."""
    for name, value in forced_acceptance(2.5).items():
        monkeypatch.setenv(name, value)  # servers inherit it
    own = point(CHAIN)
    with backend.open(Launch(points=(own,))) as session:
        block = session.run(own, requests)

    assert acceptance_length(pooled_steps(block.requests)) == pytest.approx(2.5, abs=0.05)

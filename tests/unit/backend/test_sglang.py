"""The SGLang backend: what it starts, what it reads back, what it does not measure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spectune.backend import create_backend
from spectune.backend.attached import read_facts
from spectune.backend.mock_server import MockSettings, mock_thread
from spectune.backend.sglang import SglangBackend, check_resolved, token_capacity
from spectune.backend.sglang_command import SglangSettings, forced_length
from spectune.errors import BackendMissing, CheckpointError, EngineFailure, InfeasibleConfig, UsageError
from spectune.records import Backend, Cell, Launch, Point, Sampling, SpecConfig

CHAIN = SpecConfig.chain("eagle3", 3)
SETTINGS = SglangSettings(model="/model", max_running_requests=64)
INFO = {
    "max_running_requests": 64,
    "speculative_algorithm": "EAGLE3",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with the config of a model, and no weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    config = {
        "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8, "max_position_embeddings": 512,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def backend(model: Path, **options: Any) -> SglangBackend:
    return SglangBackend(model=str(model), draft_model="/head", **options)


def launch_of(config: SpecConfig) -> Launch:
    cell = Cell(batch_size=1, context_tokens=0, temperature=0.0)
    return Launch(points=(Point(config=config, cell=cell, workload_hash="x", sampling=Sampling()),))


def test_registry_makes_it(model: Path) -> None:
    """create_backend("sglang") is a backend with trees."""
    made = create_backend("sglang", model=str(model))

    assert isinstance(made, Backend)
    assert made.capabilities().has_trees
    assert set(made.capabilities().methods) == {"off", "eagle3", "ngram", "draft_model"}


def test_command_can_be_shown_where_nothing_can_be_started(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an environment the program is `python`; starting says what to install."""
    monkeypatch.setenv("SPECTUNE_CACHE", str(tmp_path / "cache"))
    made = backend(model)

    command = made.command(launch_of(CHAIN), port=1, served_model="name")

    assert command.argv[:3] == ("python", "-m", "sglang.launch_server")
    assert ("--context-length", "512") == command.argv[
        command.argv.index("--context-length") : command.argv.index("--context-length") + 2
    ]
    with pytest.raises(BackendMissing, match="engine sglang is not installed"):
        made.open(launch_of(CHAIN)).__enter__()


def test_unsupported_configuration_is_never_a_command(model: Path) -> None:
    """What the capability table refuses cannot be started by another way either."""
    tree = SpecConfig(method="eagle3", num_steps=3, topk=2, num_draft_tokens=5)
    made = backend(model, extra_server_args=("--page-size", "16", "--attention-backend", "flashmla"))

    with pytest.raises(InfeasibleConfig, match="page size 16"):
        made.command(launch_of(tree), port=1, served_model="name")
    assert made.unsupported(CHAIN) is None


def test_standby_names_a_file_and_writes_it_before_the_start(model: Path, tmp_path: Path) -> None:
    """The command names the adaptive file; it is there when the server reads it."""
    config = SpecConfig.chain("eagle3", 3, options=(("standby", True),))
    made = backend(model, log_dir=tmp_path / "logs", server_cmd="x {args}", max_num_seqs=8)
    words = made.command(launch_of(config), port=1, served_model="name").argv

    made._prepare(launch_of(config))

    file = Path(words[words.index("--speculative-adaptive-config") + 1])
    assert json.loads(file.read_text(encoding="utf-8")) == {
        "1": {"candidate_steps": [0]},
        "9": {"candidate_steps": [3]},
    }


def test_flag_that_the_measurement_sets_is_refused(model: Path) -> None:
    """Before anything is read or started."""
    with pytest.raises(UsageError, match="max-running-requests is set by the measurement"):
        backend(model, extra_server_args=("--max-running-requests", "4"))


def test_server_that_runs_what_was_asked_is_measured() -> None:
    """Equal numbers, and fields that an older version does not tell, are no complaint."""
    check_resolved(INFO, SETTINGS, CHAIN)
    check_resolved({}, SETTINGS, CHAIN)
    check_resolved({"speculative_algorithm": None, "max_running_requests": 64}, SETTINGS, SpecConfig.off())


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"speculative_num_draft_tokens": 8}, "speculative_num_draft_tokens 4 and runs with 8"),
        ({"max_running_requests": 48}, "max_running_requests 64 and runs with 48"),
        ({"speculative_algorithm": None}, "speculative_algorithm 'EAGLE3' and runs with None"),
        ({"internal_states": [{"effective_max_running_requests_per_dp": 6}]}, "admits 6 requests at once"),
    ],
)
def test_server_that_runs_something_else_is_not_measured(changes: dict[str, Any], text: str) -> None:
    """Its numbers would stand under another name."""
    with pytest.raises(EngineFailure, match=text):
        check_resolved({**INFO, **changes}, SETTINGS, CHAIN)


def test_capacity_of_the_cache_is_read_where_it_is_told() -> None:
    """From the state of the scheduler; None where there is none."""
    assert token_capacity({"internal_states": [{"memory_usage": {"token_capacity": 4096}}]}) == 4096
    assert token_capacity({"internal_states": [{}]}) is None


@pytest.mark.parametrize(
    ("settings", "config"),
    [
        ({}, SpecConfig.off()),
        ({"num_tokens": 3}, SpecConfig.chain("eagle3", 3)),
        (
            {"num_tokens": 3, "topk": 2, "num_draft_tokens": 6},
            SpecConfig(method="eagle3", num_steps=3, topk=2, num_draft_tokens=6),
        ),
        (
            {"num_tokens": 3, "server_info": {"speculative_adaptive": True}},
            SpecConfig.chain("eagle3", 3, options=(("adaptive", "on"),)),
        ),
    ],
    ids=["off", "chain", "tree", "adaptive"],
)
def test_running_server_is_read_by_what_it_resolved(settings: dict[str, Any], config: SpecConfig) -> None:
    """--base-url of an SGLang server: it keeps no counters of drafts, its /server_info says what it runs."""
    with mock_thread(MockSettings(face="sglang", **settings)) as server:
        facts = read_facts(server.url, None)

    assert (facts.config, facts.is_sglang, facts.is_simulated) == (config, True, True)


def test_head_says_up_to_which_context_it_was_made(model: Path, tmp_path: Path) -> None:
    """The run keeps it, so that longer contexts are told beside their acceptance."""
    head = tmp_path / "head"
    head.mkdir()
    config = {"architectures": ["LlamaForCausalLMEagle3"], "max_position_embeddings": 2048}
    (head / "config.json").write_text(json.dumps(config), encoding="utf-8")

    assert SglangBackend(model=str(model), draft_model=str(head)).head_context == 2048


def test_head_of_another_kind_is_refused_before_the_start(model: Path, tmp_path: Path) -> None:
    """An EAGLE-1 head under EAGLE3 loads, runs and accepts nothing."""
    head = tmp_path / "head"
    head.mkdir()
    (head / "config.json").write_text('{"architectures": ["LlamaForCausalLMEagle"]}', encoding="utf-8")
    made = SglangBackend(model=str(model), draft_model=str(head), server_cmd="x {args}")

    with pytest.raises(CheckpointError, match="EAGLE-1"):
        made.open(launch_of(CHAIN)).__enter__()


def test_forced_acceptance_is_started_with_and_marked(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For timing rounds: the variables stand in every command, the run says what was forced."""
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "2.5")
    made = backend(model, server_cmd="x {args}")

    environment = made.command(launch_of(CHAIN), port=1, served_model="name").environment

    assert environment["SGLANG_SIMULATE_ACC_LEN"] == "2.5"
    assert environment["SGLANG_SIMULATE_ACC_METHOD"] == "match-expected"


@pytest.mark.parametrize(("told", "length"), [("2.5", 2.5), ("-1", None), ("0", None)])
def test_forced_length_is_read_as_sglang_does(told: str, length: float | None) -> None:
    """0 and below force nothing."""
    assert forced_length({"SGLANG_SIMULATE_ACC_LEN": told}) == length
    assert forced_length({}) is None


def test_forced_length_that_is_no_number_is_refused() -> None:
    """Named, before a server ends over it."""
    with pytest.raises(UsageError, match="SGLANG_SIMULATE_ACC_LEN two"):
        forced_length({"SGLANG_SIMULATE_ACC_LEN": "two"})

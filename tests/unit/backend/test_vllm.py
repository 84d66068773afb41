"""The vLLM backend without vLLM: order of starts, equal limits, retries, what its fingerprint holds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from spectune.backend.server_failures import Cause, Diagnosis
from spectune.backend.vllm import VllmBackend
from spectune.backend.vllm_model import cache_gib, check_head, kv_bytes_per_token
from spectune.errors import CheckpointError, EngineFailure, OutOfMemory, UsageError
from spectune.records import Backend, Cell, LoadSession, Point, Request, Sampling, SpecConfig

STAND_IN = Path(__file__).parents[2] / "support" / "mock_vllm.py"
SAMPLING = Sampling(max_tokens=4, ignore_eos=True)
OFF, K1, K3 = SpecConfig.off(), SpecConfig.chain("ngram", 1), SpecConfig.chain("ngram", 3)


def point(config: SpecConfig, repeat: int = 0, batch_size: int = 1) -> Point:
    cell = Cell(batch_size=batch_size, context_tokens=0, temperature=0.0)
    return Point(config=config, cell=cell, workload_hash="test", sampling=SAMPLING, repeat=repeat)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model directory as far as a server's client reads it."""
    folder = tmp_path / "model"
    folder.mkdir()
    config = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 64,
        "max_position_embeddings": 1024,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    words = {"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}}
    (folder / "tokenizer.json").write_text(json.dumps(words), encoding="utf-8")
    return folder


def backend(model: Path, *words: str, **options: Any) -> VllmBackend:
    launcher = " ".join([sys.executable, str(STAND_IN), *words, "{args}"])
    options = {"server_cmd": launcher, "device": "cpu", "log_dir": model.parent / "logs"} | options
    return VllmBackend(model=str(model), **options)


def test_is_a_backend(model: Path) -> None:
    """It speaks the one protocol, and says that each arm is a start of its own."""
    made = backend(model)

    assert isinstance(made, Backend)
    assert made.capabilities().has_boots
    assert not made.capabilities().has_trees


def test_plan_starts_off_first_and_turns_round(model: Path) -> None:
    """off, c1, c3, off, then c3, c1, off: each candidate stands between two starts of plain decoding."""
    points = [
        point(OFF, 0),
        point(K1, 0),
        point(K3, 0),
        point(OFF, 1),
        point(K1, 1),
        point(K3, 1),
        point(OFF, 2),
    ]

    launches = backend(model).plan(points)

    labels = [(launch.points[0].repeat, launch.points[0].config) for launch in launches]
    assert labels == [(0, OFF), (0, K1), (0, K3), (1, OFF), (1, K3), (1, K1), (2, OFF)]


def test_plan_one_start_serves_every_cell_of_an_arm(model: Path) -> None:
    """What can be measured on a server is measured before it is stopped."""
    points = [point(config, 0, size) for size in (1, 4) for config in (OFF, K3)]

    launches = backend(model).plan(points)

    assert [[p.cell.batch_size for p in launch.points] for launch in launches] == [[1, 4], [1, 4]]


def test_settings_length_is_at_most_the_models(model: Path) -> None:
    """A longer limit than the model has would end the start."""
    assert backend(model, max_model_len=2048).settings(OFF).max_model_len == 1024


def test_open_serves_and_stops(model: Path) -> None:
    """Inside the block requests are answered; the session can keep a load up."""
    made = backend(model)
    request = Request(request_id="a", prompt_ids=(1, 2), category="test", sampling=SAMPLING)

    with made.open(made.plan([point(K3)])[0]) as session:
        assert isinstance(session, LoadSession)
        result = session.stream(point(K3), [request], [])

    assert result.requests[0].num_output_tokens == 4
    assert result.requests[0].broken_identity() is None


def test_open_out_of_memory_is_tried_again_with_a_smaller_share(model: Path, tmp_path: Path) -> None:
    """A start without memory is repeated with less, which stands in the record of what is measured."""
    said: list[str] = []
    memory = str(tmp_path / "memory")
    made = backend(model, "--misbehave", "no_memory_once", "--memory", memory, progress=said.append)

    with made.open(made.plan([point(OFF)])[0]) as session:
        load = session.run(point(OFF), []).load

    assert load is not None
    assert load.notes == (
        "memory share lowered 1 times after running out of memory, to 0.90 of what was asked for",
    )
    assert made.settings(OFF).gpu_memory_utilization == pytest.approx(0.81)
    assert any("once more with a smaller share" in text for text in said)


class Dead:
    """A server that has no memory left."""

    def is_healthy(self) -> bool:
        return False

    def diagnosis(self) -> Diagnosis:
        return Diagnosis(cause=Cause.NO_MEMORY, evidence="CUDA out of memory", hint="less of it")


def test_death_by_memory_under_load_lowers_the_share_of_that_arm_alone(model: Path) -> None:
    """0.9 of 0.9 for its next start, 0.9 of that after another; plain decoding keeps its own."""
    made, spec = backend(model), K3

    shares = []
    for _ in range(2):
        with pytest.raises(OutOfMemory, match="died under load"):
            made._check_alive(Dead(), spec)  # type: ignore[arg-type]
        shares.append(made.settings(spec).gpu_memory_utilization)

    assert shares == [pytest.approx(0.81), pytest.approx(0.729)]
    assert made.settings(OFF).gpu_memory_utilization is None


def test_open_out_of_memory_ends_after_the_retries(model: Path) -> None:
    """Three starts without memory are enough: the point is out of memory, not the sweep."""
    said: list[str] = []
    made = backend(model, "--misbehave", "no_memory", progress=said.append)

    with pytest.raises(OutOfMemory, match="CUDA out of memory"), made.open(made.plan([point(OFF)])[0]):
        pass

    assert sum(text.startswith("starting vllm") for text in said) == 3


def test_open_dead_server_is_told_by_its_own_words(model: Path) -> None:
    """A server that dies in mid-load ends the point with what its log says, in seconds."""
    truth = json.dumps({"faults": [{"kind": "die", "first": 2}]}, separators=(",", ":"))
    made = backend(model, "--truth", f"'{truth}'")
    requests = [
        Request(request_id=str(i), prompt_ids=(i, 2), category="test", sampling=SAMPLING) for i in range(4)
    ]

    with made.open(made.plan([point(OFF)])[0]) as session:
        assert isinstance(session, LoadSession)
        with pytest.raises(EngineFailure, match="the server died under load"):
            session.stream(point(OFF), requests, [])


def test_fingerprint_names_no_folder_of_this_machine(model: Path) -> None:
    """What has to be equal elsewhere holds names and digests, not paths."""
    mark = backend(model, extra_server_args=("--block-size", "64")).fingerprint()

    assert mark.target == "model"
    assert mark.settings["extra_server_args"] == "--block-size 64"
    assert str(model.parent) not in json.dumps(mark.settings)


def test_fingerprint_tells_how_numbers_are_stored_and_drafts_are_drawn(model: Path) -> None:
    """Dtype, quantisation of the target and way of drafting stand beside every acceptance length."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    plain = backend(model).fingerprint()
    config["quantization_config"] = {"quant_method": "fp8"}
    (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    rounded = backend(model).fingerprint()

    assert (plain.dtype, plain.settings["target_quantization"]) == ("bfloat16", "none")
    assert rounded.settings["target_quantization"] == "fp8"
    assert plain.settings["draft_sampling"] == "greedy"


def test_extra_arguments_that_undo_the_measurement_are_refused_at_once(model: Path) -> None:
    """Nothing is started for settings that cannot be."""
    with pytest.raises(UsageError, match="max-num-seqs is set by the measurement"):
        backend(model, extra_server_args=("--max-num-seqs=4",))


def test_kv_cache_is_counted_from_the_config(model: Path) -> None:
    """2 tensors, 2 layers, 2 heads of 16, 2 bytes: 256 bytes a token; a GiB holds what 16 x 1024 need."""
    assert kv_bytes_per_token(model) == 256
    assert cache_gib(model, 16 * 1024) == 1
    assert cache_gib(model, 5 * 2**20) == 3  # 2 x 256 B x 5 Mi tokens = 2.5 GiB


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"architectures": ["EagleLlamaForCausalLM"]}, "an EAGLE-1 head"),
        ({"architectures": ["LlamaForCausalLM"]}, "not an EAGLE-3 head"),
    ],
)
def test_check_head_refuses_what_would_run_and_accept_nothing(
    config: dict[str, object], text: str, tmp_path: Path
) -> None:
    """A head of another kind loads without an error and drafts nonsense: it stops before the start."""
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")

    with pytest.raises(CheckpointError, match=text):
        check_head(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["LlamaForCausalLMEagle3"]},
        {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 8192},
        {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]},
    ],
)
def test_check_head_takes_every_layout_that_vllm_reads(config: dict[str, object], tmp_path: Path) -> None:
    """Classic heads under both names and the speculators layout are EAGLE-3 heads."""
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")

    check_head(tmp_path)


@pytest.mark.parametrize(
    ("extra", "size"),
    [((), 1), (("-tp", "2"), 2), (("--tensor-parallel-size=2", "--tensor_parallel_size", "4"), 4)],
    ids=["none", "short", "the last one"],
)
def test_fingerprint_tells_over_how_many_devices_the_model_is_spread(
    extra: tuple[str, ...], size: int, model: Path
) -> None:
    """A policy measured on one number of devices does not hold for another."""
    told = backend(model, extra_server_args=extra).fingerprint().settings

    assert told["tensor_parallel_size"] == size


def test_number_of_devices_that_is_none_is_refused(model: Path) -> None:
    """A word in its place is named before anything is started."""
    with pytest.raises(UsageError, match="many is not a number of devices"):
        backend(model, extra_server_args=("--tensor-parallel-size", "many")).fingerprint()

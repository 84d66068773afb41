"""What the reference backend says about itself; a tiny random target stands in for a real one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from spectune.backend import reference
from spectune.backend.reference import ReferenceBackend
from spectune.engine.target import Target
from spectune.errors import CheckpointError, UsageError, WorkloadError
from spectune.records import Cell, Launch, Point, Prompt, Sampling, SpecConfig
from tests.support.toys import head_config, head_tensors, request, save_head, save_target, tiny_target


@pytest.fixture
def backend_of(monkeypatch):
    """Makes a backend on a tiny target; `bandwidths` are what the memory measures, in turn."""

    def make(*, bandwidths=(2e9,), target=None, **options):
        measured = iter(bandwidths)
        monkeypatch.setattr(reference, "read_bandwidth_bytes_per_s", lambda device, num_bytes: next(measured))
        backend = ReferenceBackend(**{"model": "some/model", **options})
        vars(backend)["target"] = target or tiny_target()
        vars(backend)["tokenizer"] = SimpleNamespace(template_digest="t" * 64)
        return backend

    return make


def test_fingerprint_measures_the_bandwidth_once(backend_of):
    """Every fingerprint of a backend is the same one: the bandwidth does not change within a run."""
    backend = backend_of(bandwidths=(2e9, 3e9))

    assert backend.fingerprint() == backend.fingerprint()
    assert backend.fingerprint().read_bandwidth_bytes_per_s == 2e9


def test_fingerprint_holds_what_changes_acceptance(backend_of):
    """Runs with another prefill chunk, with a prefix cache or with another template are not compared."""
    backend = backend_of(prefill_chunk=64)

    settings = backend.fingerprint().settings
    assert (settings["prefill_chunk"], settings["prefix_cache"]) == (64, False)
    assert settings["chat_template"] == backend.template_digest == "t" * 64


@pytest.mark.parametrize(
    ("model", "name"),
    [
        pytest.param("folder/tiny-model", "tiny-model", id="a-folder-by-its-last-part"),
        pytest.param("owner/tiny-model", "owner/tiny-model", id="a-hub-id-whole"),
    ],
)
def test_fingerprint_names_the_target_without_its_place(model, name, backend_of, tmp_path, monkeypatch):
    """Where a folder lies on this machine is no part of what was measured."""
    (tmp_path / "folder" / "tiny-model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)

    assert backend_of(model=model).fingerprint().target == name


def test_fingerprint_tells_two_heads_in_the_same_folder_apart(backend_of, tmp_path):
    """A head that was trained again under its old name is another head."""
    target = tiny_target()
    digests = []
    for seed in (0, 1):
        config = head_config(target.config, 97)
        folder = save_head(tmp_path / "head", config, head_tensors(config, target.config, seed))
        mark = backend_of(target=target, draft_model=str(folder)).fingerprint()
        digests.append(mark.settings["draft_digest"])
        assert mark.draft == "head"

    assert len(set(digests)) == 2


# Running -------------------------------------------------------------------------------------------


def point_of(config, *, batch_size=2, temperature=0.0):
    cell = Cell(batch_size=batch_size, context_tokens=0, temperature=temperature)
    return Point(config=config, cell=cell, workload_hash="w", sampling=Sampling(temperature=temperature))


@pytest.fixture
def folders(tmp_path):
    """A target and a head for it as a user has them: two directories."""
    target = tiny_target(eos_token_id=0)
    config = head_config(target.config, 49, eagle_aux_hidden_state_layer_ids=[1, 3, 6])
    head = save_head(tmp_path / "head", config, head_tensors(config, target.config))
    return save_target(tmp_path / "target", eos_token_id=0), head


CONFIGS = [
    SpecConfig.off(),
    SpecConfig.chain("eagle3", 3),
    SpecConfig(method="eagle3", num_steps=3, topk=2, num_draft_tokens=8),
    SpecConfig.chain("ngram", 3),
]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_session_writes_one_text_whatever_the_method(temperature, folders):
    """Off, chains, trees and lookup of one session agree token for token, at two batch sizes."""
    model, head = folders
    backend = ReferenceBackend(model=str(model), draft_model=str(head), dtype="float32")
    prompt = Prompt(prompt_id="p", category="chat", turns=("to be or not to be",))
    ids = backend.encode(prompt, "", 0)
    asks = [
        request(f"r{i}", [*ids, 5 + i], temperature=temperature, max_tokens=8 + i, seed=3) for i in range(3)
    ]
    points = [point_of(config, batch_size=size) for size in (2, 3) for config in CONFIGS]

    with backend.open(backend.plan(points)[0]) as session:
        results = [session.run(point, asks) for point in points]

    texts = [[record.output_ids for record in result.requests] for result in results]
    assert [texts[0]] * 8 == texts
    assert backend.target.aux_layer_ids == (1, 3, 6)
    labels = [{r.config for r in result.rounds if r.kind == "decode"} for result in results]
    assert [{config.label} for config in CONFIGS] * 2 == labels


@pytest.mark.parametrize("config", CONFIGS[1:3], ids=lambda config: config.label)
def test_eagle3_without_a_head_is_refused_before_the_target_is_looked_for(config, tmp_path):
    """A forgotten --draft-model costs no download and no loading: the model named here does not exist."""
    backend = ReferenceBackend(model=str(tmp_path / "nowhere"))

    with pytest.raises(UsageError, match="--draft-model"), backend.open(Launch(points=(point_of(config),))):
        pass
    with pytest.raises(UsageError, match="--draft-model"):
        backend.engine(config, 1)
    assert "eagle3" not in backend.capabilities().methods


def test_wrong_head_is_refused_when_the_session_opens(folders, tmp_path):
    """A head of another vocabulary stops before anything is measured, whatever is to run first."""
    model, _ = folders
    config = head_config(tiny_target().config, 49, vocab_size=101)
    head = save_head(tmp_path / "other", config, {"norm.weight": torch.ones(1)})
    backend = ReferenceBackend(model=str(model), draft_model=str(head))

    with (
        pytest.raises(CheckpointError, match="vocab_size 101"),
        backend.open(Launch(points=(point_of(SpecConfig.off()),))),
    ):
        pass


def test_dummy_weights_need_a_config_only(folders):
    """`--load-format dummy` runs a shape without its weights and says so in the name."""
    model, _ = folders
    (model / "model.safetensors").unlink()
    backend = ReferenceBackend(model=str(model), load_format="dummy", dtype="float32")
    point = point_of(SpecConfig.chain("ngram", 2))

    with backend.open(Launch(points=(point,))) as session:
        record = session.run(point, [request("r", [5, 6, 5, 6], max_tokens=5, ignore_eos=True)]).requests[0]

    assert record.num_output_tokens == 5
    assert backend._target_name == "target (random weights)"


def test_encode_puts_the_context_before_the_prompt(folders):
    """The first tokens of the context text come first, whole; too short a text is refused."""
    model, _ = folders
    backend = ReferenceBackend(model=str(model))
    prompt = Prompt(prompt_id="p", category="chat", turns=("why?",), system="be brief")

    text = backend.tokenizer.decode(backend.encode(prompt, "once upon a time", 9))

    # the toy tokenizer has no line breaks
    assert text == "be briefRead this text first.once uponwhy?"
    with pytest.raises(WorkloadError, match="--context 99 needs more text than the 16 tokens"):
        backend.encode(prompt, "once upon a time", 99)


def test_method_that_the_engine_lacks_is_refused(folders):
    """A name outside the registry of drafters is a usage error."""
    model, _ = folders

    with pytest.raises(UsageError, match="--method medusa"):
        ReferenceBackend(model=str(model)).drafter("medusa")


def test_plain_kernels_read_the_layers_that_the_head_names(folders):
    """Without the compiled pass too: features of a head with layers of its own are those of these layers."""
    model, head = folders
    backend = ReferenceBackend(model=str(model), draft_model=str(head), dtype="float32", kernels="plain")

    drafter = backend.drafter("eagle3")

    assert drafter is not None
    assert backend.target.aux_layer_ids == (1, 3, 6)
    ids = torch.tensor([[5, 6, 7]])
    _, features = backend.target.forward_text(ids, torch.tensor([3]))
    other = Target.load(model, dtype="float32", aux_layer_ids=(1, 3, 6), kernels="plain")
    _, expected = other.forward_text(ids, torch.tensor([3]))
    usual = Target.load(model, dtype="float32", kernels="plain")
    _, default = usual.forward_text(ids, torch.tensor([3]))
    assert torch.equal(features, expected)
    assert not torch.equal(features, default)

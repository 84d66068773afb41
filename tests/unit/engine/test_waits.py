"""How often the host waits for the device: values read off tensors that would lie on one, counted."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from spectune.draft.ngram import NgramDrafter
from spectune.engine import tree as tree_module
from spectune.engine import uploads
from spectune.engine import verify as verify_module
from spectune.engine.scheduler import Engine
from spectune.engine.target import Target
from spectune.engine.verify import ForcedAcceptance, force
from spectune.records import BlockResult, Request, SpecConfig
from tests.support.toys import CONFIGS, CPU, ragged_requests, random_drafter, request, tiny_weights

OFF = SpecConfig.off()
CHAIN = SpecConfig.chain("eagle3", 3)
TREE = SpecConfig(method="eagle3", num_steps=4, topk=3, num_draft_tokens=9)
DRAWN = SpecConfig.chain("eagle3", 2, options=(("draft_sampling", "probabilistic"),))
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "warm": {"temperature": 0.7, "seed": 3},
    "nucleus": {"temperature": 1.0, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "seed": 4},
}
READS = {
    getattr(torch.Tensor, name)
    for name in (
        "tolist", "item", "cpu", "numpy", "nonzero", "masked_select", "__bool__", "__int__", "__float__",
        "__index__",
    )
} | {torch.nonzero, torch.masked_select, torch.unique}  # fmt: skip
BY_INDEX = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}


class OnDevice(torch.Tensor):
    """A tensor that stands for one on a device: what comes of it is one too, reading it is counted."""

    waits: list[str] = []  # noqa: RUF012  # the count of one test

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        has_mask = func in BY_INDEX and any(
            isinstance(part, torch.Tensor) and part.dtype == torch.bool
            for part in (args[1] if isinstance(args[1], tuple) else (args[1],))
        )
        if func in READS or has_mask:
            cls.waits.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> type[OnDevice]:
    """What the host uploads lies on a device from here on, and no loop runs compiled."""
    OnDevice.waits = []
    plain_tensor, plain_upload = torch.tensor, uploads.on_device

    def upload(values: Any, *args: Any) -> torch.Tensor:
        return plain_upload(values, *args).as_subclass(OnDevice)

    def tensor(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") is not None:
            OnDevice.waits.append("torch.tensor")
        return plain_tensor(*args, **kwargs)

    for name, module in list(sys.modules.items()):
        if name.startswith("spectune.") and name != uploads.__name__ and hasattr(module, "on_device"):
            monkeypatch.setattr(module, "on_device", upload)
    monkeypatch.setattr(torch, "tensor", tensor)
    monkeypatch.setattr(verify_module, "is_remote", lambda tensor: True)
    for module in (tree_module, verify_module):
        monkeypatch.setattr(module, "uses_kernels", lambda tensor: False)
    return OnDevice


def plain_target() -> Target:
    config, weights = tiny_weights()
    return Target(config, weights, device=CPU, dtype=torch.float32, kernels="plain")


def short_requests(**sampling: Any) -> list[Request]:
    """More requests than slots, of different lengths."""
    return ragged_requests(4, 97, **({"max_tokens": 7} | sampling))


def decoded(
    asks: list[Request], config: SpecConfig, folder: Path, forced: ForcedAcceptance | None = None
) -> BlockResult:
    target = plain_target()
    drafter = NgramDrafter(CPU) if config.method == "ngram" else random_drafter(target, folder, 97)
    engine = Engine(target, batch_size=3, eos_ids=[2], drafter=None if config.is_off else drafter)
    return engine.generate(asks, config, forced=forced)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("config", [OFF, CHAIN, TREE, DRAWN], ids=lambda config: config.label)
def test_a_round_waits_for_the_device_once(
    config: SpecConfig, sampling: dict[str, Any], tmp_path: Path, device: type[OnDevice]
) -> None:
    """A decode round reads what it emitted, a prefill its first token, and nothing else is waited for."""
    result = decoded(short_requests(**sampling), config, tmp_path)

    assert len(result.rounds) == len(device.waits)
    assert {"tolist", "__int__"} == set(device.waits)


def test_a_batch_of_warm_and_greedy_rows_waits_once_a_round(tmp_path: Path, device: type[OnDevice]) -> None:
    """Which rows get noise is known to the host."""
    asks = [request(f"r{i}", [5, 6, 7 + i], temperature=i % 2, seed=1) for i in range(5)]

    result = decoded(asks, TREE, tmp_path)

    assert len(result.rounds) == len(device.waits)


@pytest.mark.parametrize("config", [CHAIN, TREE], ids=lambda config: config.label)
def test_forced_rounds_wait_once_too(config: SpecConfig, tmp_path: Path, device: type[OnDevice]) -> None:
    """Costs that are measured with forced acceptance hold no waits of the forcing."""
    result = decoded(short_requests(), config, tmp_path, ForcedAcceptance(1.5))

    assert len(result.rounds) == len(device.waits)


def test_prompt_lookup_reads_the_committed_tokens_as_well(tmp_path: Path, device: type[OnDevice]) -> None:
    """It searches texts on the host: one more read a round and prefill, after the wait of the round."""
    asks = [request(f"r{i}", [5, 6, 7, 5, 6, 7, 5 + i], max_tokens=20) for i in range(4)]

    result = decoded(asks, SpecConfig.chain("ngram", 4), tmp_path)

    assert 2 * len(result.rounds) == len(device.waits)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("config", [*CONFIGS[1::3], CONFIGS[6], DRAWN], ids=lambda config: config.label)
def test_texts_do_not_depend_on_what_is_waited_for(
    config: SpecConfig, sampling: dict[str, Any], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The same records come out where paths keep their padding until the host has read them."""
    asks = short_requests(**sampling)
    near = decoded(asks, config, tmp_path / "near")
    request.getfixturevalue("device")

    far = decoded(asks, config, tmp_path / "far")

    assert [(r.output_ids, r.steps) for r in near.requests] == [(r.output_ids, r.steps) for r in far.requests]


def forced_by_loops(tree: Any, choices: torch.Tensor, counts: list[int], vocab_size: int) -> torch.Tensor:
    """What `force` says, one row and node at a time."""
    choices = choices.clone()
    for row, count in enumerate(counts):
        tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
        depths, valid = tree.depths[row].tolist(), tree.valid[row].tolist()
        deepest = max(depth for depth, is_valid in zip(depths, valid, strict=True) if is_valid)
        at = [i for i, depth in enumerate(depths) if valid[i] and depth == min(count, deepest)]
        node = at[0]
        children = {tokens[i] for i in range(1, len(tokens)) if valid[i] and parents[i] == node}
        token = int(choices[row, node])
        while token in children:
            token = (token + 1) % vocab_size
        choices[row, node] = token
        while node:
            choices[row, parents[node]] = tokens[node]
            node = parents[node]
    return choices


@pytest.mark.parametrize("seed", range(12))
def test_forcing_all_rows_at_once_equals_row_by_row(seed: int) -> None:
    """Random ragged trees, counts beyond their depth and crowded vocabularies give the same choices."""
    generator = torch.Generator().manual_seed(seed)
    rows, nodes, vocab = 6, 11, 13
    parents, depths = torch.zeros(2, rows, nodes, dtype=torch.int64)
    for node in range(1, nodes):
        parents[:, node] = torch.randint(0, node, (rows,), generator=generator)
        depths[:, node] = depths.gather(1, parents[:, node : node + 1])[:, 0] + 1
    valid = torch.rand(rows, nodes, generator=generator) < 0.85
    valid[:, 0] = True
    for node in range(1, nodes):
        valid[:, node] &= valid.gather(1, parents[:, node : node + 1])[:, 0]
    tokens = torch.stack([torch.randperm(vocab, generator=generator)[:nodes] for _ in range(rows)])
    tree = tree_module.DraftTree(tokens, parents, depths, torch.zeros(rows, nodes), valid)
    choices = torch.randint(0, vocab, (rows, nodes), generator=generator)
    counts = torch.randint(0, 5, (rows,), generator=generator).tolist()

    assert torch.equal(forced_by_loops(tree, choices, counts, vocab), force(tree, choices, counts, vocab))

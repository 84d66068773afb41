"""What only runs on CUDA, run on a CPU with stand-ins for the driver: control flow, waits, memory, errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from spectune.backend.reference import _device_name
from spectune.engine import graphs as graphs_module
from spectune.engine.graphs import StaticPass
from spectune.engine.kv_cache import KVCache, SlotView
from spectune.engine.memory import peak_memory_bytes, reset_peak_memory
from spectune.engine.plain_pass import PlainPass
from spectune.engine.step import Stopwatch
from spectune.engine.target import Target, resolve_dtype
from spectune.engine.uploads import is_remote, on_device
from tests.gpu import drive, machine
from tests.gpu.shapes import no_room
from tests.support.toys import CPU, tiny_weights

CUDA = torch.device("cuda")


class Driver:
    """Stands for CUDA's streams and graphs: a replay runs the recorded pass again into the same memory,
    as a graph does, and without the pass that was asked for (its inputs are the buffers)."""

    def __init__(self) -> None:
        self.recorded: list[Any] = []
        self.pools: list[object] = []
        self.replays = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        driver = self

        class Graph:
            run: Callable[[], tuple[Tensor, Tensor]]
            results: tuple[Tensor, Tensor]

            def replay(self) -> None:
                driver.replays += 1
                for place, fresh in zip(self.results, self.run(), strict=True):
                    place.copy_(fresh)

        class Stream:
            def __init__(self, device: torch.device | None = None) -> None: ...

            def wait_stream(self, other: object) -> None: ...

        @contextmanager
        def nothing(*arguments: object, **named: object) -> Iterator[None]:
            yield

        @contextmanager
        def capturing(graph: Graph, *, pool: object) -> Iterator[None]:
            driver.recorded.append(graph)
            driver.pools.append(pool)
            yield

        fake = SimpleNamespace(
            CUDAGraph=Graph,
            Stream=Stream,
            current_stream=lambda device: Stream(),
            stream=nothing,
            graph=capturing,
            graph_pool_handle=object,
        )
        monkeypatch.setattr(graphs_module.torch, "cuda", fake)
        monkeypatch.setattr(graphs_module, "is_remote", lambda tensor: True)
        plain_call = graphs_module._ShapedPass.call

        def call(self: Any, cache: KVCache) -> tuple[Tensor, Tensor]:
            results = plain_call(self, cache)
            if self.graph is not None and not hasattr(self.graph, "run"):
                self.graph.run, self.graph.results = (lambda: plain_call(self, cache)), results
            return results

        monkeypatch.setattr(graphs_module._ShapedPass, "call", call)


def plain_pass() -> tuple[Target, PlainPass]:
    config, weights = tiny_weights(seed=3)
    target = Target(config, weights, device=CPU, dtype=torch.float32, kernels="plain")
    assert target.plain is not None
    return target, target.plain


def test_a_shape_is_captured_at_its_second_call_and_replayed_from_then_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every call gives the plain pass's results for its own inputs, and results outlive later calls."""
    driver = Driver()
    target, plain = plain_pass()
    cache = target.new_cache(3, 64)
    assert isinstance(cache, KVCache)
    cache.data.normal_(generator=torch.Generator().manual_seed(1))
    driver.install(monkeypatch)
    static, view = StaticPass(plain), SlotView(range(3), CPU)
    kept = []

    for number, lengths in enumerate([[20, 21, 22], [23, 20, 19], [30, 9, 12], [31, 10, 13]]):
        ids = torch.randint(3, 97, (3, 2), generator=torch.Generator().manual_seed(number))
        positions = torch.tensor(lengths).unsqueeze(1) + torch.arange(2)
        expected = plain.forward(ids, positions, cache, view, lengths, None)
        kept.append((expected, static.forward(ids, positions, cache, view, lengths, None)))

    assert (1, 3) == (static.num_graphs, driver.replays)
    for expected, actual in kept:
        for one, other in zip(expected, actual, strict=True):
            torch.testing.assert_close(other, one, atol=2e-5, rtol=1e-5)


def test_graphs_of_one_cache_share_a_memory_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two shapes are two graphs in one pool: they are replayed one after the other."""
    driver = Driver()
    target, plain = plain_pass()
    cache = target.new_cache(2, 64)
    assert isinstance(cache, KVCache)
    driver.install(monkeypatch)
    static, view = StaticPass(plain), SlotView(range(2), CPU)

    for _ in range(2):
        for width in (1, 4):
            ids = torch.full((2, width), 5)
            static.forward(ids, torch.arange(width).expand(2, -1), cache, view, [0, 0], None)

    assert 2 == static.num_graphs == len(driver.pools)
    assert driver.pools[0] is driver.pools[1]


def test_a_lap_is_taken_when_the_device_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA each of the round's laps waits once, on a CPU none does."""
    waits: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    ticks = iter(range(100))

    for device in (CUDA, CPU):
        watch = Stopwatch(lambda: float(next(ticks)), device)
        for part in ("draft", "verify", "other", "draft"):
            watch.lap(part)
        assert {"draft": 2.0, "verify": 1.0, "other": 1.0, "forcing": 0.0} == watch.seconds

    assert [CUDA] * 4 == waits


def test_peak_memory_of_a_device_is_its_allocators(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mark is reset on the device that is asked, and read from it."""
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", calls.append)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 123)

    reset_peak_memory(CUDA)

    assert [CUDA] == calls
    assert 123 == peak_memory_bytes(CUDA)


def test_uploads_to_a_device_go_through_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pinned copy that does not block is what lets the host go on; a CPU needs neither."""
    made: list[dict[str, Any]] = []
    moved: list[dict[str, Any]] = []
    plain_tensor = torch.tensor

    def tensor(values: Any, **named: Any) -> Tensor:
        made.append(named)
        return plain_tensor(values, dtype=named["dtype"])

    def to(self: Tensor, device: torch.device, **named: Any) -> Tensor:
        moved.append(named)
        return self

    monkeypatch.setattr(torch, "tensor", tensor)
    monkeypatch.setattr(torch.Tensor, "to", to)

    found = [on_device([[1, 2], [3, 4]], device) for device in (CUDA, CPU)]

    assert [True, False] == [named["pin_memory"] for named in made]
    assert [{"non_blocking": True}] * 2 == moved
    assert [[1, 2], [3, 4]] == found[0].tolist()
    assert not is_remote(found[1])


def test_cuda_has_a_name_and_computes_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fingerprint names the device; `auto` is bf16 there."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA TEST")

    assert ("NVIDIA TEST", "cpu") == (_device_name(CUDA), _device_name(CPU))
    assert torch.bfloat16 == resolve_dtype("auto", CUDA)


@pytest.mark.parametrize(
    ("batch_size", "expected"),
    [(256, "keys and values need 285.7 GB, 100.0 GB are free"), (64, None)],
)
def test_a_shape_is_weighed_before_it_is_made(
    monkeypatch: pytest.MonkeyPatch, batch_size: int, expected: str | None
) -> None:
    """8B shapes keep 131,072 bytes a token, their head 4,096: 256 rows of 8,256 columns are 285.7 GB."""
    shape = SimpleNamespace(num_layers=32, num_kv_heads=8, head_dim=128)
    model: Any = SimpleNamespace(
        target=SimpleNamespace(device=CUDA, dtype=torch.bfloat16, config=shape),
        drafter=SimpleNamespace(config=shape),
    )
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100_000_000_000, 150_000_000_000))

    assert expected == no_room(model, batch_size, 8192)


def test_a_cuda_device_describes_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name, driver, capability, memory and the data sheet's bandwidth; what was read is measured."""
    facts = SimpleNamespace(name="NVIDIA H200", total_memory=150_000_000_000)
    gpu = SimpleNamespace(driver="580.1")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(machine, "gpus", lambda: iter([gpu]))
    monkeypatch.setattr(machine, "read_bandwidth_bytes_per_s", lambda device, size: 4.3e12)

    found = machine.describe(CUDA)

    assert ("NVIDIA H200", "cuda", "580.1", "9.0") == (
        found.name,
        found.kind,
        found.driver,
        found.compute_capability,
    )
    assert (4.8e12, 4.3e12) == (found.sheet_bandwidth_bytes_per_s, found.read_bandwidth_bytes_per_s)


@pytest.mark.parametrize("breaks", [False, True], ids=["captured", "refused"])
def test_a_device_that_captures_no_graph_is_measured_without_them(
    monkeypatch: pytest.MonkeyPatch, breaks: bool
) -> None:
    """One toy pass decides before anything is measured; the reason is kept."""
    calls = []

    def forward(*arguments: Any) -> None:
        calls.append(arguments)
        if breaks and len(calls) == 2:
            raise RuntimeError("operation not permitted when stream is capturing\ntrace")

    target = SimpleNamespace(new_cache=lambda slots, columns: None, forward=forward)
    monkeypatch.setattr(drive, "random_target", lambda *arguments: target)
    monkeypatch.setattr(drive, "SlotView", lambda slots, device: None)
    monkeypatch.setattr(drive, "wait", lambda device: None)
    monkeypatch.setattr(torch, "ones", lambda *shape, **named: None)

    found = drive.working_kernels(CUDA)

    expected = "RuntimeError: operation not permitted when stream is capturing"
    assert (("plain", expected) if breaks else ("auto", None)) == found
    assert (2 if breaks else 3) == len(calls)
    assert ("plain", None) == drive.working_kernels(CPU)

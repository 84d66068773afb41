"""Rounds of one shape: a batch of rows at one context, whose keys and values are noise.

What a round costs depends on shapes alone, so no prompt is read: the caches are filled at once and the
engine's own rounds run over them, with forced acceptance. After a round every row goes back to the same
context, so that all rounds of a shape are alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from spectune.engine.kv_cache import KVCache, SlotView
from spectune.engine.memory import peak_memory_bytes, reset_peak_memory
from spectune.engine.rounds import Rounds
from spectune.engine.running import Running
from spectune.engine.scheduler import Engine
from spectune.engine.verify import ForcedAcceptance
from spectune.records import Request, RoundRecord, Sampling, SpecConfig, StepRecord
from tests.gpu.models import Loaded

SPARE = 0.9
"""Share of the device's free memory that a shape may take; passes need some beside the caches."""
OUTPUT_BUDGET = 1 << 40  # rows never end


@dataclass(slots=True)
class Timed:
    """Rounds of one configuration, in the order in which they ran; `steps` of each row of a shape, from
    which forced acceptance counts, go on from run to run."""

    rounds: list[RoundRecord] = field(default_factory=list)
    steps: list[list[StepRecord]] = field(default_factory=list)
    num_accepted: int = 0
    num_steps: int = 0
    peak_memory_bytes: int | None = None


def arrange(passes: int, count: int) -> list[int]:
    """Numbers 0 .. count-1, forth and back in turn: A B C, C B A, ..."""
    return [
        place
        for number in range(passes)
        for place in (range(count) if number % 2 == 0 else reversed(range(count)))
    ]


class Shape:
    """A batch at a context, ready to run rounds of any configuration up to `largest`."""

    def __init__(
        self, model: Loaded, batch_size: int, context_tokens: int, configs: Sequence[SpecConfig]
    ) -> None:
        self.model, self.batch_size, self.context_tokens = model, batch_size, context_tokens
        target, drafter = model.target, model.drafter
        room = max(16, *(config.num_draft_tokens for config in configs))
        self._engine = Engine(target, drafter=drafter, batch_size=batch_size, eos_ids=())
        self._engine.room = room
        columns = context_tokens + room
        cache = target.new_cache(batch_size, columns)
        assert isinstance(cache, KVCache), "rounds of given shapes run on torch's operators or graphs"
        cache.data.normal_()
        self._engine._cache_room.cache = cache
        self._drafts = any(not config.is_off for config in configs)
        if self._drafts:
            largest = max(configs, key=lambda config: config.num_steps * max(1, config.topk))
            drafter._cache = None  # another shape's
            drafter.reserve(batch_size, columns, largest)
            assert isinstance(drafter._cache, KVCache)
            drafter._cache.data.normal_()
            drafter._states.normal_()
        requests = [
            Request(
                request_id=f"row-{index}",
                prompt_ids=(1,),
                category="shape",
                sampling=Sampling(max_tokens=OUTPUT_BUDGET, ignore_eos=True),
            )
            for index in range(batch_size)
        ]
        self._rows = [
            Running(request=request, slot=slot, arrival_s=0.0) for slot, request in enumerate(requests)
        ]
        self._runs: dict[bool, Rounds] = {}
        for is_off in (True, False) if self._drafts else (True,):
            run = Rounds(self._engine, None if is_off else drafter, None)
            run.running = list(self._rows)
            self._runs[is_off] = run

    @torch.inference_mode()
    def run(self, config: SpecConfig, forced_length: float | None, num_rounds: int, into: Timed) -> None:
        """Decode rounds of a configuration; records go to `into`."""
        run = self._runs[config.is_off]
        forced = None if forced_length is None else ForcedAcceptance(forced_length - 1)
        into.steps = into.steps or [[] for _ in self._rows]
        for row, steps in zip(self._rows, into.steps, strict=True):
            row.steps = steps
        reset_peak_memory(self.model.target.device)
        for _ in range(num_rounds):
            self._rewind()
            run.decode(config, forced, False, [])
            into.rounds.append(run.rounds.pop())
            for row in self._rows:
                into.num_accepted += row.steps[-1].num_accepted
            into.num_steps += len(self._rows)
        peak = peak_memory_bytes(self.model.target.device)
        into.peak_memory_bytes = max(filter(None, (into.peak_memory_bytes, peak)), default=None)

    def _rewind(self) -> None:
        """Every row back at the context, its last token 1."""
        for row in self._rows:
            row.length = self.context_tokens
            row.output_ids[:] = [1]
            row.chunk_s.clear()
        if self._drafts:
            drafter = self.model.drafter
            drafter._lengths[:] = [self.context_tokens] * len(drafter._lengths)


def cache_bytes(model: Loaded, batch_size: int, context_tokens: int) -> int:
    """Bytes of the target's and the head's keys and values."""
    target, head = model.target.config, model.drafter.config
    size = model.target.dtype.itemsize
    per_token = 2 * size * target.num_layers * target.num_kv_heads * target.head_dim
    per_token += 2 * size * head.num_kv_heads * head.head_dim
    return batch_size * (context_tokens + 64) * per_token


def no_room(model: Loaded, batch_size: int, context_tokens: int) -> str | None:
    """Why a shape cannot fit the device; None where it may."""
    device = model.target.device
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0]
    needed = cache_bytes(model, batch_size, context_tokens)
    if needed <= free * SPARE:
        return None
    return f"keys and values need {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free"


def plain_pass_s(shape: Shape, num_passes: int) -> float:
    """Seconds of one target pass with output head, many in a row and one wait: what graphs leave over."""
    target, cache = shape.model.target, shape._engine.cache
    device, batch = target.device, shape.batch_size
    with torch.inference_mode():
        ids = torch.ones(batch, 1, dtype=torch.int64, device=device)
        positions = torch.full((batch, 1), shape.context_tokens, device=device)
        view = SlotView(range(batch), device)
        lengths = [shape.context_tokens] * batch

        def once() -> None:
            target.best(target.forward(ids, positions, cache, view, lengths, None)[0])

        for _ in range(3):
            once()
        wait(device)
        start_s = time.perf_counter()
        for _ in range(num_passes):
            once()
        wait(device)
        return (time.perf_counter() - start_s) / num_passes


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def drift_of(values: Sequence[float]) -> float | None:
    """Median of the last third over that of the first; None for fewer than six rounds."""
    third = len(values) // 3
    return statistics.median(values[-third:]) / statistics.median(values[:third]) if third >= 2 else None

"""The plan of a sweep: which arms in which cells on which prompts. Planning launches nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from spectune.errors import UsageError
from spectune.measure.requests import num_blocks
from spectune.records import Backend, Capabilities, Cell, Method, Point, Sampling, SpecConfig
from spectune.tune.space import Pruned

if TYPE_CHECKING:
    from spectune.workload.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLoad:
    """Requests that arrive by the clock, `request_rate` a second; see `Cell`."""

    request_rate: float
    arrivals: str = "poisson"
    burstiness: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPlan:
    """Arms x cells x repeats. Every cell runs every arm, `off` first, on the same prompts."""

    workload: Workload
    configs: tuple[SpecConfig, ...]
    cells: tuple[Cell, ...]
    sampling: Sampling
    num_prompts: int
    min_blocks: int = 4
    repeats: int = 1
    pruned: Pruned = ()
    context_text: str = ""
    has_boots: bool = False
    """Every repeat is a start of each arm on the same prompts; plain decoding is started once more at
    the end, so that each candidate stands between two of its starts."""

    @property
    def points(self) -> tuple[Point, ...]:
        """Cell by cell, repeat by repeat, arm by arm."""
        return tuple(
            self.point(config, cell, repeat)
            for cell in self.cells
            for repeat in range(self.repeats + self.is_bracketed)
            for config in self.configs
            if repeat < self.repeats or config.is_off
        )

    @property
    def is_bracketed(self) -> bool:
        """Whether plain decoding closes the run as well as it opens it."""
        return self.has_boots and len(self.configs) > 1

    def point(self, config: SpecConfig, cell: Cell, repeat: int) -> Point:
        return Point(
            config=config,
            cell=cell,
            workload_hash=self.workload.digest,
            sampling=replace(self.sampling, temperature=cell.temperature),
            repeat=repeat,
        )

    def num_blocks(self, cell: Cell) -> int:
        """Blocks that each arm of the cell decodes per repeat: batches of requests, or at a server single
        requests, which end one by one."""
        return self.num_cell_requests(cell) if self.has_boots else self._num_batches(cell)

    def num_cell_requests(self, cell: Cell) -> int:
        """Requests of each arm of the cell per repeat; arrivals by the clock fill no batches."""
        if cell.is_open_loop:
            return max(self.min_blocks, self.num_prompts)
        return self._num_batches(cell) * cell.batch_size

    def _num_batches(self, cell: Cell) -> int:
        return num_blocks(cell.batch_size, num_prompts=self.num_prompts, min_blocks=self.min_blocks)

    @property
    def num_requests(self) -> int:
        """Requests of the whole sweep, calibration not counted."""
        per_arm = sum(self.num_cell_requests(cell) for cell in self.cells)
        return per_arm * (len(self.configs) * self.repeats + self.is_bracketed)


def plan_sweep(
    backend: Backend,
    workload: Workload,
    configs: Sequence[SpecConfig],
    *,
    batch_sizes: Sequence[int],
    context_tokens: Sequence[int] = (0,),
    temperatures: Sequence[float] = (0.0,),
    sampling: Sampling | None = None,
    num_prompts: int | None = None,
    min_blocks: int = 4,
    repeats: int = 1,
    pruned: Pruned = (),
    context_text: str = "",
    open_loads: Sequence[OpenLoad] = (),
) -> SweepPlan:
    """The plan that `backend` can run; what it cannot run joins `pruned` with the reason.

    `num_prompts` (requests per arm, cell and repeat) defaults to the size of the workload. `open_loads`
    add cells in which requests arrive by the clock. Raises UsageError where candidates were asked for and
    none is left.
    """
    _check_axes(batch_sizes, context_tokens, temperatures, num_prompts, min_blocks, repeats)
    if not workload.prompts:
        raise UsageError(f"workload {workload.name} holds no prompts")
    if any(context_tokens) and not context_text:
        raise UsageError(f"--context {max(context_tokens)} needs text to fill the context with")
    if pruned and all(config.is_off for config in configs):
        label, reason = pruned[0]
        raise UsageError(
            f"every candidate was pruned: {label}: {reason}",
            hint="--method off measures plain decoding alone",
        )
    capabilities = backend.capabilities()
    if open_loads and not capabilities.has_boots:
        raise UsageError(
            f"--request-rate needs a serving engine, not --backend {capabilities.name}",
            hint="--backend vllm, or --base-url of a running server",
        )
    kept, refused = _split_configs(configs, capabilities)
    cells, too_large = _cells(batch_sizes, context_tokens, temperatures, capabilities)
    cells += _open_cells(cells, open_loads)
    return SweepPlan(
        workload=workload,
        configs=kept,
        cells=cells,
        sampling=sampling or Sampling(),
        num_prompts=len(workload.prompts) if num_prompts is None else num_prompts,
        min_blocks=min_blocks,
        repeats=repeats,
        pruned=(*pruned, *refused, *too_large),
        context_text=context_text,
        has_boots=capabilities.has_boots,
    )


def _check_axes(
    batch_sizes: Sequence[int],
    context_tokens: Sequence[int],
    temperatures: Sequence[float],
    num_prompts: int | None,
    min_blocks: int,
    repeats: int,
) -> None:
    axes: tuple[tuple[str, Sequence[float], int], ...] = (
        ("--batch-size", batch_sizes, 1),
        ("--context", context_tokens, 0),
        ("--temperature", temperatures, 0),
        ("--num-prompts", () if num_prompts is None else (num_prompts,), 1),
        ("--min-blocks", (min_blocks,), 1),
        ("--num-runs", (repeats,), 1),
    )
    for flag, values, least in axes:
        if not values and flag != "--num-prompts":
            raise UsageError(f"{flag} needs at least one value")
        for value in values:
            if not value >= least:
                raise UsageError(f"{flag} {value:g} is below {least}")


def _open_cells(cells: Sequence[Cell], loads: Sequence[OpenLoad]) -> tuple[Cell, ...]:
    """Every context and temperature at every rate; warmed up at the largest load of the closed loop."""
    largest: dict[tuple[float, int], Cell] = {}
    for cell in cells:
        key = (cell.temperature, cell.context_tokens)
        if key not in largest or cell.batch_size > largest[key].batch_size:
            largest[key] = cell
    return tuple(
        replace(cell, request_rate=load.request_rate, arrivals=load.arrivals, burstiness=load.burstiness)
        for cell in largest.values()
        for load in loads
    )


def _split_configs(
    configs: Sequence[SpecConfig], capabilities: Capabilities
) -> tuple[tuple[SpecConfig, ...], Pruned]:
    kept: dict[SpecConfig, None] = {SpecConfig.off(): None}
    refused: list[tuple[str, str]] = []
    for config in configs:
        reason = _refusal(config, capabilities)
        if reason is None:
            kept[config] = None
        else:
            refused.append((config.label, reason))
    candidates = [config for config in configs if not config.is_off]
    if candidates and len(kept) == 1:
        label, reason = refused[0]
        raise UsageError(f"backend {capabilities.name} can run none of the candidates: {label}: {reason}")
    return tuple(kept), tuple(refused)


def _refusal(config: SpecConfig, capabilities: Capabilities) -> str | None:
    if config.is_off:
        return None
    needs_head = config.method in (Method.EAGLE3, Method.DRAFT_MODEL) and not capabilities.is_simulated
    if needs_head and config.draft_model is None:
        raise UsageError(
            f"method {config.method} needs --draft-model",
            hint="the directory of an EAGLE-3 head or a small model, or --method ngram",
        )
    if config.method not in capabilities.methods:
        return f"backend {capabilities.name} has no method {config.method}"
    if config.is_tree and not capabilities.has_trees:
        return f"backend {capabilities.name} verifies chains only, topk {config.topk} is a tree"
    return None


def _cells(
    batch_sizes: Sequence[int],
    context_tokens: Sequence[int],
    temperatures: Sequence[float],
    capabilities: Capabilities,
) -> tuple[tuple[Cell, ...], Pruned]:
    largest = capabilities.max_batch_size
    cells: dict[Cell, None] = {}
    too_large: dict[str, str] = {}
    for temperature in temperatures:
        for context in context_tokens:
            for batch_size in batch_sizes:
                cell = Cell(batch_size=batch_size, context_tokens=context, temperature=float(temperature))
                if largest is not None and batch_size > largest:
                    too_large[cell.label] = f"backend {capabilities.name} decodes at most {largest} together"
                else:
                    cells[cell] = None
    if not cells:
        label, reason = next(iter(too_large.items()))
        raise UsageError(f"no cell can run: {label}: {reason}")
    return tuple(cells), tuple(too_large.items())

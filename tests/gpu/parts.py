"""The parts that time rounds: bandwidth share, round costs, the time surface, the crossover."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from spectune.engine.scheduler import Engine
from spectune.engine.verify import ForcedAcceptance
from spectune.records import BlockResult, RoundRecord, SpecConfig
from spectune.store.gpu_run import GpuDocument, RoundRow
from tests.gpu.models import Loaded, Models
from tests.gpu.plan import CROSSOVER_ARMS, OFF, ROUND_CONFIGS, SURFACE_CONFIGS, Plan
from tests.gpu.prompts import requests_of
from tests.gpu.shapes import Shape, Timed, arrange, drift_of, no_room, plain_pass_s, quartiles

Arm = tuple[SpecConfig, float | None]
FORCED = 2.0
"""Acceptance length of rounds that are timed for their cost alone (1 + K at most)."""


class OutOfTime(Exception):
    """A part's share of the call is used up; what is missing is for the next call."""


@dataclass(slots=True)
class Work:
    """What all parts share. `check` raises OutOfTime, `keep` saves a row."""

    plan: Plan
    models: Models
    document: GpuDocument
    dtype: torch.dtype
    kernels: str
    check: Callable[[], None]
    keep: Callable[[object], None]

    def of(self, name: str) -> Loaded:
        return self.models.of(name, self.dtype, self.kernels)


def mbu(work: Work) -> None:
    """Plain decoding of every model alone and in a batch, at both ends of the contexts."""
    for name in work.plan.mbu_models:
        for context in work.plan.mbu_contexts:
            for batch in work.plan.prompt_batches:
                _cell(work, "mbu", name, batch, context, [(OFF, None)], work.plan.mbu_rounds)


def num_mbu(plan: Plan) -> int:
    return len(plan.mbu_models) * len(plan.mbu_contexts) * len(plan.prompt_batches)


def rounds(work: Work) -> None:
    """Round costs of chains and trees: real prompts for the model with a real head, shapes for the main one."""
    _cell(work, "rounds", work.plan.main_model, 1, work.plan.contexts[0], arms_of(ROUND_CONFIGS), 4 * work.plan.rounds)  # fmt: skip
    for batch in work.plan.prompt_batches:
        _prompts(work, batch)


def num_rounds(plan: Plan) -> int:
    return len(ROUND_CONFIGS) * (1 + len(plan.prompt_batches))


def surface(work: Work) -> None:
    """Draft, verify and other times over batch, tokens and context."""
    for batch, context in work.plan.cells(work.plan.surface_batches):
        _cell(work, "surface", work.plan.main_model, batch, context, arms_of(SURFACE_CONFIGS), work.plan.rounds)  # fmt: skip


def num_surface(plan: Plan) -> int:
    return len(SURFACE_CONFIGS) * len(plan.surface_batches) * len(plan.contexts)


def crossover(work: Work) -> None:
    """Plain against speculative decoding at given acceptance lengths, over batch and context."""
    for name in dict.fromkeys((work.plan.main_model, work.plan.small_model)):
        for batch, context in work.plan.cells(work.plan.batches):
            _cell(work, "crossover", name, batch, context, CROSSOVER_ARMS, work.plan.rounds)


def num_crossover(plan: Plan) -> int:
    models = len({plan.main_model, plan.small_model})
    return models * len(CROSSOVER_ARMS) * len(plan.batches) * len(plan.contexts)


def arms_of(configs: Sequence[SpecConfig]) -> list[Arm]:
    """Every configuration at one acceptance length, the same for all."""
    return [(config, None if config.is_off else FORCED) for config in configs]


def _cell(work: Work, part: str, name: str, batch: int, context: int, arms: Sequence[Arm], num: int) -> None:
    """All arms of one shape in turn, forth and back; rows are kept when all have run."""
    work.check()
    blank = _blank(work, part, name, batch, context)
    if all(work.document.has(blank(config, forced, "ok", None).key) for config, forced in arms):
        return

    def fail(status: str, reason: str) -> None:
        for config, forced in arms:
            work.keep(blank(config, forced, status, reason))

    try:
        model = work.of(name)
        if reason := no_room(model, batch, context):
            fail("skipped", reason)
            return
        shape = Shape(model, batch, context, [config for config, _ in arms])
        timed = [Timed() for _ in arms]
        for config, forced in arms:
            shape.run(config, forced, work.plan.warmup, Timed())
        for place in arrange(2, len(arms)):
            shape.run(*arms[place], max(1, num // 2), timed[place])
        for (config, forced), found in zip(arms, timed, strict=True):
            work.keep(row_of(work, model, part, config, batch, context, forced, found))
        if part == "mbu":
            _add_pass(work, model, shape, batch, context)
    except torch.OutOfMemoryError as error:
        fail("oom", str(error).splitlines()[0][:200])
    except RuntimeError as error:  # one shape that a kernel refuses must not end the call
        fail("failed", f"{type(error).__name__}: {error}".splitlines()[0][:300])
    finally:
        shape = None
        gc.collect()


def _blank(
    work: Work, part: str, name: str, batch: int, context: int
) -> Callable[[SpecConfig, float | None, str, str | None], RoundRow]:
    """Makes the rows of a cell that was not measured."""
    is_real = name == work.plan.small_model and work.models.has_real

    def row(config: SpecConfig, forced: float | None, status: str, reason: str | None) -> RoundRow:
        return RoundRow(
            part=part,
            model=name,
            weights="real" if is_real else "random",
            dtype=str(work.dtype).removeprefix("torch."),
            kernels=work.kernels,
            config=config,
            batch_size=batch,
            context_tokens=context,
            forced_length=forced,
            status=status,
            reason=reason,
        )

    return row


def _add_pass(work: Work, model: Loaded, shape: Shape, batch: int, context: int) -> None:
    """The target's pass alone, many in a row: how much of a plain round is not the pass."""
    seconds = plain_pass_s(shape, work.plan.mbu_rounds)
    alone = RoundRow(
        part="mbu",
        model=model.name,
        weights=model.weights,
        dtype=model.dtype,
        kernels=model.target.kernels,
        is_pass_alone=True,
        config=OFF,
        batch_size=batch,
        context_tokens=context,
        status="ok",
        num_rounds=work.plan.mbu_rounds,
        verify_s=seconds,
        round_s=seconds,
        weight_bytes=model.target.weight_bytes,
        kv_bytes=kv_bytes(model, batch * context),
    )
    work.keep(alone)


def row_of(
    work: Work,
    model: Loaded,
    part: str,
    config: SpecConfig,
    batch: int,
    context: int,
    forced: float | None,
    timed: Timed,
) -> RoundRow:
    """Medians of the rounds of one arm."""
    totals = [record.total_s for record in timed.rounds]
    low, middle, high = quartiles(totals)

    def median(part_s: Callable[[RoundRecord], float]) -> float:
        return quartiles([part_s(record) for record in timed.rounds])[1]

    return RoundRow(
        part=part,
        model=model.name,
        weights=model.weights,
        dtype=model.dtype,
        kernels=model.target.kernels,
        config=config,
        batch_size=batch,
        context_tokens=context,
        status="ok",
        forced_length=forced,
        acceptance_length=None if config.is_off else 1 + timed.num_accepted / timed.num_steps,
        num_rounds=len(timed.rounds),
        draft_s=median(lambda record: record.draft_s),
        verify_s=median(lambda record: record.verify_s),
        other_s=median(lambda record: record.other_s),
        round_s=middle,
        low_s=low,
        high_s=high,
        drift=drift_of(totals),
        tokens_per_s=sum(record.num_emitted for record in timed.rounds) / sum(totals),
        weight_bytes=model.target.weight_bytes,
        draft_weight_bytes=None if config.is_off else model.drafter.weight_bytes,
        kv_bytes=kv_bytes(model, round(statistics.fmean(record.kv_tokens for record in timed.rounds))),
        peak_memory_bytes=timed.peak_memory_bytes,
    )


def forced_of(length: float | None) -> ForcedAcceptance | None:
    """Acceptance forced to a length; None leaves the drafts to be judged."""
    return None if length is None else ForcedAcceptance(length - 1)


def kv_bytes(model: Loaded, num_tokens: int) -> int:
    """Bytes of the keys and values of so many tokens, which a pass reads."""
    config = model.target.config
    return (
        2
        * config.num_layers
        * config.num_kv_heads
        * config.head_dim
        * model.target.dtype.itemsize
        * num_tokens
    )


def _prompts(work: Work, batch: int) -> None:
    """Real rounds of the small model: prompts, the head's own drafts, all configurations in turn.

    With random weights nothing would be accepted: drafts are then accepted by force.
    """
    work.check()
    plan, name = work.plan, work.plan.small_model
    blank = _blank(work, "rounds", name, batch, 0)
    forced = None if work.models.has_real else FORCED
    arms: list[Arm] = [(config, None if config.is_off else forced) for config in ROUND_CONFIGS]
    if all(work.document.has(blank(config, length, "ok", None).key) for config, length in arms):
        return
    model = work.of(name)
    model.drafter._cache = None
    requests = requests_of(model, max(batch, plan.num_prompts), plan.max_tokens, work.models.real_folder)
    groups = [requests[i : i + batch] for i in range(0, len(requests) - batch + 1, batch)][:4]
    engine = Engine(model.target, drafter=model.drafter, batch_size=batch, eos_ids=())
    timed = [Timed() for _ in arms]

    def decode(place: int, group: int) -> BlockResult:
        config, length = arms[place]
        return engine.generate(groups[group], config, forced=forced_of(length), scratch=ROUND_CONFIGS[-1])

    for place in range(len(arms)):
        decode(place, 0)
    for number in range(len(groups)):
        for place in arrange(1, len(arms)) if number % 2 == 0 else reversed(arrange(1, len(arms))):
            work.check()
            block = decode(place, number)
            found = timed[place]
            found.rounds += [
                record for record in block.rounds if record.kind == "decode" and record.batch_size == batch
            ]
            steps = [step for request in block.requests for step in request.steps]
            found.num_accepted += sum(step.num_accepted for step in steps)
            found.num_steps += len(steps)
            found.peak_memory_bytes = max(
                filter(None, (found.peak_memory_bytes, block.peak_memory_bytes)), default=None
            )
    for (config, length), found in zip(arms, timed, strict=True):
        work.keep(row_of(work, model, "rounds", config, batch, 0, length, found))

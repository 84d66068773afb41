"""The parts that compare: speculative against plain texts in fp32, captured passes against plain ones."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from spectune.engine.graphs import StaticPass
from spectune.engine.kv_cache import KVCache, SlotView
from spectune.engine.plain_pass import PlainPass
from spectune.engine.scheduler import Engine
from spectune.records import BlockResult, Request, Sampling, SpecConfig
from spectune.store.gpu_run import CheckRow
from tests.gpu.models import Loaded
from tests.gpu.parts import Work
from tests.gpu.plan import OFF, ROUND_CONFIGS, Plan
from tests.gpu.prompts import requests_of
from tests.support.lossless import divergences

FULL = torch.float32
BATCH = 3
NUM_TEXTS = 6
SAMPLINGS = {"greedy": {}, "seeded": {"temperature": 0.8, "top_p": 0.95, "seed": 11}}
REPEATS = 4
# relative to the largest value of the plain pass: two kernels that add in another order
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}


def equality(work: Work) -> None:
    """Every configuration writes plain decoding's text in fp32, near ties counted; greedy and seeded."""
    name = work.plan.small_model
    for label, settings in SAMPLINGS.items():
        arms = [*ROUND_CONFIGS[1:], OFF]  # off: with graphs against without
        missing = [
            config
            for config in arms
            if not work.document.has(_row(work, "equality", name, FULL, _what(config, label)).key)
        ]
        if not missing:
            continue
        work.check()
        plain = work.models.of(name, FULL, "plain")
        requests = _requests(work, plain, settings)
        base = _engine(plain)
        expected = base.generate(requests, wants_margins=True)
        margins = dict(base.margins)
        for config in missing:
            work.check()
            fast = work.models.of(name, FULL, work.kernels)
            found = _engine(fast).generate(requests, config)
            row = _row(work, "equality", name, FULL, _what(config, label), weights=fast.weights)
            work.keep(_compared(row, expected, found, margins))


def num_equality(plan: Plan) -> int:
    del plan
    return len(SAMPLINGS) * len(ROUND_CONFIGS)


def _what(config: SpecConfig, sampling: str) -> str:
    if config.is_off:
        return f"plain texts with and without graphs, {sampling}"
    return f"texts of {config.label} against plain ones, {sampling}"


def _compared(
    row: CheckRow, expected: BlockResult, found: BlockResult, margins: dict[str, list[float]]
) -> CheckRow:
    different = divergences(expected.requests, found.requests, margins)
    broken = [text for text in (record.broken_identity() for record in found.requests) if text]
    return replace(
        row,
        num_compared=len(expected.requests),
        num_different=len(different) + len(broken),
        num_near_ties=sum(one.is_near_tie for one in different),
        reason=broken[0] if broken else None,
    )


def _engine(model: Loaded) -> Engine:
    model.drafter._cache = None
    return Engine(model.target, drafter=model.drafter, batch_size=BATCH, eos_ids=())


def _requests(work: Work, model: Loaded, settings: dict[str, float]) -> list[Request]:
    sampling = Sampling(max_tokens=work.plan.max_tokens, ignore_eos=True, **settings)  # type: ignore[arg-type]
    return requests_of(model, NUM_TEXTS, work.plan.max_tokens, work.models.real_folder, sampling=sampling)


def graphs(work: Work) -> None:
    """The pass in static shapes, captured on CUDA, against the plain one on the same cache."""
    for dtype in dict.fromkeys((FULL, work.dtype)):
        for batch, tokens, context in work.plan.graph_shapes:
            row = _row(
                work, "graphs", work.plan.small_model, dtype,
                f"{batch} rows, {tokens} tokens, context {context}",
            )  # fmt: skip
            if work.document.has(row.key):
                continue
            work.check()
            model = work.models.of(work.plan.small_model, dtype, "plain")
            plain = model.target.plain
            assert plain is not None
            work.keep(_captured(row, model, plain, batch, tokens, context))


def num_graphs(plan: Plan) -> int:
    return (1 if plan.is_rehearsal else 2) * len(plan.graph_shapes)


@torch.inference_mode()
def _captured(
    row: CheckRow, model: Loaded, plain: PlainPass, batch: int, tokens: int, context: int
) -> CheckRow:
    target, device = model.target, model.target.device
    cache = target.new_cache(batch, context + 4 * tokens)
    assert isinstance(cache, KVCache)
    generator = torch.Generator().manual_seed(batch)
    cache.data.normal_()
    static, view = StaticPass(plain), SlotView(range(batch), device)
    lengths = [context - index % 7 for index in range(batch)]
    worst, num_different = 0.0, 0
    for _ in range(REPEATS):  # uncaptured, captured, replayed twice with other inputs
        ids = torch.randint(3, target.config.vocab_size, (batch, tokens), generator=generator).to(device)
        positions = torch.tensor(lengths, device=device).unsqueeze(1) + torch.arange(tokens, device=device)
        expected, _ = plain.forward(ids, positions, cache, view, lengths, None)
        actual, _ = static.forward(ids, positions, cache, view, lengths, None)
        worst = max(worst, _distance(expected, actual))
        num_different += not torch.equal(target.best(expected), target.best(actual))
        lengths = [length + index % 2 for index, length in enumerate(lengths)]
    told = f"{static.num_graphs} graphs captured" if device.type == "cuda" else "not captured: no CUDA device"
    return replace(
        row,
        weights=model.weights,
        num_compared=REPEATS,
        # another best token where values agree within the tolerance is a near tie
        num_different=num_different,
        num_near_ties=num_different,
        max_difference=worst,
        tolerance=TOLERANCE[target.dtype],
        reason=told,
    )


def _distance(expected: Tensor, actual: Tensor) -> float:
    """Largest difference over the largest value."""
    scale = expected.float().abs().max()
    return float((expected.float() - actual.float()).abs().max() / scale)


def _row(
    work: Work, part: str, name: str, dtype: torch.dtype, what: str, weights: str | None = None
) -> CheckRow:
    return CheckRow(
        part=part,
        model=name,
        weights=weights or ("real" if work.models.has_real else "random"),
        dtype=str(dtype).removeprefix("torch."),
        what=what,
        status="ok",
    )

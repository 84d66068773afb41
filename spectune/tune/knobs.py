"""Settings of the engine outside the model: each combination against the base engine, block by block."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from spectune.errors import EngineFailure, UsageError
from spectune.measure.door import Door
from spectune.measure.requests import Block
from spectune.metrics.latency import is_success
from spectune.records import OPTION, Backend, BlockResult, Launch, Point
from spectune.tune.search import Evaluate, Knob, Values

KNOBS = {
    "reference": ("prefill_chunk", "kernels", "dtype", "draft_model"),
    "simulated": ("max_batch_size", "has_trees"),
}
"""Arguments of a backend that a search may change; the workload and the answer stay the same."""


def parse_knobs(texts: Sequence[str], backend: str) -> tuple[Knob, ...]:
    """`name=v1:v2` of each --knob; numbers and true/false are read as such."""
    known = KNOBS.get(backend, ())
    knobs: dict[str, Knob] = {}
    for text in texts:
        name, mark, values = text.partition("=")
        if not mark or not values:
            raise UsageError(f"--knob {text} is not NAME=VALUE:VALUE", hint="--knob prefill_chunk=128:512")
        if name not in known:
            listed = ", ".join(known) or "none"
            raise UsageError(f"--knob {name}: backend {backend} has no such setting", hint=f"known: {listed}")
        knobs[name] = Knob(name=name, values=tuple(dict.fromkeys(_value(v) for v in values.split(":"))))
    return tuple(knobs.values())


def _value(text: str) -> OPTION:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def evaluator(
    make: Callable[[Mapping[str, OPTION]], Backend], point: Point, blocks: Sequence[Block]
) -> Evaluate:
    """Speed of a combination over the base engine on the same blocks, decoded in turn, A B B A.

    Args:
        make: an engine with some settings changed.
        point: the configuration and load that tuning chose.
    """

    def evaluate(values: Values) -> float:
        logs = []
        with (
            Door(make({}), Launch(points=(point,))) as base,
            Door(make(dict(values)), Launch(points=(point,))) as changed,
        ):
            for door in (base, changed):
                door.run(point, blocks[0])  # every shape once, untimed
            for index, block in enumerate(blocks):
                doors = (base, changed) if index % 2 == 0 else (changed, base)
                seconds = {door: _seconds(door.run(point, block)) for door in doors}
                logs.append(math.log(seconds[base] / seconds[changed]))
        return math.exp(math.fsum(logs) / len(logs))

    return evaluate


def _seconds(result: BlockResult) -> float:
    """Seconds per output token of a block, prompts included."""
    tokens = sum(request.num_output_tokens for request in result.requests)
    if not all(map(is_success, result.requests)) or not tokens or result.duration_s <= 0:
        raise EngineFailure("requests failed")
    return result.duration_s / tokens

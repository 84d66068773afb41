"""What each part measures, on a device and in a rehearsal: models, configurations, batches, contexts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from spectune.records import SpecConfig

OFF = SpecConfig.off()


def chain(num_tokens: int) -> SpecConfig:
    return SpecConfig.chain("eagle3", num_tokens)


def tree(depth: int, topk: int, nodes: int) -> SpecConfig:
    return SpecConfig(method="eagle3", num_steps=depth, topk=topk, num_draft_tokens=nodes)


CHAINS = tuple(map(chain, (1, 3, 5, 7)))
TREES = (tree(3, 2, 8), tree(5, 4, 16), tree(5, 8, 32))
ROUND_CONFIGS = (OFF, *CHAINS, *TREES)
SURFACE_CONFIGS = (OFF, *CHAINS, tree(3, 2, 8), tree(5, 4, 16))
LENGTHS = (1.5, 2.0, 2.5, 3.0)
CROSSOVER_ARMS: tuple[tuple[SpecConfig, float | None], ...] = (
    (OFF, None),
    (chain(1), 1.5),
    *((chain(3), length) for length in LENGTHS),
    *((chain(5), length) for length in LENGTHS[2:]),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Sizes of all parts. Models by name; rounds are counted per arm and pass.

    main_model is the one whose surface and crossover are measured first; small_model is the one with a
    real head, if its files are at hand.
    """

    is_rehearsal: bool
    small_model: str
    main_model: str
    mbu_models: tuple[str, ...]
    mbu_contexts: tuple[int, ...]
    batches: tuple[int, ...]
    surface_batches: tuple[int, ...]
    contexts: tuple[int, ...]
    prompt_batches: tuple[int, ...]
    num_prompts: int
    max_tokens: int
    warmup: int
    mbu_rounds: int
    rounds: int
    prefix_tokens: int
    graph_shapes: tuple[tuple[int, int, int], ...]  # batch, tokens a row, context

    def cells(self, batches: tuple[int, ...]) -> Iterator[tuple[int, int]]:
        """(batch, context), the ends of both before what lies between: a part that is cut spans them."""
        for context in ends_first(self.contexts):
            for batch in ends_first(batches):
                yield batch, context


def ends_first(values: tuple[int, ...]) -> list[int]:
    """First, last, then the middle of the widest gap left, and so on."""
    if len(values) < 3:
        return list(values)
    chosen = [0, len(values) - 1]
    while len(chosen) < len(values):
        edges = sorted(chosen)
        low, high = max(itertools.pairwise(edges), key=lambda pair: pair[1] - pair[0])
        chosen.append((low + high) // 2)
    return [values[index] for index in chosen]


ON_A_DEVICE = Plan(
    is_rehearsal=False,
    small_model="smollm2-135m",
    main_model="llama-8b",
    mbu_models=("smollm2-135m", "llama-1b", "llama-8b"),
    mbu_contexts=(512, 8192),
    batches=(1, 2, 4, 8, 16, 32, 64, 128, 256),
    surface_batches=(1, 4, 16, 64, 256),
    contexts=(512, 2048, 4096, 8192),
    prompt_batches=(1, 4, 16),
    num_prompts=16,
    max_tokens=64,
    warmup=4,
    mbu_rounds=60,
    rounds=8,
    prefix_tokens=300,
    graph_shapes=((1, 1, 300), (1, 4, 300), (4, 8, 200), (16, 16, 100)),
)
REHEARSAL = Plan(
    is_rehearsal=True,
    small_model="toy",
    main_model="toy-wide",
    mbu_models=("toy", "toy-wide"),
    mbu_contexts=(16, 48),
    batches=(1, 2, 3),
    surface_batches=(1, 2, 3),
    contexts=(16, 32, 48, 64),
    prompt_batches=(1, 2),
    num_prompts=4,
    max_tokens=10,
    warmup=1,
    mbu_rounds=6,
    rounds=2,
    prefix_tokens=30,
    graph_shapes=((1, 1, 30), (2, 4, 20)),
)

"""A trace of the simulated engine: drafts drawn from the declared acceptance along its own texts.

The coins are other ones than those of its sweeps, so replay and simulated runs agree in law, not step by
step, as a trace and a run on other prompts would.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from spectune.backend.chance import coin, key_of
from spectune.backend.truth import SimulatedTruth
from spectune.records import Cell, Point, Request, SpecConfig
from spectune.store.trace_file import DrafterTrace, TiedCut, Trace

if TYPE_CHECKING:
    from numpy.typing import NDArray

ABOUT = ("fingerprint", "workload", "sampling", "provenance")


def simulated_trace(
    truth: SimulatedTruth,
    seed: int,
    requests: Sequence[Request],
    texts: Mapping[str, Sequence[int]],
    configs: Sequence[SpecConfig],
    about: Mapping[str, Mapping[str, Any]],
) -> Trace:
    """One drafter a method of `configs` that the truth declares; `texts` are output ids by request id."""
    methods = dict.fromkeys(config.method for config in configs if config.method in truth.hazards)
    drafters = tuple(
        _drafter(truth, seed, requests, texts, [config for config in configs if config.method == method])
        for method in methods
    )
    outputs = [texts[request.request_id] for request in requests]
    return Trace(
        **{name: dict(about.get(name, {})) for name in ABOUT},
        request_ids=tuple(request.request_id for request in requests),
        categories=tuple(request.category for request in requests),
        finish_reasons=("length",) * len(requests),
        num_prompt_tokens=np.array([len(request.prompt_ids) for request in requests], np.int32),
        num_outputs=np.array([len(text) for text in outputs], np.int32),
        output_ids=np.array([token for text in outputs for token in text], np.uint32),
        drafters=drafters,
    )


def trace_point(requests: Sequence[Request]) -> Point:
    """Plain decoding of one text after the other."""
    cell = Cell(batch_size=1, context_tokens=0, temperature=0.0)
    return Point(config=SpecConfig.off(), cell=cell, workload_hash="trace", sampling=requests[0].sampling)


def _drafter(
    truth: SimulatedTruth,
    seed: int,
    requests: Sequence[Request],
    texts: Mapping[str, Sequence[int]],
    configs: Sequence[SpecConfig],
) -> DrafterTrace:
    method = configs[0].method
    topks = tuple(sorted({1, *(config.topk for config in configs)}))
    depth = max(config.num_steps for config in configs)
    nodes = max(config.num_draft_tokens for config in configs)
    rate = truth.proposal_rate.get(method, 1.0)
    path: list[list[int]] = []
    ranks: dict[int, list[int]] = {topk: [] for topk in topks}
    drafted: list[int] = []
    for request in requests:
        text = texts[request.request_id]
        chain = SpecConfig.chain(method, depth)
        hazards = truth.acceptance(chain, request.category, request.sampling.temperature)
        key = key_of(seed, request.request_id, method, "trace")
        for position in range(1, len(text)):
            proposes = coin(key, position, 0) < rate
            drafted.append(depth if proposes else 0)
            left = len(text) - position if proposes else 0
            breadths = _needed(truth, key, position, hazards[:left])
            lengths = []
            for topk in topks:
                usable = sum(1 for _ in _while_below(breadths, topk))
                lengths.append(usable)
                if topk > 1:
                    ranks[topk] += _ranks(breadths[:usable], depth, nodes)
            path.append(lengths)
    whole = rate >= 1.0
    kind = np.uint8 if nodes <= 256 else np.uint16
    return DrafterTrace(
        method=method,
        draft_model=None,
        options=configs[0].options,
        topks=topks,
        max_steps=depth,
        max_draft_tokens=nodes,
        path=np.array(path, np.uint8).reshape(-1, len(topks)),
        ranks=tuple(np.array(ranks[topk], kind) for topk in topks),
        ties=TiedCut.none(),
        drafted=None if whole else _bytes(drafted),
    )


def _needed(truth: SimulatedTruth, key: int, position: int, hazards: Sequence[float]) -> list[float]:
    """Breadth that a tree must exceed at each depth to hold the text's token; 0 where a chain holds it.

    The declared truth accepts depth j with 1 - (1-h)·(1-gain)^(w-1), so the coin u is met from
    w = 1 + log((1-u)/(1-h)) / log(1-gain) on.
    """
    needed = []
    for depth, hazard in enumerate(hazards):
        u = coin(key, position, depth + 1)
        if u < hazard:
            needed.append(0.0)
        elif truth.tree_gain <= 0 or truth.tree_gain >= 1:
            needed.append(math.inf if truth.tree_gain <= 0 else 1.0)
        else:
            needed.append(1 + math.log((1 - u) / (1 - hazard)) / math.log(1 - truth.tree_gain))
    return needed


def _while_below(breadths: Sequence[float], topk: int) -> list[float]:
    kept = []
    for breadth in breadths:
        if breadth >= topk:
            break
        kept.append(breadth)
    return kept


def _ranks(breadths: Sequence[float], depth: int, nodes: int) -> list[int]:
    """Rank of each path node for every tree depth from its own on: breadth w is (N-1) / D."""
    rows = []
    before = [-1] * (depth + 1)
    for level, breadth in enumerate(breadths, start=1):
        for steps in range(level, depth + 1):
            own = math.floor(breadth * steps) if breadth > 0 else level - 1
            before[steps] = max(own, before[steps] + 1)
            rows.append(min(before[steps], nodes - 1))
    return rows


def _bytes(values: Sequence[int]) -> NDArray[np.uint8]:
    return np.array(values, np.uint8)

"""A policy in, the loads and arms out that would show it wrong."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from spectune.policy.emit_parts import ladder
from spectune.policy.file import config_of
from spectune.records import SpecConfig
from spectune.records.policy_load import PolicyArm, PolicyLoad

GENERATIONS, LARGE = 2, 16
"""Requests of a steady load for each one that runs at once, so that slots are refilled as a server's are;
from batch LARGE on a single generation says enough."""

MIN_REQUESTS = 4
MIXED_LEVELS = 12


def edges(policy: Mapping[str, Any], top: int) -> tuple[int, ...]:
    """Batch sizes up to `top` at which a switched policy runs another configuration than one below."""
    return tuple(rung.low for rung in ladder(policy)[1:] if rung.low <= top)


def steady_sizes(policy: Mapping[str, Any], top: int, further: Sequence[int] = ()) -> tuple[int, ...]:
    """1, the largest, one below, at and one above every edge, and whatever else is asked for."""
    sizes = {1, top, *further}
    for edge in edges(policy, top):
        sizes |= {edge - 1, edge, edge + 1}
    return tuple(sorted(size for size in sizes if 1 <= size <= top))


def steady(size: int, max_tokens: int) -> PolicyLoad:
    return PolicyLoad(
        name=f"batch {size}",
        levels=((size, 0),),
        num_requests=max(MIN_REQUESTS, size if size >= LARGE else GENERATIONS * size),
        max_tokens=max_tokens,
    )


def ramp(top: int, max_tokens: int) -> PolicyLoad:
    """1, 2, 4 ... top ... 4, 2, 1, each level as long as `max_tokens` of each of its sequences."""
    up = [1]
    while up[-1] * 2 < top:
        up.append(up[-1] * 2)
    levels = [*up, top, *reversed(up)] if top > 1 else [1]
    return _levels(f"ramp 1-{top}-1", levels, max_tokens)


def mixed(policy: Mapping[str, Any], top: int, max_tokens: int, *, seed: int = 0) -> PolicyLoad:
    """Short stays at random loads, most of them across an edge: what makes a switched policy thrash."""
    chance = random.Random(f"mixed|{seed}")
    near = [size for edge in edges(policy, top) for size in (edge - 1, edge)] or [1, top]
    levels = [
        chance.choice(near) if chance.random() < 0.75 else chance.randint(1, top) for _ in range(MIXED_LEVELS)
    ]
    return _levels("mixed", levels, max_tokens)


def _levels(name: str, levels: Sequence[int], max_tokens: int) -> PolicyLoad:
    budgets = tuple((level, level * max_tokens) for level in levels)
    total = sum(tokens for _, tokens in budgets)
    return PolicyLoad(name=name, levels=budgets, num_requests=-(-total // max_tokens), max_tokens=max_tokens)


def arms_of(policy: Mapping[str, Any], further: Sequence[SpecConfig] = ()) -> tuple[PolicyArm, ...]:
    """A true off, the policy, and every configuration of it (and further ones) throughout."""
    configs = [config_of(cell["config"]) for cell in policy["cells"] if cell["category"] is None]
    statics = dict.fromkeys(config for config in (*configs, *further) if not config.is_off)
    return (
        PolicyArm.static(SpecConfig.off()),
        PolicyArm.policy(),
        *(PolicyArm.static(config) for config in statics),
    )

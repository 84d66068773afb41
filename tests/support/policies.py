"""Policies made by hand: what runs at which batch size, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from spectune.records import SpecConfig


def policy_of(configs: Mapping[int, SpecConfig], *, top: int, head: str = "org/head") -> dict[str, Any]:
    """A policy that runs `configs[low]` from batch size `low` up to the next one, measured up to `top`."""
    lows = sorted(configs)
    ends = [*(low - 1 for low in lows[1:]), None]
    return {
        "source_run": "by hand",
        "fallback": "off",
        "validity": {
            "engine": "sglang",
            "is_simulated": False,
            "target": "org/target",
            "draft": head,
            "batch": [1, top],
            "context_tokens": [1, 512],
            "temperatures": [0.0],
        },
        "cells": [
            {
                "batch": [low, end],
                "context_tokens": None,
                "category": None,
                "temperature": None,
                "config": "off" if configs[low].is_off else configs[low].to_dict(),
            }
            for low, end in zip(lows, ends, strict=True)
        ],
    }


def random_adaptive(chance: random.Random) -> dict[str, Any]:
    """An adaptive file: some keys, some candidates each, some knobs for all of them or for one."""
    knobs = {
        "ema_alpha": lambda: chance.choice([0.05, 0.2, 0.5, 1.0]),
        "update_interval": lambda: chance.randint(1, 6),
        "warmup_batches": lambda: chance.randint(0, 12),
        "up_hysteresis": lambda: chance.choice([-0.25, 0.0, 0.25, 0.5]),
        "down_hysteresis": lambda: chance.choice([-0.5, -0.25, 0.0, 0.25]),
        "ceiling_coeff": lambda: chance.choice([0, 0, 0.5, 1.0, 2.0]),
    }

    def some() -> dict[str, Any]:
        return {name: draw() for name, draw in knobs.items() if chance.random() < 0.5}

    document: dict[str, Any] = some() if chance.random() < 0.5 else {}
    for key in sorted(chance.sample(range(1, 65), chance.randint(1, 5))):
        steps = chance.sample(range(8), chance.randint(1, 5))
        document[str(key)] = {"candidate_steps": steps, **(some() if chance.random() < 0.7 else {})}
    return document


def random_events(chance: random.Random, count: int) -> list[tuple[int, list[int]]]:
    """Verified batches: sizes that wander, accepted drafts that drift from good to bad."""
    events = []
    size = chance.randint(1, 70)
    mean = chance.uniform(0, 6)
    for _ in range(count):
        size = max(1, min(80, size + chance.randint(-6, 6)))
        mean = max(0.0, min(7.0, mean + chance.uniform(-0.8, 0.8)))
        accepted = [max(0, min(7, round(chance.gauss(mean, 1.5)))) for _ in range(size)]
        events.append((size, accepted if chance.random() > 0.05 else []))
    return events

"""Prompts out of this project's hands and into a JSON Lines file that it reads back unchanged."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spectune.errors import WorkloadError
from spectune.records import Prompt
from spectune.workload.synthetic import SYNTHETIC_KEY
from spectune.workload.workload import workload_digest


def deal(prompts: Sequence[Prompt], *, parts: int, size: int) -> list[tuple[Prompt, ...]]:
    """Disjoint hands of `size` prompts; each category is dealt round, so the hands are alike.

    WorkloadError where the prompts do not suffice: none is used twice.
    """
    if len(prompts) < parts * size:
        raise WorkloadError(
            f"{parts} parts of {size} prompts need {parts * size}, there are {len(prompts)}",
            hint="--num-prompts or --parts must be smaller; a prompt in two parts would find a warm cache",
        )
    by_category: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    hands: list[list[Prompt]] = [[] for _ in range(parts)]
    turn = 0
    for category in sorted(by_category):
        for prompt in by_category[category]:
            hands[turn % parts].append(prompt)
            turn += 1
    return [tuple(hand[:size]) for hand in hands]


def write_prompts(path: Path, prompts: Sequence[Prompt], *, is_synthetic: bool = False) -> str:
    """Write the prompts and return their digest as a workload in this order."""
    lines = []
    for prompt in prompts:
        row: dict[str, Any] = {
            "prompt_id": prompt.prompt_id,
            "category": prompt.category,
            "turns": list(prompt.turns),
        }
        if prompt.system is not None:
            row["system"] = prompt.system
        if prompt.max_tokens is not None:
            row["output_tokens"] = prompt.max_tokens
        if is_synthetic:
            row[SYNTHETIC_KEY] = True
        lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(lines), encoding="utf-8", newline="\n")
    except OSError as error:
        raise WorkloadError(f"{path}: cannot be written: {error.strerror or error}") from error
    return workload_digest(prompts)

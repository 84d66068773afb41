"""Prompts that a program drew decide nothing: what a draft gets right on them is not what it gets on text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def is_synthetic(workload: Mapping[str, Any]) -> bool:
    """Whether the workload of a manifest was drawn by a program."""
    account = workload.get("accounting")
    return isinstance(account, Mapping) and bool(account.get("is_synthetic"))


def refusal(manifest: Mapping[str, Any]) -> str | None:
    """Why a run of this manifest must not decide; None for real prompts, or where it was forced."""
    is_forced = bool((manifest.get("config") or {}).get("allow_synthetic"))
    if is_forced or not is_synthetic(manifest.get("workload") or {}):
        return None
    return (
        "No decision: the prompts are synthetic, and acceptance on meaningless words says nothing about real "
        "text. --allow-synthetic decides all the same."
    )

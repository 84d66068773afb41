"""Requests as traffic: when, of which kind, how long; no text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficRequest:
    """One request of a trace or a mix. Lengths that are not known are None."""

    arrival_s: float
    category: str
    num_output_tokens: int | None = None
    num_prompt_tokens: int | None = None

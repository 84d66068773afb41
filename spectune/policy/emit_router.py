"""A policy in, a rule table for a router in front of two deployments out.

For what an engine does not execute: trees beside chains, switching by category, context or temperature,
data parallelism, and an off that costs nothing because nothing that could speculate is running.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from spectune.policy.emit_parts import EmitOptions, ladder, lead_of, max_batch
from spectune.policy.file import OFF, config_of
from spectune.records import SpecConfig

SCHEMA_VERSION = 1
PLAIN, SPECULATE = "plain", "speculate"


def router_table(policy: Mapping[str, Any], options: EmitOptions) -> dict[str, Any]:
    """Two deployments and which of them takes a request; the first rule that holds decides.

    `in_flight` counts the requests of both deployments together, the one at hand included.
    """
    lead = _lead(policy)
    top = max_batch(policy, options.max_batch_size)
    deployments: dict[str, Any] = {PLAIN: {"config": OFF}}
    if lead is not None:
        deployments[SPECULATE] = {"config": lead.to_dict(), "label": lead.label}
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "spectune-router",
        "source_run": policy["source_run"],
        "validity": policy["validity"],
        "max_in_flight": top,
        "deployments": deployments,
        "rules": _joined([_rule(cell, lead) for cell in policy["cells"]]),
        "fallback": PLAIN,
        "min_gap_requests": _gap(policy),
    }


def emit_router(policy: Mapping[str, Any], options: EmitOptions) -> str:
    """The table as JSON; it is data, not a command."""
    return json.dumps(router_table(policy, options), indent=2)


def route(
    table: Mapping[str, Any],
    in_flight: int,
    *,
    context_tokens: int,
    category: str | None = None,
    temperature: float = 0.0,
) -> str:
    """The deployment that takes a request, as a router has to read the table."""
    for rule in table["rules"]:
        if rule["category"] not in (None, category):
            continue
        if all(
            _holds(rule[name], value)
            for name, value in (
                ("in_flight", in_flight),
                ("context_tokens", context_tokens),
                ("temperature", temperature),
            )
        ):
            return str(rule["deployment"])
    return str(table["fallback"])


def _holds(bounds: Sequence[float | None] | None, value: float) -> bool:
    if bounds is None:
        return True
    low, high = bounds
    return (low is None or low <= value) and (high is None or value <= high)


def _lead(policy: Mapping[str, Any]) -> SpecConfig | None:
    """What the speculating deployment runs: the configuration with the largest measured speedup, which may
    be of a category alone."""
    found = [
        (cell["speedup"] or 0.0, config_of(cell["config"]))
        for cell in policy["cells"]
        if cell["config"] != OFF
    ]
    measured = max(found, key=lambda pair: (pair[0], [-part for part in pair[1].size]), default=None)
    return lead_of(ladder(policy), lambda config: True) or (None if measured is None else measured[1])


def _rule(cell: Mapping[str, Any], lead: SpecConfig | None) -> dict[str, Any]:
    """A cell with another configuration than the deployment's goes there only where it is no smaller."""
    config = config_of(cell["config"])
    fits = lead is not None and not config.is_off and config.size >= lead.size
    return {
        "category": cell["category"],
        "context_tokens": cell["context_tokens"],
        "temperature": cell["temperature"],
        "in_flight": cell["batch"],
        "deployment": SPECULATE if fits else PLAIN,
    }


def _joined(rules: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Neighbouring loads with one answer as one rule."""
    kept: list[dict[str, Any]] = []
    for rule in rules:
        last = kept[-1] if kept else None
        same = last is not None and all(
            last[name] == rule[name] for name in ("category", "context_tokens", "temperature", "deployment")
        )
        end = None if last is None else last["in_flight"][1]
        if last is not None and same and end is not None and end + 1 == rule["in_flight"][0]:
            last["in_flight"] = [last["in_flight"][0], rule["in_flight"][1]]
            continue
        kept.append({**rule, "in_flight": list(rule["in_flight"])})
    return kept


def _gap(policy: Mapping[str, Any]) -> int:
    """Requests by which the load has to fall below an edge before speculation is used again."""
    edges = (policy.get("deadband") or {}).get("edges", ())
    return 1 if any(edge["rounds"] > 1 for edge in edges) else 0

"""What must be equal for two measurements to be compared, and what may differ because it is under test."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from spectune.records import Sampling

UNDER_TEST = frozenset(
    {
        "engine_version",
        "draft",
        "draft_weight_bytes",
        "settings.draft_digest",
        "settings.truth",  # the declared engine of a simulation
        "read_bandwidth_bytes_per_s",
    }
)
"""A new engine or head is what gates are for; the bandwidth is measured anew at every start."""

OF_MACHINE = frozenset(
    {"device", "threads", "backend", "dtype", "settings.prefill_chunk", "settings.prefix_cache"}
)
"""What changes seconds but not acceptance: counts of one drafter on one text know no machine."""

Difference = tuple[str, Any, Any]


def fingerprint_differences(
    base: Mapping[str, Any], head: Mapping[str, Any], *, needs_machine: bool = True
) -> tuple[Difference, ...]:
    """(field, base, head) of all that forbids the comparison.

    Args:
        needs_machine: False where only acceptance is compared.
    """
    ignored = UNDER_TEST if needs_machine else UNDER_TEST | OF_MACHINE
    return tuple(found for found in _all_differences(base, head) if found[0] not in ignored)


def under_test(base: Mapping[str, Any], head: Mapping[str, Any]) -> tuple[Difference, ...]:
    """(field, base, head) of what differs because it is being compared."""
    shown = UNDER_TEST - {"read_bandwidth_bytes_per_s"}
    return tuple(found for found in _all_differences(base, head) if found[0] in shown)


def sampling_differences(base: Sampling, head: Sampling) -> tuple[Difference, ...]:
    """(field, base, head); a server's own default temperature is a difference like any other."""
    one, other = asdict(base), asdict(head)
    return tuple((f"sampling.{name}", one[name], other[name]) for name in one if one[name] != other[name])


def describe(differences: tuple[Difference, ...]) -> str:
    """`device is "cpu" in the baseline and "H200" now; ...`."""
    return "; ".join(
        f"{name} is {json.dumps(base)} in the baseline and {json.dumps(head)} now"
        for name, base, head in differences
    )


def _all_differences(base: Mapping[str, Any], head: Mapping[str, Any]) -> list[Difference]:
    """Unequal fields that both sides observed."""
    one, other = _flat(base), _flat(head)
    names = [*one, *(name for name in other if name not in one)]
    return [
        (name, one.get(name), other.get(name))
        for name in names
        if one.get(name) != other.get(name) and (name in one) and (name in other)
    ]


def _flat(mark: Mapping[str, Any]) -> dict[str, Any]:
    settings = mark.get("settings") or {}
    plain = {name: value for name, value in mark.items() if name != "settings" and value is not None}
    return plain | {f"settings.{name}": value for name, value in settings.items() if value is not None}

"""A policy file: its published schema, what it is valid for, and reading it with the place of any damage."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

from spectune.errors import NotComparable, UsageError
from spectune.records import Fingerprint, SpecConfig

POLICY_SCHEMA_VERSION = 1
OFF = "off"

COMPARABLE_KEYS = (
    "engine", "engine_version", "target", "draft", "device", "dtype", "tensor_parallel_size", "threads",
)  # fmt: skip
"""Validity keys that must be equal before a policy may be used."""


def policy_schema() -> dict[str, Any]:
    """The published JSON schema of a policy file."""
    text = resources.files("spectune.policy").joinpath("policy.schema.json").read_text("utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema


def identity_of(fingerprint: Fingerprint) -> dict[str, Any]:
    """What a policy is valid for: engine, models, device and parallelism."""
    return {
        "engine": fingerprint.backend,
        "engine_version": fingerprint.engine_version,
        "target": fingerprint.target,
        "draft": fingerprint.draft,
        "device": fingerprint.device,
        "dtype": fingerprint.dtype,
        "tensor_parallel_size": int(fingerprint.settings.get("tensor_parallel_size", 1)),
        "threads": fingerprint.threads,
        "is_simulated": fingerprint.is_simulated,
    }


def check_engine(policy: Mapping[str, Any], engine: str) -> None:
    """Raise NotComparable for a policy of another engine, before this one is made ready."""
    if (measured := policy["validity"]["engine"]) != engine:
        raise NotComparable(
            f"the policy of {policy.get('source_run')} was measured elsewhere: engine {measured!r} against {engine!r}",
            hint=f"--backend {measured} serves what it was measured on",
        )


def check_validity(policy: Mapping[str, Any], fingerprint: Fingerprint) -> None:
    """Raise NotComparable, naming each difference, if a policy was measured on something else."""
    here = identity_of(fingerprint)
    measured = policy["validity"]
    differing = [
        f"{key} {measured.get(key)!r} against {here[key]!r}"
        for key in COMPARABLE_KEYS
        if measured.get(key) != here[key]
    ]
    if differing:
        raise NotComparable(
            f"the policy of {policy.get('source_run')} was measured elsewhere: {'; '.join(differing)}",
            hint="sweep on this deployment and build a policy from that run",
        )


def load_policy(data: Any, *, origin: str = "policy") -> dict[str, Any]:
    """Check a policy that came from a file; raises UsageError naming `origin` and the key."""
    if not isinstance(data, dict) or data.get("kind") != "spectune-policy":
        raise UsageError(
            f"{origin}: not a spectune policy", hint="a sweep writes policy.json into its run directory"
        )
    if data.get("schema_version") != POLICY_SCHEMA_VERSION:
        raise UsageError(
            f"{origin}: schema_version {data.get('schema_version')!r}, this version reads "
            f"{POLICY_SCHEMA_VERSION}"
        )
    schema = policy_schema()
    _check_keys(data, schema, origin)
    if not isinstance(data["cells"], list):
        raise UsageError(f"{origin}: cells must be a list")
    for index, cell in enumerate(data["cells"]):
        where = f"{origin}: cells[{index}]"
        _check_keys(cell, schema["$defs"]["cell"], where)
        _check_range(cell["batch"], f"{where}.batch")
        if cell["context_tokens"] is not None:
            _check_range(cell["context_tokens"], f"{where}.context_tokens")
        _check_range(cell["temperature"], f"{where}.temperature")
        _check_config(cell["config"], f"{where}.config")
    _check_config(data["fallback"], f"{origin}: fallback")
    _check_validity(data["validity"], schema["$defs"]["validity"], origin)
    return data


def _check_config(value: Any, where: str) -> None:
    if value != OFF and not isinstance(value, dict):
        raise UsageError(f'{where}: {value!r} is neither "off" nor an object')
    try:
        config = config_of(value)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{where}: {error}") from error
    numbers = (config.num_steps, config.topk, config.num_draft_tokens)
    if not all(isinstance(number, int) for number in numbers):
        raise UsageError(
            f"{where}: num_steps, topk and num_draft_tokens {list(numbers)} must be whole numbers"
        )
    if value != OFF and "draft_model" not in value:
        raise UsageError(f"{where}: missing draft_model", hint="null where the drafter has no model")


def _check_validity(validity: Any, schema: Mapping[str, Any], origin: str) -> None:
    _check_keys(validity, schema, f"{origin}: validity")
    for name in ("batch", "context_tokens"):
        _check_range(validity[name], f"{origin}: validity.{name}")
    if not isinstance(validity["batch"][1], int):
        raise UsageError(f"{origin}: validity.batch {validity['batch']!r} names no largest batch size")
    temperatures = validity["temperatures"]
    if not isinstance(temperatures, list) or not temperatures:
        raise UsageError(f"{origin}: validity.temperatures {temperatures!r} is not a list of temperatures")


def _check_keys(data: Any, schema: Mapping[str, Any], where: str) -> None:
    if not isinstance(data, dict):
        raise UsageError(f"{where}: must be an object")
    if missing := sorted(set(schema["required"]) - set(data)):
        raise UsageError(f"{where}: missing {', '.join(missing)}")
    if unknown := sorted(set(data) - set(schema["properties"])):
        raise UsageError(f"{where}: unknown keys {', '.join(unknown)}")


def _check_range(pair: Any, where: str) -> None:
    good = (
        isinstance(pair, list)
        and len(pair) == 2
        and isinstance(pair[0], int | float)
        and (pair[1] is None or (isinstance(pair[1], int | float) and pair[0] <= pair[1]))
    )
    if not good:
        raise UsageError(f"{where}: {pair!r} is not [low, high] with low <= high")


def config_of(value: Any) -> SpecConfig:
    """The configuration of a cell: "off" or an object."""
    return SpecConfig.off() if value == OFF else SpecConfig.from_dict(value)

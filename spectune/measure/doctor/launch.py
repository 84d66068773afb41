"""A launch line of a serving engine, checked before it costs a start.

Reads the words of a command line; starts nothing. What needs the head or the target is asked of the
other modules by the command line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from spectune.measure.doctor.findings import Finding, error, warning
from spectune.measure.doctor.flags import parse_flags
from spectune.measure.doctor.names import RENAMED_FLAGS
from spectune.measure.doctor.sglang import check_sglang
from spectune.measure.doctor.vllm import check_vllm


def check_launch(engine: str, words: Sequence[str], *, version: str | None = None) -> Iterator[Finding]:
    """Findings about the speculative part of a launch line."""
    flags = parse_flags(words)
    renamed = RENAMED_FLAGS.get(engine, {})
    for flag in flags:
        if flag in renamed or flag.replace("-", "_") in renamed:
            successor = renamed.get(flag) or renamed[flag.replace("-", "_")]
            yield error(
                "flags",
                f"--{flag} is not a flag of {engine}{f' {version}' if version else ''} any more",
                signature="unrecognized arguments, the engine does not start",
                fix=f"use {successor}",
            )
    if engine == "vllm":
        yield from check_vllm(flags, version)
    elif engine == "sglang":
        yield from check_sglang(flags)


def check_resolved(asked: Mapping[str, Any], resolved: Mapping[str, Any]) -> Iterator[Finding]:
    """What was asked for against what a started engine says it runs with."""
    for key, value in asked.items():
        if key in resolved and resolved[key] != value:
            yield warning(
                "resolved",
                f"{key} was asked as {value!r}, the engine runs with {resolved[key]!r}",
                signature="the numbers belong to another configuration than their label says",
                fix="measure under the value that runs, or change the flags until it is honoured",
            )

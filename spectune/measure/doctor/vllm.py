"""vLLM's --speculative-config against its rules; versions 0.32 and 0.33 were read."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

from spectune.measure.doctor.findings import Finding, error, fine, warning
from spectune.measure.doctor.flags import REFUSED_AT_START, as_value, as_whole
from spectune.measure.doctor.names import (
    VLLM_KEYS,
    VLLM_METHODS,
    VLLM_REMOVED_METHODS,
    VLLM_RENAMED_KEYS,
    closest,
    parse_version,
)

MAX_TOKENS = 128
"""vLLM's rejection sampler holds no longer drafts."""

_NEEDS_MODEL = ("eagle", "eagle3", "draft_model", "dflash")
_SHORT = {"spec-method": "method", "spec-model": "model", "spec-tokens": "num_speculative_tokens"}


def check_vllm(flags: Mapping[str, str | None], version: str | None) -> Iterator[Finding]:
    """Findings about the speculative flags of a vLLM launch line."""
    config, findings = vllm_config(flags)
    yield from findings
    if not config:
        return
    tensor_parallel = as_whole(flags.get("tensor-parallel-size")) or 1
    found = list(check_vllm_config(config, tensor_parallel_size=tensor_parallel, version=version))
    budget = list(_token_budget(config, flags))
    yield from (*found, *budget)
    if not findings and not found and not budget:
        yield fine("launch", "the speculative settings are complete")


def vllm_config(flags: Mapping[str, str | None]) -> tuple[dict[str, Any], list[Finding]]:
    """The speculative configuration of --speculative-config, its dotted forms and short forms together."""
    config: dict[str, Any] = {}
    findings: list[Finding] = []
    text = flags.get("speculative-config")
    if text is not None:
        try:
            parsed = json.loads(text)
        except ValueError as broken:
            parsed = None
            findings.append(_no_json(str(broken)))
        if isinstance(parsed, dict):
            config |= parsed
        elif parsed is not None:
            findings.append(_no_json(f"it is a {type(parsed).__name__}"))
    for flag, value in flags.items():
        head, dot, key = flag.partition(".")
        if head == "speculative-config" and dot:
            if "-" in key:
                findings.append(
                    error(
                        "flags",
                        f"--{flag}: behind the dot the name keeps its underscores",
                        signature="an unknown field of SpeculativeConfig",
                        fix=f"--{head}.{key.replace('-', '_')}",
                    )
                )
            config[key.replace("-", "_")] = as_value(value)
        elif flag in _SHORT:
            config[_SHORT[flag]] = as_value(value)
    return config, findings


def _no_json(why: str) -> Finding:
    return error(
        "launch",
        f"--speculative-config is no JSON object: {why}",
        signature=REFUSED_AT_START,
        fix="quote it for the shell: --speculative-config '{\"method\": ...}'",
    )


def check_vllm_config(
    config: Mapping[str, Any], *, tensor_parallel_size: int = 1, version: str | None = None
) -> Iterator[Finding]:
    """A --speculative-config against the rules of vLLM."""
    for key in config:
        if key not in VLLM_KEYS:
            successor = VLLM_RENAMED_KEYS.get(key) or closest(key, VLLM_KEYS)
            yield error(
                "launch",
                f"--speculative-config has no field {key}",
                signature=REFUSED_AT_START,
                fix=f"use {successor}"
                if successor
                else f"remove it; fields are {', '.join(sorted(VLLM_KEYS))}",
            )
    method = config.get("method")
    yield from _vllm_method(method, version)
    if method in _NEEDS_MODEL and not config.get("model"):
        yield error(
            "launch",
            f"method {method} without a draft model",
            signature="the target is loaded a second time as its own draft, then a crash",
            fix='name the head: "model": "path/to/head"',
        )
    yield from _vllm_length(config, method)
    yield from check_tensor_parallel(config.get("draft_tensor_parallel_size"), tensor_parallel_size)
    if (schedule := config.get("num_speculative_tokens_per_batch_size")) is not None:
        yield from check_schedule(schedule, config.get("num_speculative_tokens"))


def _vllm_method(method: Any, version: str | None) -> Iterator[Finding]:
    if method is None or method in VLLM_METHODS or str(method).endswith("_mtp"):
        return
    removed = VLLM_REMOVED_METHODS.get(str(method))
    if removed is not None and version is not None and parse_version(version) < removed:
        return
    if removed is not None:
        text = f"method {method} was removed in vLLM {'.'.join(map(str, removed))}"
    else:
        text = f"vLLM has no method {method}"
    guess = closest(str(method).lower(), VLLM_METHODS)
    yield error(
        "launch",
        text,
        signature=REFUSED_AT_START,
        fix=f"use {guess}" if guess else f"one of {', '.join(VLLM_METHODS)}",
    )


def _vllm_length(config: Mapping[str, Any], method: Any) -> Iterator[Finding]:
    length = config.get("num_speculative_tokens")
    if length is None:
        if method in ("suffix", "dspark"):
            return  # these have a length of their own
        yield error(
            "launch",
            "num_speculative_tokens is missing",
            signature="TypeError: '>' not supported between NoneType and int, or a missing n_predict",
            fix=f"write it: a whole number of 1..{MAX_TOKENS}",
        )
    elif isinstance(length, bool) or not isinstance(length, int) or not 1 <= length <= MAX_TOKENS:
        yield error(
            "launch",
            f"num_speculative_tokens {length!r} is not a whole number of 1..{MAX_TOKENS}",
            signature=REFUSED_AT_START,
            fix="leave out --speculative-config to switch speculation off",
        )


def check_tensor_parallel(draft: Any, target: int) -> Iterator[Finding]:
    """vLLM runs a draft on one device or on as many as the target."""
    if draft is None or draft in (1, target):
        return
    yield error(
        "tensor-parallel",
        f"draft_tensor_parallel_size {draft!r} is neither 1 nor the target's {target}",
        signature=REFUSED_AT_START,
        fix=f"use 1 for a small head, or {target}",
    )


def check_schedule(schedule: Any, num_tokens: Any) -> Iterator[Finding]:
    """num_speculative_tokens_per_batch_size: [[first, last, K], ...] from 1 on, without overlap."""
    is_list = isinstance(schedule, list | tuple) and bool(schedule)
    if not is_list or not all(isinstance(row, list | tuple) and len(row) == 3 for row in schedule):
        yield error(
            "schedule",
            "num_speculative_tokens_per_batch_size is no list of [first, last, K]",
            signature=REFUSED_AT_START,
            fix="such as [[1, 4, 5], [5, 16, 3], [17, 256, 0]]",
        )
        return
    if not all(isinstance(value, int) and not isinstance(value, bool) for row in schedule for value in row):
        yield error(
            "schedule", "the schedule holds what is no whole number", signature=REFUSED_AT_START,
            fix="use whole numbers",
        )  # fmt: skip
        return
    rows = sorted(tuple(row) for row in schedule)
    if rows[0][0] != 1:
        yield error(
            "schedule", f"the schedule starts at batch {rows[0][0]}", signature=REFUSED_AT_START,
            fix="start it at 1",
        )  # fmt: skip
    for (_, last, _), (first, _, _) in itertools.pairwise(rows):
        if first <= last:
            yield error(
                "schedule", f"batch {first} is in two ranges", signature=REFUSED_AT_START,
                fix="ranges include both ends",
            )  # fmt: skip
    most = max(row[2] for row in rows)
    if isinstance(num_tokens, int) and most > num_tokens:
        yield warning(
            "schedule",
            f"the schedule asks for K={most}, num_speculative_tokens is {num_tokens}",
            signature=f"K is cut to {num_tokens} without a word",
            fix=f"num_speculative_tokens {most}",
        )


def _token_budget(config: Mapping[str, Any], flags: Mapping[str, str | None]) -> Iterator[Finding]:
    length = config.get("num_speculative_tokens")
    budget, seqs = as_whole(flags.get("max-num-batched-tokens")), as_whole(flags.get("max-num-seqs"))
    if not isinstance(length, int) or budget is None or seqs is None:
        return
    yield from check_token_budget(budget, seqs, length)


def check_token_budget(budget: int, max_num_seqs: int, num_tokens: int) -> Iterator[Finding]:
    """A step verifies K+1 tokens of every sequence, and the scheduler's budget limits their sum."""
    needed = max_num_seqs * (num_tokens + 1)
    if budget >= needed:
        return
    yield error(
        "token-budget",
        f"{max_num_seqs} sequences of K={num_tokens} verify {needed} tokens a step, max-num-batched-tokens is {budget}",
        signature=f"no error: at most {budget // (num_tokens + 1)} sequences run together, the rest waits",
        fix=f"--max-num-batched-tokens {needed} or more, or K={max(0, budget // max_num_seqs - 1)}",
    )

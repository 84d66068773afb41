"""`spectune policy verify --backend vllm`: serve with what was emitted."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spectune.cli.console import say
from spectune.errors import UsageError

if TYPE_CHECKING:
    from spectune.backend.vllm import VllmBackend
    from spectune.records import SpecConfig
    from spectune.records.policy_load import LoadSample, PolicyArm, PolicyLoad

FLAG = "--speculative-config"


def emitted_document(policy: Mapping[str, Any], max_batch_size: int) -> dict[str, Any]:
    """The JSON that `spectune policy emit --engine vllm` writes; UsageError where it writes none."""
    from spectune.policy.emit import emit
    from spectune.policy.emit_parts import EmitOptions
    from spectune.policy.forms import parts_of

    words = parts_of(emit(policy, "vllm", EmitOptions(max_batch_size=max_batch_size))).words
    if FLAG not in words:
        raise UsageError("on vLLM this policy never speculates: there is nothing to verify")
    document: dict[str, Any] = json.loads(words[words.index(FLAG) + 1])
    return document


def serve_vllm(
    policy: dict[str, Any],
    folder: Path,
    *,
    model: str | None,
    draft_model: str | None,
    engine_python: str | None,
    max_batch_size: int | None,
    batch_sizes: Sequence[int],
    num_runs: int,
    max_tokens: int,
    max_seconds: float | None,
    loads: Sequence[PolicyLoad] | None = None,
    is_bracketed: bool = True,
) -> tuple[list[LoadSample], bool]:
    """Samples of vLLM servers, old and new, and whether all are there.

    `loads` replace those that follow from the policy; plain decoding is started again at the end unless
    `is_bracketed` is false.
    """
    from spectune.backend.vllm import VllmBackend
    from spectune.cli.policy_samples import append_sample, read_samples
    from spectune.cli.policy_verify import head_of, loads_of
    from spectune.measure.policy_verify import requests_by_load
    from spectune.measure.policy_verify_server import EmittedVllm, serve_starts
    from spectune.measure.requests import RequestBuilder
    from spectune.policy.file import check_validity, config_of
    from spectune.policy.verify_loads import arms_of
    from spectune.records import Sampling
    from spectune.workload import load_workload

    top = max_batch_size or int(policy["validity"]["batch"][1])
    emitted = emitted_document(policy, top)
    head = draft_model or head_of(policy)
    settings: dict[str, Any] = {
        "model": model,
        "draft_model": head,
        "engine_python": engine_python,
        "max_num_seqs": max(16, top),
        "log_dir": folder / "servers",
        "progress": say,
    }
    plain = VllmBackend(**settings)
    check_validity(policy, plain.fingerprint())
    configs = [config_of(cell["config"]) for cell in policy["cells"] if cell["config"] != "off"]
    lead = _lead(configs, emitted, head)
    arms = [arm for arm in arms_of(policy) if arm.config is None or not arm.config.is_tree]

    def backend_of(arm: PolicyArm) -> VllmBackend:
        return EmittedVllm(emitted, **settings) if arm.is_policy else VllmBackend(**settings)

    loads = loads or loads_of(policy, top, batch_sizes, max_tokens)
    asked = requests_by_load(RequestBuilder(plain), load_workload(None).prompts, Sampling())
    samples = read_samples(folder)
    done = {(sample.load, sample.repeat, sample.arm, sample.boot) for sample in samples}
    say(f"served as the policy: {FLAG} {json.dumps(emitted)}")
    for sample in serve_starts(
        backend_of,
        lead,
        arms,
        loads,
        asked,
        repeats=num_runs,
        done=done,
        is_bracketed=is_bracketed,
        max_seconds=max_seconds,
        say=say,
    ):
        append_sample(folder, sample)
        samples.append(sample)
    return samples, len(samples) >= (len(arms) + is_bracketed) * len(loads) * num_runs


def _lead(configs: Sequence[SpecConfig], emitted: Mapping[str, Any], head: str | None) -> SpecConfig:
    """The chain that a server of the emitted JSON makes room for."""
    from spectune.records import SpecConfig

    depth = int(emitted["num_speculative_tokens"])
    known = next((config for config in configs if config.is_chain), None)
    base = known or SpecConfig.chain(str(emitted["method"]), depth, draft_model=head)
    return replace(base, num_steps=depth, topk=1, num_draft_tokens=depth + 1)

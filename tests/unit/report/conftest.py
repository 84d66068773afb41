"""Hand-made run summaries: full, one point, all failed, simulated."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from spectune.policy.comparison import (
    Acceptance,
    ArmSummary,
    CellComparison,
    Decision,
    Failure,
    Latency,
    Prediction,
    Rounds,
    RunSummary,
    Spread,
)
from spectune.records import Cell, Fingerprint, Interval, SpecConfig, Status
from spectune.report import render_report

OFF = SpecConfig.off()
ARMS = (
    SpecConfig.chain("eagle3", 2),
    SpecConfig.chain("eagle3", 4),
    SpecConfig(method="eagle3", num_steps=4, topk=4, num_draft_tokens=12),
    SpecConfig.chain("ngram", 4, options=(("window", 3),)),
)
PLAIN_ROUND_S = {1: 0.0412, 4: 0.0531, 16: 0.1180}
SPEEDUPS = {1: (1.42, 1.61, 1.55, 1.12), 4: (1.28, 1.31, 1.09, 1.01), 16: (0.94, 0.81, 0.62, 0.88)}
CATEGORY_FACTOR = {"chat": 0.92, "code": 1.24, "summarization": 1.02}
HAZARDS = {"eagle3": (0.74, 0.66, 0.61, 0.57), "ngram": (0.31, 0.62, 0.71, 0.75)}


def interval(value: float, *, half: float = 0.045, n: int = 8) -> Interval:
    return Interval(value=value, low=round(value * (1 - half), 4), high=round(value * (1 + half), 4), n=n)


def spread(mean: float, n: int = 48) -> Spread:
    return Spread(n=n, mean=mean, p50=mean * 0.98, p90=mean * 1.13, p99=mean * 1.31)


def acceptance(config: SpecConfig) -> Acceptance:
    if config.is_off:
        return Acceptance(
            num_steps=6000, num_proposed=0, num_verified=0, num_accepted=0, acceptance_length=None,
            reason="off proposes no drafts", acceptance_length_per_request=None, survival=(),
            conditional_acceptance=(), depth_acceptance_rate=None, draft_acceptance_rate=None,
            zero_accept_share=None, proposed_per_step=None, alpha=None,
        )  # fmt: skip
    hazards = HAZARDS[config.method][: config.max_accepted]
    survival = tuple(math.prod(hazards[: depth + 1]) for depth in range(len(hazards)))
    return Acceptance(
        num_steps=2400,
        num_proposed=2400 * (config.num_draft_tokens - 1),
        num_verified=2400 * (config.num_draft_tokens - 1),
        num_accepted=round(2400 * sum(survival)),
        acceptance_length=1 + sum(survival),
        reason=None,
        acceptance_length_per_request=1.04 + sum(survival),
        survival=survival,
        conditional_acceptance=hazards,
        depth_acceptance_rate=sum(survival) / config.num_steps,
        draft_acceptance_rate=sum(survival) / (config.num_draft_tokens - 1),
        zero_accept_share=1 - survival[0],
        proposed_per_step=float(config.num_draft_tokens - 1),
        alpha=0.68,
    )


def arm(config: SpecConfig, batch: int, speedup: float | None, *, scope: str = "all") -> ArmSummary:
    plain = PLAIN_ROUND_S[batch]
    accepted = acceptance(config)
    tokens = accepted.acceptance_length or 1.0
    total = plain if speedup is None else plain * tokens / speedup
    draft = 0.0 if config.is_off else total * 0.22
    tpot = total / tokens
    error = 0.03 if config.is_chain else 0.09
    return ArmSummary(
        config=config,
        scope=scope,
        status=Status.OK,
        num_requests=48 if scope == "all" else 16,
        output_tokens=6144,
        output_tokens_per_s=batch / tpot,
        reached_batch=batch * 0.98,
        peak_memory_bytes=812_000_000,
        acceptance=accepted,
        latency=Latency(
            tpot_s=spread(tpot),
            ttft_s=spread(0.32),
            inter_chunk_s=spread(total),
            e2e_s=spread(0.32 + 127 * tpot),
        ),
        rounds=Rounds(
            num_rounds=900,
            draft_s=draft,
            verify_s=total * 0.95 - draft,
            other_s=total * 0.05,
            tokens_per_sequence=tokens,
            round_tpot_s=tpot,
        ),
        speedup=None if speedup is None else interval(speedup, half=0.045 if scope == "all" else 0.11),
        speedup_basis=None if speedup is None else "paired blocks" if scope == "all" else "paired requests",
        prediction=Prediction(
            predicted_tpot_s=tpot / (1 + error),
            measured_tpot_s=tpot,
            residual_fraction=error,
            predicted_speedup=None if speedup is None else speedup * (1 + error),
            ideal_speedup=None if speedup is None else tokens * 0.9,
            draft_cost_ratio=None if config.is_off else 0.11,
            break_even_acceptance_length=None if speedup is None else total / plain,
            floor_tpot_s=0.0288 / tokens,
            floor_share=0.0288 / tokens / tpot,
            waterfall=()
            if speedup is None
            else (
                ("acceptance", math.log(tokens)),
                ("verify", -0.31),
                ("draft", -0.22),
                ("other", -0.05),
                ("residual", math.log(speedup) - math.log(tokens) + 0.58),
            ),
            reason="plain decoding is what speedups are measured against" if config.is_off else None,
        ),
        point_ids=("0123456789abcdef",),
    )


def comparison(batch: int, scope: str = "all") -> CellComparison:
    factor = CATEGORY_FACTOR.get(scope, 1.0)
    cell = Cell(batch_size=batch, context_tokens=512, temperature=0.0)
    arms = (
        arm(OFF, batch, None, scope=scope),
        *(
            arm(config, batch, value * factor, scope=scope)
            for config, value in zip(ARMS, SPEEDUPS[batch], strict=True)
        ),
    )
    best = max(arms[1:], key=lambda item: item.speedup.value if item.speedup else 0.0)
    is_on = best.speedup is not None and best.speedup.low is not None and best.speedup.low > 1
    decision = Decision(
        verdict="on" if is_on else "off",
        chosen=best.config if is_on else OFF,
        reason="lower bound above 1 after correction for 4 candidates"
        if is_on
        else "no arm beats plain decoding",
        speedup=best.speedup if is_on else None,
        runner_up=ARMS[0] if best.config != ARMS[0] else ARMS[1],
        runner_up_reason="slower by 9% on the same blocks",
    )
    return CellComparison(cell=cell, scope=scope, arms=arms, decision=decision)


POLICY = {
    "schema_version": 1,
    "engine": "reference",
    "validity": {"target": "SmolLM2-135M-Instruct", "device": "cpu", "dtype": "bfloat16"},
    "fallback": "off",
    "cells": [
        {"batch": [1, 2], "context_tokens": None, "category": None, "temperature": [0.0, 0.0],
         "config": ARMS[1].to_dict(), "speedup": 1.61, "speedup_ci": [1.54, 1.68], "num_steps": 2400,
         "source": "run-a"},
        {"batch": [3, 8], "context_tokens": [0, 1024], "category": "code", "temperature": [0.0, 0.0],
         "config": ARMS[1].to_dict(), "speedup": 1.31, "speedup_ci": [1.25, 1.37], "num_steps": 2400,
         "source": "run-a"},
        {"batch": [9, 16], "context_tokens": None, "category": None, "temperature": [0.0, 0.0],
         "config": "off", "speedup": None, "speedup_ci": None, "num_steps": 0, "source": "run-a"},
    ],
}  # fmt: skip


@pytest.fixture(scope="session")
def full_summary() -> RunSummary:
    """Three batches, five arms, three categories, a failed and a pruned point."""
    return RunSummary(
        schema_version=1,
        run_name="smollm2-eagle3-cpu",
        outcome="depends on load",
        verdict="eagle3 K=4 is 1.61 times as fast as plain decoding at batch 1 (95% interval 1.54 to 1.68). "
        "From batch 16 on nothing beats plain decoding.",
        is_simulated=False,
        fingerprint=Fingerprint(
            backend="reference", engine_version="0.1.0", target="SmolLM2-135M-Instruct",
            draft="eagle3-smollm2", device="cpu", dtype="bfloat16", threads=2, settings={"prepacked": True},
        ),
        cells=tuple(comparison(batch) for batch in (1, 4, 16)),
        categories=tuple(comparison(batch, scope) for batch in (1, 4, 16) for scope in CATEGORY_FACTOR),
        failures=(
            Failure(
                label="eagle3 D=8 k=8 N=64 @ batch 16, context 512, T=0",
                status=Status.OOM,
                reason="the point did not fit in memory\nTraceback (most recent call last):\n"
                "  allocate 9.1 GiB for the KV cache\nRuntimeError: out of memory",
            ),
        ),
        pruned=(("eagle3 D=2 k=2 N=16", "15 drafted nodes asked for, but depth 2 with topk 2 drafts 6"),),
        policy=POLICY,
        commands={
            "vllm": "vllm serve SmolLM2-135M-Instruct \\\n  --speculative-config "
            '\'{"method": "eagle3", "num_speculative_tokens": 4}\'',
            "sglang": "python -m sglang.launch_server --speculative-algorithm EAGLE3 "
            "--speculative-num-steps 4 --speculative-eagle-topk 1 --speculative-num-draft-tokens 5",
        },
        advice=("31% of the steps of ngram K=4 accept nothing: keep it for code.",),
        cautions=("the reached batch was 15.6 where 16 was asked for",),
        workload={"name": "builtin", "digest": "a1b2c3", "num_prompts": 48,
                  "categories": {"chat": 16, "code": 16, "summarization": 16}},
        provenance={"argv": ["spectune", "sweep", "--batch-size", "1,4,16", "--name", "two words"],
                    "machine": {"cpu": "Example CPU 2.0 GHz", "cores": 2, "memory_bytes": 8 << 30},
                    "python": "3.11.2", "versions": {"torch": "2.13.0", "numpy": "2.3.1"}, "git": None},
        definitions={"acceptance_length": "1 + accepted / steps, pooled over steps, bonus token included"},
    )  # fmt: skip


@pytest.fixture(scope="session")
def one_point_summary(full_summary: RunSummary) -> RunSummary:
    """One batch, plain decoding and one arm, one block: no interval."""
    arms = (
        arm(OFF, 1, None),
        replace(arm(ARMS[0], 1, 1.42), speedup=Interval(value=1.42, low=None, high=None, n=1)),
    )
    decision = Decision(verdict="off", chosen=OFF, reason="one block gives no interval")
    cell = Cell(batch_size=1, context_tokens=0, temperature=0.0)
    return replace(
        full_summary,
        outcome="do not speculate",
        verdict="One block is too few to tell 1.42 from 1.",
        cells=(CellComparison(cell=cell, scope="all", arms=arms, decision=decision),),
        categories=(),
        failures=(),
        pruned=(),
        policy=None,
        commands={},
        advice=(),
        cautions=(),
    )


@pytest.fixture(scope="session")
def all_failed_summary(full_summary: RunSummary) -> RunSummary:
    """Every point failed; the cell still names its arms."""
    arms = tuple(
        ArmSummary(
            config=config,
            scope="all",
            status=Status.FAILED,
            reason="engine died",
            num_requests=8,
            num_failed=8,
        )
        for config in (OFF, ARMS[0])
    )
    decision = Decision(verdict="no data", chosen=OFF, reason="no point succeeded")
    cell = Cell(batch_size=1, context_tokens=512, temperature=0.0)
    return replace(
        full_summary,
        outcome="no data",
        verdict="All 2 points failed.",
        fingerprint=None,
        cells=(CellComparison(cell=cell, scope="all", arms=arms, decision=decision),),
        categories=(),
        failures=tuple(
            Failure(label=f"{config.label} @ {cell.label}", status=Status.FAILED,
                    reason="engine died\nlast line of the log: illegal instruction")
            for config in (OFF, ARMS[0])
        ),
        policy=None,
        commands={},
    )  # fmt: skip


@pytest.fixture(scope="session")
def simulated_summary(full_summary: RunSummary) -> RunSummary:
    """The full summary from declared costs instead of an engine."""
    return replace(full_summary, is_simulated=True)


@pytest.fixture(scope="session")
def render() -> Callable[[RunSummary], str]:
    """`render_report` that draws each of the shared summaries once for all tests."""
    pages: dict[int, tuple[RunSummary, str]] = {}

    def rendered(summary: RunSummary) -> str:
        if id(summary) not in pages:
            pages[id(summary)] = (summary, render_report(summary))
        return pages[id(summary)][1]

    return rendered

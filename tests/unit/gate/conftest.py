"""Gates, blocks and simulated sides that the tests of gate/ share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from spectune.backend.simulated import SimulatedBackend
from spectune.backend.truth import SimulatedTruth
from spectune.gate.file import AcceptanceGate, GateFile, Minimum, Origin, SpeedGate, Statistics, Subject
from spectune.measure.sides import Sides
from spectune.records import BlockResult, Request, RequestRecord, Sampling, SpecConfig, StepRecord

CONFIG = SpecConfig.chain("eagle3", 3)
NOISE = {"boot_noise_sd": 0.01, "request_noise_sd": 0.02, "noise_sd": 0.05}


def _record(name: str, accepted: Sequence[int], *, tokens: Sequence[int] | None = None) -> RequestRecord:
    """A request whose steps accepted so many drafts of three."""
    steps = tuple(
        StepRecord(num_proposed=3, num_verified=3, num_accepted=a, num_emitted=a + 1) for a in accepted
    )
    count = 1 + sum(accepted) + len(accepted)
    ids = tuple(tokens) if tokens is not None else tuple(range(count))
    assert len(ids) == count
    return RequestRecord(
        request_id=name,
        category="chat",
        num_prompt_tokens=3,
        output_ids=ids,
        arrival_s=0.0,
        first_token_s=0.1,
        finish_s=0.1 + 0.02 * count,
        finish_reason="length",
        steps=steps,
    )


def _gate(**changes: Any) -> GateFile:
    """A gate of eagle3 K=3 with length 1.6; sections are changed by name."""
    made = GateFile(
        name="made",
        origin=Origin(created="2026-11-30T10:00:00+00:00"),
        subject=Subject(
            config=CONFIG.to_dict(),
            batch_size=1,
            context_tokens=0,
            sampling={"max_tokens": 32, "ignore_eos": True},
            workload="made",
            workload_digest="d",
        ),
        minimum=Minimum(num_prompts=2, num_steps=10),
        acceptance=AcceptanceGate(
            acceptance_length=1.6,
            per_position=(0.4, 0.15, 0.05),
            tolerance=0.01,
            num_steps=1000,
            output_tokens=1600,
        ),
        speed=SpeedGate(max_slowdown=0.03),
        statistics=Statistics(num_starts=12, pair_noise=0.018),
    )
    for section, values in changes.items():
        made = replace(made, **{section: replace(getattr(made, section), **values)})
    return made


def _sides(base: dict[str, Any], head: dict[str, Any], *, seed: int = 1, num_prompts: int = 12) -> Sides:
    """Two simulated engines on one noisy machine."""
    requests = tuple(
        (
            Request(
                request_id=f"p{i}-0",
                prompt_ids=(1, 2, 3),
                category="chat",
                sampling=Sampling(max_tokens=32, ignore_eos=True),
            ),
        )
        for i in range(num_prompts)
    )
    truths = (replace(SimulatedTruth(), **{**NOISE, **changes}) for changes in (base, head))
    backends = {
        side: SimulatedBackend(truth=truth, seed=seed, noise_seed=10 * seed + place)
        for place, (side, truth) in enumerate(zip(("base", "head"), truths, strict=True))
    }
    return Sides(backends, requests)


@pytest.fixture
def record() -> Callable[..., RequestRecord]:
    """Makes a request record from accepted counts."""
    return _record


@pytest.fixture
def blocks_of() -> Callable[..., dict[int, BlockResult]]:
    """Makes one block a request record."""

    def make(*records: RequestRecord) -> dict[int, BlockResult]:
        return {
            index: BlockResult(requests=(record,), rounds=(), duration_s=1.0)
            for index, record in enumerate(records)
        }

    return make


@pytest.fixture
def gate_of() -> Callable[..., GateFile]:
    """Makes a gate."""
    return _gate


@pytest.fixture
def sides_of() -> Callable[..., Sides]:
    """Makes two simulated engines side by side."""
    return _sides

"""Hand-made records and summaries for the tests of policy/."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from spectune.policy.arms import ArmData
from spectune.policy.comparison import Acceptance, ArmSummary, CellComparison, Decision, Prediction, Rounds
from spectune.policy.decide import decide
from spectune.records import (
    BlockResult,
    Cell,
    Fingerprint,
    Interval,
    RequestRecord,
    RoundRecord,
    SpecConfig,
    Status,
    StepRecord,
)


class Make:
    """Builders with the smallest arguments that a test has to name."""

    off = SpecConfig.off()

    @staticmethod
    def chain(num_tokens: int, method: str = "eagle3", **kwargs: Any) -> SpecConfig:
        return SpecConfig.chain(method, num_tokens, **kwargs)

    @staticmethod
    def tree(depth: int = 5, topk: int = 4, num_draft_tokens: int = 16) -> SpecConfig:
        return SpecConfig(method="eagle3", num_steps=depth, topk=topk, num_draft_tokens=num_draft_tokens)

    @staticmethod
    def cell(batch_size: int = 1, context_tokens: int = 0, temperature: float = 0.0) -> Cell:
        return Cell(batch_size=batch_size, context_tokens=context_tokens, temperature=temperature)

    @staticmethod
    def steps(accepted: Sequence[int], drafted: int) -> tuple[StepRecord, ...]:
        """One step for each accepted count, `drafted` tokens proposed and verified in each."""
        return tuple(
            StepRecord(num_proposed=drafted, num_verified=drafted, num_accepted=n, num_emitted=n + 1)
            for n in accepted
        )

    @staticmethod
    def request(
        steps: Sequence[StepRecord] = (), *, name: str = "prompt-0", category: str = "chat", **kwargs: Any
    ) -> RequestRecord:
        """A successful request whose output adds up; one second to the first token, one per step."""
        num_output = 1 + sum(step.num_emitted for step in steps)
        fields: dict[str, Any] = {
            "request_id": name,
            "category": category,
            "num_prompt_tokens": 10,
            "output_ids": tuple(range(num_output)),
            "arrival_s": 0.0,
            "first_token_s": 1.0,
            "finish_s": 1.0 + len(steps),
            "finish_reason": "length",
            "steps": tuple(steps),
        }
        return RequestRecord(**{**fields, **kwargs})

    @classmethod
    def block(
        cls,
        *,
        tpot_s: float = 1.0,
        emitted: int = 1,
        name: str = "prompt-0",
        category: str = "chat",
        steps: Sequence[StepRecord] = (),
        num_rounds: int = 2,
        kv_tokens: int = 100,
    ) -> BlockResult:
        """One request alone in its rounds, each of `tpot_s * emitted` seconds of verification."""
        rounds = tuple(
            RoundRecord(
                kind="decode",
                batch_size=1,
                kv_tokens=kv_tokens,
                config="",
                start_s=0.0,
                draft_s=0.0,
                verify_s=tpot_s * emitted,
                other_s=0.0,
                num_emitted=emitted,
            )
            for _ in range(num_rounds)
        )
        request = cls.request(steps or cls.steps([0], 0), name=name, category=category)
        return BlockResult(requests=(request,), rounds=rounds, duration_s=10.0)

    @classmethod
    def arm_data(
        cls, config: SpecConfig, blocks: Mapping[tuple[int, int], BlockResult], **kwargs: Any
    ) -> ArmData:
        return ArmData(config=config, cell=cls.cell(), blocks=dict(blocks), point_ids=("id",), **kwargs)

    @staticmethod
    def interval(value: float, half: float = 0.02, *, n: int = 8, level: float = 0.95) -> Interval:
        return Interval(value=value, low=value - half, high=value + half, n=n, level=level)

    @staticmethod
    def acceptance(length: float | None, **kwargs: Any) -> Acceptance:
        fields: dict[str, Any] = {
            "num_steps": 100,
            "num_proposed": 300,
            "num_verified": 300,
            "num_accepted": 0 if length is None else round((length - 1) * 100),
            "acceptance_length": length,
            "reason": "no draft steps observed" if length is None else None,
            "acceptance_length_per_request": length,
            "survival": (),
            "conditional_acceptance": (),
            "depth_acceptance_rate": None,
            "draft_acceptance_rate": 0.5,
            "zero_accept_share": 0.25,
            "proposed_per_step": 3.0,
            "alpha": 0.75,
            "num_drafting_steps": 100,
        }
        return Acceptance(**{**fields, **kwargs})

    @staticmethod
    def rounds(tokens: float = 1.0, *, draft: float = 0.0, verify: float = 1.0, other: float = 0.0) -> Rounds:
        return Rounds(
            num_rounds=50,
            draft_s=draft,
            verify_s=verify,
            other_s=other,
            tokens_per_sequence=tokens,
            round_tpot_s=(draft + verify + other) / tokens,
        )

    @staticmethod
    def prediction(residual: float) -> Prediction:
        """A prediction of one second that the measurement missed by `residual`."""
        unknown = dict.fromkeys(
            ("predicted_speedup", "ideal_speedup", "draft_cost_ratio", "floor_tpot_s", "floor_share")
        )
        return Prediction(
            predicted_tpot_s=1.0,
            measured_tpot_s=1.0 + residual,
            residual_fraction=residual,
            break_even_acceptance_length=None,
            **unknown,
        )

    @classmethod
    def plain_arm(cls, **kwargs: Any) -> ArmSummary:
        fields: dict[str, Any] = {"scope": "all", "status": Status.OK, "rounds": cls.rounds()}
        return ArmSummary(config=cls.off, **{**fields, **kwargs})

    @classmethod
    def arm(
        cls,
        config: SpecConfig,
        speedup: Interval | float | None = None,
        *,
        length: float | None = 2.0,
        **kwargs: Any,
    ) -> ArmSummary:
        """An arm with a paired speedup; a bare number gets an interval of +-0.02."""
        if isinstance(speedup, float):
            speedup = cls.interval(speedup)
        fields: dict[str, Any] = {
            "scope": "all",
            "status": Status.OK,
            "rounds": cls.rounds(length or 1.0),
            "speedup_basis": "paired blocks",
            "acceptance": cls.acceptance(length),
        }
        return ArmSummary(config=config, speedup=speedup, **{**fields, **kwargs})

    @classmethod
    def decide(
        cls, arms: Sequence[ArmSummary], differences: Mapping[Any, Interval] | None = None
    ) -> Decision:
        """`decide` with each arm's own interval as the corrected one; unnamed pairs differ clearly."""
        corrected = {arm.config: arm.speedup for arm in arms if arm.speedup is not None}
        known = differences or {}

        def difference(fast: SpecConfig, slow: SpecConfig) -> Interval | None:
            return known.get((fast, slow), cls.interval(1.2, 0.1))

        return decide(arms, corrected=corrected, difference=difference)

    @classmethod
    def compare(
        cls, cell: Cell, *arms: ArmSummary, scope: str = "all", plain: ArmSummary | None = None
    ) -> CellComparison:
        told = (plain or cls.plain_arm(scope=scope), *arms)
        return CellComparison(cell=cell, scope=scope, arms=told, decision=cls.decide(told))

    @staticmethod
    def fingerprint(**kwargs: Any) -> Fingerprint:
        fields: dict[str, Any] = {
            "backend": "reference",
            "engine_version": "0.1",
            "target": "org/target",
            "draft": "org/head",
            "device": "cpu",
            "dtype": "float32",
            "threads": 2,
        }
        return Fingerprint(**{**fields, **kwargs})


@pytest.fixture
def make() -> type[Make]:
    return Make

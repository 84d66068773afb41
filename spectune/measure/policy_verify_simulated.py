"""A simulated engine as an arm of a verification: declared costs, its own clock, declared faults of
switching."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from spectune.backend.chance import key_of
from spectune.backend.simulated_sequence import SimulatedSequence
from spectune.backend.truth import SimulatedTruth
from spectune.records import BlockResult, Chooser, Cut, Request, RoundRecord, SpecConfig, chain_or_tree_pool
from spectune.records.policy_load import PolicyArm, PolicyLoad


class SimulatedServer:
    """Rounds of declared cost.

    Args:
        chooser: made anew for each serving of the policy.
        switch_rounds: plain rounds that every change of configuration costs the policy.
        standby_cost: time of an off round of the policy over that of an engine that cannot speculate.
    """

    def __init__(
        self,
        truth: SimulatedTruth,
        *,
        chooser: Callable[[], Chooser],
        switch_rounds: float = 0.0,
        standby_cost: float = 1.0,
        seed: int = 0,
    ) -> None:
        self._truth, self._chooser = truth, chooser
        self._switch_rounds, self._standby_cost, self._seed = switch_rounds, standby_cost, seed

    def serve(self, arm: PolicyArm, load: PolicyLoad, requests: Sequence[Request]) -> BlockResult:
        """All requests at the load's levels."""
        chooser = self._chooser() if arm.is_policy else None
        waiting = deque(requests)
        running: list[SimulatedSequence] = []
        done: list[SimulatedSequence] = []
        rounds: list[RoundRecord] = []
        now_s, emitted, last = 0.0, 0, None
        while waiting or running:
            while waiting and len(running) < max(1, load.limit(emitted)):
                running.append(self._begin(waiting.popleft(), now_s))
                emitted += 1
            config = arm.config or self._choose(chooser, running)
            turn = self._round(config, running, now_s, arm, is_switch=last not in (None, config))
            last = config
            now_s += turn.total_s
            emitted += turn.num_emitted
            rounds.append(turn)
            for sequence in running:
                sequence.chunk_s.append(now_s)
            done += [sequence for sequence in running if sequence.is_done]
            running = [sequence for sequence in running if not sequence.is_done]
        order = {request.request_id: index for index, request in enumerate(requests)}
        records = sorted((one.record() for one in done), key=lambda record: order[record.request_id])
        return BlockResult(requests=tuple(records), rounds=tuple(rounds), duration_s=now_s)

    def _choose(self, chooser: Chooser | None, running: Sequence[SimulatedSequence]) -> SpecConfig:
        assert chooser is not None, "only the policy has no configuration of its own"
        tokens = sum(sequence.kv_tokens for sequence in running) // len(running)
        return chooser.choose(batch_size=len(running), context_tokens=tokens, acceptance_ema=None)

    def _begin(self, request: Request, now_s: float) -> SimulatedSequence:
        """The first token is there; nothing else is timed of a prefill."""
        sequence = SimulatedSequence(
            request=request,
            output_ids=tuple(range(request.sampling.max_tokens)),
            last_cut=Cut.LENGTH.value,
            hazards=(),
            proposal_rate=1.0,
            key=key_of(self._seed, request.request_id),
            flip=None,
            noise=1.0,
            arrival_s=now_s,
        )
        sequence.num_emitted = 1
        sequence.chunk_s.append(now_s)
        return sequence

    def _round(
        self,
        config: SpecConfig,
        running: Sequence[SimulatedSequence],
        now_s: float,
        arm: PolicyArm,
        *,
        is_switch: bool,
    ) -> RoundRecord:
        truth, size = self._truth, len(running)
        pool = 0 if config.is_off else chain_or_tree_pool(config.num_steps, config.topk)
        emitted = 0
        for sequence in running:
            request = sequence.request
            sequence.hazards = truth.acceptance(config, request.category, request.sampling.temperature)
            step = sequence.step(pool, config.num_draft_tokens - 1)
            sequence.steps.append(step)
            sequence.num_emitted += step.num_emitted
            emitted += step.num_emitted
        plain_s = truth.plain_s(size)
        verify_s = plain_s + truth.verify_s_per_token * (config.num_draft_tokens - 1) * size
        if arm.is_policy and config.is_off:
            verify_s *= self._standby_cost
        return RoundRecord(
            kind="decode",
            batch_size=size,
            kv_tokens=sum(sequence.kv_tokens for sequence in running),
            config=config.label,
            start_s=now_s,
            draft_s=truth.draft_s(config),
            verify_s=verify_s,
            other_s=truth.other_s
            + truth.other_s_per_sequence * size
            + (self._switch_rounds * plain_s if is_switch else 0.0),
            num_emitted=emitted,
        )

"""Serving arms under loads: order, resuming, samples of rounds, and a real engine that switches."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest

from spectune.backend.truth import SimulatedTruth
from spectune.draft.deferred import DeferredDrafter
from spectune.engine.scheduler import Engine
from spectune.errors import EngineFailure
from spectune.measure.policy_verify import sample_of, serve_in_turn, switch_cost
from spectune.measure.policy_verify_simulated import SimulatedServer
from spectune.records import BlockResult, Chooser, Request, RequestRecord, RoundRecord, SpecConfig
from spectune.records.policy_load import PolicyArm, PolicyLoad
from tests.support.toys import cyclic_pair, ragged_requests, random_drafter, request, tiny_target

OFF = SpecConfig.off()
K3 = SpecConfig.chain("eagle3", 3)
LOAD = PolicyLoad(name="batch 2", levels=((2, 0),), num_requests=4, max_tokens=8)
ARMS = (PolicyArm.static(OFF), PolicyArm.policy(), PolicyArm.static(K3))


def asks(load: PolicyLoad, repeat: int) -> tuple[Request, ...]:
    return tuple(
        request(f"r{repeat}-{i}", [5 + i], max_tokens=load.max_tokens, ignore_eos=True)
        for i in range(load.num_requests)
    )


class Recording:
    """A server that does nothing but remember."""

    def __init__(self) -> None:
        self.served: list[tuple[str, int]] = []

    def serve(self, arm: PolicyArm, load: PolicyLoad, requests: Sequence[Request]) -> BlockResult:
        self.served.append((arm.label, load.max_tokens))
        turn = RoundRecord(
            kind="decode", batch_size=2, kv_tokens=1, config="off", start_s=0, draft_s=0, verify_s=1, other_s=0, num_emitted=2
        )  # fmt: skip
        return BlockResult(requests=(), rounds=(turn,), duration_s=1.0)


def test_arms_take_turns_forwards_and_backwards_after_a_warm_up() -> None:
    """off, policy, K=3, then the other way round; each is warmed once under the load."""
    server = Recording()

    samples = list(serve_in_turn(server, ARMS, [LOAD], asks, repeats=2))

    assert [sample.arm for sample in samples] == [
        "off", "policy", "eagle3 K=3", "eagle3 K=3", "policy", "off",
    ]  # fmt: skip
    assert [label for label, tokens in server.served if tokens == 6] == ["off", "policy", "eagle3 K=3"]


def test_what_is_there_is_not_served_again() -> None:
    """A verification that stopped goes on with the missing samples."""
    done = {("batch 2", 0, "off"), ("batch 2", 0, "policy")}

    samples = list(serve_in_turn(Recording(), ARMS, [LOAD], asks, repeats=1, done=done))

    assert [sample.arm for sample in samples] == ["eagle3 K=3"]


def test_serving_ends_when_its_time_is_over() -> None:
    """Every look at the clock takes 3 s: of 5 s one sample comes, and nothing is lost."""
    seconds = itertools.count(0, 3)

    samples = list(
        serve_in_turn(
            Recording(), ARMS, [LOAD], asks, repeats=1, max_seconds=5, clock=lambda: float(next(seconds))
        )
    )

    assert len(samples) == 1


def turn(
    config: str, seconds: float, *, size: int = 1, emitted: int = 1, kind: str = "decode"
) -> RoundRecord:
    return RoundRecord(
        kind=kind, batch_size=size, kv_tokens=1, config=config, start_s=0.0, draft_s=0.25 * seconds,
        verify_s=0.75 * seconds, other_s=0.0, num_emitted=emitted,
    )  # fmt: skip


def test_sample_times_a_steady_load_at_its_level() -> None:
    """Two rounds of two sequences, 3 s and 6 tokens: 1 s a token of one sequence; the drain does not count,
    nor does the target's part of a prefill."""
    rounds = (
        turn("draft", 8.0, kind="prefill"),
        turn("eagle3 K=3", 1.0, size=2, emitted=2),
        turn("eagle3 K=3", 2.0, size=2, emitted=4),
        turn("off", 9.0),
    )

    sample = sample_of(BlockResult(requests=(), rounds=rounds, duration_s=20.0), LOAD, ARMS[1], 0)

    assert sample.tpot_s == 1.0
    assert sample.seconds == 1.0 + 2.0 + 9.0 + 2.0
    assert [(part.batch_size, part.config, part.num_rounds) for part in sample.parts] == [
        (1, "off", 1),
        (2, "eagle3 K=3", 2),
    ]
    assert sample.by_batch_size(1) == {1: (1.0, 9.0)}
    assert sample.by_batch_size(2) == {1: (1.0, 9.0), 2: (3.0, 1.0 + 2.0 + 2.0)}


def test_draft_of_a_prompt_counts_where_a_resting_one_would_have_read_it() -> None:
    """4 s of draft in a prefill belong to the sequence that runs next, whichever configuration reads it."""
    drafts_at_once = (
        turn("draft", 16.0, kind="prefill"),
        turn("k", 3.0),
        turn("off", 5.0, size=2, emitted=2),
    )
    drafts_later = (turn("off", 0.0, kind="prefill"), turn("k", 7.0), turn("off", 5.0, size=2, emitted=2))

    samples = [
        sample_of(BlockResult(requests=(), rounds=rounds, duration_s=30.0), LOAD, ARMS[1], 0)
        for rounds in (drafts_at_once, drafts_later)
    ]

    assert [sample.by_batch_size(2) for sample in samples] == [{1: (1.0, 7.0), 2: (1.0, 5.0)}] * 2


def test_switch_cost_is_the_first_round_beyond_the_next_ones() -> None:
    """5 s after off where later rounds of the kind take 2: 3 s for one switch; leaving costs nothing."""
    rounds = [turn("off", 1), turn("k", 5), turn("k", 2), turn("k", 2), turn("k", 2), turn("off", 1)]

    assert switch_cost(rounds) == (1, 3.0)
    assert switch_cost(rounds[:1]) == (0, None)


def test_switch_without_rounds_after_it_costs_what_the_others_did() -> None:
    """Two switches, one of them the last round of all: 3 s for the first, so 6 s for both."""
    rounds = [turn("off", 1), turn("k", 5), turn("k", 2), turn("k", 2), turn("off", 1), turn("k", 9)]

    assert switch_cost(rounds) == (2, 6.0)


def test_what_the_hypervisor_took_is_no_switch_cost() -> None:
    """A first round of 9 s that was cut into tells nothing; nor does a later one, beside two of 2 s."""
    cut = replace(turn("k", 9), stolen_s=5.0)
    rounds = [turn("off", 1), cut, turn("k", 2), turn("off", 1), turn("k", 5), cut, cut, turn("k", 2)]

    assert switch_cost(rounds) == (2, 6.0)


def test_sample_of_a_load_with_failed_requests_is_refused() -> None:
    """A request that failed was not served: its load says nothing of a policy."""
    request = RequestRecord(
        request_id="r", category="chat", num_prompt_tokens=3, output_ids=(), arrival_s=0.0, first_token_s=None,
        finish_s=None, finish_reason=None, error="died",
    )  # fmt: skip

    with pytest.raises(EngineFailure, match="1 of 1 requests failed: died"):
        sample_of(BlockResult(requests=(request,), rounds=(), duration_s=1.0), LOAD, ARMS[1], 0)


class Switching:
    """Off in a batch, on alone."""

    def choose(self, *, batch_size: int, context_tokens: int, acceptance_ema: float | None) -> SpecConfig:
        return K3 if batch_size == 1 else OFF


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_of_a_ramp_are_the_plain_ones_whatever_is_switched(tmp_path, temperature: float) -> None:
    """Off and on in mid-text, with a draft that rests meanwhile: not a token changes."""
    target = tiny_target()
    drafter = DeferredDrafter(random_drafter(target, tmp_path, 97))
    requests = ragged_requests(9, 97, temperature=temperature, max_tokens=20)
    load = PolicyLoad(name="ramp", levels=((1, 20), (3, 60), (1, 0)), num_requests=9, max_tokens=20)
    plain = Engine(target, batch_size=3, eos_ids=[]).generate(requests)

    engine = Engine(target, batch_size=3, eos_ids=[], drafter=drafter)
    chooser: Chooser = Switching()
    served = engine.generate(requests, chooser=chooser, scratch=K3, limit=load.limit)

    assert [r.output_ids for r in plain.requests] == [r.output_ids for r in served.requests]
    assert {(r.batch_size > 1, r.config) for r in served.rounds if r.kind == "decode"} == {
        (False, "eagle3 K=3"),
        (True, "off"),
    }


def test_draft_that_rested_accepts_as_if_it_had_not() -> None:
    """A perfect head accepts every draft in the first round after a stay in off."""
    target, drafter = cyclic_pair()
    engine = Engine(target, batch_size=2, eos_ids=[], drafter=DeferredDrafter(drafter))
    requests = [request("long", [1], max_tokens=40), request("short", [6], max_tokens=10)]

    rounds = engine.generate(requests, chooser=Switching(), scratch=K3).rounds
    drafted = [r.num_emitted for r in rounds if r.config == "eagle3 K=3"]

    assert drafted[:-1] == [4] * (len(drafted) - 1)


def test_simulated_server_charges_declared_switches() -> None:
    """Two plain rounds a switch: the policy's first round after a change takes that much longer."""

    class Alternating:
        def __init__(self) -> None:
            self._turn = itertools.cycle([OFF, OFF, K3, K3, K3, K3])

        def choose(self, *, batch_size: int, context_tokens: int, acceptance_ema: float | None) -> SpecConfig:
            return next(self._turn)

    truth = SimulatedTruth(plain_s_by_batch={1: 1.0}, other_s=0.0, other_s_per_sequence=0.0)
    server = SimulatedServer(truth, chooser=Alternating, switch_rounds=2.0)
    load = PolicyLoad(name="batch 1", levels=((1, 0),), num_requests=1, max_tokens=200)

    rounds = server.serve(PolicyArm.policy(), load, asks(load, 0)).rounds
    num_switches, seconds = switch_cost(rounds)

    assert seconds == pytest.approx(2.0 * num_switches)
    assert {r.config for r in rounds} == {"off", "eagle3 K=3"}

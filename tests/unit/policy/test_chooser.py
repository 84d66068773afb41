"""Choosers: the table with its deadband, acceptance of the moment, and learning while serving."""

from __future__ import annotations

import pytest

from spectune.policy.chooser import MIN_ROUNDS, PROBE_BUDGET, PROBE_ROUNDS, PolicyChooser
from spectune.policy.learner import LearningChooser
from spectune.policy.table import build_policy
from spectune.records import Cell, RoundTimes, SpecConfig

OFF = SpecConfig.off()
K1, K3 = SpecConfig.chain("eagle3", 1), SpecConfig.chain("eagle3", 3)


@pytest.fixture
def policy(make):
    """K=3 at batch 1 (1.5x +- 0.02), off from batch 4."""
    cells = [make.compare(make.cell(1), make.arm(K3, 1.5)), make.compare(make.cell(4), make.arm(K3, 0.8))]
    return build_policy(
        cells,
        (),
        run_name="run",
        fingerprint=make.fingerprint(),
        contexts={cell.cell: (20, 300) for cell in cells},
        switch_cost_rounds=1.0,
    )


def ask(chooser, batch_size, accepted=None, context=100) -> int:
    return chooser.choose(batch_size=batch_size, context_tokens=context, acceptance_ema=accepted).num_steps


def test_chooser_leaves_at_once_and_returns_after_the_deadband(policy):
    """At batch 1 running off loses a third of each round, so a price of one round is lost in
    1 / (1 - 1/1.48) = 4 rounds; leaving for off costs nothing."""
    chooser = PolicyChooser(policy, temperature=0.0)

    depths = [ask(chooser, size) for size in (1, 4, 1, 1, 4, 1, 1, 1, 1, 1)]

    assert depths == [3, 0, 0, 0, 0, 0, 0, 0, 3, 3]


def test_chooser_names_the_largest_configuration(policy):
    """An engine asks what to make room for."""
    assert PolicyChooser(policy).largest == K3


def test_chooser_falls_back_to_off_beyond_the_measured_context(policy):
    """The fallback holds for a context that nobody measured."""
    assert ask(PolicyChooser(policy, temperature=0.0), 1, context=301) == 0


def needing(policy, accepted: float):
    """The policy with a break-even of so many accepted drafts wherever it speculates."""
    cells = [
        {**c, "break_even_accepted": None if c["config"] == "off" else accepted} for c in policy["cells"]
    ]
    return {**policy, "cells": cells}


def test_policy_says_what_a_round_has_to_accept(make):
    """A round of 1.5 plain ones has to emit 1.5 tokens: half a draft accepted."""
    arm = make.arm(K3, 1.3, rounds=make.rounds(2.0, draft=0.2, verify=1.3))
    cell = make.compare(make.cell(1), arm)
    policy = build_policy(
        [cell], (), run_name="run", fingerprint=make.fingerprint(), contexts={cell.cell: (20, 300)}
    )

    assert policy["cells"][0]["break_even_accepted"] == pytest.approx(0.5)


def test_chooser_rests_what_is_not_accepted_and_looks_again_for_almost_nothing(policy):
    """After a hundred poor rounds K=3 rests, but for looks that cost 0.5% of the time at most."""
    chooser = PolicyChooser(needing(policy, 0.4), temperature=0.0)

    depths = [ask(chooser, 1, 0.1) for _ in range(5000)]
    looks = depths[MIN_ROUNDS:].count(3)

    assert depths[:MIN_ROUNDS] == [3] * MIN_ROUNDS
    assert depths[MIN_ROUNDS] == 0
    assert 0 < looks * 0.4 <= PROBE_BUDGET * 5000
    assert looks % PROBE_ROUNDS == 0


def test_chooser_is_not_misled_by_single_rounds(policy):
    """A moving mean that dips below the break-even now and then, as chance has it, changes nothing."""
    chooser = PolicyChooser(needing(policy, 0.3), temperature=0.0)

    depths = [ask(chooser, 1, 0.1 if step % 4 == 0 else 0.5) for step in range(2000)]

    assert set(depths) == {3}


def test_chooser_goes_on_as_soon_as_a_look_finds_acceptance(policy):
    """Acceptance above the break-even, found by a look, ends the rest; what was seen before it does not."""
    chooser = PolicyChooser(needing(policy, 0.4), temperature=0.0, patience=1)
    for _ in range(MIN_ROUNDS + 10):
        ask(chooser, 1, 0.1)
    assert [ask(chooser, 1, 0.5) for _ in range(10)] == [0] * 10  # no draft ran: this is an old mean
    while ask(chooser, 1, 0.1) == 0:
        pass

    assert [ask(chooser, 1, 0.5) for _ in range(50)] == [3] * 50


def test_chooser_does_not_judge_one_configuration_by_anothers_acceptance(make):
    """K=1 accepts 0.8 at batch 2; K=3, which needs 1.0 at batch 1, starts with a clean sheet there."""
    cells = [make.compare(make.cell(1), make.arm(K3, 1.3)), make.compare(make.cell(2), make.arm(K1, 1.2))]
    policy = build_policy(
        cells, (), run_name="run", fingerprint=make.fingerprint(), contexts={c.cell: (20, 300) for c in cells}
    )
    policy["cells"][0]["break_even_accepted"] = 1.0
    policy["cells"][1]["break_even_accepted"] = 0.2
    chooser = PolicyChooser(policy, temperature=0.0, patience=1)

    assert [ask(chooser, 2, 0.8) for _ in range(2 * MIN_ROUNDS)] == [1] * 2 * MIN_ROUNDS

    assert [ask(chooser, 1, 1.5) for _ in range(2 * MIN_ROUNDS)][1:] == [3] * (2 * MIN_ROUNDS - 1)


def test_chooser_can_be_told_to_run_the_table_alone(policy):
    """Without the acceptance of the moment nothing rests."""
    chooser = PolicyChooser(needing(policy, 0.4), temperature=0.0, uses_acceptance=False)

    assert {ask(chooser, 1, 0.0) for _ in range(500)} == {3}


# Learning ------------------------------------------------------------------------------------------


class Served:
    """A made-up engine: declared seconds and acceptance by configuration and batch size, its own clock."""

    def __init__(self, seconds, accepted) -> None:
        self.seconds, self.accepted = seconds, accepted
        self.now_s = 0.0
        self.tokens = 0.0
        self.ema: float | None = None

    def run(self, chooser: LearningChooser, batch_size: int, rounds: int) -> list[SpecConfig]:
        chosen = []
        for _ in range(rounds):
            config = chooser.choose(batch_size=batch_size, context_tokens=100, acceptance_ema=self.ema)
            chosen.append(config)
            self.now_s += self.seconds[config.label][batch_size]
            gained = self.accepted.get(config.label, 0.0)
            self.tokens += 1 + gained
            if not config.is_off:
                self.ema = gained if self.ema is None else 0.8 * self.ema + 0.2 * gained
        return chosen


def surface(seconds) -> dict[tuple[str, Cell], RoundTimes]:
    return {
        (label, Cell(batch_size=size, context_tokens=0, temperature=0.0)): RoundTimes(
            draft_s=0.0, verify_s=value, other_s=0.0, num_rounds=10
        )
        for label, by_size in seconds.items()
        for size, value in by_size.items()
    }


SECONDS = {"off": {1: 1.0, 8: 2.0}, "eagle3 K=1": {1: 1.2, 8: 3.4}, "eagle3 K=3": {1: 1.5, 8: 6.0}}
ACCEPTED = {"eagle3 K=1": 0.6, "eagle3 K=3": 1.2}


def learner(engine: Served, seconds=SECONDS, accepted=ACCEPTED) -> LearningChooser:
    return LearningChooser(surface(seconds), accepted, [K1, K3], clock=lambda: engine.now_s)


def test_learner_runs_the_best_goodput_at_each_load():
    """At batch 1 K=3 gives 2.2/1.5, more than 1.6/1.2 and 1; at batch 8 off gives 1/2, more than 1.6/3.4."""
    engine = Served(SECONDS, ACCEPTED)
    chooser = learner(engine)

    alone, together = engine.run(chooser, 1, 200), engine.run(chooser, 8, 200)

    assert alone.count(K3) >= 195
    # a look at K=1 loses 1 - (1.6/3.4)/(1/2) = 6%: 0.5% of 400 rounds pay for 32 of them
    assert together.count(OFF) >= 200 - 32


def test_learner_corrects_a_surface_that_is_wrong():
    """Calibrated as cheap, really dear: the clock tells, and K=3 is left."""
    really = {**SECONDS, "eagle3 K=3": {1: 4.0, 8: 9.0}}
    engine = Served(really, ACCEPTED)
    chooser = learner(engine)

    engine.run(chooser, 1, 100)

    assert engine.run(chooser, 1, 100).count(K3) <= 2


def test_learner_turns_off_when_acceptance_is_gone_and_returns_with_it():
    """Traffic that the head cannot draft for is decoded plainly, within the budget for looks."""
    engine = Served(SECONDS, {"eagle3 K=1": 0.0, "eagle3 K=3": 0.0})
    chooser = learner(engine)

    engine.run(chooser, 1, 50)
    lost = engine.run(chooser, 1, 1000)
    engine.accepted = ACCEPTED
    engine.run(chooser, 1, 4000)
    regained = engine.run(chooser, 1, 100)

    # a look at K=1 loses 0.2 rounds: 0.5% of 1,050 rounds pay for 26 of them
    assert lost.count(OFF) >= 970
    assert regained.count(OFF) <= 5


def test_learner_loses_no_more_than_its_budget_by_looking():
    """Over 2,000 rounds at one load the time is within 1% of the best static choice."""
    engine = Served(SECONDS, ACCEPTED)

    engine.run(learner(engine), 1, 2000)

    assert engine.now_s / engine.tokens <= 1.01 * 1.5 / 2.2

"""Theory, fed with what a sweep measured, finds the truth that the simulator declared.

Truth by hand: depths are accepted with 0.5, 0.4, 0.35 given the one before, so a chain of 3 gives
1 + 0.5 + 0.2 + 0.07 = 1.77 tokens. Seconds at batch 1: off 0.020 + 0.001 = 0.021; K=3 drafts
3 · 0.002 = 0.006, verifies 0.020 + 3 · 0.001 = 0.023, other 0.001: 0.030 together. At batch 2: off
0.023; K=3 0.006 + 0.022 + 2 · 3 · 0.001 + 0.001 = 0.035. At batch 16: off 0.051; K=3 0.105.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from spectune.backend.simulated import SimulatedBackend
from spectune.backend.truth import SimulatedTruth
from spectune.metrics.acceptance import (
    acceptance_length,
    censored_alpha,
    conditional_acceptance,
    pooled_steps,
    survival,
)
from spectune.metrics.throughput import round_tpot
from spectune.policy.summary import summarize
from spectune.records import Sampling, SpecConfig
from spectune.theory.speedup import break_even_acceptance_length, general_speedup, tau_from_hazards

OFF = SpecConfig.off()
EAGLE = SpecConfig.chain("eagle3", 3)
LONG = Sampling(max_tokens=300, ignore_eos=True)

ROUND_SECONDS = {1: (0.021, 0.030), 2: (0.023, 0.035), 16: (0.051, 0.105)}


def truth_of(hazards=(0.5, 0.4, 0.35), **kwargs):
    values = {
        "plain_s_by_batch": {1: 0.020, 2: 0.022, 16: 0.050},
        "context_s_per_token": 0.0,
        "verify_s_per_token": 0.001,
        "draft_step_s": {"eagle3": 0.002},
        "draft_round_s": {},
        "other_s": 0.001,
        "other_s_per_sequence": 0.0,
        "hazards": {"eagle3": {"default": hazards}},
        "proposal_rate": {},
        "noise_sd": 0.01,
    }
    return SimulatedTruth(**{**values, **kwargs})


def run(sweep, plan_of, truth, configs=(EAGLE,), **kwargs):
    backend = SimulatedBackend(truth=truth, seed=7)
    plan = plan_of(backend, configs, sampling=LONG, **kwargs)
    return plan, sweep(plan, backend)


def measured(store, plan, config, batch_size):
    cell = next(cell for cell in plan.cells if cell.batch_size == batch_size)
    blocks = store.blocks(plan.point(config, cell, 0).point_id).values()
    steps = pooled_steps([request for block in blocks for request in block.requests])
    totals = round_tpot([turn for block in blocks for turn in block.rounds], batch_size)
    return steps, totals, store.surface()[config.label, cell]


@pytest.mark.parametrize("batch_size", [1, 2, 16])
def test_theory_predicts_the_declared_and_the_measured_speedup(batch_size, sweep, plan_of):
    """Calibrated times and measured acceptance give the speedup of the declared truth, which is also
    the measured ratio of times per token."""
    plan, store = run(sweep, plan_of, truth_of(), batch_sizes=(batch_size,))
    _, off, off_times = measured(store, plan, OFF, batch_size)
    steps, arm, times = measured(store, plan, EAGLE, batch_size)
    off_s, arm_s = ROUND_SECONDS[batch_size]

    predicted = general_speedup(
        acceptance_length(steps), off_times.total_s, times.draft_s, times.verify_s, times.other_s
    )

    declared = 1.77 * off_s / arm_s
    assert declared == pytest.approx(predicted, rel=0.05)
    assert declared == pytest.approx(off.round_tpot_s / arm.round_tpot_s, rel=0.05)


def test_calibration_recovers_the_declared_seconds(sweep, plan_of):
    """Medians of noisy rounds are the declared draft, verify and other seconds within the noise."""
    plan, store = run(sweep, plan_of, truth_of())

    _, _, times = measured(store, plan, EAGLE, 1)

    assert times.draft_s == pytest.approx(0.006, rel=0.02)
    assert times.verify_s == pytest.approx(0.023, rel=0.02)
    assert times.other_s == pytest.approx(0.001, rel=0.02)


def test_rounds_without_noise_cost_exactly_the_declared_seconds(sweep, plan_of):
    """With noise off the mean full-batch round is the declared sum to the last digit."""
    plan, store = run(sweep, plan_of, truth_of(noise_sd=0.0), batch_sizes=(2,))

    assert measured(store, plan, OFF, 2)[1].total_s == pytest.approx(0.023, abs=1e-12)
    assert measured(store, plan, EAGLE, 2)[1].total_s == pytest.approx(0.035, abs=1e-12)


def test_acceptance_recovers_the_declared_hazards(sweep, plan_of):
    """Conditional acceptance by depth is what was declared, and so is their acceptance length.

    Accepted drafts have a standard deviation of 0.93 a step; 3 standard errors of 1300 steps are 0.08.
    """
    plan, store = run(sweep, plan_of, truth_of())

    steps, _, _ = measured(store, plan, EAGLE, 1)

    assert acceptance_length(steps) == pytest.approx(1.77, abs=0.08)
    assert conditional_acceptance(survival(steps, 3)) == pytest.approx((0.5, 0.4, 0.35), abs=0.08)
    assert tau_from_hazards((0.5, 0.4, 0.35)) == pytest.approx(1.77)


def test_speedup_of_mixed_categories_with_short_outputs_is_the_steady_one(sweep, plan_of, workload_of):
    """Code always accepts its draft and chat never: 16 tokens after the first take 8 and 16 steps, so 8
    sequences each emit 256 tokens in 192 steps, 4/3 a step. A round of K=1 at batch 16 costs 0.002 +
    0.050 + 0.016 + 0.001 = 0.069 against 0.051: 0.986x. While all 16 run, 1.5 a step would say 1.11x."""
    config = SpecConfig.chain("eagle3", 1)
    truth = replace(truth_of(), hazards={"eagle3": {"default": (0.5,), "code": (1.0,), "chat": (0.0,)}})
    backend = SimulatedBackend(truth=truth, seed=7)
    plan = plan_of(
        backend,
        (config,),
        workload=workload_of(("chat", "code"), each=8),
        batch_sizes=(16,),
        sampling=Sampling(max_tokens=17, ignore_eos=True),
    )

    cell = summarize(sweep(plan, backend)).cells[0]

    told = cell.arm(config)
    assert told.rounds.tokens_per_sequence == pytest.approx(4 / 3)
    assert told.speedup.value == pytest.approx(4 / 3 * 0.051 / 0.069, rel=0.01)
    assert cell.break_even(told) == pytest.approx(0.069 / 0.051, rel=0.01)


def test_alpha_recovers_a_constant_hazard(sweep, plan_of):
    """One declared probability at every depth is what the censored estimate finds."""
    plan, store = run(sweep, plan_of, truth_of(hazards=(0.6,)))

    steps, _, _ = measured(store, plan, EAGLE, 1)

    assert censored_alpha(steps) == pytest.approx(0.6, abs=0.04)


def test_break_even_agrees_with_which_arm_is_faster(sweep, plan_of):
    """At batch 16 a round costs 0.105 / 0.051 = 2.06 plain ones, more than the 1.77 tokens it gives."""
    plan, store = run(sweep, plan_of, truth_of(), batch_sizes=(1, 16))
    needed, faster = {}, {}
    for batch_size in (1, 16):
        _, off, off_times = measured(store, plan, OFF, batch_size)
        _, arm, times = measured(store, plan, EAGLE, batch_size)
        needed[batch_size] = break_even_acceptance_length(
            off_times.total_s, times.draft_s, times.verify_s, times.other_s
        )
        faster[batch_size] = arm.round_tpot_s < off.round_tpot_s

    assert needed == {1: pytest.approx(30 / 21, rel=0.02), 16: pytest.approx(105 / 51, rel=0.02)}
    assert faster == {1: True, 16: False}


def test_tree_accepts_the_declared_gain_over_a_chain(sweep, plan_of):
    """Breadth (7-1)/3 = 2 at a gain of 0.2 turns 0.5 into 1 - 0.5·0.8 = 0.6, 0.4 into 0.52 and 0.35 into
    0.48: 1 + 0.6 + 0.312 + 0.14976 = 2.06176 tokens."""
    tree = SpecConfig(method="eagle3", num_steps=3, topk=4, num_draft_tokens=7)
    plan, store = run(sweep, plan_of, truth_of(tree_gain=0.2), configs=(tree,))

    steps, _, _ = measured(store, plan, tree, 1)

    assert acceptance_length(steps) == pytest.approx(2.06176, abs=0.1)


def test_categories_recover_their_own_acceptance(sweep, plan_of):
    """Code declared at 0.8 and chat at 0.2 with K=1 give 1.8 and 1.2 tokens a step."""
    config = SpecConfig.chain("eagle3", 1)
    truth = replace(truth_of(), hazards={"eagle3": {"default": (0.5,), "code": (0.8,), "chat": (0.2,)}})
    plan, store = run(sweep, plan_of, truth, configs=(config,))
    blocks = store.blocks(plan.point(config, plan.cells[0], 0).point_id).values()
    requests = [request for block in blocks for request in block.requests]

    lengths = {
        category: acceptance_length(pooled_steps([r for r in requests if r.category == category]))
        for category in ("code", "chat")
    }

    assert lengths == {"code": pytest.approx(1.8, abs=0.06), "chat": pytest.approx(1.2, abs=0.06)}

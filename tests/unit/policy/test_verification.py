"""Which loads would show a policy wrong, and what samples of them say."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from spectune.policy.file import policy_schema
from spectune.policy.table import build_policy
from spectune.policy.verification import (
    Verification,
    document,
    unfinished,
    unmeasured_places,
    verify,
    with_router_advice,
    with_verification,
)
from spectune.policy.verify_loads import arms_of, mixed, ramp, steady, steady_sizes
from spectune.records import SpecConfig
from spectune.records.policy_load import LoadPart, LoadSample

K1, K3 = SpecConfig.chain("eagle3", 1), SpecConfig.chain("eagle3", 3)


@pytest.fixture
def policy(make):
    """K=3 up to batch 4, off from 5 on."""
    cells = [
        make.compare(make.cell(size), make.arm(K3, speedup))
        for size, speedup in ((1, 1.5), (4, 1.2), (5, 0.9), (16, 0.6))
    ]
    return build_policy(
        cells,
        (),
        run_name="run",
        fingerprint=make.fingerprint(),
        contexts={cell.cell: (20, 300) for cell in cells},
    )


# Loads ---------------------------------------------------------------------------------------------


def test_loads_lie_below_at_and_above_every_edge(policy):
    """The edge is batch 5: 4, 5 and 6 are served, with 1, the largest, and what is asked for."""
    assert steady_sizes(policy, 16) == (1, 4, 5, 6, 16)
    assert steady_sizes(policy, 16, (8, 99)) == (1, 4, 5, 6, 8, 16)
    assert steady_sizes(policy, 4) == (1, 4)


def test_arms_are_off_the_policy_and_every_configuration(policy):
    """Category cells are not served: nobody asks by category there."""
    assert [arm.label for arm in arms_of(policy, [K1, K3])] == ["off", "policy", "eagle3 K=3", "eagle3 K=1"]


@pytest.mark.parametrize(
    ("top", "levels"), [(32, [1, 2, 4, 8, 16, 32, 16, 8, 4, 2, 1]), (5, [1, 2, 4, 5, 4, 2, 1])]
)
def test_ramp_goes_up_and_down(top, levels):
    """Levels double up to the top and come back, each as long as one generation of its requests."""
    load = ramp(top, 10)

    assert [level for level, _ in load.levels] == levels
    assert load.num_requests == sum(levels)
    assert [load.limit(tokens) for tokens in (0, 9, 10, 29, 30)] == [1, 1, 2, 2, 4]
    assert load.limit(10**6) == 1


def test_mixed_load_crosses_the_edges(policy):
    """Most of its stays are just below or at an edge, and the same seed gives the same load."""
    levels = [level for level, _ in mixed(policy, 16, 8).levels]

    assert sum(level in (4, 5) for level in levels) >= len(levels) // 2
    assert mixed(policy, 16, 8) == mixed(policy, 16, 8)


def test_steady_load_refills_its_slots():
    """Two generations of requests, so that the load is held while some end; one of a large batch."""
    assert (steady(4, 8).num_requests, steady(1, 8).num_requests, steady(16, 8).num_requests) == (8, 4, 16)


# Verdicts ------------------------------------------------------------------------------------------


def samples(
    times: dict[str, dict[str, float]], *, spread: float = 0.01, repeats: int = 4
) -> list[LoadSample]:
    """Seconds per token by load and arm; repeats differ by `spread` in each arm's own way."""
    found = []
    for load, by_arm in times.items():
        for number, (arm, tpot_s) in enumerate(by_arm.items()):
            for repeat in range(repeats):
                wobble = 1 + spread * ((repeat + number) % 2 - 0.5)
                found.append(
                    LoadSample(
                        load=load, arm=arm, repeat=repeat, seconds=1.0, num_tokens=10, tpot_s=tpot_s * wobble
                    )
                )
    return found


def cell(batch: list[int | None], label: str) -> dict[str, Any]:
    """A cell of a policy for all categories, as far as verification reads it."""
    return {"batch": batch, "category": None, "config": "off" if label == "off" else {"method": label}}


GOOD = {
    "batch 1": {"off": 1.0, "policy": 0.71, "eagle3 K=3": 0.70},
    "batch 16": {"off": 1.0, "policy": 1.01, "eagle3 K=3": 1.7},
}


def test_policy_near_the_best_of_each_load_is_kept():
    """1.41x of off alone where static K=3 gives 1.43x, 0.99x of off in a batch where K=3 gives 0.59x."""
    found = verify(samples(GOOD))

    assert (found.verdict, found.reasons, found.advice) == ("kept", (), None)
    assert [load.best_static for load in found.loads] == ["eagle3 K=3", "off"]
    assert found.loads[0].over_off.value == pytest.approx(1 / 0.71, rel=0.02)


def test_policy_that_collapses_at_an_edge_is_withdrawn_with_static_advice():
    """232 tokens a second of either static choice, 24 of the policy: it goes, and what to do instead stays."""
    times = {
        "batch 4": {"off": 1 / 232, "policy": 1 / 236, "eagle3 K=2": 1 / 240},
        "batch 5": {"off": 1 / 232, "policy": 1 / 24, "eagle3 K=2": 1 / 231},
    }

    found = verify(samples(times))

    assert found.verdict == "withdrawn"
    assert "batch 5: 0.10x" in found.reasons[0]
    assert found.advice is not None
    assert found.advice.startswith("serve eagle3 K=2 at every load: 1.01x of off")


def test_withdrawn_policy_without_a_sound_static_choice_advises_off():
    """K=2 falls to half somewhere, so nothing that speculates is advised."""
    times = {
        "batch 1": {"off": 1.0, "policy": 0.8, "eagle3 K=2": 0.7},
        "batch 9": {"off": 1.0, "policy": 1.4, "eagle3 K=2": 2.0},
    }

    found = verify(samples(times))

    assert found.verdict == "withdrawn"
    assert (
        found.advice == "serve without speculation: no configuration holds up at every load that was served"
    )


def test_policy_that_loses_only_while_it_is_off_is_left_to_a_router():
    """K=1 gains 25% at batch 2; off at batch 3 costs 7% in a server that can speculate and nothing elsewhere."""
    times = {
        "batch 2": {"off": 1.0, "policy": 0.8, "eagle3 K=1": 0.8},
        "batch 3": {"off": 1.0, "policy": 1.07, "eagle3 K=1": 1.04},
    }
    cells = [cell([1, 2], "eagle3 K=1"), cell([3, None], "off")]

    found = with_router_advice({"cells": cells}, verify(samples(times, spread=0.002)))

    assert found.verdict == "withdrawn"
    assert found.behind_router == (2,)
    assert found.advice is not None
    assert "the gain at batch 2 stays (spectune policy emit --engine router)" in found.advice


def test_gain_behind_a_router_is_in_the_policy_file(policy):
    """The sizes stand beside verdict and advice, within the published schema."""
    found = replace(verify(samples(GOOD)), verdict="withdrawn", advice="two servers", behind_router=(1, 2))

    kept = with_verification(policy, found, "vllm")

    jsonschema.Draft202012Validator(policy_schema()).validate(kept)
    assert kept["verification"]["behind_router"] == [1, 2]


def test_policy_that_loses_while_it_speculates_is_left_to_nobody():
    """K=1 that runs at 0.8 where the policy asks for it loses behind a router as well."""
    times = {
        "batch 2": {"off": 1.0, "policy": 0.8, "eagle3 K=1": 0.8},
        "batch 3": {"off": 1.0, "policy": 1.25, "eagle3 K=1": 1.25},
    }

    found = with_router_advice(
        {"cells": [cell([1, None], "eagle3 K=1")]}, verify(samples(times, spread=0.002))
    )

    assert found.verdict == "withdrawn"
    assert found.behind_router == ()


@pytest.mark.parametrize(("seconds", "verdict"), [(0.76, "withdrawn"), (0.72, "kept")])
def test_policy_may_be_five_percent_behind_the_best_static_choice(seconds, verdict):
    """Faster than off by a quarter and more, 8% or 3% behind K=2 throughout."""
    found = verify(samples({"batch 2": {"off": 1.0, "policy": seconds, "eagle3 K=2": 0.70}}, spread=0.002))

    assert found.verdict == verdict
    if verdict == "withdrawn":
        assert "of eagle3 K=2 throughout, the best static choice, at least 0.95 is asked" in found.reasons[0]
        assert found.advice is not None
        assert found.advice.startswith("serve eagle3 K=2 at every load: 1.43x of off")


def test_policy_slower_than_true_off_is_withdrawn():
    """3% below an engine that cannot speculate, clearly: standby is not free."""
    found = verify(samples({"batch 16": {"off": 1.0, "policy": 1.03, "eagle3 K=3": 2.0}}, spread=0.002))

    assert found.verdict == "withdrawn"
    assert "of an engine without speculation, at least 0.98 is asked" in found.reasons[0]


def test_policy_whose_loss_lies_in_the_noise_is_inconclusive():
    """A value below the limit with an interval beyond 1 neither keeps nor withdraws."""
    found = verify(samples({"batch 16": {"off": 1.0, "policy": 1.04, "eagle3 K=3": 2.0}}, spread=0.2))

    assert found.verdict == "inconclusive"
    assert "within the noise" in found.reasons[0]


def test_nothing_measured_is_inconclusive():
    """No samples, no verdict."""
    assert verify([]).verdict == "inconclusive"


def test_small_batches_of_a_ramp_are_judged_by_themselves():
    """A policy that wins over the ramp and loses in its quiet half is seen."""

    def part(size, seconds, emitted):
        return LoadPart(batch_size=size, config="x", num_rounds=10, seconds=seconds, num_emitted=emitted)

    found = verify(
        [
            LoadSample(
                load="ramp", arm=arm, repeat=repeat, seconds=seconds, num_tokens=100, tpot_s=None, parts=parts
            )
            for repeat in range(4)
            for arm, seconds, parts in (
                ("off", 3.0 + 0.01 * repeat, (part(2, 1.0, 20), part(8, 2.0, 80))),
                ("policy", 2.9, (part(2, 1.5, 20), part(8, 1.4, 80))),
            )
        ],
        parts_up_to=4,
    )

    assert [(load.load, load.verdict) for load in found.loads] == [
        ("ramp", "kept"),
        ("ramp, rounds of at most 4", "withdrawn"),
    ]


def test_quiet_rounds_are_compared_at_equal_batch_sizes():
    """1 s a token alone and 3 s in fours for every arm: level, whatever share of its rounds an arm ran alone."""

    def parts(alone, in_fours):
        return (
            LoadPart(batch_size=1, config="x", num_rounds=1, seconds=1.0 * alone, num_emitted=alone),
            LoadPart(
                batch_size=4, config="x", num_rounds=1, seconds=3.0 * in_fours, num_emitted=4 * in_fours
            ),
        )

    found = verify(
        [
            LoadSample(
                load="ramp", arm=arm, repeat=0, seconds=1.0, num_tokens=1, tpot_s=None, parts=parts(*tokens)
            )
            for arm, tokens in (("off", (10, 10)), ("policy", (2, 18)), ("eagle3 K=1", (18, 2)))
        ],
        parts_up_to=4,
    )

    quiet = found.loads[1]
    assert quiet.over_off is not None
    assert quiet.over_off.value == pytest.approx(1.0)
    assert dict(quiet.statics)["eagle3 K=1"].value == pytest.approx(1.0)


def test_switch_cost_is_told_in_plain_rounds():
    """0.3 s over two switches, plain rounds of 0.1 s: 1.5 rounds each."""
    plain = LoadPart(batch_size=1, config="off", num_rounds=10, seconds=1.0, num_emitted=10)
    found = verify(
        [
            LoadSample(
                load="r", arm="off", repeat=0, seconds=1.0, num_tokens=10, tpot_s=None, parts=(plain,)
            ),
            LoadSample(
                load="r",
                arm="policy",
                repeat=0,
                seconds=1.0,
                num_tokens=10,
                tpot_s=None,
                num_switches=2,
                switch_s=0.3,
            ),
        ]
    )

    assert found.switch_cost_rounds == pytest.approx(1.5)


def test_switch_cost_is_in_plain_rounds_of_the_load_that_switched():
    """0.3 s over two switches in a load of 0.1 s rounds; rounds of 1 s in another load say nothing of it."""
    samples = [
        LoadSample(
            load=load, arm="off", repeat=0, seconds=1.0, num_tokens=10, tpot_s=None,
            parts=(LoadPart(batch_size=1, config="off", num_rounds=10, seconds=seconds, num_emitted=10),),
        )
        for load, seconds in (("r", 1.0), ("large", 10.0))
    ]  # fmt: skip
    samples.append(
        LoadSample(
            load="r", arm="policy", repeat=0, seconds=1.0, num_tokens=10, tpot_s=None, num_switches=2,
            switch_s=0.3,
        )
    )  # fmt: skip

    assert verify(samples).switch_cost_rounds == pytest.approx(1.5)


def test_a_part_of_the_runs_cannot_keep_a_policy(policy):
    """Kept by what was served so far: open until all is; withdrawn stays withdrawn."""
    found = Verification(verdict="kept", loads=(), reasons=(), advice=None, switch_cost_rounds=None)
    lost = replace(found, verdict="withdrawn", reasons=("batch 1: lost",))

    assert (unfinished(found).verdict, unfinished(found).reasons) == (
        "inconclusive",
        ("not all runs are done",),
    )
    assert unfinished(lost) == lost


def test_policy_carries_its_verification(policy):
    """The file with the verdict fits the published schema, the document is strict JSON."""
    found = verify(samples(GOOD))
    kept = json.loads(json.dumps(with_verification(policy, found, "reference"), allow_nan=False))

    jsonschema.Draft202012Validator(policy_schema()).validate(kept)

    assert kept["verification"] == {"verdict": "kept", "engine": "reference", "reasons": [], "advice": None}
    assert json.loads(json.dumps(document(found), allow_nan=False))["loads"][0]["over_off"]["num_runs"] == 4


def test_loads_that_were_lost_without_a_measurement_are_named(make):
    """Off at batch 2 and 3 is inferred from 1 and 4: losing there asks for a sweep, losing at 4 does not."""
    cells = [make.compare(make.cell(1), make.arm(K3, 1.5)), make.compare(make.cell(4), make.arm(K3, 0.8))]
    policy = build_policy(
        cells, (), run_name="run", fingerprint=make.fingerprint(), contexts={c.cell: (20, 300) for c in cells}
    )
    lost = {"off": 1.0, "policy": 1.0, "eagle3 K=3": 0.7}

    found = verify(samples({"batch 2": lost, "batch 4": lost, "mixed": lost}))

    assert unmeasured_places(policy, found) == (2,)


def test_sample_survives_json():
    """What is on disk is what was measured."""
    part = LoadPart(batch_size=1, config="off", num_rounds=1, seconds=0.5, num_emitted=1)
    sample = LoadSample(load="r", arm="off", repeat=0, seconds=1.0, num_tokens=2, tpot_s=0.5, parts=(part,))

    assert LoadSample.from_dict(json.loads(json.dumps(sample.to_dict()))) == sample

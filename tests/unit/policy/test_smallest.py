"""Fewer edges for a stated loss, and how long a switch waits at an edge."""

from __future__ import annotations

import itertools
import json
import random

import jsonschema
import pytest

from spectune.policy.deadband import MAX_ROUNDS, patience_of, rounds_to_wait
from spectune.policy.file import load_policy, policy_schema
from spectune.policy.smallest import Option, fewest_edges
from spectune.policy.table import build_policy, choose
from spectune.records import Interval, SpecConfig

OFF = SpecConfig.off()
K1, K3, K5 = (SpecConfig.chain("eagle3", k) for k in (1, 3, 5))


def options(**values):
    """off at 1 and the named chains at their speedups."""
    named = {"k1": K1, "k3": K3, "k5": K5}
    return {OFF: Option(config=OFF, value=1.0)} | {
        named[name]: Option(config=named[name], value=value) for name, value in values.items()
    }


PLACES = [
    options(k1=1.30, k3=1.50, k5=1.52),
    options(k1=1.25, k3=1.31),
    options(k1=1.22, k3=1.23),
    options(k1=1.03),
]
CHOSEN = [K5, K3, K1, OFF]


@pytest.mark.parametrize(
    ("max_loss", "expected"),
    [
        (0.0, (K5, K3, K3, OFF)),  # 1.23 loses nothing against the 1.22 that was chosen for its size
        (0.02, (K3, K3, K3, OFF)),  # 1.50 of 1.52 and all of 1.22: one edge instead of three
        (0.35, (OFF, OFF, OFF, OFF)),  # off is within a third of 1.52, and has no edge at all
    ],
)
def test_table_has_the_fewest_edges_within_the_loss(max_loss, expected):
    """What a place gives up is at most the stated share of its own decision's speedup."""
    assert fewest_edges(CHOSEN, PLACES, max_loss=max_loss) == expected


def test_table_equals_enumeration_on_random_places():
    """Fewest edges, then least time lost, as trying all tables finds them."""
    chance = random.Random(3)
    for _ in range(60):
        places, chosen = [], []
        for _ in range(5):
            known = options(**{name: chance.uniform(1.0, 1.6) for name in ("k1", "k3", "k5")})
            places.append(known)
            chosen.append(chance.choice(list(known)))
        loss = chance.choice([0.02, 0.1, 0.3])

        def cost(path, places=places, chosen=chosen):
            edges = sum(a != b for a, b in itertools.pairwise(path))
            pairs = zip(path, chosen, places, strict=True)
            return edges, round(sum(max(0.0, k[own].value / k[c].value - 1) for c, own, k in pairs), 12)

        allowed = [
            [c for c in known if c == own or (own != OFF and known[c].value >= (1 - loss) * known[own].value)]
            for own, known in zip(chosen, places, strict=True)
        ]
        expected = min(cost(path) for path in itertools.product(*allowed))

        assert cost(fewest_edges(chosen, places, max_loss=loss)) == expected


def test_non_monotone_table_is_kept():
    """Off alone, on together: what pays only in a batch stays on there and off below."""
    places = [options(k3=0.9), options(k3=1.4), options(k3=0.8)]

    assert fewest_edges([OFF, K3, OFF], places, max_loss=0.05) == (OFF, K3, OFF)


def build(make, cells, **kwargs):
    return build_policy(
        cells,
        (),
        run_name="run",
        fingerprint=make.fingerprint(),
        contexts={cell.cell: (20, 300) for cell in cells},
        **kwargs,
    )


def test_policy_says_what_an_edge_saved_costs(make):
    """A place that runs its neighbour's configuration names both and the allowed loss."""
    cells = [
        make.compare(make.cell(1), make.arm(K3, 1.50), make.arm(K5, 1.52)),
        make.compare(make.cell(2), make.arm(K3, 1.40), make.arm(K5, 1.20)),
    ]
    policy = build(make, cells, max_loss=0.02)

    assert [choose(policy, size, 100, None, 0.0) for size in (1, 2)] == [K3, K3]
    assert policy["max_loss"] == 0.02
    assert "eagle3 K=5 (1.52x) was the decision there" in policy["cells"][0]["source"]
    jsonschema.Draft202012Validator(policy_schema()).validate(json.loads(json.dumps(policy)))
    assert load_policy(json.loads(json.dumps(policy))) == policy


def test_place_without_data_is_off_and_says_so(make):
    """A broken cell between two that speculate does not take their word."""
    broken = make.compare(make.cell(4), plain=make.plain_arm(rounds=None))
    cells = [
        make.compare(make.cell(1), make.arm(K3, 1.5)),
        broken,
        make.compare(make.cell(8), make.arm(K3, 1.3)),
    ]
    policy = build(make, cells)
    place = next(cell for cell in policy["cells"] if cell["batch"][0] == 4)

    assert [choose(policy, size, 100, None, 0.0).num_steps for size in (1, 2, 4, 6, 8)] == [3, 0, 0, 0, 3]
    assert place["config"] == "off"
    assert "no data at batch 4" in place["source"]
    assert policy["validity"]["batch"] == [1, 8]


def test_policy_carries_standby_costs(make):
    """An engine that may speculate and does not is 5% slower: 1 / 0.952 of the time."""
    standby = make.arm(
        SpecConfig.chain("eagle3", 3, options=(("standby", True),)),
        Interval(value=0.952, low=0.94, high=0.97, n=8),
    )
    cell = make.compare(make.cell(1), make.arm(K3, 1.5))
    object.__setattr__(cell, "standby", (standby,))

    (told,) = build(make, [cell])["standby"]

    assert told["cost"] == pytest.approx(1.0504, abs=1e-4)
    assert told["cost_ci"] == pytest.approx([1 / 0.97, 1 / 0.94])


# The deadband --------------------------------------------------------------------------------------


def test_switch_to_more_waits_until_the_loss_has_paid_for_it(make):
    """On at 1.50x +- 0.02 against off: at least 1 - 1/1.48 = 32% of a round is lost by staying off, so a
    price of two rounds is lost in 7."""
    cell = make.compare(make.cell(1), make.arm(K3, 1.5))

    assert rounds_to_wait(OFF, K3, cell, switch_cost_rounds=2.0) == 7
    assert rounds_to_wait(OFF, K3, cell, switch_cost_rounds=0.0) == 1
    assert rounds_to_wait(K3, OFF, cell, switch_cost_rounds=2.0) == 1


def test_switch_between_what_is_not_known_apart_waits_longest(make):
    """Wide intervals and unknown configurations wait as long as any switch does."""
    cell = make.compare(
        make.cell(1), make.arm(K1, make.interval(1.2, 0.1)), make.arm(K3, make.interval(1.25, 0.1))
    )

    assert rounds_to_wait(K1, K3, cell, switch_cost_rounds=1.0) == MAX_ROUNDS
    assert rounds_to_wait(K1, K5, cell, switch_cost_rounds=1.0) == MAX_ROUNDS


def test_wider_interval_waits_longer(make):
    """The same difference, known less well, is acted on later."""
    waits = [
        rounds_to_wait(
            OFF,
            K3,
            make.compare(make.cell(1), make.arm(K3, make.interval(1.5, half))),
            switch_cost_rounds=2.0,
        )
        for half in (0.02, 0.2, 0.4)
    ]

    assert waits == sorted(waits)
    assert waits[0] < waits[-1]


def test_deadband_of_a_policy_names_both_directions(make):
    """Leaving speculation is immediate, returning to it waits; the price says whether it was measured."""
    cells = [make.compare(make.cell(1), make.arm(K3, 1.5)), make.compare(make.cell(4), make.arm(K3, 0.8))]

    assumed, measured = build(make, cells), build(make, cells, switch_cost_rounds=2.0)

    assert assumed["deadband"]["is_assumed"]
    assert not measured["deadband"]["is_assumed"]
    assert patience_of(measured) == {("eagle3 K=3", "off"): 1, ("off", "eagle3 K=3"): 7}

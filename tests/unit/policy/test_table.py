"""The neutral policy: building, reading, choosing."""

from __future__ import annotations

import json
from dataclasses import replace

import jsonschema
import pytest

from spectune.errors import NotComparable, UsageError
from spectune.policy.chooser import PolicyChooser
from spectune.policy.file import check_validity, load_policy, policy_schema
from spectune.policy.table import build_policy, choose


def build(make, cells, categories=(), *, contexts=None, fingerprint=None):
    seen = contexts or {cell.cell: (20, 300) for cell in cells}
    return build_policy(
        cells,
        categories,
        run_name="run",
        fingerprint=fingerprint or make.fingerprint(),
        contexts=seen,
        workload={"name": "chat", "digest": "d"},
    )


@pytest.fixture
def policy(make):
    """K=5 at batch 1, K=3 at batch 4, off at batch 16."""
    return build(
        make,
        [
            make.compare(make.cell(1), make.arm(make.chain(5), 1.8)),
            make.compare(make.cell(4), make.arm(make.chain(3), 1.4)),
            make.compare(make.cell(16), make.arm(make.chain(3), 0.8)),
        ],
    )


@pytest.mark.parametrize(
    ("batch_size", "depth"), [(1, 5), (2, 3), (4, 3), (5, 0), (15, 0), (16, 0), (1000, 0)]
)
def test_choose_follows_the_measured_batch_sizes(policy, batch_size, depth):
    """Measured sizes get their decision, gaps the smaller one, everything above off."""
    assert choose(policy, batch_size, 100, None, 0.0).num_steps == depth


def test_policy_conforms_to_its_published_schema(policy):
    """What is built validates against policy.schema.json and survives JSON."""
    copy = json.loads(json.dumps(policy, allow_nan=False))

    jsonschema.Draft202012Validator(policy_schema()).validate(copy)

    assert load_policy(copy) == policy


def test_policy_states_the_context_it_is_valid_for(policy):
    """One measured context: cells and validity say so, and longer contexts fall back to off."""
    assert policy["validity"]["context_tokens"] == [0, 300]
    assert choose(policy, 1, 300, None, 0.0).num_steps == 5
    assert choose(policy, 1, 301, None, 0.0).is_off


def test_policy_with_two_contexts_has_both_axes(make):
    """Speculation pays at short context and loses at 185k tokens at the same batch size."""
    short, long = make.cell(1, 0), make.cell(1, 185_000)
    policy = build(
        make,
        [make.compare(short, make.arm(make.chain(3), 1.5)), make.compare(long, make.arm(make.chain(3), 0.8))],
        contexts={short: (20, 400), long: (185_020, 185_400)},
    )

    chosen = [choose(policy, 1, tokens, None, 0.0).num_steps for tokens in (100, 400, 50_000, 185_100)]

    assert chosen == [3, 3, 0, 0]


def test_policy_holds_a_temperature_only_where_it_was_measured(make):
    """Between T=0 (K=5) and T=1 (K=2) the smaller holds, above T=1 the fallback."""
    policy = build(
        make,
        [
            make.compare(make.cell(1, 0, 0.0), make.arm(make.chain(5), 1.8)),
            make.compare(make.cell(1, 0, 1.0), make.arm(make.chain(2), 1.2)),
        ],
    )

    chosen = [choose(policy, 1, 100, None, t).num_steps for t in (0.0, 0.6, 1.0, 1.2)]

    assert chosen == [5, 2, 2, 0]


def test_choose_takes_the_smallest_where_a_coordinate_is_unknown(make):
    """Without a temperature the most cautious of the measured ones decides."""
    policy = build(
        make,
        [
            make.compare(make.cell(1, 0, 0.0), make.arm(make.chain(5), 1.8)),
            make.compare(make.cell(1, 0, 1.0), make.arm(make.chain(2), 1.2)),
        ],
    )

    assert choose(policy, 1, 100).num_steps == 2


def test_policy_gives_a_category_cells_where_it_clearly_differs(make):
    """Prose loses where the mix gains: prose is off, others and the mix keep K=3."""
    cell = make.cell()
    prose = make.compare(cell, make.arm(make.chain(3), 0.8), scope="prose")
    code = make.compare(cell, make.arm(make.chain(3), 1.9), scope="code")
    policy = build(make, [make.compare(cell, make.arm(make.chain(3), 1.5))], [prose, code])

    chosen = [choose(policy, 1, 100, name, 0.0).num_steps for name in ("prose", "code", None)]

    assert chosen == [0, 3, 3]
    assert {cell["category"] for cell in policy["cells"]} == {"prose", None}


def test_policy_cell_carries_speedup_interval_steps_and_source(policy):
    """A measured cell says what it rests on; a gap claims nothing."""
    first, gap = policy["cells"][0], policy["cells"][1]

    assert (first["batch"], first["speedup"], first["num_steps"]) == ([1, 1], 1.8, 100)
    assert first["speedup_ci"] == pytest.approx([1.78, 1.82])
    assert first["source"].startswith("run: measured at batch 1")
    assert (gap["batch"], gap["speedup"], gap["num_steps"]) == ([2, 3], None, 0)
    assert "not measured" in gap["source"]


def test_policy_of_a_run_without_data_is_absent(make):
    """No baseline anywhere, no policy."""
    assert build(make, [make.compare(make.cell(), plain=make.plain_arm(rounds=None))]) is None


def test_policy_measured_at_another_tensor_parallel_size_is_refused(make, policy):
    """A head that helps on one GPU may not help on four: TP is part of the validity."""
    four = make.fingerprint(settings={"tensor_parallel_size": 4})

    with pytest.raises(NotComparable, match="tensor_parallel_size 1 against 4"):
        check_validity(policy, four)

    check_validity(policy, make.fingerprint())


def test_policy_for_another_target_is_refused(make, policy):
    """Every model of the policy must be the one that is served."""
    with pytest.raises(NotComparable, match="target 'org/target' against 'org/other'"):
        check_validity(policy, replace(make.fingerprint(), target="org/other"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "other"}, "not a spectune policy"),
        ({"schema_version": 99}, "schema_version 99"),
        ({"extra": 1}, "unknown keys extra"),
        ({"cells": [{"batch": [1, 2]}]}, r"cells\[0\]: missing"),
    ],
)
def test_load_policy_names_what_is_wrong(policy, change, message):
    """A damaged policy file is refused with the place of the damage."""
    with pytest.raises(UsageError, match=message):
        load_policy({**policy, **change}, origin="policy.json")


def test_load_policy_refuses_a_reversed_range(policy):
    """A range runs upwards."""
    cells = [{**policy["cells"][0], "batch": [4, 1]}]

    with pytest.raises(UsageError, match=r"cells\[0\].batch"):
        load_policy({**policy, "cells": cells})


def test_chooser_runs_the_table(policy):
    """The engine's chooser answers as the evaluator does."""
    chooser = PolicyChooser(policy, temperature=0.0)

    depths = [
        chooser.choose(batch_size=b, context_tokens=100, acceptance_ema=None).num_steps for b in (1, 4, 16)
    ]

    assert depths == [5, 3, 0]


def test_chooser_with_patience_does_not_flicker_at_an_edge(policy):
    """A batch size that crosses an edge for one round changes nothing; for two rounds it does."""
    chooser = PolicyChooser(policy, temperature=0.0, patience=2)

    depths = [
        chooser.choose(batch_size=b, context_tokens=100, acceptance_ema=None).num_steps
        for b in (1, 4, 1, 4, 4)
    ]

    assert depths == [5, 5, 5, 5, 3]

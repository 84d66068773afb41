"""Planning asks the backend what it can do and launches nothing."""

from __future__ import annotations

import pytest

from spectune.backend.simulated import SimulatedBackend
from spectune.errors import UsageError
from spectune.records import Capabilities, Cell, Prompt, SpecConfig
from spectune.tune.plan import plan_sweep
from spectune.workload.workload import Workload

OFF = SpecConfig.off()
CHAIN = SpecConfig.chain("eagle3", 2)
TREE = SpecConfig(method="eagle3", num_steps=3, topk=2, num_draft_tokens=6)

WORKLOAD = Workload(
    name="made",
    prompts=tuple(Prompt(prompt_id=str(i), category="chat", turns=(str(i),)) for i in range(6)),
    digest="d",
)


class Real(SimulatedBackend):
    """Says that it is not simulated and has no n-grams."""

    def capabilities(self):
        return Capabilities(name="real", methods=("off", "eagle3"), has_trees=True, has_rounds=True)

    def open(self, launch):
        raise AssertionError("planning must not launch")


def plan(backend, configs=(OFF, CHAIN), **kwargs):
    return plan_sweep(backend, WORKLOAD, configs, **{"batch_sizes": (1,), **kwargs})


def test_plan_crosses_cells_repeats_and_arms_off_first():
    """2 temperatures x 2 batches x 2 repeats x 2 arms; every point has an id of its own."""
    made = plan(SimulatedBackend(), batch_sizes=(1, 4), temperatures=(0, 1), repeats=2)

    assert len(made.points) == 16
    assert len({point.point_id for point in made.points}) == 16
    assert [point.config.label for point in made.points[:2]] == ["off", "eagle3 K=2"]
    assert {point.sampling.temperature for point in made.points} == {0.0, 1.0}
    assert made.num_requests == (6 + 16) * 2 * 2 * 2


def test_plan_adds_off_where_it_was_not_named():
    """Plain decoding is a candidate in every search."""
    assert plan(SimulatedBackend(), (CHAIN,)).configs == (OFF, CHAIN)


def test_plan_prunes_trees_on_a_backend_without_trees():
    """A tree point is not run as something else: it is left out with the reason."""
    made = plan(SimulatedBackend(has_trees=False), (OFF, CHAIN, TREE))

    assert made.configs == (OFF, CHAIN)
    assert made.pruned == (
        ("eagle3 D=3 k=2 N=6", "backend simulated verifies chains only, topk 2 is a tree"),
    )


def test_plan_prunes_batches_that_the_backend_cannot_hold():
    """A batch beyond the engine's limit is a reason, not a silent smaller batch."""
    made = plan(SimulatedBackend(max_batch_size=4), batch_sizes=(1, 8))

    assert made.cells == (Cell(batch_size=1, context_tokens=0, temperature=0.0),)
    assert made.pruned == (("batch 8, context 0, T=0", "backend simulated decodes at most 4 together"),)


def test_plan_eagle3_without_a_head_is_refused_before_any_launch():
    """A real engine needs the head, whether or not it offers the method; the error names the flag."""

    class Headless(Real):
        def capabilities(self):
            return Capabilities(name="real", methods=("off", "ngram"), has_trees=True, has_rounds=True)

    for backend in (Real(), Headless()):
        with pytest.raises(UsageError, match="--draft-model"):
            plan(backend, (CHAIN, SpecConfig.chain("ngram", 2)))


def test_plan_eagle3_with_a_head_is_accepted():
    """With a head the plan is made."""
    config = SpecConfig.chain("eagle3", 2, draft_model="heads/x")

    assert plan(Real(), (config,)).configs == (OFF, config)


def test_plan_of_nothing_but_pruned_trees_is_refused_with_the_first_reason():
    """A grid of which nothing is left to compare says why instead of measuring plain decoding alone."""
    pruned = (("eagle3 D=1 k=4 N=8", "needs 7 drafted nodes"), ("eagle3 D=2 k=4 N=32", "needs 31"))

    with pytest.raises(UsageError, match="eagle3 D=1 k=4 N=8: needs 7 drafted nodes"):
        plan(SimulatedBackend(), (OFF,), pruned=pruned)
    assert plan(SimulatedBackend(), (CHAIN,), pruned=pruned).configs == (OFF, CHAIN)


def test_plan_of_plain_decoding_alone_is_accepted():
    """`--method off` asks for no candidates, so none is missed."""
    assert plan(SimulatedBackend(), (OFF,)).configs == (OFF,)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param({"batch_sizes": ()}, "--batch-size", id="no-batch"),
        pytest.param({"batch_sizes": (0,)}, "--batch-size 0", id="batch-zero"),
        pytest.param({"temperatures": (-0.5,)}, "--temperature -0.5", id="negative-temperature"),
        pytest.param({"num_prompts": 0}, "--num-prompts 0", id="no-prompts"),
        pytest.param({"repeats": 0}, "--num-runs 0", id="no-repeats"),
        pytest.param({"context_tokens": (64,)}, "--context 64", id="no-context-text"),
        pytest.param({"configs": (SpecConfig.chain("ngram", 2),)}, "no method ngram", id="nothing-left"),
    ],
)
def test_plan_wrong_axis_names_flag_and_value(arguments, words):
    """Every mistake is a usage error before anything runs."""
    with pytest.raises(UsageError, match=words):
        plan(Real(), **arguments)

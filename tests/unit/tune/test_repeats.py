"""Prompts are not asked twice in a cell unless that is wanted."""

from __future__ import annotations

from typing import Any

import pytest

from spectune.backend import create_backend
from spectune.errors import UsageError
from spectune.records import Prompt, SpecConfig
from spectune.tune.manifest import num_repeated
from spectune.tune.plan import SweepPlan, plan_sweep
from spectune.tune.repeats import without_repeats
from spectune.workload.workload import Workload


def plan(count: int, **options: Any) -> SweepPlan:
    prompts = tuple(Prompt(prompt_id=str(i), category="x", turns=(str(i),)) for i in range(count))
    workload = Workload(name="w", prompts=prompts, digest="d" * 64)
    configs = [SpecConfig.off(), SpecConfig.chain("ngram", 3)]
    return plan_sweep(create_backend("simulated"), workload, configs, **options)


def test_cells_that_the_prompts_cannot_fill_are_left_out_with_the_numbers() -> None:
    """20 prompts fill four batches of 1 and of 4, not of 16: those need 64."""
    kept = without_repeats(plan(20, batch_sizes=(1, 4, 16), num_prompts=32))

    assert [cell.batch_size for cell in kept.cells] == [1, 4]
    assert ("64 prompts are needed and 20 are there; --repeat-prompts asks them again") == kept.pruned[0][1]
    assert num_repeated(kept) == 0


def test_requests_are_cut_to_whole_batches_of_prompts() -> None:
    """20 prompts in batches of 3: 18 requests, for 21 would ask one again."""
    kept = without_repeats(plan(20, batch_sizes=(3,), num_prompts=100))

    assert kept.num_prompts == 18
    assert kept.num_blocks(kept.cells[0]) == 6


def test_repeats_of_the_grid_share_the_prompts() -> None:
    """Two runs of a cell use different prompts, so each has half of them."""
    kept = without_repeats(plan(20, batch_sizes=(1,), num_prompts=20, repeats=2))

    assert kept.num_prompts == 10
    assert num_repeated(kept) == 0


def test_enough_prompts_leave_the_plan_alone() -> None:
    """With 64 prompts nothing changes."""
    asked = plan(64, batch_sizes=(1, 4, 16), num_prompts=32)

    assert without_repeats(asked) == asked


def test_no_cell_left_is_an_error_that_names_the_flag() -> None:
    """Three prompts cannot fill four batches."""
    with pytest.raises(UsageError, match="4 prompts are needed and 3 are there") as raised:
        without_repeats(plan(3, batch_sizes=(1,)))

    assert "--repeat-prompts" in (raised.value.hint or "")


def test_repeated_requests_are_counted() -> None:
    """With repeats on, 64 requests on 20 prompts repeat 44."""
    assert num_repeated(plan(20, batch_sizes=(16,), num_prompts=32)) == 44

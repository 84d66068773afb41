"""The search over engine settings: nothing twice, failures remembered, the model's answer first."""

from __future__ import annotations

from pathlib import Path

import pytest

from spectune.errors import EngineFailure, UsageError
from spectune.tune.knobs import parse_knobs
from spectune.tune.search import Knob, Values, combinations, exhaustive, random_search, search

CHUNKS = Knob(name="prefill_chunk", values=(64, 128, 256, 512))
KERNELS = Knob(name="kernels", values=("auto", "plain"))


class Engine:
    """Scores a combination and counts how often it was asked."""

    def __init__(self, broken: tuple[Values, ...] = ()) -> None:
        self.asked: list[Values] = []
        self.broken = broken

    def __call__(self, values: Values) -> float:
        self.asked.append(values)
        if values in self.broken:
            raise EngineFailure("it died")
        known = dict(values)
        return int(known["prefill_chunk"]) / 512 + (known["kernels"] == "auto")


def test_search_of_a_small_space_tries_everything_once_and_says_so() -> None:
    """More trials than combinations: the search ends when the space is exhausted, without repeats."""
    engine = Engine()

    found = search([CHUNKS, KERNELS], engine, num_trials=50, seed=1)

    assert found.end == "exhausted"
    assert sorted(map(str, combinations([CHUNKS, KERNELS]))) == sorted(map(str, engine.asked))
    assert found.best == exhaustive([CHUNKS, KERNELS], Engine()).best


def test_search_starts_with_the_answer_of_the_model() -> None:
    """The first combination is the one that was given."""
    engine = Engine()

    search([CHUNKS, KERNELS], engine, num_trials=3, start={"prefill_chunk": 256, "kernels": "plain"}, seed=3)

    assert (("prefill_chunk", 256), ("kernels", "plain")) == engine.asked[0]
    assert len(engine.asked) == 3


def test_duplicate_values_are_one_combination() -> None:
    """A value that is given twice is tried once."""
    engine = Engine()

    found = search([Knob(name="prefill_chunk", values=(64, 64, 128)), KERNELS], engine, num_trials=50)

    assert found.num_combinations == 4
    assert len(engine.asked) == len(set(engine.asked)) == 4


def test_a_failed_combination_is_a_result_and_the_search_goes_on() -> None:
    """It has a reason in place of a score, and the best is another one."""
    broken = (("prefill_chunk", 512), ("kernels", "auto"))

    found = search([CHUNKS, KERNELS], Engine((broken,)), num_trials=50, seed=2)

    failed = [one for one in found.tried if one.failure is not None]
    assert [(broken, "it died")] == [(one.values, one.failure) for one in failed]
    assert found.best is not None
    assert found.best.values == (("prefill_chunk", 256), ("kernels", "auto"))


def test_a_stored_search_goes_on_where_it_ended_and_keeps_failures(tmp_path: Path) -> None:
    """The second start measures only what is missing; a failed combination is not tried again."""
    storage = f"sqlite:///{tmp_path / 'study.db'}"
    broken = (("prefill_chunk", 64), ("kernels", "auto"))
    first, second, third = Engine((broken,)), Engine(), Engine()
    start = dict(broken)
    search([CHUNKS, KERNELS], first, num_trials=3, storage=storage, start=start)

    found = search([CHUNKS, KERNELS], second, num_trials=50, storage=storage)

    assert not set(first.asked) & set(second.asked)
    assert len(first.asked) + len(second.asked) == 8
    assert [one.values for one in found.tried if one.failure] == [broken]
    search([CHUNKS, KERNELS], third, num_trials=50, storage=storage, retry_failed=True)
    assert [broken] == third.asked


def test_random_search_draws_without_replacement() -> None:
    """As many different combinations as trials, and all of them at most."""
    engine = Engine()

    found = random_search([CHUNKS, KERNELS], engine, num_trials=20, seed=5)

    assert found.end == "exhausted"
    assert len(set(engine.asked)) == len(engine.asked) == 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("prefill_chunk", "not NAME=VALUE", id="no-values"),
        pytest.param("speed=1:2", "no such setting", id="unknown"),
    ],
)
def test_knobs_that_cannot_be_used_are_named(text: str, message: str) -> None:
    """The flag is quoted with what is wrong about it."""
    with pytest.raises(UsageError, match=message):
        parse_knobs([text], "reference")


def test_knob_values_keep_their_types() -> None:
    """Numbers are numbers, words are words, repeats are dropped."""
    knobs = parse_knobs(["prefill_chunk=128:512:128", "kernels=auto:plain"], "reference")

    assert [Knob(name="prefill_chunk", values=(128, 512)), KERNELS] == list(knobs)

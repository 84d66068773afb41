"""Optuna for engine settings that the model does not know: batch limits, chunk sizes, vocabularies of drafts.

The first trial is the model's answer. A combination is measured once: a sampler that suggests it again is
told the known value, and the search ends when nothing is left to try. The only module that knows Optuna.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spectune.errors import SpectuneError, UsageError
from spectune.records import OPTION

Values = tuple[tuple[str, OPTION], ...]
"""One value for each knob, in the order of the knobs."""

Evaluate = Callable[[Values], float]
"""Larger is better; raises SpectuneError or MemoryError for a combination that cannot run."""

MOST_REPEATS = 20
"""Known suggestions in a row after which an untried combination is drawn at random."""

REASON = "reason"


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """A setting and the values that are allowed."""

    name: str
    values: tuple[OPTION, ...]

    def __post_init__(self) -> None:
        if len(set(self.values)) < 1:
            raise UsageError(
                f"--knob {self.name} has no values", hint="for example --knob prefill_chunk=128:512"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """One combination: its score, or why it has none."""

    values: Values
    score: float | None
    failure: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """All combinations that were tried, in order; `end` says why no more: exhausted, trials."""

    tried: tuple[Tried, ...]
    end: str
    num_combinations: int

    @property
    def best(self) -> Tried | None:
        done = [one for one in self.tried if one.score is not None]
        return max(done, key=lambda one: one.score or -math.inf) if done else None


def combinations(knobs: Sequence[Knob]) -> list[Values]:
    """Every combination once."""
    names = [knob.name for knob in knobs]
    values = itertools.product(*(dict.fromkeys(knob.values) for knob in knobs))
    return [tuple(zip(names, combination, strict=True)) for combination in values]


def exhaustive(knobs: Sequence[Knob], evaluate: Evaluate) -> SearchResult:
    """Every combination: what a search is judged by."""
    tried = tuple(_measure(values, evaluate) for values in combinations(knobs))
    return SearchResult(tried=tried, end="exhausted", num_combinations=len(tried))


def random_search(
    knobs: Sequence[Knob], evaluate: Evaluate, *, num_trials: int, seed: int = 0
) -> SearchResult:
    """Combinations in random order, none twice."""
    order = combinations(knobs)
    random.Random(seed).shuffle(order)
    tried = tuple(_measure(values, evaluate) for values in order[:num_trials])
    end = "exhausted" if len(tried) == len(order) else "trials"
    return SearchResult(tried=tried, end=end, num_combinations=len(order))


def search(
    knobs: Sequence[Knob],
    evaluate: Evaluate,
    *,
    num_trials: int,
    seed: int = 0,
    start: Mapping[str, OPTION] | None = None,
    storage: str | None = None,
    study_name: str = "spectune",
    retry_failed: bool = False,
) -> SearchResult:
    """Tree-structured Parzen estimator over the knobs.

    Args:
        num_trials: combinations to measure, those that the storage holds already included.
        start: the model's answer, measured first.
        storage: Optuna's address of a study, for example sqlite:///study.db; several workers may share it
            and a search goes on where it ended.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    whole = combinations(knobs)
    study = optuna.create_study(
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=min(5, max(1, num_trials // 3))),
        storage=storage,
        study_name=study_name,
        load_if_exists=True,
    )
    space: dict[str, optuna.distributions.BaseDistribution] = {
        knob.name: optuna.distributions.CategoricalDistribution(tuple(dict.fromkeys(knob.values)))
        for knob in knobs
    }
    if start:
        study.enqueue_trial(dict(start), skip_if_exists=True)
    known = _known(study, knobs, retry_failed=retry_failed)
    repeats = 0
    chance = random.Random(seed)
    while len(known) < min(num_trials, len(whole)):
        if repeats >= MOST_REPEATS:
            left = [values for values in whole if values not in known]
            study.enqueue_trial(dict(chance.choice(left)))
            repeats = 0
        trial = study.ask(space)
        values: Values = tuple((knob.name, trial.params[knob.name]) for knob in knobs)
        # what other workers have found meanwhile counts as well
        known = {**_known(study, knobs, retry_failed=retry_failed), **known}
        if values in known:
            repeats += 1
            _tell(study, trial, known[values])
            continue
        repeats = 0
        known[values] = _measure(values, evaluate)
        _tell(study, trial, known[values])
    end = "exhausted" if len(known) == len(whole) else "trials"
    return SearchResult(tried=tuple(known.values()), end=end, num_combinations=len(whole))


def _measure(values: Values, evaluate: Evaluate) -> Tried:
    try:
        return Tried(values=values, score=evaluate(values))
    # the last two: a value that the engine cannot take
    except (SpectuneError, MemoryError, ValueError, TypeError) as error:
        text = str(error).strip().splitlines()
        return Tried(values=values, score=None, failure=text[0] if text else type(error).__name__)


def _tell(study: Any, trial: Any, tried: Tried) -> None:
    import optuna

    if tried.score is None:
        trial.set_user_attr(REASON, tried.failure)
        study.tell(trial, state=optuna.trial.TrialState.FAIL)
    else:
        study.tell(trial, tried.score)


def _known(study: Any, knobs: Sequence[Knob], *, retry_failed: bool) -> dict[Values, Tried]:
    """What the study holds of this space; failed combinations are known too, unless they are tried again."""
    found: dict[Values, Tried] = {}
    for trial in study.get_trials(deepcopy=False):
        if set(trial.params) != {knob.name for knob in knobs}:
            continue
        values: Values = tuple((knob.name, trial.params[knob.name]) for knob in knobs)
        if trial.value is not None:
            found[values] = Tried(values=values, score=trial.value)
        elif not retry_failed and trial.state.name == "FAIL" and values not in found:
            found[values] = Tried(values=values, score=None, failure=trial.user_attrs.get(REASON))
    return found

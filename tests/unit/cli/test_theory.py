"""Calculators: numbers worked out by hand, with the formula beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Spectune = Callable[..., Any]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        pytest.param(
            [
                "speedup",
                "--alpha",
                "0.5",
                "--num-tokens",
                "2",
                "--draft-cost",
                "0.25",
                "--verify-cost",
                "1.25",
            ],
            {"tokens per step": 1.75, "ideal speedup": 1.75 / 1.5, "speedup": 1.0},
            id="speedup-from-alpha",
        ),
        pytest.param(
            ["speedup", "--acceptance-length", "3", "--num-tokens", "5", "--draft-cost", "0.1"],
            {"speedup": 2.0},
            id="speedup-from-acceptance-length",
        ),
        pytest.param(
            ["break-even", "--plain-ms", "20", "--draft-ms", "6", "--verify-ms", "24"],
            {"break-even acceptance length": 1.5},
            id="break-even-length",
        ),
        pytest.param(
            [
                *("break-even", "--plain-ms", "11", "--draft-ms", "2", "--verify-ms", "12"),
                *("--acceptance-length", "1.5", "--per-token-ms", "1", "--num-tokens", "2"),
            ],
            {"break-even batch": 2.0},
            id="break-even-batch",
        ),
        pytest.param(
            ["optimal-k", "--alpha", "0", "--draft-cost", "0.1"],
            {"optimal K": 0, "ideal speedup": 1.0},
            id="never-accepted-means-off",
        ),
        pytest.param(
            [
                *("floor", "--weight-gb", "10", "--kv-gb", "2", "--bandwidth-gb-s", "1000"),
                *("--acceptance-length", "2", "--measured-ms", "24"),
            ],
            {"floor of a round, ms": 12.0, "floor of a token, ms": 6.0, "bandwidth share": 0.5},
            id="floor",
        ),
        pytest.param(
            [
                *("cost", "--usd-per-gpu-hour", "3.6", "--tokens-per-s", "1000", "--speedup", "2"),
                *("--training-gpu-hours", "100"),
            ],
            {"USD per Mtok, plain": 1.0, "USD saved per Mtok": 0.5, "plain GPU hours to break even": 200.0},
            id="cost",
        ),
    ],
)
def test_theory_known_numbers_are_recovered(
    spectune: Spectune, argv: list[str], expected: dict[str, Any]
) -> None:
    """Each calculator gives the number worked out by hand and states its formula."""
    document = spectune("theory", *argv, "--json").document

    assert pytest.approx(expected) == {name: document["results"][name] for name in expected}
    assert set(expected) <= set(document["formulas"])


def test_theory_text_shows_formula_and_number(spectune: Spectune) -> None:
    """Without --json a person reads the formula next to the number."""
    answer = spectune("theory", "floor", "--weight-gb", "10", "--bandwidth-gb-s", "1000")

    assert "floor of a round, ms = 10    (weights + keys and values read) / bandwidth" in answer.out


def test_theory_head_that_never_pays_says_never(spectune: Spectune) -> None:
    """A head that does not make serving faster never pays for itself."""
    answer = spectune(
        *("theory", "cost", "--usd-per-gpu-hour", "1", "--tokens-per-s", "100"),
        *("--speedup", "0.9", "--training-gpu-hours", "10"),
    )

    assert "plain GPU hours to break even = never" in answer.out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["speedup", "--num-tokens", "2", "--draft-cost", "0.1"], "give either --alpha or"),
        (["speedup", "--alpha", "1.2", "--num-tokens", "2", "--draft-cost", "0.1"], "1.2"),
        (
            ["cost", "--usd-per-gpu-hour", "1", "--tokens-per-s", "1", "--training-gpu-hours", "1"],
            "--speedup",
        ),
    ],
    ids=["nothing-to-go-by", "alpha-above-one", "training-without-speedup"],
)
def test_theory_impossible_input_is_refused(spectune: Spectune, argv: list[str], message: str) -> None:
    """What cannot be calculated is a usage error that names the input."""
    answer = spectune("theory", *argv)

    assert (2, "") == (answer.code, answer.out)
    assert message in answer.err

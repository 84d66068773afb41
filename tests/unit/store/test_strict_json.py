"""Values of results become JSON that every reader accepts, or are refused by name."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path

import numpy as np
import pytest

from spectune.errors import StoreError
from spectune.records import Interval, Status
from spectune.store import dump_strict


class Colour(Enum):
    RED = "red"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        pytest.param(np.float32(0.5), 0.5, id="numpy-float"),
        pytest.param(np.int64(3), 3, id="numpy-int"),
        pytest.param(np.bool_(True), True, id="numpy-bool"),
        pytest.param(np.array([[1, 2]]), [[1, 2]], id="numpy-array"),
        pytest.param(Path("a") / "b", "a/b", id="path"),
        pytest.param(datetime(2026, 1, 2, tzinfo=UTC), "2026-01-02T00:00:00+00:00", id="datetime"),
        pytest.param(Colour.RED, "red", id="enum"),
        pytest.param(Status.OOM, "oom", id="string-enum"),
        pytest.param((1, (2, None)), [1, [2, None]], id="tuples"),
        pytest.param({"b", "a"}, ["a", "b"], id="set"),
        pytest.param(True, True, id="bool"),
        pytest.param(
            Interval(value=1.5, low=None, high=None, n=1),
            {"value": 1.5, "low": None, "high": None, "n": 1, "level": 0.95},
            id="record",
        ),
        pytest.param({Colour.RED: 1, 4: 2}, {"red": 1, "4": 2}, id="keys"),
    ],
)
def test_dump_value_of_a_result_becomes_plain_json(value, expected):
    """Types that results are made of are written as what they mean."""
    assert {"x": expected} == json.loads(dump_strict({"x": value}))


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), -float("inf"), np.float64("nan"), np.array([0.0, float("nan")])],
    ids=["nan", "inf", "minus-inf", "numpy-nan", "nan-in-array"],
)
def test_dump_number_that_json_lacks_is_refused_by_its_key(value):
    """NaN and infinity never reach a file, and the message says where they stood."""
    with pytest.raises(StoreError, match=r"summary\.cells\[1\]\.speedup"):
        dump_strict({"cells": [{}, {"speedup": value}]}, where="summary")


def test_dump_unknown_type_is_refused_by_its_key():
    """A type without a meaning in JSON is not turned into its repr."""
    with pytest.raises(StoreError, match=r"value\.x is a object"):
        dump_strict({"x": object()})

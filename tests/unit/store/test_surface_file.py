"""time-surface.json: what is written is read, and what is damaged is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spectune.errors import StoreError
from spectune.records import SpecConfig
from spectune.store.surface import (
    SURFACE_FILE,
    HeldOut,
    Line,
    SurfacePoint,
    TimeSurface,
    read_surface,
    write_surface,
)

POINT = SurfacePoint(
    batch_size=4,
    config=SpecConfig.chain("ngram", 2, options=(("prompt_lookup_max", 5),)),
    kv_tokens=400.0,
    commit_tokens=1.5,
    num_rounds=8,
    draft_s=0.001,
    verify_s=0.02,
    other_s=0.0005,
)
LINE = Line(
    part="verify",
    family="target",
    batch_size=4,
    base_s={1: 0.01, 3: 0.02},
    buckets={1: 0, 3: 1},
    kv_s={0: 1e-6, 1: 2e-6},
)
SURFACE = TimeSurface(
    fingerprint={"target": "toy"},
    provenance={},
    source="rounds",
    points=(POINT,),
    lines=(LINE,),
    held_out=HeldOut(num_points=1, median=0.01, p95=0.02, rms=0.012),
    drift=-0.01,
    duration_s=3.0,
)


def test_a_surface_comes_back_as_it_was(tmp_path: Path) -> None:
    """Integer keys and an open range of contexts survive JSON."""
    write_surface(tmp_path / SURFACE_FILE, SURFACE)

    assert read_surface(tmp_path) == SURFACE
    assert read_surface(tmp_path / SURFACE_FILE) == SURFACE


def test_the_error_of_times_is_the_held_out_one() -> None:
    """And never claimed to be nothing."""
    assert SURFACE.time_error == 0.012


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(lambda data: data.update(surface_version=9), "version 9", id="another-version"),
        pytest.param(lambda data: data.pop("lines"), "damaged", id="a-part-is-missing"),
        pytest.param(lambda data: data["points"][0].update(speed=1), "damaged", id="an-unknown-key"),
    ],
)
def test_a_surface_that_cannot_be_read_is_named(tmp_path: Path, change, message: str) -> None:
    """With the file and what to do."""
    file = tmp_path / SURFACE_FILE
    write_surface(file, SURFACE)
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))

    with pytest.raises(StoreError, match=message) as caught:
        read_surface(tmp_path)

    assert str(file) in caught.value.message


def test_a_missing_surface_says_how_to_make_one(tmp_path: Path) -> None:
    """The hint is the command."""
    with pytest.raises(StoreError) as caught:
        read_surface(tmp_path)

    assert "spectune profile" in str(caught.value.hint)

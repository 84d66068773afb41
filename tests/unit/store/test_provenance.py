"""Where a run came from, in values that JSON can hold."""

from __future__ import annotations

import json
from datetime import UTC, datetime

from spectune.provenance import collect
from spectune.store import dump_strict


def test_collect_names_argv_date_machine_and_versions():
    """A reader can tell when, where and with what a run was made."""
    found = collect(["spectune", "sweep"], now=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC))

    assert found["argv"] == ["spectune", "sweep"]
    assert found["date"] == "2026-01-02T03:04:05+00:00"
    assert found["machine"]["cores"] >= 1
    assert "numpy" in found["packages"]
    assert found == json.loads(dump_strict(found))


def test_collect_keeps_thread_settings_and_no_other_environment(monkeypatch):
    """Thread counts matter to a result; anything else in the environment stays private."""
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("SOME_TOKEN", "secret")

    text = dump_strict(collect([]))

    assert json.loads(text)["environment"]["OMP_NUM_THREADS"] == "3"
    assert "secret" not in text

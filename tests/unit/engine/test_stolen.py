"""Reading what a hypervisor took from this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from spectune.engine.stolen import StolenTime, nothing_stolen

LINE = "cpu  2032089 451 197310 1422929 8127 0 1708 {steal} 0 0\ncpu0 1016044 225 98655 711464 4063 0 854 1\n"


def test_stolen_seconds_are_the_ticks_of_all_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1,250 ticks of 10 ms are 12.5 s, and a counter that rises is read anew."""
    monkeypatch.setattr("os.sysconf", lambda name: 100)
    stat = tmp_path / "stat"
    stat.write_text(LINE.format(steal=1250))
    stolen = StolenTime(stat)

    assert stolen() == 12.5
    with stat.open("r+") as file:
        file.write(LINE.format(steal=1251))
    assert stolen() == 12.51
    stolen.close()
    assert stolen() == 0.0


@pytest.mark.parametrize("text", [None, "", "cpu 1 2 3", LINE.format(steal=0)])
def test_machines_that_do_not_tell_or_are_not_shared_have_nothing_stolen(
    text: str | None, tmp_path: Path
) -> None:
    """No counters, other counters, or none that ever rose: 0.0, and no file stays open."""
    stat = tmp_path / "stat"
    if text is not None:
        stat.write_text(text)

    assert StolenTime(stat)() == nothing_stolen() == 0.0

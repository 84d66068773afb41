"""Facts and page of a device's measurement, from a document written by hand."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from spectune.report.gpu_page import render_gpu
from spectune.report.gpu_rows import RoundFacts, break_even, facts_of
from spectune.store.gpu_run import GpuDocument
from tests.support.gpu_document import check_row, round_row, speculative_row


def one(document: GpuDocument, part: str, *, is_off: bool, batch_size: int = 1) -> RoundFacts:
    """The facts of a row that is not of passes alone."""
    return next(
        facts
        for facts in facts_of(document)
        if facts.row.part == part
        and facts.row.config.is_off == is_off
        and facts.row.batch_size == batch_size
        and not facts.row.is_pass_alone
    )


def test_bandwidth_share_is_bytes_over_time_and_bandwidth(document: GpuDocument) -> None:
    """17 GB in 5 ms are 3.4 TB/s: 85% of a sheet's 4 TB/s, all of the 3.4 TB/s that were measured."""
    facts = one(document, "mbu", is_off=True)

    assert 0.85 == pytest.approx(facts.mbu)
    assert 1.0 == pytest.approx(facts.read_share)
    assert 0.04 == pytest.approx(facts.other_share)
    assert facts.speedup is None


def test_speedup_is_measured_predicted_and_split(document: GpuDocument) -> None:
    """350 against 200 tokens/s is 1.75; 2.5 · 5 / 7 is predicted; the parts add up to the measured one."""
    facts = one(document, "rounds", is_off=False)

    assert 1.75 == facts.speedup
    assert 12.5 / 7 == pytest.approx(facts.predicted_speedup)
    assert math.log(1.75) == pytest.approx(math.fsum(gain for _, gain in facts.waterfall))
    assert math.log(2.5) == pytest.approx(dict(facts.waterfall)["acceptance"])


def test_speculative_rounds_have_no_bandwidth_share(document: GpuDocument) -> None:
    """Their bytes are not those of plain decoding."""
    facts = one(document, "rounds", is_off=False)

    assert (None, None) == (facts.mbu, facts.read_share)


def test_a_round_faster_than_its_bytes_is_suspect(document: GpuDocument) -> None:
    """17 GB at 4 TB/s take 4.25 ms; 3 ms are not to be believed, nor is an acceptance length of 5 at K=3."""
    document.add(round_row(round_s=3e-3))
    document.add(speculative_row(part="rounds", acceptance_length=5.0))

    assert "under the 4.250 ms" in str(one(document, "mbu", is_off=True).impossible)
    assert "above min(N, D+1) = 4" in str(one(document, "rounds", is_off=False).impossible)


def test_break_even_is_the_last_batch_before_the_first_loss(document: GpuDocument) -> None:
    """Gains at 1 and 64, a loss at 256; a line that never loses says so."""
    document.add(round_row(part="crossover", context_tokens=2048))
    document.add(speculative_row(part="crossover", context_tokens=2048))
    document.add(round_row(part="crossover", context_tokens=8192))
    document.add(speculative_row(part="crossover", context_tokens=8192, tokens_per_s=100.0))

    assert [
        ("llama-8b", "eagle3 K=3, AL 2.5", 512, 64, True),
        ("llama-8b", "eagle3 K=3, AL 2.5", 2048, 1, False),
        ("llama-8b", "eagle3 K=3, AL 2.5", 8192, None, True),
    ] == break_even(facts_of(document))


def test_unsettled_rounds_are_marked(document: GpuDocument) -> None:
    """A last third 8% slower than the first had not settled."""
    document.add(round_row(drift=1.08))

    assert one(document, "mbu", is_off=True).unsettled
    assert not one(document, "rounds", is_off=True).unsettled


def test_page_holds_charts_tables_and_what_is_missing(document: GpuDocument) -> None:
    """MBU, waterfall and crossover are drawn, skipped shapes are told, nothing is loaded from elsewhere."""
    text = render_gpu(document, "run")

    for name in ("gpu-mbu", "gpu-waterfall-0", "gpu-crossover-0"):
        assert f'id="chart-{name}"' in text
    for words in (
        "1 of 1 checks hold", "85% of the data sheet bandwidth", "needs 275.0 GB", "1 of 140 rows",
        "Neither draft nor verification: 4.0% to 7.1% of a round",
    ):  # fmt: skip
        assert words in text
    assert "REHEARSAL" not in text
    assert [] == re.findall(r"(?:src|href)=\"(?!#)[^\"]*\"", text)


def test_page_of_a_rehearsal_says_so_everywhere(document: GpuDocument) -> None:
    """Title, banner and every chart carry the mark."""
    text = render_gpu(replace(document, is_rehearsal=True), "run")

    assert "<title>REHEARSAL: run" in text
    assert "toy models on a CPU, no GPU was run" in text
    assert text.count('<figure class="chart"') == text.count('<span class="sim-tag">REHEARSAL</span>')


def test_page_of_a_failed_check_counts_nothing(document: GpuDocument) -> None:
    """Fast and wrong is wrong."""
    document.add(check_row(num_different=1))

    text = render_gpu(document, "run")

    assert "0 of 1 checks hold; 1 do not, so nothing below counts" in text
    assert "DOES NOT HOLD" in text


def test_page_of_nothing_stands(document: GpuDocument) -> None:
    """A call that broke off at once still has a page."""
    empty = replace(document, checks={}, rounds={}, parts={})

    assert "not measured" in render_gpu(empty, "run")


def test_page_without_a_data_sheet_uses_what_was_measured(document: GpuDocument) -> None:
    """An unknown device has no MBU, only the share of its measured bandwidth."""
    unknown = replace(document, device=replace(document.device, sheet_bandwidth_bytes_per_s=None))

    text = render_gpu(unknown, "run")

    assert "100% of the measured read bandwidth" in text
    assert "no data sheet of this device is known" in text

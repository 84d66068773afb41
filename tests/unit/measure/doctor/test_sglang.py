"""SGLang launch lines: what does not start, and what starts as something else."""

from __future__ import annotations

import shlex

import pytest

from spectune.measure.doctor.launch import check_launch

TRIPLE = "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
LIMIT = "--max-running-requests 64"


def findings(text: str) -> list[tuple[str, str]]:
    """(severity, text) of everything that is said of a line."""
    return [(str(finding.severity), finding.text) for finding in check_launch("sglang", shlex.split(text))]


def test_sound_line_has_no_finding() -> None:
    """All three numbers, the head and the limit: nothing to say, whichever spelling of the head's flag."""
    for flag in ("--speculative-draft-model-path", "--speculative-draft-model"):
        assert findings(f"--speculative-algorithm EAGLE3 {flag} h {TRIPLE} {LIMIT}") == []


def test_head_that_is_missing_is_an_error_before_any_gpu_work() -> None:
    """SGLang loads the target twice and ends."""
    (found,) = findings(f"--speculative-algorithm EAGLE3 {TRIPLE} {LIMIT}")

    assert found == ("error", "algorithm EAGLE3 without --speculative-draft-model-path")


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (f"--speculative-algorithm NGRAM {TRIPLE}", "algorithm NGRAM"),
        (
            "--speculative-algorithm EAGLE3 --speculative-draft-model h --speculative-num-steps 3 "
            "--speculative-eagle-topk 2 --speculative-num-draft-tokens 6",
            "trees (topk 2)",
        ),
        (
            f"--speculative-algorithm EAGLE3 --speculative-draft-model h {TRIPLE} --enable-dp-attention",
            "--enable-dp-attention",
        ),
    ],
)
def test_adaptive_that_is_ignored_is_a_warning(line: str, what: str) -> None:
    """SGLang says it once in its log and runs the static configuration."""
    found = findings(f"{line} {LIMIT} --speculative-adaptive")

    assert ("warning", f"--speculative-adaptive does not work with {what}") in found


@pytest.mark.parametrize("algorithm", ["NGRAM", "STANDALONE"])
def test_attention_data_parallelism_without_eagle_is_an_error(algorithm: str) -> None:
    """Both are refused at the start."""
    found = findings(
        f"--speculative-algorithm {algorithm} --speculative-draft-model d {TRIPLE} {LIMIT} --enable-dp-attention"
    )

    assert ("error", f"algorithm {algorithm} does not run with --enable-dp-attention") in found

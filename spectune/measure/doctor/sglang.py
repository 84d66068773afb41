"""SGLang's speculative flags against its rules; version 0.5.23 was read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from spectune.measure.doctor.findings import Finding, error, warning
from spectune.measure.doctor.flags import REFUSED_AT_START, as_whole
from spectune.measure.doctor.names import RENAMED_FLAGS, SGLANG_ALGORITHMS, SGLANG_FLAGS, closest
from spectune.records.config import chain_or_tree_pool

_TREE_BACKENDS = ("flashinfer", "fa3", "triton")


def check_sglang(flags: Mapping[str, str | None]) -> Iterator[Finding]:
    """Findings about the speculative flags of an SGLang launch line."""
    for flag in flags:
        if (
            flag.startswith("speculative-")
            and flag not in SGLANG_FLAGS
            and flag not in RENAMED_FLAGS["sglang"]
        ):
            guess = closest(flag, SGLANG_FLAGS)
            yield error(
                "flags",
                f"SGLang has no flag --{flag}",
                signature="unrecognized arguments, the engine does not start",
                fix=f"use --{guess}" if guess else "remove it",
            )
    algorithm = flags.get("speculative-algorithm")
    if algorithm is None:
        return
    if algorithm.upper() not in SGLANG_ALGORITHMS:
        yield error(
            "launch",
            f"SGLang has no algorithm {algorithm}",
            signature=REFUSED_AT_START,
            fix=f"one of {', '.join(SGLANG_ALGORITHMS)}",
        )
    draft = flags.get("speculative-draft-model-path") or flags.get("speculative-draft-model")
    if algorithm.upper() in ("EAGLE3", "STANDALONE") and not draft:
        yield error(
            "launch",
            f"algorithm {algorithm} without --speculative-draft-model-path",
            signature="the target is loaded twice, then a crash",
            fix="name the head with --speculative-draft-model-path",
        )
    if algorithm.upper() in ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE"):
        yield from check_triple(
            *(flags.get(f"speculative-{name}") for name in ("num-steps", "eagle-topk", "num-draft-tokens"))
        )
    yield from _sglang_tree(flags)
    yield from _sglang_adaptive(flags, algorithm.upper())
    if algorithm.upper() in ("STANDALONE", "NGRAM") and "enable-dp-attention" in flags:
        yield error(
            "launch",
            f"algorithm {algorithm} does not run with --enable-dp-attention",
            signature=REFUSED_AT_START,
            fix="leave --enable-dp-attention out, or use EAGLE3",
        )
    if flags.get("max-running-requests") is None:
        yield warning(
            "admission",
            "--max-running-requests is not set: with speculation SGLang takes 48",
            signature="throughput stops growing at 48 requests, the others queue",
            fix="set it, to the same number in the plain and the speculative server",
        )


def check_triple(steps: Any, topk: Any, draft_tokens: Any) -> Iterator[Finding]:
    """num-steps, eagle-topk, num-draft-tokens: all three or none; the last one counts the root."""
    given = [steps, topk, draft_tokens]
    if all(value is None for value in given):
        return
    numbers = [as_whole(value) for value in given]
    if any(value is not None and (number is None or number < 1) for value, number in zip(given, numbers)):
        yield error(
            "triple",
            f"num-steps {steps}, eagle-topk {topk}, num-draft-tokens {draft_tokens}: need whole numbers from 1 on",
            signature=REFUSED_AT_START,
            fix="leave out --speculative-algorithm to switch speculation off",
        )
        return
    own_steps, own_topk, own_tokens = numbers
    if None in numbers:
        full = complete_triple(own_steps, own_topk, own_tokens)
        yield error(
            "triple",
            "of num-steps, eagle-topk and num-draft-tokens some are missing",
            signature="TypeError: a comparison with None at the start",
            fix=f"--speculative-num-steps {full[0]} --speculative-eagle-topk {full[1]} "
            f"--speculative-num-draft-tokens {full[2]}",
        )
        return
    assert own_steps is not None  # None in numbers was answered above
    assert own_topk is not None
    assert own_tokens is not None
    if own_topk == 1 and own_tokens != own_steps + 1:
        yield warning(
            "triple",
            f"a chain of {own_steps} steps verifies {own_steps + 1} tokens, the root included, not {own_tokens}",
            signature=f"SGLang runs {own_steps + 1} without a word",
            fix=f"--speculative-num-draft-tokens {own_steps + 1}",
        )
    pool = chain_or_tree_pool(own_steps, own_topk)
    if own_topk > 1 and own_tokens - 1 > pool:
        yield error(
            "triple",
            f"{own_tokens} verified tokens need {own_tokens - 1} drafted ones, {own_steps} steps of topk {own_topk} "
            f"draft {pool}",
            signature="a crash in topk at the first draft",
            fix=f"--speculative-num-draft-tokens {pool + 1} at most",
        )


def complete_triple(steps: int | None, topk: int | None, draft_tokens: int | None) -> tuple[int, int, int]:
    """All three numbers from those given: a chain unless a topk says otherwise."""
    topk = topk or 1
    if steps is None:
        steps = (
            3 if draft_tokens is None else max(1, draft_tokens - 1 if topk == 1 else min(3, draft_tokens - 1))
        )
    if draft_tokens is None:
        draft_tokens = steps + 1 if topk == 1 else min(chain_or_tree_pool(steps, topk), 4 * steps) + 1
    return steps, topk, draft_tokens


def _sglang_tree(flags: Mapping[str, str | None]) -> Iterator[Finding]:
    topk = as_whole(flags.get("speculative-eagle-topk")) or 1
    if topk == 1:
        return
    backend, page = flags.get("attention-backend"), as_whole(flags.get("page-size")) or 1
    if backend == "trtllm_mha" or (page > 1 and backend not in (None, *_TREE_BACKENDS)):
        yield error(
            "tree",
            f"trees (topk {topk}) do not run on attention backend {backend} with page size {page}",
            signature=REFUSED_AT_START,
            fix=f"topk 1, page size 1, or one of {', '.join(_TREE_BACKENDS)}",
        )


def _sglang_adaptive(flags: Mapping[str, str | None], algorithm: str) -> Iterator[Finding]:
    """What makes SGLang run the static configuration with one warning in its log."""
    if "speculative-adaptive" not in flags:
        return
    topk = as_whole(flags.get("speculative-eagle-topk")) or 1
    reasons = (
        (
            algorithm not in ("EAGLE", "EAGLE3", "NEXTN"),
            f"algorithm {algorithm}",
            "algorithm EAGLE or EAGLE3",
        ),
        (topk > 1, f"trees (topk {topk})", "topk 1, or two servers behind a router"),
        ("enable-dp-attention" in flags, "--enable-dp-attention", "leave it out, or set a static depth"),
        ("enable-two-batch-overlap" in flags, "--enable-two-batch-overlap", "leave it out"),
    )
    for holds, what, fix in reasons:
        if holds:
            yield warning(
                "adaptive",
                f"--speculative-adaptive does not work with {what}",
                signature="the static configuration runs, with one warning in the log",
                fix=fix,
            )

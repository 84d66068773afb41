"""Pairing of two arms."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spectune.policy.arms import summarize_arm
from spectune.policy.speedup import (
    paired_log_ratios,
    paired_speedup,
    round_log_ratios,
    with_speedup,
)
from spectune.records import BlockResult, StepRecord


def test_speedup_is_the_geometric_mean_over_common_blocks(make):
    """Ratios 2 and 8 on the two common blocks give 4; a block of one arm alone is left out."""
    off = make.arm_data(
        make.off, {(0, i): make.block(tpot_s=t, name=f"p{i}-0") for i, t in enumerate((2.0, 8.0, 5.0))}
    )
    arm = make.arm_data(make.chain(3), {(0, i): make.block(tpot_s=1.0, name=f"p{i}-0") for i in range(2)})

    speedup = paired_speedup(off, arm)

    assert speedup is not None
    assert (speedup.value, speedup.n) == (pytest.approx(4.0), 2)


def test_speedup_counts_repeats_of_the_same_prompts_as_one_cluster(make):
    """Two repeats of two prompts are two independent observations, not four."""
    keys = [(repeat, index) for repeat in range(2) for index in range(2)]
    off = make.arm_data(make.off, {k: make.block(tpot_s=2.0 + k[1], name=f"p{k[1]}-{k[0]}") for k in keys})
    arm = make.arm_data(make.chain(3), {k: make.block(tpot_s=1.0, name=f"p{k[1]}-{k[0]}") for k in keys})

    speedup = paired_speedup(off, arm)

    assert speedup is not None
    assert speedup.n == 2


def test_speedup_uses_decode_rounds_only(make):
    """A prefill round does not enter the time per token."""
    block = make.block(tpot_s=2.0, name="p0-0")
    prefill = make.block(tpot_s=50.0).rounds[0]
    slow = BlockResult(
        requests=block.requests,
        rounds=(*block.rounds, type(prefill)(**{**_fields(prefill), "kind": "prefill"})),
        duration_s=1.0,
    )
    fast = make.arm_data(make.chain(3), {(0, 0): make.block(tpot_s=1.0, name="p0-0")})

    pairs = paired_log_ratios(make.arm_data(make.off, {(0, 0): slow}), fast)

    assert [ratio for _, ratio in pairs] == [pytest.approx(0.6931471805599453)]


def test_round_ratios_do_not_ask_what_rounds_emit(make):
    """Rounds of 2 s against rounds of 4 s are a ratio of one half, whether those emit four tokens or one."""
    off = make.arm_data(make.off, {(0, i): make.block(tpot_s=2.0, name=f"p{i}-0") for i in range(2)})
    many = make.block(tpot_s=1.0, emitted=4, name="p0-0")
    one = make.block(tpot_s=4.0, emitted=1, name="p1-0")
    arm = make.arm_data(make.chain(3), {(0, 0): many, (0, 1): one})

    ratios = round_log_ratios(off, arm)

    assert ratios == [pytest.approx(-0.6931471805599453)] * 2


def test_round_ratios_are_not_moved_by_rounds_that_others_stretched(make):
    """One of four rounds that takes fifty times as long leaves the ratio of the others: one half."""
    off = make.arm_data(make.off, {(0, 0): make.block(tpot_s=2.0, name="p0-0")})
    calm = make.block(tpot_s=4.0, name="p0-0")
    usual = next(turn for turn in calm.rounds if turn.kind == "decode")
    stretched = type(usual)(**{**_fields(usual), "verify_s": 200.0})
    rounds = (usual, usual, usual, stretched)
    block = BlockResult(requests=calm.requests, rounds=rounds, duration_s=1.0)
    arm = make.arm_data(make.chain(3), {(0, 0): block})

    ratios = round_log_ratios(off, arm)

    assert ratios == [pytest.approx(-0.6931471805599453)]


def _fields(record):
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


def _told(make, off, arm, scope):
    whole = {data.config.label: summarize_arm(data) for data in (off, arm)}
    return with_speedup(summarize_arm(arm, scope), arm, off, whole)


def test_category_with_three_blocks_of_its_own_is_paired_directly(make):
    """Three prompts of a category alone in their blocks give an interval of their own."""
    categories = ("chat", "code", "chat", "code", "chat", "code")
    steps = make.steps([1], 3)
    off = make.arm_data(
        make.off,
        {(0, i): make.block(tpot_s=2.0, name=f"p{i}-0", category=c) for i, c in enumerate(categories)},
    )
    arm = make.arm_data(
        make.chain(3),
        {
            (0, i): make.block(tpot_s=1.0 if c == "code" else 4.0, name=f"p{i}-0", category=c, steps=steps)
            for i, c in enumerate(categories)
        },
    )

    told = _told(make, off, arm, "code")

    assert told.speedup_basis == "paired requests"
    assert told.speedup is not None
    assert (told.speedup.value, told.speedup.n) == (pytest.approx(2.0), 3)


def test_category_in_mixed_blocks_gets_pooled_round_time_over_what_its_steps_emit(make):
    """Plain 1 s, speculative round 2 s, 3 tokens a step in code and 1.5 in chat: 1.5x and 0.75x."""
    chat = make.request(make.steps([1, 0], 3), name="a-0", category="chat")
    code = make.request(make.steps([2, 2], 3), name="b-0", category="code")
    block = BlockResult(
        requests=(chat, code), rounds=make.block(tpot_s=1.0, emitted=2).rounds, duration_s=1.0
    )
    plain = BlockResult(
        requests=(
            make.request(make.steps([0], 0), name="a-0", category="chat"),
            make.request(make.steps([0], 0), name="b-0", category="code"),
        ),
        rounds=make.block(tpot_s=1.0, emitted=1).rounds,
        duration_s=1.0,
    )
    off, arm = make.arm_data(make.off, {(0, 0): plain}), make.arm_data(make.chain(3), {(0, 0): block})

    code_told, chat_told = _told(make, off, arm, "code"), _told(make, off, arm, "chat")

    assert {code_told.speedup_basis, chat_told.speedup_basis} == {"pooled round time"}
    assert code_told.speedup is not None
    assert chat_told.speedup is not None
    assert (code_told.speedup.value, chat_told.speedup.value) == (1.5, 0.75)
    assert code_told.speedup.low is None


def test_category_step_cut_by_the_length_counts_what_it_emits(make):
    """Steps of 3 tokens and of 2 where the limit cut the third: 2.5 tokens at a round of 2 s are 1.25x,
    though both accepted 2 drafts and the acceptance length is 3."""
    cut = StepRecord(num_proposed=2, num_verified=2, num_accepted=2, num_emitted=2, cut="length")
    requests = tuple(
        make.request(steps, name=name, category=category)
        for name, category, steps in (
            ("a-0", "chat", make.steps([1, 0], 2)),
            ("b-0", "code", (*make.steps([2], 2), cut)),
        )
    )
    plain = make.block(tpot_s=1.0).requests[0]
    off = make.arm_data(
        make.off,
        {
            (0, 0): BlockResult(
                requests=(plain, replace(plain, request_id="b-0", category="code")),
                rounds=make.block(tpot_s=1.0).rounds,
                duration_s=1.0,
            )
        },
    )
    rounds = make.block(tpot_s=1.0, emitted=2).rounds
    arm = make.arm_data(
        make.chain(2), {(0, 0): BlockResult(requests=requests, rounds=rounds, duration_s=1.0)}
    )

    told = _told(make, off, arm, "code")

    assert told.speedup is not None
    assert told.speedup.value == pytest.approx(1.25)
    assert told.acceptance is not None
    assert told.acceptance.acceptance_length == 3


def test_speedup_without_plain_decoding_is_absent(make):
    """Nothing to compare with gives no speedup."""
    arm = make.arm_data(make.chain(3), {(0, 0): make.block()})

    told = with_speedup(summarize_arm(arm), arm, None, {})

    assert told.speedup is None

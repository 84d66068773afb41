"""One start of both sides: what its log ratios are made of."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from spectune.gate.pairs import THROUGHPUT, TPOT, pair_start
from spectune.records import BlockResult, RoundRecord


@pytest.fixture
def timed(record):
    """Makes a block of one request whose rounds take the given ms; prefill takes 20 ms, the rest 5 ms."""

    def make(*round_ms: float) -> BlockResult:
        one = RoundRecord(
            kind="decode",
            batch_size=1,
            kv_tokens=10,
            config="eagle3 K=3",
            start_s=0.0,
            draft_s=0.0,
            verify_s=0.0,
            other_s=0.0,
            num_emitted=2,
        )
        rounds = [replace(one, verify_s=ms / 1000) for ms in round_ms]
        prefill = replace(one, kind="prefill", verify_s=0.020, num_emitted=1)
        return BlockResult(
            requests=(record("p0", [1] * len(round_ms)),),
            rounds=(prefill, *rounds),
            duration_s=0.025 + sum(round_ms) / 1000,
        )

    return make


def test_a_disturbed_block_does_not_move_the_ratio_of_equal_sides(timed):
    """One block of eight at four times the time, one round of another at ten times: log ratio 0."""
    calm, disturbed, spiked = timed(*[10] * 8), timed(*[40] * 8), timed(*[10] * 7, 100)
    base = dict(enumerate([calm] * 8))
    head = {**base, 2: disturbed, 5: spiked}

    pair = pair_start(base, head, 1, 3)

    assert pair.slowdowns == {TPOT: pytest.approx(0.0), THROUGHPUT: pytest.approx(0.0)}
    # one block of log 4, one of log (70 + 100) / 80
    assert pair.mean_slowdown == pytest.approx((math.log(4) + math.log(170 / 80)) / 8)


def test_a_slowdown_of_all_rounds_is_seen_whole(timed):
    """Every round 5% slower: time per token 5%, throughput 4 of 105 ms."""
    base = dict(enumerate([timed(*[10] * 8)] * 8))
    head = dict(enumerate([timed(*[10.5] * 8)] * 8))

    pair = pair_start(base, head, 1, 3)

    assert pair.slowdowns[TPOT] == pytest.approx(math.log(1.05))
    assert pair.slowdowns[THROUGHPUT] == pytest.approx(math.log(109 / 105))


def test_prefill_that_slows_down_is_seen_by_throughput_alone(timed):
    """20 ms more before the first round of 80: 125 ms instead of 105."""
    block = timed(*[10] * 8)
    base = dict(enumerate([block] * 8))
    head = dict(enumerate([replace(block, duration_s=block.duration_s + 0.020)] * 8))

    pair = pair_start(base, head, 1, 3)

    assert pair.slowdowns[TPOT] == pytest.approx(0.0)
    assert pair.slowdowns[THROUGHPUT] == pytest.approx(math.log(125 / 105))

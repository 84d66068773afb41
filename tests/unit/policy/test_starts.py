"""Arms that are starts of their own: plain decoding on both sides, what starts and standby cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest

from spectune.policy.arms import ArmData, pool_rounds
from spectune.policy.comparison import ArmSummary, CellComparison, Decision
from spectune.policy.speedup import block_tpots, last_start_ratio, paired_speedup, start_log_ratios, widen
from spectune.policy.starts import standby_cost, start_notes
from spectune.records import (
    BlockResult,
    Cell,
    Interval,
    LoadRecord,
    RequestRecord,
    SpecConfig,
    Status,
    StepRecord,
)

CELL = Cell(batch_size=2, context_tokens=0, temperature=0.0)
OFF, EAGLE = SpecConfig.off(), SpecConfig.chain("eagle3", 1)
PLAIN = StepRecord(num_proposed=0, num_verified=0, num_accepted=0, num_emitted=1)


def block(tpot_s: float, prompt: int, num_tokens: int = 10) -> BlockResult:
    """One request at a server: `num_tokens` after the first, `tpot_s` each."""
    record = RequestRecord(
        request_id=f"prompt{prompt}-0",
        category="chat",
        num_prompt_tokens=5,
        output_ids=tuple(range(num_tokens + 1)),
        arrival_s=0.0,
        first_token_s=1.0,
        finish_s=1.0 + tpot_s * num_tokens,
        finish_reason="length",
        steps=(PLAIN,) * num_tokens,
    )
    return BlockResult(requests=(record,), rounds=(), duration_s=1.0, load=LoadRecord(concurrency=2))


def arm(config: SpecConfig, tpots: Mapping[tuple[int, int], float]) -> ArmData:
    """Seconds per token by (start, prompt)."""
    blocks = {key: block(tpot, key[1]) for key, tpot in tpots.items()}
    return ArmData(config=config, cell=CELL, blocks=blocks, has_boots=True)


def test_plain_decoding_of_a_candidate_is_the_mean_of_the_starts_around_it() -> None:
    """1 s before and 4 s after are 2 s where the candidate ran: the geometric mean."""
    off = arm(OFF, {(0, 0): 1.0, (1, 0): 4.0})

    assert block_tpots(off)[0, 0] == pytest.approx(2.0)


def test_speedup_of_a_drifting_machine_is_that_of_its_middle() -> None:
    """Plain decoding slows from 1 s to 4 s; a candidate of 1 s is 2x, and the ends of the drift, 1x and
    4x, are in the interval."""
    off = arm(OFF, {(0, i): 1.0 for i in range(3)} | {(1, i): 4.0 for i in range(3)})
    fast = arm(EAGLE, {(0, i): 1.0 for i in range(3)})

    speedup = paired_speedup(off, fast)

    assert speedup is not None
    assert speedup.value == pytest.approx(2.0)
    assert (speedup.low, speedup.high) == (pytest.approx(1.0), pytest.approx(4.0))


def test_speedup_of_a_steady_machine_keeps_the_interval_of_its_prompts() -> None:
    """Where plain decoding is the same at both ends nothing is added: 2x on every prompt is 2x."""
    off = arm(OFF, {(start, i): 2.0 for start in (0, 1) for i in range(3)})
    fast = arm(EAGLE, {(0, i): 1.0 for i in range(3)})

    speedup = paired_speedup(off, fast)

    assert speedup is not None
    assert (speedup.low, speedup.value, speedup.high) == (pytest.approx(2.0),) * 3


def test_speedup_over_three_starts_holds_their_spread() -> None:
    """Starts of 1.5x, 2x and 2.667x of the same prompts: no spread over prompts, all of it over starts.

    log ratios -ln(4/3), 0, +ln(4/3) around ln 2; sd ln(4/3), t(2) = 4.3027.
    """
    off = arm(OFF, {(start, i): 2.0 for start in range(4) for i in range(3)})
    tpots = {0: 2.0 / 1.5, 1: 1.0, 2: 0.75}
    fast = arm(EAGLE, {(start, i): tpot for start, tpot in tpots.items() for i in range(3)})

    speedup = paired_speedup(off, fast)

    half = 4.302653 * math.log(4 / 3) / math.sqrt(3)
    assert speedup is not None
    assert len(start_log_ratios(off, fast)) == 3
    assert speedup.value == pytest.approx(2.0)
    assert speedup.low == pytest.approx(2.0 * math.exp(-half), rel=1e-5)


def test_widen_adds_squares_of_half_widths() -> None:
    """Half widths of ln 1.3 and ln 1.2 make one of √(ln² 1.3 + ln² 1.2)."""
    prompts = Interval(value=2.0, low=2.0 / 1.3, high=2.0 * 1.3, n=5)
    starts = Interval(value=2.0, low=2.0 / 1.2, high=2.0 * 1.2, n=3)

    both = widen(prompts, starts)

    factor = math.exp(math.hypot(math.log(1.3), math.log(1.2)))
    assert (both.low, both.high) == (pytest.approx(2.0 / factor), pytest.approx(2.0 * factor))


def test_last_start_ratio_is_paired_by_prompt() -> None:
    """Each prompt takes 1.5 times as long in the last start as in the first, whatever its own time."""
    off = arm(OFF, {(0, 0): 1.0, (0, 1): 2.0, (1, 0): 1.2, (1, 1): 2.4, (2, 0): 1.5, (2, 1): 3.0})

    ratio = last_start_ratio(off)

    assert ratio is not None
    assert ratio.value == pytest.approx(1.5)


def test_server_arm_has_the_step_time_and_no_parts() -> None:
    """Ten steps of 0.5 s: the whole is known, draft, verify and other are not."""
    rounds = pool_rounds(arm(OFF, {(0, 0): 0.5}))

    assert rounds is not None
    assert (rounds.total_s, rounds.round_tpot_s, rounds.num_rounds) == (
        pytest.approx(0.5),
        pytest.approx(0.5),
        10,
    )
    assert rounds.parts is None


def test_standby_cost_is_the_inverse_of_its_speedup() -> None:
    """0.8x of the speed is 1.25x of the time, and the bounds change places."""
    cost = standby_cost(Interval(value=0.8, low=0.5, high=1.0, n=4))

    assert (cost.low, cost.value, cost.high) == (1.0, 1.25, 2.0)


def comparison(last_start: float) -> CellComparison:
    ratio = Interval(value=last_start, low=None, high=None, n=3)
    decision = Decision(verdict="off", chosen=OFF, reason="")
    return CellComparison(cell=CELL, scope="all", arms=(), decision=decision, last_start=ratio)


def test_start_notes_tell_an_unsteady_machine_from_a_steady_one() -> None:
    """Plain decoding that changed by 20% between its starts is said to be unsteady, 1% is not."""
    assert "was not steady" in start_notes([comparison(1.2)], num_starts=3)[0]
    assert "was steady" in start_notes([comparison(1.01)], num_starts=3)[0]


@pytest.mark.parametrize(("num_starts", "is_said"), [(1, True), (2, True), (3, False)])
def test_start_notes_say_what_the_interval_does_not_hold(num_starts: int, is_said: bool) -> None:
    """With fewer than three starts of each arm their spread cannot be estimated, and that is said."""
    notes = " ".join(start_notes([comparison(1.0)], num_starts=num_starts))

    assert is_said == ("--num-boots 3 or more" in notes)


def test_start_notes_show_the_caches_where_they_differ() -> None:
    """A draft's own cache takes room: 1,000 tokens against 800 is said, equal caches are not."""

    def cell(*capacities: int) -> CellComparison:
        arms = tuple(
            ArmSummary(config=config, scope="all", status=Status.OK, kv_capacity_tokens=tokens)
            for config, tokens in zip((OFF, EAGLE), capacities, strict=True)
        )
        return replace(comparison(1.0), arms=arms)

    assert "off 1,000, eagle3 K=1 800" in start_notes([cell(1000, 800)], num_starts=3)[-1]
    assert all("caches" not in note for note in start_notes([cell(1000, 1000)], num_starts=3))

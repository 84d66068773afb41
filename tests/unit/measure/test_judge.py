"""What became of a point: success share, identities and reached batch decide, with the reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spectune.measure.calibrate import round_times
from spectune.measure.cautions import Doubt, point_cautions, workload_cautions
from spectune.measure.divergence import find_divergence
from spectune.measure.judge import judge_point
from spectune.policy.cautions import CUT_ROUNDS, DRIFT
from spectune.records import (
    BlockResult,
    Cell,
    Gap,
    LoadRecord,
    Point,
    Prompt,
    Request,
    RequestRecord,
    RoundRecord,
    RoundTimes,
    Sampling,
    SpecConfig,
    Status,
    StepRecord,
)

EAGLE = SpecConfig.chain("eagle3", 2)
ASKED = Request(request_id="r", prompt_ids=(1, 2), category="chat", sampling=Sampling())


def no_gap(*_):
    """An engine that cannot tell how close a tie was."""
    return None


def point(config=EAGLE, batch_size=1):
    cell = Cell(batch_size=batch_size, context_tokens=0, temperature=0.0)
    return Point(config=config, cell=cell, workload_hash="w", sampling=Sampling())


def request(name="r", *, error=None, output_ids=(1, 2, 3), finish="stop", accepted=1):
    step = StepRecord(
        num_proposed=max(2, accepted),
        num_verified=max(2, accepted),
        num_accepted=accepted,
        num_emitted=accepted + 1,
    )
    return RequestRecord(
        request_id=name,
        category="chat",
        num_prompt_tokens=2,
        output_ids=() if error else output_ids,
        arrival_s=0.0,
        first_token_s=None if error else 0.1,
        finish_s=None if error or finish is None else 0.2,
        finish_reason=None if error else finish,
        steps=() if error else (step,),
        error=error,
    )


def turn(batch_size=1, total_s=0.03, kind="decode"):
    return RoundRecord(
        kind=kind,
        batch_size=batch_size,
        kv_tokens=1,
        config=EAGLE.label,
        start_s=0.0,
        draft_s=0.0,
        verify_s=total_s,
        other_s=0.0,
        num_emitted=2 * batch_size,
    )


def block(requests=(), rounds=(), peak=None):
    return BlockResult(requests=tuple(requests), rounds=tuple(rounds), duration_s=1.5, peak_memory_bytes=peak)


def prompts(count, *, turns=1):
    return tuple(
        Prompt(prompt_id=f"p{i}", category="chat", turns=tuple(f"{i}.{turn}" for turn in range(turns)))
        for i in range(count)
    )


def test_judge_point_all_succeeded_is_ok():
    """Counts, duration and peak memory of the blocks are summed up."""
    outcome = judge_point(
        point(), {0: block([request()], [turn()], 5), 1: block([request("s")], [turn()], 9)}
    )

    assert (outcome.status, outcome.reason) == (Status.OK, None)
    assert (outcome.num_requests, outcome.num_failed) == (2, 0)
    assert (outcome.duration_s, outcome.peak_memory_bytes, outcome.reached_batch) == (3.0, 9, 1.0)


@pytest.mark.parametrize(
    ("num_failed", "status"),
    [
        pytest.param(1, Status.OK, id="exactly-99-percent"),
        pytest.param(2, Status.FAILED, id="below-99-percent"),
        pytest.param(100, Status.FAILED, id="none-succeeded"),
    ],
)
def test_judge_point_needs_99_percent_of_the_requests(num_failed, status):
    """Of 100 requests one may fail, two may not; the first error is the reason."""
    requests = [request(str(i), error="HTTP 400" if i < num_failed else None) for i in range(100)]

    outcome = judge_point(point(), {0: block(requests, [turn()])})

    assert outcome.status is status
    assert outcome.num_failed == num_failed
    if status is Status.FAILED:
        assert outcome.reason == f"{num_failed} of 100 requests failed: HTTP 400"


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        pytest.param(request(output_ids=()), "no output", id="empty-answer"),
        pytest.param(request(finish=None), "the answer has no end", id="truncated-stream"),
    ],
)
def test_judge_point_answer_without_output_or_end_is_a_failure(bad, reason):
    """An empty or truncated answer is never a fast success."""
    outcome = judge_point(point(), {0: block([bad], [turn()])})

    assert outcome.status is Status.FAILED
    assert outcome.reason == f"1 of 1 requests failed: {reason}"


def test_judge_point_token_counts_that_do_not_add_up_are_suspect():
    """Four tokens said, one first token and two emitted: the identity is named."""
    outcome = judge_point(point(), {0: block([request(output_ids=(1, 2, 3, 4))], [turn()])})

    assert outcome.status is Status.SUSPECT
    assert "output_tokens 4 != 1 + emitted 2" in outcome.reason


def test_judge_point_more_accepted_than_possible_is_suspect():
    """A chain of two cannot accept three."""
    impossible = request(accepted=3, output_ids=(1, 2, 3, 4, 5))

    outcome = judge_point(point(), {0: block([impossible], [turn()])})

    assert outcome.status is Status.SUSPECT
    assert "accepted 3 drafts in a step of eagle3 K=2, which can accept 2" in outcome.reason


def test_judge_point_batch_never_reached_is_capped():
    """Three together where four were asked for is another load."""
    outcome = judge_point(point(batch_size=4), {0: block([request()], [turn(3), turn(2)])})

    assert outcome.status is Status.CAPPED


def test_judge_point_without_requests_is_failed():
    """Nothing run is nothing measured."""
    assert judge_point(point(), {}).status is Status.FAILED


def test_round_times_are_medians_after_the_first_two_full_rounds():
    """Cold rounds, prefill and the draining tail do not enter: median of 3, 5 and 4 is 4."""
    rounds = [
        turn(2, 90.0),
        turn(1, 50.0, kind="prefill"),
        turn(2, 80.0),
        *(turn(2, float(seconds)) for seconds in (3, 5, 4)),
        turn(1, 70.0),
    ]

    assert round_times(rounds, 2) == RoundTimes(draft_s=0.0, verify_s=4.0, other_s=0.0, num_rounds=3)
    assert round_times(rounds[:3], 2) is None


def doubts(*args):
    return [caution.doubt for caution in point_cautions(*args)]


def steady(count=6, seconds=0.03, **kwargs):
    return {i: block([request(f"r{i}", **kwargs)], [turn(total_s=seconds)] * 10) for i in range(count)}


def test_cautions_steady_point_has_none():
    """Enough equal rounds and accepted drafts raise no doubt."""
    assert doubts(point(), steady()) == []


def test_cautions_last_third_slower_than_the_first_is_drift():
    """30 ms, then 36 ms in the last third: 20% is named."""
    blocks = steady()
    for i in (4, 5):
        blocks[i] = block([request(f"r{i}")], [turn(total_s=0.036)] * 10)

    (caution,) = point_cautions(point(), blocks)

    assert caution.doubt is Doubt.DRIFT
    assert "20% slower" in caution.text
    assert DRIFT.fullmatch(caution.text)  # what the report gathers over arms


def test_cautions_first_third_slower_than_the_last_is_drift_too():
    """36 ms in the first third, then 30 ms: what was still warming up is named."""
    blocks = steady()
    for i in (0, 1):
        blocks[i] = block([request(f"r{i}")], [turn(total_s=0.036)] * 10)

    (caution,) = point_cautions(point(), blocks)

    assert caution.doubt is Doubt.DRIFT
    assert "17% faster" in caution.text


def test_cautions_rounds_that_the_hypervisor_cut_into_are_counted():
    """A fifth of 60 rounds was ten times as long, part of it stolen: that is named, and is no drift."""
    blocks = {}
    for i in range(6):
        rounds = [turn()] * 8 + [replace(turn(total_s=0.3), stolen_s=0.01 * i + 0.01)] * 2
        blocks[i] = block([request(f"r{i}")], rounds)

    (caution,) = point_cautions(point(), blocks)

    assert caution.doubt is Doubt.CUT_ROUNDS
    assert caution.text == (
        "the hypervisor took CPU for others during 12 of 60 full rounds: times are those of the other 48"
    )
    assert CUT_ROUNDS.fullmatch(caution.text)  # what the report gathers over arms


def test_cautions_a_round_in_ten_that_was_cut_into_is_no_doubt():
    """Six of 60 are set aside in silence."""
    blocks = {
        i: block([request(f"r{i}")], [turn()] * 9 + [replace(turn(total_s=0.3), stolen_s=0.01)])
        for i in range(6)
    }

    assert doubts(point(), blocks) == []


def test_cautions_times_of_an_arm_without_a_whole_round_are_the_machines():
    """All 60 rounds were cut into: no time is the engine's."""
    blocks = {i: block([request(f"r{i}")], [replace(turn(), stolen_s=0.01)] * 10) for i in range(6)}

    (caution,) = point_cautions(point(), blocks)

    assert "during 60 of 60 full rounds: none is left" in caution.text


def test_cautions_few_full_rounds_are_counted():
    """Rounds below the batch do not count as full."""
    (caution,) = point_cautions(point(batch_size=2), {0: block([request()], [turn(2)] * 5 + [turn(1)] * 90)})

    assert caution.doubt is Doubt.FEW_ROUNDS
    assert "only 5 rounds" in caution.text


def test_cautions_nothing_accepted_names_the_pair():
    """A draft that is never accepted may belong to another target."""
    assert doubts(point(), steady(accepted=0, output_ids=(1, 2))) == [Doubt.INEFFECTIVE]


def test_cautions_output_that_differs_from_off_says_where():
    """The earliest differing token of all requests is named, counted from 0."""
    found = find_divergence(point(), steady(), steady(output_ids=(1, 2, 9)), {}, no_gap)

    (caution,) = point_cautions(point(), steady(), found)

    assert caution.doubt is Doubt.OUTPUT_DIFFERS
    assert "6 of 6 outputs differ from plain decoding, the earliest at token 2" in caution.text


def test_divergence_at_a_near_tie_is_no_mismatch():
    """Where rounding may decide, a different token is told with its gap and accepted."""
    off = steady(output_ids=(1, 2, 9))
    asked = {f"r{i}": ASKED for i in range(6)}

    found = find_divergence(point(), steady(), off, asked, lambda *_: Gap(value=0.06, tolerance=0.5))

    assert found is not None
    assert found.mismatch is None
    assert "0.06 apart: a near tie (limit 0.5)" in found.text


def test_divergence_above_the_tolerance_is_a_mismatch():
    """Where the two best tokens were clearly apart, the arm is not lossless."""
    off = steady(output_ids=(1, 2, 9))
    asked = {f"r{i}": ASKED for i in range(6)}

    found = find_divergence(point(), steady(), off, asked, lambda *_: Gap(value=2.0, tolerance=0.5))

    assert found is not None
    assert found.mismatch is not None
    assert "at token 2, where the two best tokens are 2 apart" in found.mismatch


def test_divergence_of_equal_outputs_is_none():
    """Arms that say the same are lossless as far as they were seen."""
    assert find_divergence(point(), steady(), steady(), {}, no_gap) is None


def test_cautions_of_the_workload_name_reuse_and_missing_calibration():
    """Too few prompts and prompts that serve twice are said once for the run."""
    both = workload_cautions(prompts(8), 24, has_calibration=False)

    assert [caution.doubt for caution in both] == [Doubt.PROMPTS_REUSED, Doubt.CALIBRATED_ON_MEASURED]
    assert workload_cautions(prompts(24), 24, has_calibration=True) == ()


def test_cautions_of_the_workload_count_prompts_whose_later_turns_are_not_asked():
    """A conversation is measured on its first turn, and the run says for how many prompts."""
    (caution,) = workload_cautions((*prompts(3), *prompts(1, turns=2)), 4, has_calibration=True)

    assert caution.text == "1 of 4 prompts have several turns: only the first is asked"


def test_judge_point_at_a_request_rate_has_no_batch_to_reach():
    """What runs together under arrivals by the clock is measured, not asked for: never capped."""
    cell = Cell(batch_size=16, context_tokens=0, temperature=0.0, request_rate=2.0, arrivals="poisson")
    load = LoadRecord(concurrency=16, reached=1.3)
    served = replace(block([request()]), load=load)

    assert judge_point(replace(point(), cell=cell), {0: served}).status is Status.OK
    assert judge_point(point(batch_size=16), {0: served}).status is Status.CAPPED


@pytest.mark.parametrize(("accepted_steps", "is_told"), [(4, True), (60, False)], ids=["1.02", "1.30"])
def test_cautions_hardly_any_draft_accepted_in_many_steps_is_a_wrong_pair(accepted_steps, *, is_told):
    """4 of 200 steps accept a draft: 1.02 is named as a pair that does not belong together, 1.30 is not."""
    blocks = {
        i: block([request(f"r{i}", accepted=int(i < accepted_steps), output_ids=(1, 2, 3) if i < accepted_steps else (1, 2))],
                 [turn()] * 10)
        for i in range(200)
    }  # fmt: skip

    found = point_cautions(point(), blocks)

    assert is_told == any(caution.doubt is Doubt.INEFFECTIVE for caution in found)
    if is_told:
        text = next(caution.text for caution in found if caution.doubt is Doubt.INEFFECTIVE)
        assert "acceptance length 1.02" in text
        assert "check that draft and target belong together" in text


def test_cautions_answers_that_end_although_the_end_was_to_be_ignored():
    """Two of six answers stopped by themselves under --ignore-eos: said; without the switch nothing is."""
    ignoring = replace(point(), sampling=replace(Sampling(), ignore_eos=True))
    blocks = steady(finish="length")
    for i in (1, 4):
        blocks[i] = block([request(f"r{i}", finish="stop")], [turn()] * 10)

    (caution,) = point_cautions(ignoring, blocks)

    assert caution.doubt is Doubt.EOS_NOT_IGNORED
    assert "2 of 6 answers ended by themselves (stop)" in caution.text
    assert point_cautions(point(), blocks) == ()
    assert point_cautions(ignoring, steady(finish="length")) == ()

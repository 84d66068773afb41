"""One arm: pooling, statuses, physics."""

from __future__ import annotations

import pytest

from spectune.policy.arms import measure_acceptance, summarize_arm
from spectune.records import BlockResult, SpecConfig, Status, StepRecord


def test_acceptance_of_unequal_requests_is_pooled_not_a_mean_of_means(make):
    """10 steps with 40 tokens and 200 steps with 260 tokens give 300/210, the request mean stands apart."""
    short = make.request(make.steps([3] * 10, 3), name="a-0")
    long = make.request(make.steps([1] * 60 + [0] * 140, 3), name="b-0")

    told = measure_acceptance(make.chain(3), (short, long))

    assert (told.acceptance_length, told.acceptance_length_per_request) == pytest.approx((300 / 210, 2.65))


def test_acceptance_of_a_tree_names_depth_rate_and_node_utilisation_apart(make):
    """1.5 accepted of depth 3 and 15 verified nodes is 0.50 by depth and 0.10 by node."""
    request = make.request(make.steps([1, 2], 15))

    told = measure_acceptance(make.tree(3, 4, 16), (request,))

    assert (told.depth_acceptance_rate, told.draft_acceptance_rate) == pytest.approx((0.50, 0.10))


@pytest.mark.parametrize("config", [SpecConfig.off(), SpecConfig.chain("ngram", 3)], ids=["off", "ngram"])
def test_acceptance_without_any_draft_is_none_with_a_reason(make, config):
    """Nothing drafted gives null values and a reason, never 0, 1 or NaN."""
    told = measure_acceptance(config, (make.request(make.steps([0, 0], 0)),))

    assert told.acceptance_length is None
    assert told.draft_acceptance_rate is None
    assert told.zero_accept_share is None
    assert told.reason == "no draft steps observed"


def test_acceptance_of_a_drafter_that_rarely_drafts_shows_its_coverage(make):
    """18 of 19 drafts accepted in 83 steps is an acceptance length of 1.217 at 0.23 drafts a step."""
    drafting = make.steps([1] * 18 + [0], 1)
    request = make.request((*drafting, *make.steps([0] * 64, 0)))

    told = measure_acceptance(make.chain(1, "ngram"), (request,))

    assert told.num_steps == 83
    assert told.num_drafting_steps == 19
    assert told.acceptance_length == pytest.approx(1.217, abs=5e-4)
    assert told.proposed_per_step == pytest.approx(0.229, abs=5e-4)


def test_arm_below_99_percent_success_has_no_latency(make):
    """One failed request of fifty fails the arm and takes its times away."""
    good = [make.request(make.steps([0], 0), name=f"p{i}-0") for i in range(49)]
    bad = make.request(name="p49-0", error="404 model not found", finish_s=None, output_ids=())
    block = BlockResult(requests=(*good, bad), rounds=make.block().rounds, duration_s=1.0)

    arm = summarize_arm(make.arm_data(make.off, {(0, 0): block}))

    assert (arm.status, arm.num_failed) == (Status.FAILED, 1)
    assert (arm.latency, arm.rounds, arm.output_tokens_per_s) == (None, None, None)
    assert "49 of 50" in (arm.reason or "")
    assert "404 model not found" in (arm.reason or "")


def test_arm_at_99_percent_success_keeps_its_latency(make):
    """One failed request of a hundred is tolerated and counted."""
    good = [make.request(make.steps([0], 0), name=f"p{i}-0") for i in range(99)]
    bad = make.request(name="p99-0", error="timeout", finish_s=None, output_ids=())
    block = BlockResult(requests=(*good, bad), rounds=make.block().rounds, duration_s=1.0)

    arm = summarize_arm(make.arm_data(make.off, {(0, 0): block}))

    assert (arm.status, arm.num_failed) == (Status.OK, 1)
    assert arm.latency is not None
    assert arm.latency.tpot_s is not None
    assert arm.latency.tpot_s.n == 99


def test_arm_with_a_broken_identity_is_suspect_and_named(make):
    """Output that does not add up to its steps makes the arm suspect."""
    request = make.request(make.steps([1], 3), name="bad-0", output_ids=(1, 2, 3, 4, 5))
    block = BlockResult(requests=(request,), rounds=make.block().rounds, duration_s=1.0)

    arm = summarize_arm(make.arm_data(make.chain(3), {(0, 0): block}))

    assert arm.status is Status.SUSPECT
    assert "bad-0: output_tokens 5 != 1 + emitted 2" in (arm.reason or "")
    assert arm.rounds is None


def test_arm_somewhat_faster_than_a_measured_bandwidth_allows_is_kept(make):
    """A bandwidth measured beside other work is too low; it refuses nothing that is near it."""
    fingerprint = make.fingerprint(weight_bytes=1000, kv_bytes_per_token=1, read_bandwidth_bytes_per_s=1000.0)
    data = make.arm_data(make.off, {(0, 0): make.block(tpot_s=0.7, kv_tokens=100)})

    assert summarize_arm(data, fingerprint=fingerprint).status is Status.OK


def test_arm_faster_than_its_bytes_can_be_read_is_suspect(make):
    """Rounds of 0.5 s are impossible where reading weights and cache takes 1.1 s."""
    fingerprint = make.fingerprint(weight_bytes=1000, kv_bytes_per_token=1, read_bandwidth_bytes_per_s=1000.0)
    data = make.arm_data(make.off, {(0, 0): make.block(tpot_s=0.5, kv_tokens=100)})

    arm = summarize_arm(data, fingerprint=fingerprint)

    assert arm.status is Status.SUSPECT
    assert "500.000 ms is under the 1100.000 ms" in (arm.reason or "")
    assert arm.latency is None


def test_arm_that_accepts_more_than_its_depth_is_suspect(make):
    """A chain of 1 cannot accept two drafts in a step."""
    steps = (StepRecord(num_proposed=2, num_verified=2, num_accepted=2, num_emitted=3),)

    arm = summarize_arm(make.arm_data(make.chain(1), {(0, 0): make.block(steps=steps)}))

    assert arm.status is Status.SUSPECT
    assert "accepted 2 drafts, eagle3 K=1 can accept 1" in (arm.reason or "")


def test_arm_of_a_category_counts_only_its_requests(make):
    """The scope restricts requests, steps and, where a block is all of one category, rounds."""
    blocks = {
        (0, 0): make.block(tpot_s=1.0, category="chat", steps=make.steps([0], 3)),
        (0, 1): make.block(tpot_s=3.0, category="code", steps=make.steps([3], 3)),
    }

    arm = summarize_arm(make.arm_data(make.chain(3), blocks), "code")

    assert arm.num_requests == 1
    assert arm.acceptance is not None
    assert arm.acceptance.acceptance_length == 4.0
    assert arm.rounds is not None
    assert arm.rounds.round_tpot_s == 3.0


def test_arm_that_never_ran_keeps_the_status_of_its_point(make):
    """An arm without a usable point carries why."""
    data = make.arm_data(make.chain(3), {}, status=Status.OOM, reason="8 GiB asked, 2 GiB free")

    arm = summarize_arm(data)

    assert (arm.status, arm.reason) == (Status.OOM, "8 GiB asked, 2 GiB free")

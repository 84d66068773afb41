"""What engines execute of a policy."""

from __future__ import annotations

import json
import shlex

import pytest

from spectune.errors import UsageError
from spectune.policy.emit import emit, emit_all, vllm_lookup, vllm_schedule
from spectune.policy.emit_parts import ladder
from spectune.policy.table import build_policy, choose
from spectune.records import SpecConfig


def policy_of(make, configs, *, categories=(), **kwargs):
    """A policy from {batch size: configuration}; off where the candidate loses."""
    cells = [
        make.compare(make.cell(batch), make.arm(make.chain(3) if config.is_off else config, 0.7 if config.is_off else 1.5))
        for batch, config in configs.items()
    ]  # fmt: skip
    return build_policy(
        cells,
        categories,
        run_name="run",
        fingerprint=make.fingerprint(**kwargs),
        contexts={cell.cell: (20, 300) for cell in cells},
    )


def vllm_config(text: str) -> dict[str, object]:
    words = shlex.split(text.splitlines()[-1])
    return json.loads(words[words.index("--speculative-config") + 1])


@pytest.mark.parametrize(
    ("batch_size", "depth"),
    [(1, 3), (16, 3), (40, 3), (64, 2), (128, 2), (200, 2), (256, 0), (4096, 0), (5000, 0)],
)
def test_vllm_lookup_inherits_over_gaps_and_above(batch_size, depth):
    """1-16: 3, 64-128: 2, 256-4096: 0 - a gap and the tail keep the K before them."""
    schedule = [[1, 16, 3], [64, 128, 2], [256, 4096, 0]]

    assert vllm_lookup(schedule, batch_size, num_speculative_tokens=3) == depth


def test_vllm_lookup_clamps_to_the_maximum():
    """A K above num_speculative_tokens runs as num_speculative_tokens."""
    assert vllm_lookup([[1, 8, 7]], 4, num_speculative_tokens=3) == 3


@pytest.mark.parametrize("schedule", [[], [[2, 8, 3]], [[1, 8, 3], [8, 16, 2]], [[1, 8, -1]], [[4, 1, 2]]])
def test_vllm_lookup_refuses_what_vllm_refuses(schedule):
    """Ranges start at 1, do not overlap and are not negative."""
    with pytest.raises(UsageError, match="num_speculative_tokens_per_batch_size"):
        vllm_lookup(schedule, 1, num_speculative_tokens=3)


def test_vllm_schedule_is_gap_free_and_runs_as_the_policy_says(make):
    """Every batch size up to the maximum has one range, with the evaluator's own answer."""
    policy = policy_of(make, {1: make.chain(5), 4: make.chain(3), 16: make.off})
    schedule = vllm_schedule(ladder(policy), 64, runs=lambda config: True)

    covered = [size for start, end, _ in schedule for size in range(start, end + 1)]
    depths = [vllm_lookup(schedule, size, num_speculative_tokens=5) for size in range(1, 65)]

    assert covered == list(range(1, 65))
    assert depths == [choose(policy, size).num_steps for size in range(1, 65)]
    assert schedule == [(1, 1, 5), (2, 4, 3), (5, 64, 0)]


def test_vllm_command_carries_head_depth_and_schedule(make):
    """The JSON holds vLLM's own keys, the largest K and ranges as lists."""
    policy = policy_of(make, {1: make.chain(5), 4: make.chain(3), 16: make.off})

    assert vllm_config(emit(policy, "vllm")) == {
        "method": "eagle3",
        "model": "org/head",
        "num_speculative_tokens": 5,
        "num_speculative_tokens_per_batch_size": [[1, 1, 5], [2, 4, 3], [5, 16, 0]],
    }


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_command_with_names_says_to_put_folders_in_their_place(make, engine):
    """A shipped head and a target without an owner are names, which a server cannot load."""
    config = make.chain(3, draft_model="small-eagle3")
    text = emit(policy_of(make, {1: config}, target="Small-135M", draft="small-eagle3"), engine)

    assert "# put your folders or hub ids in place of the names Small-135M, small-eagle3\n" in text


def test_vllm_command_for_ngram_needs_no_model(make):
    """N-gram drafting takes its window, not a head."""
    config = SpecConfig.chain("ngram", 4, options=(("prompt_lookup_max", 4), ("prompt_lookup_min", 2)))

    emitted = vllm_config(emit(policy_of(make, {1: config}), "vllm"))

    assert emitted == {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 2,
    }


def test_vllm_command_does_not_emit_trees_and_says_why(make):
    """A tree becomes K=0 with the reason above the command; a chain beside it stays."""
    policy = policy_of(make, {1: make.tree(), 2: make.chain(3), 3: make.off})

    text = emit(policy, "vllm")

    assert "vLLM drafts chains only" in text
    assert "eagle3 D=5 k=4 N=16" in text
    assert vllm_config(text)["num_speculative_tokens_per_batch_size"] == [[1, 1, 0], [2, 2, 3], [3, 3, 0]]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_command_of_an_off_policy_is_plain_serving(make, engine):
    """Do not speculate means no speculative flags at all."""
    text = emit(policy_of(make, {1: make.off}), engine)

    assert "do not speculate" in text
    assert "--spec" not in text.splitlines()[-1]


def test_sglang_chain_policy_is_flags_and_an_adaptive_file(make):
    """Keys are the smallest batch size of each range, one step count each, 0 for off."""
    text = emit(policy_of(make, {1: make.chain(5), 4: make.chain(3), 16: make.off}), "sglang")
    adaptive = next(line for line in text.splitlines() if line.startswith("{"))

    assert json.loads(adaptive) == {
        "1": {"candidate_steps": [5]},
        "2": {"candidate_steps": [3]},
        "5": {"candidate_steps": [0]},
    }
    command = text.splitlines()[-1]
    assert "--speculative-num-steps 5 --speculative-eagle-topk 1 --speculative-num-draft-tokens 6" in command
    assert "--speculative-algorithm EAGLE3 --speculative-draft-model-path org/head" in command
    assert "--max-running-requests 16" in command
    assert command.endswith("--speculative-adaptive --speculative-adaptive-config adaptive.json")


def test_sglang_tree_is_static_with_the_reason(make):
    """A tree that is on at some batch sizes only needs a router, and the text says so."""
    text = emit(policy_of(make, {1: make.tree(), 4: make.off}), "sglang")

    assert "--speculative-num-steps 5 --speculative-eagle-topk 4 --speculative-num-draft-tokens 16" in text
    assert "--speculative-adaptive" not in text
    assert "behind a router" in text


def test_emit_says_that_categories_need_a_router(make):
    """What no engine executes is named, not dropped."""
    prose = make.compare(make.cell(), make.arm(make.chain(3), 0.7), scope="prose")

    text = emit(policy_of(make, {1: make.chain(3)}, categories=[prose]), "vllm")

    assert "does not switch by category; decided otherwise: prose" in text


def test_emit_of_a_simulated_run_is_marked(make):
    """Numbers that were declared are not for deployment."""
    texts = emit_all(policy_of(make, {1: make.chain(3)}, is_simulated=True))

    assert set(texts) == {"vllm", "sglang"}
    assert all(text.startswith("# from a simulated run") for text in texts.values())


def test_emit_for_an_unknown_engine_lists_the_known_ones(make):
    """The error names the flag and the engines."""
    with pytest.raises(UsageError, match="--engine foo") as caught:
        emit(policy_of(make, {1: make.chain(3)}), "foo")

    assert caught.value.hint == "one of vllm, sglang"

"""What SGLang is started with to run a policy; its own parser reads the same in tests/real."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from spectune.errors import UsageError
from spectune.policy.emit import emit
from spectune.policy.emit_sglang import sglang_launch, with_acceptance
from spectune.policy.sglang_adaptive import AdaptivePolicy, captured_sizes
from spectune.records import SpecConfig
from tests.support.policies import policy_of

OFF = SpecConfig.off()


def chain(depth: int) -> SpecConfig:
    return SpecConfig.chain("eagle3", depth, draft_model="org/head")


TREE = SpecConfig(method="eagle3", num_steps=5, topk=4, num_draft_tokens=16, draft_model="org/head")


def flags_of(configs: Mapping[int, SpecConfig], **kwargs: Any) -> dict[str, str | None]:
    return dict(sglang_launch(policy_of(configs, top=16), 16, **kwargs).flags)


def test_chain_policy_is_flags_and_an_adaptive_file() -> None:
    """Keys are the batch sizes where the depth changes, one depth each, 0 for off."""
    text = emit(policy_of({1: chain(5), 2: chain(3), 5: OFF}, top=16), "sglang")
    adaptive = next(line for line in text.splitlines() if line.startswith("{"))

    assert json.loads(adaptive) == {
        "1": {"candidate_steps": [5]},
        "2": {"candidate_steps": [3]},
        "5": {"candidate_steps": [0]},
    }
    assert text.splitlines()[-1] == (
        "python -m sglang.launch_server --model-path org/target --max-running-requests 16 "
        "--speculative-algorithm EAGLE3 --speculative-draft-model-path org/head --speculative-num-steps 5 "
        "--speculative-eagle-topk 1 --speculative-num-draft-tokens 6 --speculative-adaptive "
        "--speculative-adaptive-config adaptive.json"
    )


def test_batch_sizes_of_one_graph_run_the_least_of_their_policy() -> None:
    """9 and 10 share the graph of 10: a policy of 3 up to 9 and off from 10 is off at both."""
    launch = sglang_launch(policy_of({1: chain(3), 10: OFF}, top=16), 16)
    assert launch.adaptive is not None

    for captured in (captured_sizes(16), None):  # None: a batch that runs without a graph is not padded
        policy = AdaptivePolicy(launch.adaptive, initial_steps=3, captured=captured)
        assert [policy.steps(batch) for batch in (8, 9, 10, 11)] == [3, 0, 0, 0]


def test_speculation_that_no_graph_has_for_itself_is_off() -> None:
    """Only batch size 9 speculates, and it runs in the graph of 10."""
    flags = flags_of({1: OFF, 9: chain(3), 10: OFF})

    assert set(flags) == {"model-path", "max-running-requests"}


def test_first_depth_is_one_that_the_file_has() -> None:
    """SGLang refuses a --speculative-num-steps that no key has: 5 at batch 9 alone becomes 3 of the rest."""
    flags = flags_of({1: OFF, 9: chain(5), 10: chain(3), 12: OFF})

    assert flags["speculative-num-steps"] == "3"
    assert flags["speculative-num-draft-tokens"] == "4"


def test_tree_is_static_with_the_reason() -> None:
    """A tree that is on at some batch sizes only needs a router, and the text says so."""
    text = emit(policy_of({1: TREE, 4: OFF}, top=16), "sglang")

    assert "--speculative-num-steps 5 --speculative-eagle-topk 4 --speculative-num-draft-tokens 16" in text
    assert "--speculative-adaptive" not in text
    assert "behind a router" in text
    assert "--max-running-requests 3 " in text  # off from 4 on: more never run together with drafts


def test_drafter_that_pays_above_batch_1_only_is_left_to_a_router() -> None:
    """A tree that SGLang cannot switch on at batch 4 would run at 1 to 3 too, where the policy is off."""
    text = emit(policy_of({1: OFF, 4: TREE, 8: OFF}, top=16), "sglang")

    assert "--speculative-num-steps" not in text
    assert "behind a router" in text


def test_ngram_writes_all_three_numbers_and_the_breadth() -> None:
    """Left out, SGLang searches 10 branches and verifies 12 tokens."""
    flags = flags_of({1: SpecConfig.chain("ngram", 4)})

    assert {name: value for name, value in flags.items() if name.startswith("speculative")} == {
        "speculative-algorithm": "NGRAM",
        "speculative-num-steps": "4",
        "speculative-eagle-topk": "1",
        "speculative-num-draft-tokens": "5",
        "speculative-ngram-max-bfs-breadth": "1",
    }


def test_policy_by_acceptance_may_fall_to_any_smaller_depth_and_off() -> None:
    """Below the policy's own depth SGLang chooses; a range that is off stays off."""
    adaptive = with_acceptance(
        {
            "1": {"candidate_steps": [5]},
            "4": {"candidate_steps": [2]},
            "9": {"candidate_steps": [0]},
        }
    )

    assert [adaptive[key]["candidate_steps"] for key in ("1", "4", "9")] == [[0, 2, 5], [0, 2], [0]]
    assert all(
        (knobs["up_hysteresis"], knobs["down_hysteresis"]) == (0.25, -0.25) for knobs in adaptive.values()
    )


def test_policy_by_acceptance_leaves_a_bad_text_alone() -> None:
    """Nothing accepted for 15 batches: drafts nothing; everything accepted: the depth of the policy."""
    launch = sglang_launch(policy_of({1: chain(3)}, top=16), 16, by_acceptance=True)
    assert launch.adaptive is not None
    bad = AdaptivePolicy(launch.adaptive, initial_steps=3, captured=captured_sizes(16))
    good = AdaptivePolicy(launch.adaptive, initial_steps=3, captured=captured_sizes(16))

    for _ in range(15):
        bad.observe(1, [0])
        good.observe(1, [3])

    assert (bad.steps(1), good.steps(1)) == (0, 3)


@pytest.mark.parametrize(
    "configs",
    [{1: chain(5), 4: chain(3), 9: OFF}, {1: TREE}, {1: OFF}, {1: SpecConfig.chain("ngram", 3)}],
    ids=["adaptive", "tree", "off", "ngram"],
)
def test_yaml_holds_what_the_flags_hold(configs: dict[int, SpecConfig]) -> None:
    """The file for --config has the same names and values, numbers as numbers, bare flags as true."""
    launch = sglang_launch(policy_of(configs, top=16), 16)
    text = launch.yaml.split("<<'EOF'\n")[-1].split("\nEOF")[0]

    found = yaml.safe_load(text)

    assert {name: None if value is True else str(value) for name, value in found.items()} == dict(
        launch.flags
    )
    assert launch.yaml.endswith("python -m sglang.launch_server --config sglang.yaml")


def test_yaml_in_a_container_is_refused() -> None:
    """The file inside the file would be looked for in the container's own folder."""
    with pytest.raises(UsageError, match=r"adaptive\.json where it is not"):
        emit(policy_of({1: chain(3), 5: OFF}, top=16), "sglang-yaml", form="kubernetes")

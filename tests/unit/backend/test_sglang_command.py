"""SGLang's command line: what is always written, what is refused, what no start is spent on."""

from __future__ import annotations

import pytest

from spectune.backend.extra_args import extra_value
from spectune.backend.sglang_command import (
    SglangSettings,
    adaptive_document,
    check_extra,
    check_version,
    flag_name,
    forced_acceptance,
    server_arguments,
)
from spectune.backend.sglang_support import infeasible, unsupported
from spectune.errors import InfeasibleConfig, UsageError
from spectune.records import SpecConfig

SETTINGS = SglangSettings(model="/model", max_running_requests=64, context_length=4096)


def flags_of(config: SpecConfig, draft: str | None = "/head", **changes: object) -> dict[str, str | None]:
    """Flags by name, None where there is no value."""
    words = server_arguments(
        SETTINGS, config, draft_path=draft, served_model="name", host="h", port=1, **changes
    )  # type: ignore[arg-type]
    found: dict[str, str | None] = {}
    for index, word in enumerate(words):
        if word.startswith("--"):
            has_value = index + 1 < len(words) and not words[index + 1].startswith("--")
            found[word.removeprefix("--")] = words[index + 1] if has_value else None
    return found


def spec_of(flags: dict[str, str | None]) -> dict[str, str | None]:
    return {name: value for name, value in flags.items() if name.startswith("speculative")}


def test_chain_writes_all_three_numbers_and_the_head() -> None:
    """A chain of 3 verifies 4 tokens, the root included; nothing is left to SGLang's own choice."""
    assert spec_of(flags_of(SpecConfig.chain("eagle3", 3))) == {
        "speculative-algorithm": "EAGLE3",
        "speculative-draft-model-path": "/head",
        "speculative-num-steps": "3",
        "speculative-eagle-topk": "1",
        "speculative-num-draft-tokens": "4",
    }


def test_tree_writes_its_own_three_numbers() -> None:
    """Depth, children and verified tokens of a tree are independent."""
    flags = flags_of(SpecConfig(method="eagle3", num_steps=5, topk=4, num_draft_tokens=16))

    numbers = ("num-steps", "eagle-topk", "num-draft-tokens")
    assert [flags[f"speculative-{name}"] for name in numbers] == ["5", "4", "16"]


def test_ngram_writes_the_breadth_that_overrides_topk() -> None:
    """SGLang takes topk of NGRAM from the breadth of its search, 10 if unset."""
    assert spec_of(flags_of(SpecConfig.chain("ngram", 4), draft=None)) == {
        "speculative-algorithm": "NGRAM",
        "speculative-num-steps": "4",
        "speculative-eagle-topk": "1",
        "speculative-num-draft-tokens": "5",
        "speculative-ngram-max-bfs-breadth": "1",
    }


def test_small_draft_model_is_standalone() -> None:
    """Method draft_model is SGLang's STANDALONE with the model's folder."""
    flags = spec_of(flags_of(SpecConfig.chain("draft_model", 3)))

    assert flags["speculative-algorithm"] == "STANDALONE"
    assert flags["speculative-draft-model-path"] == "/head"


def test_limit_on_running_requests_is_written_and_equal_in_all_arms() -> None:
    """Unset it is 48 as soon as SGLang speculates and thousands if not: a high batch would queue."""
    limits = {
        flags_of(config)["max-running-requests"]
        for config in (SpecConfig.off(), SpecConfig.chain("eagle3", 3))
    }

    assert limits == {"64"}


def test_plain_arm_differs_from_a_speculating_one_in_speculative_flags_only() -> None:
    """Chunk, cache, sampling defaults, metrics: the same words in every arm."""
    plain, chain = flags_of(SpecConfig.off()), flags_of(SpecConfig.chain("eagle3", 3))

    assert plain == {name: value for name, value in chain.items() if not name.startswith("speculative")}
    assert {"enable-metrics", "disable-radix-cache"} <= plain.keys()


def test_cache_and_chunks_are_on_only_as_in_production() -> None:
    """An arm served as in production shares beginnings of prompts and prefills them in chunks of 512."""
    config = SpecConfig.chain("eagle3", 2, options=(("production", True),))
    production = flags_of(config)

    assert "disable-radix-cache" not in production
    assert production["chunked-prefill-size"] == "512"


def test_head_that_is_not_named_is_refused_before_a_start() -> None:
    """Without a draft path SGLang loads the target twice and ends."""
    with pytest.raises(InfeasibleConfig, match="--draft-model"):
        flags_of(SpecConfig.chain("eagle3", 3), draft=None)


def test_standby_drafts_nothing_up_to_the_limit_and_is_built_for_its_depth() -> None:
    """Depth 0 at every batch size that can be; the depth itself above the limit, where it is never reached."""
    config = SpecConfig.chain("eagle3", 3, options=(("standby", True),))

    assert adaptive_document(config, 16) == {
        "1": {"candidate_steps": [0]},
        "17": {"candidate_steps": [3]},
    }
    assert adaptive_document(SpecConfig.chain("eagle3", 3), 16) is None


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("--speculative-draft-model=/x", "speculative-draft-model-path"),
        ("--speculative_draft_model_path", "speculative-draft-model-path"),
        ("--tensor-parallel-size", "tp-size"),
        ("--tp", "tp-size"),
        ("--model", "model-path"),
    ],
)
def test_two_spellings_of_a_flag_are_one_name(spelling: str, name: str) -> None:
    """Aliases, underscores and equals signs do not make another flag."""
    assert flag_name(spelling) == name


@pytest.mark.parametrize(
    ("word", "successor"),
    [
        ("--num-speculative-tokens", "speculative-num-steps"),
        ("--speculative-model", "speculative-draft-model-path"),
        ("--max-num-seqs=8", "max-running-requests"),
    ],
)
def test_unknown_flag_is_caught_before_a_start_with_the_name_it_has(word: str, successor: str) -> None:
    """Names of vLLM or of older versions are refused with what SGLang calls it."""
    with pytest.raises(UsageError) as caught:
        check_extra([word, "3"])

    assert successor in str(caught.value.hint)


@pytest.mark.parametrize(
    "word", ["--speculative-num-steps", "--port=1", "--speculative-draft-model", "--model"]
)
def test_flag_that_the_measurement_sets_is_refused(word: str) -> None:
    """Given twice it would undo the measurement in silence."""
    with pytest.raises(UsageError, match="is set by the measurement"):
        check_extra([word, "3"])


def test_version_that_is_not_known_is_refused() -> None:
    """0.5.x was read; another one may have renamed what is written here."""
    check_version("0.5.23")

    with pytest.raises(UsageError, match=r"sglang 0\.6\.1"):
        check_version("0.6.1")


def test_value_of_a_users_own_flag_is_found_in_both_spellings() -> None:
    """`--page-size 16` and `--page_size=16` say the same."""
    assert extra_value(["--page-size", "16"], "page-size") == "16"
    assert extra_value(["--page_size=16"], "page-size") == "16"
    assert extra_value(["--other"], "page-size") is None


@pytest.mark.parametrize("topk", range(1, 5))
@pytest.mark.parametrize("steps", range(1, 5))
@pytest.mark.parametrize("tokens", range(2, 20))
def test_tree_is_feasible_exactly_where_the_builder_has_enough_nodes(
    steps: int, topk: int, tokens: int
) -> None:
    """The builder collects topk nodes, then topk² a level, and takes the best N-1 of them."""
    pool = [node for level in range(steps) for node in range(topk if level == 0 else topk * topk)]
    can_build = len(pool) >= tokens - 1 and (topk > 1 or tokens == steps + 1)

    assert (infeasible(steps, topk, tokens) is None) == can_build


TREE = SpecConfig(method="eagle3", num_steps=3, topk=2, num_draft_tokens=5)
NGRAM_TREE = SpecConfig(method="ngram", num_steps=3, topk=2, num_draft_tokens=5)


@pytest.mark.parametrize(
    ("config", "backend", "page", "reason"),
    [
        (TREE, None, 1, None),
        (TREE, None, None, None),
        (TREE, "fa3", 16, None),
        (TREE, "flashinfer", 16, None),
        (TREE, "triton", 16, None),
        (TREE, "flashmla", 16, "page size 16"),
        (TREE, None, 16, "page size 16"),
        (TREE, "trtllm_mha", 1, "chains only"),
        (SpecConfig.chain("eagle3", 3), "trtllm_mha", 16, None),
        (NGRAM_TREE, "flashinfer", 16, None),
        (NGRAM_TREE, "triton", 16, "page size 16"),
        (SpecConfig.off(), "trtllm_mha", 16, None),
        (SpecConfig.chain("suffix", 3), None, 1, "no method suffix"),
        (SpecConfig.chain("ngram", 19), None, 1, "18 tokens deep"),
        (SpecConfig.chain("draft_model", 3, options=(("standby", True),)), None, 1, "EAGLE3 chains only"),
    ],
)
def test_capability_table(
    config: SpecConfig, backend: str | None, page: int | None, reason: str | None
) -> None:
    """What SGLang's own checks accept and refuse, by attention backend and page size."""
    found = unsupported(config, attention_backend=backend, page_size=page)

    assert (found is None) if reason is None else (found is not None and reason in found)


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_ngram_and_standalone_do_not_run_with_attention_data_parallelism(method: str) -> None:
    """SGLang refuses both at its start."""
    config = SpecConfig.chain(method, 3)

    assert "attention data parallelism" in str(unsupported(config, has_dp_attention=True))
    assert unsupported(config) is None


def test_forced_acceptance_is_two_variables() -> None:
    """The bonus token is in the length; below 1 there is nothing to force."""
    assert forced_acceptance(2.6) == {
        "SGLANG_SIMULATE_ACC_LEN": "2.6",
        "SGLANG_SIMULATE_ACC_METHOD": "match-expected",
    }
    with pytest.raises(UsageError, match="below 1"):
        forced_acceptance(0.5)

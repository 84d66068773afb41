"""Launch lines that would fail, or silently run something else, are told before a launch."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

import pytest

from spectune.errors import UsageError
from spectune.measure.doctor import Finding, Severity
from spectune.measure.doctor.launch import check_launch, check_resolved
from spectune.measure.doctor.machine import MachineFacts, check_machine, parse_gpus
from spectune.measure.doctor.names import draft_length_name
from spectune.measure.doctor.sampling import check_sampling
from spectune.measure.doctor.sglang import check_triple, complete_triple


def launch(engine: str, line: str, version: str | None = None) -> list[Finding]:
    findings = check_launch(engine, shlex.split(line), version=version)
    return [found for found in findings if found.severity in (Severity.ERROR, Severity.WARNING)]


def texts(findings: Iterable[Finding]) -> str:
    return "\n".join(f"{found.text} -> {found.fix}" for found in findings)


GOOD = '{"method": "eagle3", "model": "HEAD", "num_speculative_tokens": 3}'


@pytest.mark.parametrize(
    ("engine", "line"),
    [
        pytest.param("vllm", f"vllm serve T --speculative-config '{GOOD}' --max-num-seqs 16", id="vllm"),
        pytest.param(
            "vllm", "serve T --spec-method eagle3 --spec-model HEAD --spec-tokens 4", id="vllm-short-forms"
        ),
        pytest.param(
            "vllm",
            "serve T -sc.method ngram --speculative-config.num_speculative_tokens=3",
            id="vllm-dotted",
        ),
        pytest.param(
            "sglang",
            "--speculative-algorithm EAGLE3 --speculative-draft-model-path H --speculative-num-steps 5 "
            "--speculative-eagle-topk 4 --speculative-num-draft-tokens 16 --max-running-requests 64",
            id="sglang-tree",
        ),
    ],
)
def test_complete_launch_lines_have_no_finding(engine: str, line: str) -> None:
    """The forms that the engines document pass."""
    assert launch(engine, line) == []


@pytest.mark.parametrize(
    ("engine", "line", "proposed"),
    [
        pytest.param("vllm", "--speculative-model X --num-speculative-tokens 3", '"model"', id="vllm-model"),
        pytest.param("vllm", "--num_speculative_tokens=3", '"num_speculative_tokens"', id="underscores"),
        pytest.param("vllm", "--speculative-disable-by-batch-size 8", "_per_batch_size", id="vllm-batch"),
        pytest.param("llama.cpp", "-m T --draft-max 16", "--spec-draft-n-max", id="llama.cpp"),
        pytest.param("trtllm", "--num_nextn_predict_layers 3", "max_draft_len", id="trtllm"),
        pytest.param("sglang", "--num-speculative-tokens 3", "--speculative-num-steps", id="sglang"),
        pytest.param(
            "sglang", "--speculative-num-step 3", "--speculative-num-steps", id="sglang-misspelt"
        ),
        pytest.param(
            "vllm", f"--speculative-config.num-speculative-tokens 3 --speculative-config '{GOOD}'",
            "--speculative-config.num_speculative_tokens", id="hyphens-behind-the-dot",
        ),
        pytest.param(
            "vllm",
            '--speculative-config \'{"method": "ngram", "num_speculative_tokens": 3, "tensor_parallel_size": 1}\'',
            "draft_tensor_parallel_size", id="json-field",
        ),
        pytest.param(
            "vllm",
            '--speculative-config \'{"method": "ngram", "num_speculative_token": 3}\'',
            "num_speculative_tokens", id="json-field-misspelt",
        ),
        pytest.param(
            "vllm",
            '--speculative-config \'{"method": "ngram", "num_speculative_tokens": 3, "disable_by_batch_size": 8}\'',
            "num_speculative_tokens_per_batch_size", id="json-switch-without-effect",
        ),
    ],
)  # fmt: skip
def test_flags_of_other_versions_get_the_new_name(engine: str, line: str, proposed: str) -> None:
    """A flag or field that the engine does not have is told with the one that took its place."""
    found = launch(engine, line)

    assert found
    assert found[0].severity is Severity.ERROR
    assert proposed in texts(found)


@pytest.mark.parametrize(
    ("engine", "version", "name"),
    [
        ("vllm", "0.32.0+cpu", "num_speculative_tokens"),
        ("vllm", "v0.33.1", "num_speculative_tokens"),
        ("sglang", "0.5.23", "speculative_num_steps"),
        ("trtllm", "1.2.0", "num_nextn_predict_layers"),
        ("trtllm", "1.3.0", "max_draft_len"),
        ("llama.cpp", "b6000", "draft-max"),
        ("llama.cpp", "b11000", "spec-draft-n-max"),
    ],
)
def test_draft_length_has_the_name_of_the_version(engine: str, version: str, name: str) -> None:
    """K has one name here and the engine's own name where it is written."""
    assert draft_length_name(engine, version) == name


@pytest.mark.parametrize(
    ("engine", "version"), [("vllm", "0.34.0"), ("vllm", "0.6.1"), ("llama.cpp", "b9000"), ("mlc", "1.0")]
)
def test_unknown_version_is_said_to_be_unsupported(engine: str, version: str) -> None:
    """A version that nobody has read is no guess."""
    with pytest.raises(UsageError, match=f"unsupported version: {engine} {version}"):
        draft_length_name(engine, version)


@pytest.mark.parametrize(
    ("length", "text"),
    [
        pytest.param("", "num_speculative_tokens is missing", id="missing"),
        pytest.param(', "num_speculative_tokens": 0', "0 is not a whole number of 1..128", id="zero"),
        pytest.param(', "num_speculative_tokens": -1', "-1 is not a whole number of 1..128", id="negative"),
        pytest.param(', "num_speculative_tokens": true', "True is not a whole number", id="boolean"),
        pytest.param(', "num_speculative_tokens": 200', "200 is not a whole number", id="too-long"),
    ],
)
def test_vllm_needs_a_draft_length_within_its_range(length: str, text: str) -> None:
    """The number is always required, and refused with its range where it cannot be."""
    found = launch("vllm", '--speculative-config \'{"method": "mtp"' + length + "}'")

    assert [Severity.ERROR] == [one.severity for one in found]
    assert text in found[0].text
    assert "1..128" in texts(found)


def test_eagle3_without_a_head_is_an_error_before_any_start() -> None:
    """Both engines would load the target twice and crash."""
    in_vllm = launch("vllm", '--speculative-config \'{"method": "eagle3", "num_speculative_tokens": 3}\'')
    in_sglang = launch("sglang", "--speculative-algorithm EAGLE3 --max-running-requests 8")

    assert "without a draft model" in in_vllm[0].text
    assert "without --speculative-draft-model-path" in in_sglang[0].text


@pytest.mark.parametrize(
    ("given", "completed"),
    [
        pytest.param((1, None, None), (1, 1, 2), id="steps"),
        pytest.param((None, None, 5), (4, 1, 5), id="draft-tokens"),
        pytest.param((3, 1, None), (3, 1, 4), id="chain"),
        pytest.param((None, None, None), (3, 1, 4), id="nothing"),
    ],
)
def test_partial_triples_are_completed_to_chains(
    given: tuple[int | None, ...], completed: tuple[int, int, int]
) -> None:
    """One or two of the three numbers make a chain: topk 1, draft tokens = steps + 1."""
    assert complete_triple(*given) == completed


def test_partial_triple_is_an_error_with_the_whole_one() -> None:
    """SGLang compares None with a number; all three are written instead."""
    found = list(check_triple("1", None, None))

    assert found[0].severity is Severity.ERROR
    assert (
        found[0].fix
        == "--speculative-num-steps 1 --speculative-eagle-topk 1 --speculative-num-draft-tokens 2"
    )


def test_chain_counts_the_root_among_its_draft_tokens() -> None:
    """steps=3, topk=1, draft=5 runs as 4: the root is one of them; 4 is fine."""
    assert "verifies 4 tokens, the root included, not 5" in next(iter(check_triple("3", "1", "5"))).text
    assert list(check_triple("3", "1", "4")) == []


def test_tree_with_more_nodes_than_candidates_is_an_error() -> None:
    """Two steps of topk 2 draft 2 + 4 = 6 candidates, seven nodes with the root."""
    assert "draft 6" in next(iter(check_triple("2", "2", "8"))).text
    assert list(check_triple("2", "2", "7")) == []


@pytest.mark.parametrize(
    "flags",
    ["--attention-backend trtllm_mha", "--attention-backend torch_native --page-size 16"],
)
def test_trees_on_backends_without_them_are_refused(flags: str) -> None:
    """topk > 1 crashes on some attention backends: told with those that work."""
    tree = (
        "--speculative-algorithm EAGLE3 --speculative-draft-model-path H --speculative-num-steps 3 "
        "--speculative-eagle-topk 4 --speculative-num-draft-tokens 8 --max-running-requests 8 "
    )

    found = launch("sglang", tree + flags)

    assert [found[0].check, found[0].severity] == ["tree", Severity.ERROR]
    assert launch("sglang", tree + "--attention-backend fa3 --page-size 16") == []


def test_admission_limit_of_sglang_is_told() -> None:
    """Without the flag SGLang admits 48 requests once it speculates."""
    found = launch("sglang", "--speculative-algorithm NGRAM")

    assert "takes 48" in found[0].text


@pytest.mark.parametrize(("draft", "is_fine"), [(1, True), (4, True), (2, False), (8, False)])
def test_draft_tensor_parallel_is_one_or_the_targets(draft: int, is_fine: bool) -> None:
    """On a target over four devices a draft runs on one or on four."""
    config = GOOD[:-1] + f', "draft_tensor_parallel_size": {draft}}}'

    found = launch("vllm", f"--speculative-config '{config}' --tensor-parallel-size 4")

    assert (found == []) is is_fine


def test_value_that_the_started_engine_does_not_honour_is_told() -> None:
    """A draft size of 1 that the engine turned into 4 is seen by comparing with its own words."""
    asked = {"draft_tensor_parallel_size": 1, "num_speculative_tokens": 3}

    found = list(check_resolved(asked, {"draft_tensor_parallel_size": 4, "num_speculative_tokens": 3}))

    assert ["draft_tensor_parallel_size was asked as 1, the engine runs with 4"] == [
        one.text for one in found
    ]


def test_token_budget_below_the_verified_tokens_is_an_error() -> None:
    """64 sequences of K=3 verify 256 tokens a step; a budget of 128 holds 32 of them."""
    line = f"--speculative-config '{GOOD}' --max-num-seqs 64 --max-num-batched-tokens"

    found = launch("vllm", f"{line} 128")

    assert "verify 256 tokens a step, max-num-batched-tokens is 128" in found[0].text
    assert "at most 32 sequences" in (found[0].signature or "")
    assert launch("vllm", f"{line} 256") == []


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        pytest.param("[[2, 4, 3]]", "starts at batch 2", id="start"),
        pytest.param("[[1, 4, 3], [4, 8, 1]]", "batch 4 is in two ranges", id="overlap"),
        pytest.param('{"1": 3}', "no list of [first, last, K]", id="dictionary"),
        pytest.param("[[1, 4, 5]]", "asks for K=5, num_speculative_tokens is 3", id="too-long"),
    ],
)
def test_schedules_follow_the_rules_of_vllm(schedule: str, text: str) -> None:
    """A batch schedule starts at 1, has no overlap, is a list, and stays within K."""
    config = GOOD[:-1] + f', "num_speculative_tokens_per_batch_size": {schedule}}}'

    assert text in texts(launch("vllm", f"--speculative-config '{config}'"))


def test_removed_method_depends_on_the_version() -> None:
    """Medusa is there in 0.32 and gone in 0.33."""
    line = '--speculative-config \'{"method": "medusa", "num_speculative_tokens": 3}\''

    assert launch("vllm", line, "0.32.0") == []
    assert "removed in vLLM 0.33" in launch("vllm", line, "0.33.0")[0].text


@pytest.mark.parametrize(
    ("engine", "options", "named"),
    [
        pytest.param("vllm", {"temperature": 0.7, "min_p": 0.01}, ["min_p"], id="min-p"),
        pytest.param("vllm", {"logit_bias": {"5": -100}}, ["logit_bias"], id="logit-bias"),
        pytest.param("trtllm", {"logprobs": 5}, ["logprobs"], id="logprobs"),
        pytest.param("reference", {"presence_penalty": 0.5}, ["presence_penalty"], id="reference"),
        pytest.param("vllm", {"min_p": 0.0, "logit_bias": {}, "top_p": 0.9}, [], id="neutral-values"),
        pytest.param("reference", {"min_p": 0.1}, [], id="reference-has-min-p"),
    ],
)
def test_sampling_options_without_speculation_are_named(
    engine: str, options: dict[str, object], named: list[str]
) -> None:
    """An option that speculation does not support is an error that also bars the plain arm."""
    found = [one for one in check_sampling(engine, options) if one.severity is Severity.ERROR]

    assert [name for name in named if name in texts(found)] == named
    assert len(found) == len(named)
    assert all("both arms" in (one.fix or "") for one in found)


# Machine ------------------------------------------------------------------------------------------


def machine(**changes: object) -> MachineFacts:
    facts: dict[str, object] = {
        "cores": 2,
        "cpu_model": "cpu",
        "architecture": "x86_64",
        "cpu_flags": ("avx2", "avx512_bf16"),
        "memory_bytes": 16 << 30,
        "available_bytes": 8 << 30,
        "load_average": 0.1,
        "governor": None,
        "read_bandwidth_bytes_per_s": 2e10,
    }
    return MachineFacts(**{**facts, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "weight_bytes", "expected"),
    [
        pytest.param({}, 1 << 30, [], id="fine"),
        pytest.param({}, 9 << 30, ["memory"], id="weights-too-large"),
        pytest.param({"governor": "powersave"}, None, ["clocks"], id="powersave"),
        pytest.param({"load_average": 1.5}, None, ["load"], id="busy"),
        pytest.param({"cpu_flags": ("avx2",)}, None, ["isa"], id="no-bf16"),
    ],
)
def test_machine_findings(changes: dict[str, object], weight_bytes: int | None, expected: list[str]) -> None:
    """Each trouble of a machine is one finding, and a quiet one that fits has none."""
    findings = check_machine(machine(**changes), weight_bytes=weight_bytes)

    assert expected == [
        found.check for found in findings if found.severity in (Severity.ERROR, Severity.WARNING)
    ]


def test_gpu_lines_are_read() -> None:
    """A line of nvidia-smi's CSV; a clock that is not told is 0."""
    gpus = list(parse_gpus("NVIDIA H200, 143771, 2, [N/A], 1980, 570.1\nbroken\n"))

    assert [(gpu.name, gpu.memory_bytes, gpu.clock_mhz, gpu.max_clock_mhz) for gpu in gpus] == [
        ("NVIDIA H200", 143771 << 20, 0.0, 1980.0)
    ]

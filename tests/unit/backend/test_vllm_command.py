"""vLLM's command line: the documents and flags that its version reads, and what is refused before a start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spectune.backend.command_line import launcher
from spectune.backend.vllm_command import (
    VllmSettings,
    check_extra,
    check_version,
    cpu_environment,
    program,
    server_arguments,
    spec_document,
)
from spectune.errors import InfeasibleConfig, UsageError
from spectune.records import SpecConfig

SETTINGS = VllmSettings(model="/models/target", max_num_seqs=16, max_model_len=4096)


def document(config: SpecConfig, draft: str | None = None) -> dict[str, object] | None:
    return spec_document(config, draft_path=draft, max_num_seqs=16)


def arguments(config: SpecConfig, draft: str | None = None) -> list[str]:
    return server_arguments(
        SETTINGS, config, draft_path=draft, served_model="ours", host="127.0.0.1", port=8123
    )


def test_spec_document_off_is_absent() -> None:
    """Plain decoding starts without any speculative setting."""
    assert document(SpecConfig.off()) is None
    assert "--speculative-config" not in arguments(SpecConfig.off())


def test_spec_document_of_each_method() -> None:
    """Every method is written with vLLM's names, always with its number of tokens."""
    eagle = SpecConfig.chain("eagle3", 3, draft_model="head")
    ngram = SpecConfig.chain("ngram", 4)
    draft = SpecConfig.chain("draft_model", 5, draft_model="small")
    suffix = SpecConfig.chain("suffix", 8)

    assert document(eagle, "/heads/h") == {
        "method": "eagle3",
        "model": "/heads/h",
        "num_speculative_tokens": 3,
    }
    assert document(ngram) == {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_max": 5,
        "prompt_lookup_min": 1,
    }
    assert document(draft, "/m") == {"method": "draft_model", "model": "/m", "num_speculative_tokens": 5}
    assert document(suffix) == {"method": "suffix", "num_speculative_tokens": 8}


def test_spec_document_standby_schedules_no_drafts_at_any_batch_size() -> None:
    """Standby is started for K drafts and told to make none, from one sequence to the most there can be."""
    standby = SpecConfig.chain("eagle3", 3, draft_model="head", options=(("standby", True),))

    assert document(standby, "/h") == {
        "method": "eagle3",
        "model": "/h",
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": [[1, 16, 0]],
    }


def test_spec_document_tree_is_refused_with_the_reason() -> None:
    """A tree is no chain, and vLLM verifies chains only."""
    tree = SpecConfig(method="eagle3", num_steps=3, topk=4, num_draft_tokens=8, draft_model="head")

    with pytest.raises(InfeasibleConfig, match="chains only, topk 4 is a tree"):
        document(tree, "/h")


def test_arms_differ_in_speculation_alone() -> None:
    """Limits that decide how much is admitted are written out and equal with and without speculation."""
    plain, spec = arguments(SpecConfig.off()), arguments(SpecConfig.chain("ngram", 3))

    assert plain == spec[: len(plain)]
    assert spec[len(plain) :: 2] == ["--per-request-spec-decode-metrics", "--speculative-config"]
    for flag, value in (
        ("max-num-seqs", "16"),
        ("max-num-batched-tokens", "4096"),
        ("max-model-len", "4096"),
    ):
        assert plain[plain.index(f"--{flag}") + 1] == value
    assert "--no-enable-prefix-caching" in plain
    assert plain[plain.index("--generation-config") + 1] == "vllm"


def test_arguments_hold_one_json_word() -> None:
    """The document is one word of JSON, never a shell's idea of it."""
    words = arguments(SpecConfig.chain("ngram", 3))

    assert json.loads(words[words.index("--speculative-config") + 1])["num_speculative_tokens"] == 3


def test_program_is_the_module() -> None:
    """The console script of the CPU build looks for a package of another name and fails."""
    assert program("/venv/bin/python") == ["/venv/bin/python", "-m", "vllm.entrypoints.openai.api_server"]


@pytest.mark.parametrize("version", ["0.32.0", "0.33.1", "0.32.0+cpu"])
def test_check_version_known(version: str) -> None:
    """Versions whose flags were read are served."""
    check_version(version)


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "1.0", "unknown"])
def test_check_version_unknown_is_refused_not_guessed(version: str) -> None:
    """For another version the flags are not known: no guess is started."""
    with pytest.raises(UsageError, match="is not a version whose flags are known"):
        check_version(version)


def test_check_extra_proposes_the_new_name() -> None:
    """A flag that is gone is caught before the start, with what says the same today."""
    with pytest.raises(UsageError, match="has no speculative-model any more") as caught:
        check_extra(("--speculative_model", "x"))

    assert "speculative-config" in str(caught.value.hint)


@pytest.mark.parametrize("flag", ["--max-num-seqs", "--speculative-config.method", "--enable_prefix_caching"])
def test_check_extra_refuses_what_the_measurement_sets(flag: str) -> None:
    """The same setting twice would undo the measurement's own in silence."""
    with pytest.raises(UsageError, match="is set by the measurement"):
        check_extra((flag, "4"))


def test_launcher_takes_all_arguments_and_the_port() -> None:
    """A launcher of the user's own gets every argument where it wants it."""
    argv = launcher("docker run -p {port}:{port} image {args} -v", ["--model", "m"], 8123)

    assert argv == ["docker", "run", "-p", "8123:8123", "image", "--model", "m", "-v"]


def test_launcher_without_a_place_for_arguments_is_refused() -> None:
    """Without the arguments the launcher would start something else."""
    with pytest.raises(UsageError, match="has no word"):
        launcher("docker run image", ["--model", "m"], 8123)


def test_cpu_environment_names_few_cores_and_keeps_what_is_set(tmp_path: Path) -> None:
    """Two cores are named, because the engine would keep one free; the user's own settings stay."""
    python = tmp_path / "bin" / "python"
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()
    settings = VllmSettings(model="m", kv_cache_gib=3)

    assert cpu_environment(settings, str(python), (4, 7), own={}) == {
        "VLLM_CPU_KVCACHE_SPACE": "3",
        "VLLM_CPU_OMP_THREADS_BIND": "4,7",
        "LD_PRELOAD": str(tmp_path / "lib" / "libiomp5.so"),
    }
    kept = cpu_environment(settings, str(python), (4, 7), own={"VLLM_CPU_OMP_THREADS_BIND": "nobind"})
    assert kept["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in cpu_environment(settings, "/x/bin/python", (0, 1, 2), own={})


@pytest.mark.parametrize(
    "word",
    ["-sc", "-sc.method", "--config", "--config=f.yaml", "--speculative-conf", "--speculative_config.method"],
)
def test_extra_flags_that_would_make_plain_decoding_speculate_are_refused(word: str) -> None:
    """Extras go to every arm: a schedule in one of them, or in a file, would speculate where nothing should."""
    with pytest.raises(UsageError, match="is set by the measurement"):
        check_extra([word, "x"])


def test_extra_flags_of_the_deployment_pass() -> None:
    """Beginnings that are flags of their own are no abbreviations of ours."""
    check_extra(["--tensor-parallel-size", "2", "--model-impl", "vllm", "--max-num-partial-prefills", "2"])

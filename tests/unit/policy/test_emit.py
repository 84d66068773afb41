"""What engines execute of a policy."""

from __future__ import annotations

import json
import shlex

import pytest

from spectune.errors import UsageError
from spectune.policy.emit import EMITTERS, emit, emit_all
from spectune.policy.emit_parts import EmitOptions, ladder
from spectune.policy.emit_router import route, router_table
from spectune.policy.emit_tensorrt_llm import lookup
from spectune.policy.emit_vllm import NEWEST, OLDEST, vllm_lookup, vllm_schedule
from spectune.policy.forms import parts_of
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

    assert (
        caught.value.hint
        == "one of vllm, sglang, sglang-yaml, sglang-acceptance, tensorrt-llm, llama.cpp, reference, router"
    )


# What an engine would ignore ------------------------------------------------------------------------


def edge(make):
    """K=3 up to batch 4, off from 16."""
    return policy_of(make, {1: make.chain(3), 4: make.chain(3), 16: make.off})


def test_vllm_schedule_with_data_parallelism_is_refused(make):
    """vLLM drops the schedule then; a static configuration is served all the same."""
    with pytest.raises(UsageError, match="--data-parallel-size 2: vLLM ignores a schedule") as caught:
        emit(edge(make), "vllm", EmitOptions(data_parallel_size=2))

    static = emit(
        policy_of(make, {1: make.chain(3)}), "vllm", EmitOptions(data_parallel_size=2, max_batch_size=1)
    )

    assert "--engine router" in (caught.value.hint or "")
    assert "--data-parallel-size 2" in static.splitlines()[-1]


def test_vllm_schedule_for_suffix_decoding_is_refused(make):
    """Methods that the runner does not schedule would draft at every load."""
    policy = policy_of(make, {1: make.chain(3, method="suffix"), 4: make.off})

    with pytest.raises(UsageError, match="for method suffix"):
        emit(policy, "vllm")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (EmitOptions(runner="v1"), "piecewise graphs"),
        (EmitOptions(runner="v2"), "still drafts all of them"),
    ],
)
def test_vllm_runner_is_warned_of(make, options, words):
    """What each runner does with a schedule stands above the command."""
    config = make.chain(3, method="draft_model", draft_model="org/small")
    policy = policy_of(make, {1: config, 4: make.off}, device="cuda")

    assert words in emit(policy, "vllm", options)


@pytest.mark.parametrize("version", ["0.31.1", "0.34.0", "0.9.2", "1.0"])
def test_vllm_of_an_unknown_version_is_refused(make, version):
    """Another version may read the schedule differently or not at all: no guess is written."""
    with pytest.raises(UsageError, match="unsupported version of vLLM") as caught:
        emit(edge(make), "vllm", EmitOptions(engine_version=version))

    assert caught.value.hint == "known are 0.32 and 0.33"


@pytest.mark.parametrize("version", [None, "0.32.0", "0.33.1"])
def test_vllm_never_gets_the_switch_that_does_nothing(make, version):
    """The old off-by-batch-size is accepted and ignored by newer versions."""
    text = emit(edge(make), "vllm", EmitOptions(engine_version=version))

    assert "disable_by_batch_size" not in text.replace("-", "_")
    assert vllm_config(text)["num_speculative_tokens_per_batch_size"] == [[1, 4, 3], [5, 16, 0]]


def test_versions_of_vllm_are_those_that_are_launched():
    """Emitting and launching know the same versions."""
    from spectune.backend import vllm_command

    assert (OLDEST, NEWEST) == (vllm_command.OLDEST, vllm_command.NEWEST)


def test_vllm_command_names_the_measured_standby_cost(make):
    """What K=0 costs there was measured: it stands above the command."""
    policy = edge(make) | {"standby": [{"method": "eagle3", "batch": 16, "cost": 1.061, "cost_ci": None}]}

    assert "1.06x at batch 16" in emit(policy, "vllm")


def test_vllm_on_a_cpu_is_started_by_its_module(make):
    """The CPU build's console script does not find its own version."""
    text = emit(policy_of(make, {1: make.chain(3)}, backend="vllm"), "vllm")

    assert "python -m vllm.entrypoints.openai.api_server --model org/target" in text


# TensorRT-LLM --------------------------------------------------------------------------------------


def tensorrt(text: str) -> dict[str, object]:
    import yaml

    return yaml.safe_load(dict(parts_of(text).files)["speculation.yaml"])["speculative_config"]


STEPS = {1: 4, 4: 4, 16: 3, 48: 1, 64: 0}


def steps_policy(make):
    return policy_of(make, {size: make.chain(k) if k else make.off for size, k in STEPS.items()})


def test_tensorrt_from_1_3_keys_are_upper_bounds(make):
    """{4: 4, 16: 3, 48: 1}: inclusive, 0 above the last, the smallest key is the maximum."""
    written = tensorrt(emit(steps_policy(make), "tensorrt-llm", EmitOptions(engine_version="1.3.0rc2")))

    assert written == {
        "decoding_type": "Eagle3",
        "max_draft_len": 4,
        "speculative_model": "org/head",
        "draft_len_schedule": {4: 4, 16: 3, 48: 1},
    }


def test_tensorrt_before_1_3_keys_are_lower_bounds(make):
    """The same policy for an older version: keys from 1 on, off is 0."""
    written = tensorrt(emit(steps_policy(make), "tensorrt-llm", EmitOptions(engine_version="1.2.1")))

    assert written["draft_len_schedule"] == {1: 4, 5: 3, 17: 1, 49: 0}


@pytest.mark.parametrize(("version", "has_upper_bounds"), [("1.2", False), ("1.3", True)])
def test_tensorrt_runs_as_the_policy_says(make, version, has_upper_bounds):
    """Either spelling gives the evaluator's own answer at every batch size."""
    policy = steps_policy(make)
    written = tensorrt(emit(policy, "tensorrt-llm", EmitOptions(engine_version=version)))

    depths = [
        lookup(written["draft_len_schedule"], size, has_upper_bounds=has_upper_bounds)
        for size in range(1, 65)
    ]

    assert depths == [choose(policy, size).num_steps for size in range(1, 65)]


def test_tensorrt_without_a_version_gets_what_all_versions_read_alike(make):
    """max_concurrency with the smallest K of the range, and the reason."""
    text = emit(steps_policy(make), "tensorrt-llm")

    assert tensorrt(text) == {
        "decoding_type": "Eagle3",
        "max_draft_len": 1,
        "speculative_model": "org/head",
        "max_concurrency": 48,
    }
    assert "--engine-version is not given" in text


@pytest.mark.parametrize("version", ["0.21", "2.0", "newest"])
def test_tensorrt_of_an_unknown_version_is_refused(make, version):
    """Keys were renamed and turned around between versions: no guess is written."""
    with pytest.raises(UsageError, match=f"--engine-version {version}"):
        emit(steps_policy(make), "tensorrt-llm", EmitOptions(engine_version=version))


def test_tensorrt_schedule_that_would_rise_is_lowered_and_says_so(make):
    """Off in between stays off above, a K above the first becomes the first."""
    policy = policy_of(make, {1: make.chain(2), 2: make.chain(3), 4: make.off, 8: make.chain(2), 9: make.off})
    text = emit(policy, "tensorrt-llm", EmitOptions(engine_version="1.3"))

    assert tensorrt(text)["draft_len_schedule"] == {2: 2}
    assert "K=3 from batch 2 on becomes 2" in text
    assert "cannot speculate again above an off range" in text


def test_tensorrt_tree_is_dynamic_and_limited_by_concurrency(make):
    """A tree has no schedule: one shape up to its last batch size."""
    text = emit(
        policy_of(make, {1: make.tree(), 4: make.off}), "tensorrt-llm", EmitOptions(engine_version="1.3")
    )

    assert tensorrt(text) == {
        "decoding_type": "Eagle3",
        "max_draft_len": 5,
        "speculative_model": "org/head",
        "use_dynamic_tree": True,
        "dynamic_tree_max_topK": 4,
        "max_total_draft_tokens": 16,
        "max_concurrency": 1,
    }


# llama.cpp -----------------------------------------------------------------------------------------


def test_llama_cpp_holds_the_load_that_was_decided(make):
    """No policy by load there: --parallel ends where speculation does, and the text says who takes the rest."""
    text = emit(edge(make), "llama.cpp")

    assert text.splitlines()[-1] == (
        "llama-server -m org/target -md org/head --parallel 4 --spec-type draft-eagle3 "
        "--spec-draft-n-max 3 --spec-draft-p-min 0.0"
    )
    assert "--engine router" in text


def test_llama_cpp_off_is_said_in_its_own_flag(make):
    """Do not speculate is --spec-type none."""
    text = emit(policy_of(make, {1: make.off}), "llama.cpp", EmitOptions(engine_version="b11000"))

    assert text.splitlines()[-1] == "llama-server -m org/target --parallel 1 --spec-type none"


def test_llama_cpp_of_an_old_build_is_refused(make):
    """--draft-max and --spec-draft-n-max are the same thing of different builds; an unknown flag is fatal."""
    with pytest.raises(UsageError, match="unsupported build"):
        emit(edge(make), "llama.cpp", EmitOptions(engine_version="b4000"))


# Router --------------------------------------------------------------------------------------------


def test_router_sends_requests_where_the_policy_decided(make):
    """Two deployments; load and category choose, as the policy's own evaluator does."""
    prose = make.compare(make.cell(), make.arm(make.chain(3), 0.7), scope="prose")
    policy = policy_of(make, {1: make.chain(3), 4: make.chain(3), 16: make.off}, categories=[prose])
    table = router_table(policy, EmitOptions())

    for size in range(1, 20):
        for category in (None, "prose", "code"):
            own = choose(policy, size, 100, category, 0.0)
            expected = "plain" if own.is_off else "speculate"
            assert route(table, size, context_tokens=100, category=category) == expected
    assert route(table, 1, context_tokens=301) == "plain"
    assert table["deployments"]["speculate"]["label"] == "eagle3 K=3"


def test_router_takes_trees_that_an_engine_cannot_switch(make):
    """A tree up to batch 2, plain above."""
    table = router_table(policy_of(make, {1: make.tree(), 2: make.tree(), 4: make.off}), EmitOptions())

    assert [rule["in_flight"] for rule in table["rules"]] == [[1, 2], [3, None]]
    assert [rule["deployment"] for rule in table["rules"]] == ["speculate", "plain"]


# Forms ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm", "llama.cpp", "reference"])
def test_script_of_every_engine_is_a_script(make, engine, tmp_path):
    """serve.sh parses as bash and ends in the engine's own command."""
    import subprocess

    file = tmp_path / "serve.sh"
    file.write_text(emit(edge(make), engine, EmitOptions(), form="serve.sh"))

    assert subprocess.run(["bash", "-n", str(file)], check=False).returncode == 0
    assert file.read_text().splitlines()[-1].startswith("exec ")
    assert file.read_text().splitlines()[-1].endswith(' "$@"')


def test_script_runs_the_command_with_its_arguments_whole(make, tmp_path):
    """The JSON of --speculative-config reaches the engine as one argument."""
    import subprocess

    (tmp_path / "vllm").write_text('#!/bin/sh\nfor word in "$@"; do echo "$word"; done\n')
    (tmp_path / "vllm").chmod(0o755)
    script = tmp_path / "serve.sh"
    script.write_text(emit(edge(make), "vllm", form="serve.sh"))

    told = subprocess.run(
        ["bash", str(script), "--port", "9"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()

    assert json.loads(told[told.index("--speculative-config") + 1])["num_speculative_tokens"] == 3
    assert told[-2:] == ["--port", "9"]


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm", "llama.cpp"])
def test_kubernetes_arguments_are_yaml_of_the_same_words(make, engine):
    """Container arguments are the words of the command; files come as a ConfigMap and are mounted."""
    import yaml

    text = emit(edge(make), engine, EmitOptions(engine_version="1.3" if engine == "tensorrt-llm" else None))
    documents = list(yaml.safe_load_all(emit(
        edge(make), engine, EmitOptions(engine_version="1.3" if engine == "tensorrt-llm" else None), form="kubernetes"
    )))  # fmt: skip
    container = documents[0]["containers"][0]
    parts = parts_of(text)

    words = [word.removeprefix("/settings/") for word in (*container["command"], *container["args"])]

    assert words == list(parts.words)
    assert (documents[1]["data"] if parts.files else {}) == dict(parts.files)


def test_router_table_has_no_script(make):
    """A table is data."""
    with pytest.raises(UsageError, match="a router table is data"):
        emit(edge(make), "router", form="serve.sh")


def test_withdrawn_policy_is_not_emitted(make):
    """A policy that lost when it was served gives its reason and the advice instead."""
    told = {
        "verdict": "withdrawn",
        "engine": "vllm",
        "reasons": ["0.31x of off at batch 3"],
        "advice": "serve off",
    }

    for engine in EMITTERS:
        with pytest.raises(UsageError, match=r"withdrawn: 0\.31x of off at batch 3") as caught:
            emit(edge(make) | {"verification": told}, engine)
        assert caught.value.hint == "serve off"


def test_router_is_emitted_for_what_only_a_shared_server_loses(make):
    """Withdrawn because off is not free in one server: two servers may still run it, one server may not."""
    told = {
        "verdict": "withdrawn",
        "engine": "vllm",
        "reasons": ["0.93x of off at batch 4"],
        "advice": "two servers",
        "behind_router": [1],
    }

    table = json.loads(emit(edge(make) | {"verification": told}, "router"))

    assert set(table["deployments"]) == {"plain", "speculate"}
    with pytest.raises(UsageError, match="withdrawn"):
        emit(edge(make) | {"verification": told}, "vllm")


def test_policy_that_never_speculates_emits_for_every_engine(make):
    """Every K slower than none: each engine gets its plain command, and the router one deployment."""
    policy = policy_of(make, {1: make.off, 16: make.off})

    for engine in ("vllm", "sglang", "tensorrt-llm", "llama.cpp"):
        assert "do not speculate" in emit(policy, engine)
    assert json.loads(emit(policy, "router"))["deployments"] == {"plain": {"config": "off"}}


@pytest.mark.parametrize("engine", [name for name in EMITTERS if name not in ("router", "reference")])
@pytest.mark.parametrize("config", ["chain", "tree", "ngram"])
def test_speculation_above_the_largest_batch_is_not_emitted(make, engine, config):
    """Off from 1 to 7, on from 8: a server of four requests together does not speculate, whatever it could do."""
    chosen = {"chain": make.chain(3), "tree": make.tree(), "ngram": SpecConfig.chain("ngram", 3)}[config]
    policy = policy_of(make, {1: make.off, 8: chosen})

    text = emit(policy, engine, EmitOptions(max_batch_size=4, engine_version=None))

    assert "do not speculate" in text
    commands = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    assert "speculative" not in commands

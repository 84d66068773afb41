"""What spectune emits for SGLang, handed to SGLang's own parser, hooks, policy and field lists.

Needs `spectune engines install sglang --parser-only`, or SPECTUNE_SGLANG_PYTHON; skipped with the reason
where there is neither. No kernel is called, so nothing here says that a server would decode.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import random
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spectune.backend.environments import find_parser
from spectune.backend.mock_server import sglang_face
from spectune.backend.server_words import SGLANG_WORDS
from spectune.backend.sglang import RESOLVED
from spectune.backend.sglang_command import SglangSettings, adaptive_document, server_arguments
from spectune.backend.sglang_parser import ask_sglang
from spectune.backend.sglang_support import unsupported
from spectune.errors import BackendMissing
from spectune.measure.doctor.names import SGLANG_FLAGS
from spectune.policy.emit_sglang import sglang_launch
from spectune.policy.sglang_adaptive import AdaptivePolicy, captured_sizes
from spectune.records import SpecConfig
from tests.support.policies import policy_of, random_adaptive, random_events

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

PINNED = "0.5.23"
NUM_POLICIES = 200
NUM_BATCHES = 120
LIMITS = (1, 8, 16, 33, 48, 64, 100, 256, 300)
OFF = SpecConfig.off()


def chain(depth: int) -> SpecConfig:
    return SpecConfig.chain("eagle3", depth, draft_model="org/head")


def standby(depth: int) -> SpecConfig:
    return SpecConfig.chain("eagle3", depth, draft_model="org/head", options=(("standby", True),))


CONFIGS = {
    config.label: config
    for config in (
        OFF,
        *(chain(depth) for depth in (1, 3, 7)),
        SpecConfig(method="eagle3", num_steps=5, topk=4, num_draft_tokens=16),
        SpecConfig(method="eagle3", num_steps=2, topk=8, num_draft_tokens=64),
        SpecConfig.chain("draft_model", 3),
        SpecConfig(method="draft_model", num_steps=3, topk=2, num_draft_tokens=6),
        SpecConfig.chain("ngram", 4),
        SpecConfig(method="ngram", num_steps=4, topk=3, num_draft_tokens=12),
        standby(3),
    )
}
POLICIES = {
    "off-above": {1: chain(5), 4: chain(3), 9: chain(1), 17: OFF},
    "edges-inside-a-graph": {1: chain(5), 10: chain(3), 34: OFF},
    "not-monotone": {1: OFF, 4: chain(5), 7: chain(1), 30: chain(3), 45: OFF},
    "one-chain": {1: chain(4)},
    "off": {1: OFF},
    "tree": {1: SpecConfig(method="eagle3", num_steps=5, topk=4, num_draft_tokens=16), 8: OFF},
    "ngram": {1: SpecConfig.chain("ngram", 5), 20: OFF},
    "lost-in-a-graph": {1: OFF, 9: chain(3), 10: OFF},
}


@pytest.fixture(scope="module")
def python() -> str:
    """The interpreter that has SGLang."""
    own = os.environ.get("SPECTUNE_SGLANG_PYTHON")
    if own:
        return own
    try:
        return find_parser("sglang").python
    except BackendMissing as error:
        pytest.skip(f"{error.message}: {error.hint}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and a head: configs alone, which is all that the parser reads."""
    root = tmp_path_factory.mktemp("sglang")
    shape = {
        "hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 128, "vocab_size": 512, "max_position_embeddings": 4096, "torch_dtype": "bfloat16",
        "model_type": "llama",
    }  # fmt: skip
    for name, more in (
        ("target", {"architectures": ["LlamaForCausalLM"]}),
        (
            "head",
            {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 256},
        ),
    ):
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps({**shape, **more}), encoding="utf-8")
    return root


@pytest.fixture(scope="module")
def launches(folder: Path) -> dict[str, list[str]]:
    """Command lines by name: of the backend, of every emitted policy, as flags and as YAML."""
    found = {}
    settings = SglangSettings(model=str(folder / "target"), max_running_requests=64, context_length=2048)
    for label, config in CONFIGS.items():
        document = adaptive_document(config, 64)
        file = folder / f"{len(found)}.json"
        file.write_text(json.dumps(document), encoding="utf-8")
        found[f"backend {label}"] = server_arguments(
            settings,
            config,
            draft_path=str(folder / "head"),
            served_model="name",
            host="127.0.0.1",
            port=30000,
            adaptive_path=None if document is None else str(file),
        )
    for name, configs in POLICIES.items():
        for by_acceptance in (False, True):
            launch = sglang_launch(policy_of(configs, top=48), 48, by_acceptance=by_acceptance)
            own = folder / f"{name}-{by_acceptance}"
            own.mkdir()
            if launch.adaptive is not None:
                (own / "adaptive.json").write_text(json.dumps(launch.adaptive), encoding="utf-8")
            key = f"policy {name} {'acceptance' if by_acceptance else 'batch'}"
            found[key] = located(shlex.split(launch.command)[3:], folder, own)
            yaml = launch.yaml.split("<<'EOF'\n")[-1].split("\nEOF")[0]
            for text, path in (("org/target", folder / "target"), ("org/head", folder / "head")):
                yaml = yaml.replace(text, str(path))
            (own / "sglang.yaml").write_text(
                yaml.replace("adaptive.json", str(own / "adaptive.json")), encoding="utf-8"
            )
            found[f"yaml {name} {'acceptance' if by_acceptance else 'batch'}"] = [
                "--config",
                str(own / "sglang.yaml"),
            ]
    for limit in LIMITS:
        found[f"limit {limit}"] = server_arguments(
            SglangSettings(model=str(folder / "target"), max_running_requests=limit, context_length=2048),
            chain(3), draft_path=str(folder / "head"), served_model="n", host="h", port=1,
        )  # fmt: skip
    found["two spellings a"] = spelled(folder, "--speculative-draft-model-path")
    found["two spellings b"] = spelled(folder, "--speculative-draft-model")
    for name, flags in REFUSED.items():
        found[f"refused {name}"] = [*spelled(folder, "--speculative-draft-model-path")[:-6], *flags]
    return found


REFUSED = {
    "page": [
        "--speculative-num-steps",
        "3",
        "--speculative-eagle-topk",
        "2",
        "--speculative-num-draft-tokens",
        "5",
        "--page-size",
        "16",
        "--attention-backend",
        "torch_native",
    ],
    "trtllm": [
        "--speculative-num-steps",
        "3",
        "--speculative-eagle-topk",
        "2",
        "--speculative-num-draft-tokens",
        "5",
        "--attention-backend",
        "trtllm_mha",
        "--page-size",
        "16",
    ],
    "one number": ["--speculative-num-steps", "3"],
}


def spelled(folder: Path, flag: str) -> list[str]:
    head = str(folder / "head")
    return [
        "--model-path", str(folder / "target"), "--device", "cuda", "--random-seed", "0",
        "--speculative-algorithm", "EAGLE3", flag, head, "--speculative-num-steps", "3",
        "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4",
    ]  # fmt: skip


def located(words: list[str], folder: Path, own: Path) -> list[str]:
    """The emitted words with folders in place of the names, as a user puts them."""
    places = {
        "org/target": str(folder / "target"),
        "org/head": str(folder / "head"),
        "adaptive.json": str(own / "adaptive.json"),
    }
    return [places.get(word, word) for word in words] + ["--device", "cuda"]


@functools.cache
def policy_runs() -> list[dict[str, Any]]:
    """200 random files, each over verified batches of wandering size and acceptance."""
    runs = []
    for seed in range(NUM_POLICIES):
        chance = random.Random(seed)
        config = random_adaptive(chance)
        union = sorted(
            {
                depth
                for entry in config.values()
                if isinstance(entry, dict)
                for depth in entry["candidate_steps"]
            }
        )
        runs.append(
            {
                "config": config,
                "initial_steps": chance.choice(union),
                "captured": captured_sizes(64) if chance.random() < 0.7 else None,
                "events": random_events(chance, NUM_BATCHES),
            }
        )
    return runs


def lookups() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every emitted policy by batch size, looked at below, at and above every key."""
    for name, configs in POLICIES.items():
        launch = sglang_launch(policy_of(configs, top=48), 48)
        if launch.adaptive is not None:
            flags = dict(launch.flags)
            yield (
                name,
                {
                    "config": launch.adaptive,
                    "initial_steps": int(str(flags["speculative-num-steps"])),
                    "captured": captured_sizes(48),
                    "events": [(size, []) for size in range(1, 49)],
                },
            )


@pytest.fixture(scope="module")
def told(python: str, launches: dict[str, list[str]]) -> dict[str, Any]:
    """SGLang's answers to everything, asked once: its package takes seconds to load."""
    runs = [*policy_runs(), *(run for _, run in lookups())]
    answers = ask_sglang(arguments=list(launches.values()), policies=runs, python=python)
    return {
        "version": answers["version"],
        "arguments": dict(zip(launches, answers["arguments"], strict=True)),
        "policies": answers["policies"][:NUM_POLICIES],
        "lookups": dict(
            zip((name for name, _ in lookups()), answers["policies"][NUM_POLICIES:], strict=True)
        ),
    }


def numbers(resolved: dict[str, Any]) -> tuple[Any, ...]:
    names = ("algorithm", "num_steps", "eagle_topk", "num_draft_tokens", "adaptive")
    return tuple(resolved[f"speculative_{name}"] for name in names)


def test_version_is_the_pinned_one(told: dict[str, Any]) -> None:
    """What holds here holds of this version."""
    assert told["version"] == PINNED


@pytest.mark.parametrize("label", CONFIGS)
def test_command_of_a_start_resolves_to_what_was_meant(told: dict[str, Any], label: str) -> None:
    """Algorithm, steps, topk, tokens and the limit come out of SGLang's resolution as they went in."""
    config = CONFIGS[label]
    resolved = told["arguments"][f"backend {label}"]["resolved"]
    algorithm = {"off": None, "eagle3": "EAGLE3", "draft_model": "STANDALONE", "ngram": "NGRAM"}[
        config.method
    ]
    expected = (algorithm, config.num_steps, config.topk, config.num_draft_tokens, config.is_standby)

    assert numbers(resolved) == ((None, None, None, None, False) if config.is_off else expected)
    assert resolved["max_running_requests"] == 64
    assert (resolved["disable_radix_cache"], resolved["chunked_prefill_size"]) == (True, 2048)
    assert (resolved["sampling_defaults"], resolved["enable_metrics"]) == ("openai", True)


@pytest.mark.parametrize("form", ["policy", "yaml"])
@pytest.mark.parametrize("kind", ["batch", "acceptance"])
@pytest.mark.parametrize("name", POLICIES)
def test_emitted_policy_is_accepted_and_resolves_to_what_was_meant(
    told: dict[str, Any], name: str, kind: str, form: str
) -> None:
    """The line to paste and the file for --config give the numbers of the policy, adaptive where it is."""
    launch = sglang_launch(policy_of(POLICIES[name], top=48), 48, by_acceptance=kind == "acceptance")
    flags = dict(launch.flags)
    answer = told["arguments"][f"{form} {name} {kind}"]

    assert "error" not in answer, answer
    resolved = answer["resolved"]
    # a drafter that SGLang cannot switch is held to the load that it was decided for
    assert resolved["max_running_requests"] == {"tree": 7, "ngram": 19}.get(name, 48)
    if "speculative-algorithm" not in flags:
        assert numbers(resolved) == (None, None, None, None, False)
        return
    meant = [
        int(str(flags[f"speculative-{part}"])) for part in ("num-steps", "eagle-topk", "num-draft-tokens")
    ]
    assert numbers(resolved) == (flags["speculative-algorithm"], *meant, launch.adaptive is not None)


@pytest.mark.parametrize("name", [name for name, _ in lookups()])
def test_emitted_adaptive_file_runs_the_policy_at_every_batch_size(told: dict[str, Any], name: str) -> None:
    """Batch sizes that share a captured graph run the least that the policy has for any of them."""
    configs = POLICIES[name]
    sizes = captured_sizes(48)

    def meant(batch: int) -> int:
        top = next(size for size in sizes if size >= batch)
        below = max([size for size in sizes if size < batch], default=0)
        group = range(below + 1, top + 1)
        return min(configs[max(low for low in configs if low <= size)].num_steps for size in group)

    assert told["lookups"][name]["steps"] == [meant(batch) for batch in range(1, 49)]


@pytest.mark.parametrize("seed", range(NUM_POLICIES))
def test_own_evaluator_decides_as_sglang_does(told: dict[str, Any], seed: int) -> None:
    """Depth before every batch and every switch, over batches of random size and acceptance."""
    run = policy_runs()[seed]
    policy = AdaptivePolicy(run["config"], initial_steps=run["initial_steps"], captured=run["captured"])

    steps, switches = [], []
    for batch_size, accepted in run["events"]:
        steps.append(policy.steps(batch_size))
        switches.append(policy.observe(batch_size, accepted))

    answer = told["policies"][seed]
    assert (steps, switches) == (answer["steps"], answer["switches"])
    assert policy.candidate_steps == answer["candidate_steps"]


def test_random_policies_switch(told: dict[str, Any]) -> None:
    """Equal decisions mean something only where there are some: most files switch, up and down."""
    switching = [answer for answer in told["policies"] if any(s is not None for s in answer["switches"])]

    assert len(switching) > NUM_POLICIES / 2
    assert any(0 in answer["switches"] for answer in switching)


@pytest.mark.parametrize("limit", LIMITS)
def test_captured_sizes_are_those_that_sglang_captures(told: dict[str, Any], limit: int) -> None:
    """Keys of adaptive files are placed at these, so they have to be SGLang's own."""
    answer = told["arguments"][f"limit {limit}"]
    captured = answer["captured"]

    # without a GPU's memory to ask SGLang captures up to 160, with one up to 256 or more
    assert captured == [size for size in captured_sizes(limit) if size <= captured[-1]]
    assert captured[-1] == limit or captured[-1] >= 160


def test_two_spellings_resolve_to_the_same(told: dict[str, Any]) -> None:
    """--speculative-draft-model is --speculative-draft-model-path: one fingerprint for both."""
    assert told["arguments"]["two spellings a"] == told["arguments"]["two spellings b"]


def test_what_the_capability_table_refuses_sglang_refuses(told: dict[str, Any]) -> None:
    """Trees on pages or on a chain backend, and one number of three: SGLang ends at its start."""
    tree = SpecConfig(method="eagle3", num_steps=3, topk=2, num_draft_tokens=5)
    for name, settings in (
        ("page", {"attention_backend": "torch_native", "page_size": 16}),
        ("trtllm", {"attention_backend": "trtllm_mha", "page_size": 16}),
    ):
        assert "error" in told["arguments"][f"refused {name}"], name
        assert unsupported(tree, **settings) is not None  # type: ignore[arg-type]
    assert "error" in told["arguments"]["refused one number"]


@pytest.fixture(scope="module")
def package(python: str) -> Path:
    """Where the package lies, to read its source: importing its server needs what is not there."""
    found = sorted(Path(python).parent.parent.glob("lib/python3*/site-packages/sglang/srt"))
    if not found:
        pytest.skip(f"{python} keeps its packages elsewhere")
    return found[0]


def strings(file: Path) -> set[str]:
    """Every text in a module's code."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def fields_of(file: Path, name: str) -> set[str]:
    """Annotated fields of a class."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name]
    assert len(found) == 1, f"{file} has {len(found)} classes {name}"
    return {
        node.target.id
        for node in found[0].body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def test_details_of_a_request_have_sglangs_names(package: Path) -> None:
    """What the protocol server sends and the adapter reads are fields of SGLang's own classes."""
    protocol = package / "entrypoints" / "openai" / "protocol.py"

    assert set(sglang_face.SPEC_DETAILS) <= fields_of(protocol, "SpecTokensDetails")
    assert "spec_tokens_details" in fields_of(protocol, "SglExt")
    for request in ("CompletionRequest", "ChatCompletionRequest"):
        assert {"return_spec_tokens_details", "return_token_ids"} <= fields_of(protocol, request)
    choice = fields_of(protocol, "CompletionResponseStreamChoice")
    assert {"matched_stop", "token_ids", "prompt_token_ids", "finish_reason"} <= choice
    assert "sglext" in fields_of(protocol, "CompletionStreamResponse")


def test_meta_info_has_sglangs_names(package: Path) -> None:
    """The native route tells the same counts under the same names."""
    names = strings(package / "managers" / "tokenizer_manager.py")

    assert {*sglang_face.META_INFO, *sglang_face.SPEC_DETAILS} <= names


def test_metrics_have_sglangs_names(package: Path) -> None:
    """Every series that is read or served is one that SGLang exports."""
    names = strings(package / "observability" / "metrics_collector.py")
    served = {
        "sglang:prompt_tokens_total", "sglang:generation_tokens_total", "sglang:cached_tokens_total",
        "sglang:num_requests_total", "sglang:num_retracted_requests_total", "sglang:spec_verify_calls_total",
        "sglang:queue_time_seconds", "sglang:e2e_request_latency_seconds", "sglang:num_running_reqs",
        "sglang:num_queue_reqs", "sglang:spec_num_steps", "sglang:spec_num_draft_tokens",
        "sglang:spec_accept_length",
    }  # fmt: skip
    words = SGLANG_WORDS
    read = {words.queue_s, words.life_s, words.preemptions, words.cache_queries, words.cache_hits}

    assert served <= names
    assert {name.removesuffix("_sum") for name in read} <= names


def test_server_info_has_sglangs_names(package: Path) -> None:
    """Resolved arguments are fields of SGLang's arguments, the state's names are in its scheduler."""
    fields: set[str] = set()
    for file in (package / "arg_groups" / "fields").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                fields.add(node.target.id)
    state = strings(package / "managers" / "scheduler_components" / "internal_state.py")

    assert {*sglang_face.SERVER_INFO, *RESOLVED} <= fields
    assert set(sglang_face.INTERNAL_STATE) <= state
    assert "token_capacity" in strings(package / "managers" / "scheduler_components" / "memory_usage.py")


def test_routes_are_sglangs(package: Path) -> None:
    """Every route that is asked or served exists."""
    names = strings(package / "entrypoints" / "http_server.py")

    assert {
        "/health", "/health_generate", "/server_info", "/get_server_info", "/flush_cache", "/generate",
        "/v1/models", "/v1/completions", "/v1/chat/completions",
    } <= names  # fmt: skip


def test_flags_that_the_doctor_knows_are_sglangs(package: Path) -> None:
    """A flag that SGLang drops or renames breaks this before it breaks an advice."""
    fields = fields_of(package / "arg_groups" / "fields" / "spec.py", "Spec")
    known = {name.replace("_", "-") for name in fields} | {"speculative-draft-model"}

    assert SGLANG_FLAGS <= known

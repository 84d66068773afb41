"""A launch in, vLLM's command line and environment out; starts nothing.

Settings of vLLM are written without dashes here and get them in `render`. Sources: vLLM 0.32 and 0.33,
config/speculative.py, engine/arg_utils.py, v1/worker/cpu_worker.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spectune.backend.command_line import render
from spectune.backend.extra_args import plain_name
from spectune.errors import InfeasibleConfig, UsageError
from spectune.records import Method, SpecConfig

OLDEST, NEWEST = (0, 32), (0, 33)
"""Versions whose flags were read; an older one speaks other flags."""

METHODS = (Method.OFF, Method.EAGLE3, Method.NGRAM, Method.SUFFIX, Method.DRAFT_MODEL)
MODEL_METHODS = (Method.EAGLE3, Method.DRAFT_MODEL)
"""They pay for keeping a draft's cache even where they draft nothing."""

NGRAM_WINDOW = {"prompt_lookup_max": 5, "prompt_lookup_min": 1}

PRODUCTION_CHUNK = 512
"""Prompt tokens that a step prefills at most as in production, so that long prompts come in chunks."""

CPU_VARIABLES = ("VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND", "LD_PRELOAD")

# Flags of earlier versions, and what says the same in those that are known here.
_RENAMED: Mapping[str, str] = {
    "speculative-model": "speculative-config '{\"model\": ...}'",
    "num-speculative-tokens": "speculative-config '{\"num_speculative_tokens\": ...}'",
    "speculative-draft-tensor-parallel-size": "speculative-config '{\"draft_tensor_parallel_size\": ...}'",
    "speculative-disable-by-batch-size": "speculative-config '{\"num_speculative_tokens_per_batch_size\": ...}'",
    "ngram-prompt-lookup-max": "speculative-config '{\"prompt_lookup_max\": ...}'",
    "ngram-prompt-lookup-min": "speculative-config '{\"prompt_lookup_min\": ...}'",
    "spec-decoding-acceptance-method": "speculative-config '{\"rejection_sample_method\": ...}'",
    "typical-acceptance-sampler-posterior-threshold": "nothing: the sampler is gone",
    "disable-logprobs-during-spec-decoding": "nothing: it is always so",
    "use-v2-block-manager": "nothing: there is only one",
    "num-scheduler-steps": "nothing: steps are always scheduled one by one",
    "disable-log-requests": "enable-log-requests (off is the default)",
}

# What the measurement itself decides; the same flag twice would undo it in silence.
_OURS = (
    "model",
    "served-model-name",
    "host",
    "port",
    "speculative-config",
    "sc",
    "config",
    "spec-method",
    "spec-model",
    "spec-tokens",
    "per-request-spec-decode-metrics",
    "max-num-seqs",
    "max-model-len",
    "enable-prefix-caching",
    "no-enable-prefix-caching",
    "disable-log-stats",
    "generation-config",
    "chat-template",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """What every arm of a run shares."""

    model: str
    dtype: str = "bfloat16"
    max_num_seqs: int = 16
    max_model_len: int = 2048
    enforce_eager: bool = True
    gpu_memory_utilization: float | None = None
    kv_cache_gib: int | None = None
    extra: tuple[str, ...] = ()
    chat_template: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def max_num_batched_tokens(self) -> int:
        """Written out because speculation changes the default: it would differ between the arms."""
        return max(2048, self.max_model_len)


def check_version(version: str) -> None:
    """UsageError for a version whose flags are not known to be the ones written here."""
    found = re.match(r"(\d+)\.(\d+)", version)
    known = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    if found is None or not OLDEST <= (int(found[1]), int(found[2])) <= NEWEST:
        raise UsageError(
            f"vllm {version} is not a version whose flags are known here ({known})",
            hint="spectune engines install vllm, or start it yourself and give --base-url",
        )


def check_extra(extra: Sequence[str]) -> None:
    """UsageError for a flag that is gone, with its new name, and for one that the measurement sets."""
    for word in extra:
        if not word.startswith("-"):
            continue
        name = plain_name(word).split(".")[0]
        if name in _RENAMED:
            raise UsageError(
                f"--extra-server-args: vllm {OLDEST[0]}.{OLDEST[1]} has no {name} any more",
                hint=f"it is now {_RENAMED[name]}; spectune writes it from its own flags",
            )
        # argparse takes any beginning of a flag that is no other flag's
        if name in _OURS or (len(name) > 3 and any(flag.startswith(name) for flag in _OURS)):
            raise UsageError(
                f"--extra-server-args: {name} is set by the measurement",
                hint="use spectune's own flag for it, if there is one",
            )


def spec_document(config: SpecConfig, *, draft_path: str | None, max_num_seqs: int) -> dict[str, Any] | None:
    """vLLM's speculative_config; None for plain decoding.

    Raises InfeasibleConfig for what vLLM cannot run: it drafts chains only.
    """
    if config.is_off:
        return None
    if config.is_tree:
        raise InfeasibleConfig(f"vllm verifies chains only, topk {config.topk} is a tree")
    document: dict[str, Any] = {"method": config.method}
    if config.method in MODEL_METHODS:
        if draft_path is None:
            raise InfeasibleConfig(f"method {config.method} needs --draft-model")
        document["model"] = draft_path
    document["num_speculative_tokens"] = config.num_steps
    if config.method == Method.NGRAM:
        document |= {name: config.option(name, default) for name, default in NGRAM_WINDOW.items()}
    if config.is_standby:
        document["num_speculative_tokens_per_batch_size"] = [[1, max_num_seqs, 0]]
    known = {*NGRAM_WINDOW, "standby", "production"}
    document |= {name: value for name, value in config.options if name not in known}
    return document


def server_arguments(
    settings: VllmSettings,
    config: SpecConfig,
    *,
    draft_path: str | None,
    served_model: str,
    host: str,
    port: int,
) -> list[str]:
    """Everything after the program, ready for a process."""
    flags: dict[str, str | bool] = {
        "model": settings.model,
        "served-model-name": served_model,
        "host": host,
        "port": str(port),
        "dtype": settings.dtype,
        "max-model-len": str(settings.max_model_len),
        "max-num-seqs": str(settings.max_num_seqs),
        "max-num-batched-tokens": str(settings.max_num_batched_tokens),
        "no-enable-prefix-caching": True,
        # sampling defaults of the model's own file would fill what a client leaves out
        "generation-config": "vllm",
        "enforce-eager": settings.enforce_eager,
    }
    if settings.chat_template is not None:
        flags["chat-template"] = settings.chat_template
    if config.is_production:
        del flags["no-enable-prefix-caching"]
        room = settings.max_num_seqs * config.num_draft_tokens  # every sequence verifies in the same step
        flags |= {
            "enable-prefix-caching": True,
            "enable-chunked-prefill": True,
            "max-num-batched-tokens": str(max(PRODUCTION_CHUNK, room)),
        }
    if settings.gpu_memory_utilization is not None:
        flags["gpu-memory-utilization"] = f"{settings.gpu_memory_utilization:g}"
    document = spec_document(config, draft_path=draft_path, max_num_seqs=settings.max_num_seqs)
    if document is not None:
        flags["per-request-spec-decode-metrics"] = "detailed"
        flags["speculative-config"] = json.dumps(document, separators=(",", ":"))
    return [*render(flags), *settings.extra]


def program(python: str) -> list[str]:
    """How the server is started: the console script of the CPU build does not find its own version."""
    return [python, "-m", "vllm.entrypoints.openai.api_server"]


def cpu_environment(
    settings: VllmSettings, python: str, cores: Sequence[int], *, own: Mapping[str, str]
) -> dict[str, str]:
    """Variables of the CPU build: memory of the cache, which cores decode, Intel's OpenMP if it is there.

    With two cores the engine's own choice leaves one or none to decode with, so they are named. What the
    user has set (`own`) stays.
    """
    found = {"VLLM_CPU_KVCACHE_SPACE": str(settings.kv_cache_gib or 2)}
    if len(cores) <= 2:
        found["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    library = Path(python).parent.parent / "lib" / "libiomp5.so"
    if library.exists():
        found["LD_PRELOAD"] = str(library)
    return found | {name: own[name] for name in CPU_VARIABLES if name in own}


def common_environment(model: str) -> dict[str, str]:
    """Variables of every server: nothing is reported or fetched while it is measured."""
    found = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if Path(model).is_dir():
        found["HF_HUB_OFFLINE"] = "1"
    return found

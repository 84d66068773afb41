"""A launch in, SGLang's command line and environment out; starts nothing.

Settings are written without dashes here and get them in `render`. Source: SGLang 0.5.23,
srt/arg_groups/fields and srt/arg_groups/speculative_hook.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spectune.backend.command_line import render
from spectune.backend.extra_args import plain_name
from spectune.backend.sglang_support import ALGORITHMS, MODEL_METHODS
from spectune.errors import InfeasibleConfig, UsageError
from spectune.records import Method, SpecConfig
from spectune.store.sglang_bench import ALIASES

KNOWN = (0, 5)
"""Major and minor version whose flags were read, at 0.5.23."""

PRODUCTION_CHUNK = 512
"""Prompt tokens that a step prefills at most as in production, so that long prompts come in chunks."""

# Flags of earlier versions and of vLLM, and what says the same.
RENAMED: Mapping[str, str] = {
    "speculative-num-speculative-tokens": "speculative-num-steps",
    "num-speculative-tokens": "speculative-num-steps",
    "speculative-model": "speculative-draft-model-path",
    "speculative-config": "speculative-algorithm, speculative-draft-model-path and the three numbers",
    "eagle-topk": "speculative-eagle-topk",
    "num-draft-tokens": "speculative-num-draft-tokens",
    "max-num-seqs": "max-running-requests",
    "max-model-len": "context-length",
}

# What the measurement itself decides; the same flag twice would undo it in silence.
OURS = (
    "model-path",
    "served-model-name",
    "host",
    "port",
    "context-length",
    "max-running-requests",
    "chunked-prefill-size",
    "disable-radix-cache",
    "enable-metrics",
    "enable-cache-report",
    "sampling-defaults",
    "random-seed",
    "stream-interval",
    "speculative-algorithm",
    "speculative-draft-model-path",
    "speculative-num-steps",
    "speculative-eagle-topk",
    "speculative-num-draft-tokens",
    "speculative-adaptive",
    "speculative-adaptive-config",
    "speculative-ngram-max-bfs-breadth",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangSettings:
    """What every arm of a run shares."""

    model: str
    dtype: str = "bfloat16"
    device: str = "cuda"
    max_running_requests: int = 16
    context_length: int = 2048
    disable_cuda_graph: bool = False
    mem_fraction_static: float | None = None
    chat_template: str | None = None
    extra: tuple[str, ...] = ()

    @property
    def chunked_prefill_size(self) -> int:
        """Written out and as long as any prompt: the default depends on the device's memory."""
        return max(2048, self.context_length)


def check_version(version: str) -> None:
    """UsageError for a version whose flags are not known to be the ones written here."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) != KNOWN:
        raise UsageError(
            f"sglang {version} is not a version whose flags are known here ({KNOWN[0]}.{KNOWN[1]})",
            hint="spectune engines install sglang, or start it yourself and give --base-url",
        )


def check_extra(extra: Sequence[str]) -> None:
    """UsageError for a flag that is gone, with its new name, and for one that the measurement sets."""
    for word in extra:
        if not word.startswith("-"):
            continue
        name = flag_name(word)
        if name in RENAMED:
            raise UsageError(
                f"--extra-server-args: sglang has no {name}",
                hint=f"it is now {RENAMED[name]}; spectune writes it from its own flags",
            )
        if name in OURS:
            raise UsageError(
                f"--extra-server-args: {name} is set by the measurement",
                hint="use spectune's own flag for it, if there is one",
            )


def flag_name(word: str) -> str:
    """`speculative_draft-model=x` is `speculative-draft-model-path`: one name for every spelling."""
    name = plain_name(word)
    return ALIASES.get(name, name)


def server_arguments(
    settings: SglangSettings,
    config: SpecConfig,
    *,
    draft_path: str | None,
    served_model: str,
    host: str,
    port: int,
    adaptive_path: str | None = None,
) -> list[str]:
    """Everything after the program, ready for a process."""
    flags: dict[str, str | bool] = {
        "model-path": settings.model,
        "served-model-name": served_model,
        "host": host,
        "port": str(port),
        "device": settings.device,
        "dtype": settings.dtype,
        "context-length": str(settings.context_length),
        # unset it is 48 with speculation and thousands without: the arms would differ
        "max-running-requests": str(settings.max_running_requests),
        "chunked-prefill-size": str(settings.chunked_prefill_size),
        "disable-radix-cache": True,
        "enable-metrics": True,
        "enable-cache-report": True,
        # sampling defaults of the model's own file would fill what a client leaves out
        "sampling-defaults": "openai",
        "random-seed": "1",
        "disable-cuda-graph": settings.disable_cuda_graph,
    }
    if settings.chat_template is not None:
        flags["chat-template"] = settings.chat_template
    if config.is_production:
        flags |= {"disable-radix-cache": False, "chunked-prefill-size": str(PRODUCTION_CHUNK)}
    if settings.mem_fraction_static is not None:
        flags["mem-fraction-static"] = f"{settings.mem_fraction_static:g}"
    flags |= spec_flags(config, draft_path=draft_path, adaptive_path=adaptive_path)
    return [*render(flags), *settings.extra]


def spec_flags(
    config: SpecConfig, *, draft_path: str | None, adaptive_path: str | None = None
) -> dict[str, str | bool]:
    """SGLang's speculative flags: algorithm, draft and always all three numbers; none for plain decoding.

    Given one or two of the numbers SGLang compares with None and ends.
    """
    if config.is_off:
        return {}
    if config.method not in ALGORITHMS:
        raise InfeasibleConfig(f"sglang has no method {config.method}")
    flags: dict[str, str | bool] = {"speculative-algorithm": ALGORITHMS[config.method]}
    if config.method in MODEL_METHODS:
        if draft_path is None:
            raise InfeasibleConfig(
                f"method {config.method} needs --draft-model: without one SGLang loads the target twice and ends"
            )
        flags["speculative-draft-model-path"] = draft_path
    flags |= {
        "speculative-num-steps": str(config.num_steps),
        "speculative-eagle-topk": str(config.topk),
        "speculative-num-draft-tokens": str(config.num_draft_tokens),
    }
    if config.method == Method.NGRAM:
        flags["speculative-ngram-max-bfs-breadth"] = str(config.topk)
    if adaptive_path is not None:
        flags |= {"speculative-adaptive": True, "speculative-adaptive-config": adaptive_path}
    return flags


def adaptive_document(config: SpecConfig, max_running_requests: int) -> dict[str, Any] | None:
    """The adaptive file of a start: its own policy, or for standby no drafts at any batch size.

    The key above the admitted requests is never reached; it makes SGLang build what `num_steps` needs.
    """
    told = config.option("adaptive")
    if told is not None:
        document: dict[str, Any] = json.loads(str(told))
        return document
    if not config.is_standby:
        return None
    return {
        "1": {"candidate_steps": [0]},
        str(max_running_requests + 1): {"candidate_steps": [config.num_steps]},
    }


def forced_acceptance(acceptance_length: float) -> dict[str, str]:
    """Variables that make SGLang accept on average `acceptance_length` tokens a step, bonus included.

    For measuring what rounds cost: verification runs whole, the text is nonsense. One length is drawn a
    step for the whole batch.
    """
    if acceptance_length < 1:
        raise UsageError(f"forced acceptance length {acceptance_length:g} is below 1")
    return {
        "SGLANG_SIMULATE_ACC_LEN": f"{acceptance_length:g}",
        "SGLANG_SIMULATE_ACC_METHOD": "match-expected",
    }


def forced_length(environment: Mapping[str, str]) -> float | None:
    """Acceptance length that these variables force, None where they force none."""
    told = environment.get("SGLANG_SIMULATE_ACC_LEN")
    if told is None:
        return None
    try:
        length = float(told)
    except ValueError as error:
        raise UsageError(f"SGLANG_SIMULATE_ACC_LEN {told} is not a number") from error
    return length if length > 0 else None  # SGLang takes 0 and below for off


def program(python: str) -> list[str]:
    """How the server is started."""
    return [python, "-m", "sglang.launch_server"]


def common_environment(model: str) -> dict[str, str]:
    """Variables of every server: nothing is reported or fetched while it is measured."""
    found = {"DO_NOT_TRACK": "1"}
    if Path(model).is_dir():
        found["HF_HUB_OFFLINE"] = "1"
    return found

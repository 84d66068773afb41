"""Settings of serving engines: from flags to a backend, and what is going to be started."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spectune.cli.arrivals import trace_times
from spectune.cli.console import duration, say
from spectune.errors import UsageError

if TYPE_CHECKING:
    from spectune.backend.launched import LaunchedBackend
    from spectune.cli.sweep_options import SweepOptions
    from spectune.records import Point, SpecConfig
    from spectune.tune.plan import SweepPlan
    from spectune.tune.space import Pruned

SERVING = ("vllm", "sglang")
SUFFIX, SUFFIX_MODULE = "suffix", "arctic_inference"
MIN_SEQS = 16
ROOM_TOKENS = 2048

# Measured on two cores with the default target.
EAGER_START_S, COMPILED_START_S = 35.0, 100.0

# What a launcher of ours decides and a running server has decided already.
_RELAUNCH = {
    "engine_python": "--engine-python",
    "server_cmd": "--server-cmd",
    "extra_server_args": "--extra-server-args",
    "max_num_seqs": "--max-num-seqs",
    "max_model_len": "--max-model-len",
    "enforce_eager": "--enforce-eager",
    "gpu_memory_utilization": "--gpu-memory-utilization",
    "port": "--port",
}


def is_serving(options: SweepOptions) -> bool:
    """Whether the settings name an engine that is spoken to over HTTP."""
    return options.backend in SERVING


def server_options(options: SweepOptions, run: Path | None) -> dict[str, Any]:
    """What the backend is made with. `run` is where logs of servers go."""
    from spectune.cli.inputs import head_of, template_of

    check_sampling(options)
    largest = max(options.batch_size)
    if options.max_num_seqs is not None and options.max_num_seqs < largest:
        raise UsageError(
            f"--max-num-seqs {options.max_num_seqs} is below --max-concurrency {largest}: the server would queue"
        )
    return {
        "model": options.model,
        "draft_model": head_of(options),
        "device": None if options.device == "cpu" else options.device,
        "dtype": options.dtype,
        "engine_python": options.engine_python,
        "server_cmd": options.server_cmd,
        "extra_server_args": tuple(shlex.split(options.extra_server_args or "")),
        "max_num_seqs": options.max_num_seqs or max(MIN_SEQS, largest),
        "max_model_len": model_room(options),
        "is_eager": options.enforce_eager,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "ready_timeout_s": options.server_ready_timeout,
        "port": options.port,
        "log_dir": None if run is None else run / "servers",
        "trace_s": trace_times(options),
        "chat_template": template_of(options),
        "progress": say,
    }


def without_absent_methods(
    options: SweepOptions, configs: tuple[SpecConfig, ...]
) -> tuple[tuple[SpecConfig, ...], Pruned]:
    """The configurations that the engine's environment can run, and why it cannot run the others.

    vLLM drafts by suffix with a package of its own; a launcher's environment cannot be looked into.
    """
    from spectune.backend.environments import find_environment, holds_module

    needs = [config for config in configs if config.method == SUFFIX]
    if not needs or options.backend != "vllm" or options.server_cmd or options.base_url:
        return configs, ()
    python = find_environment("vllm", options.engine_python).python
    if holds_module(python, SUFFIX_MODULE):
        return configs, ()
    reason = f"vllm drafts by suffix with arctic-inference, which {python} lacks: {python} -m pip install arctic-inference"
    kept = tuple(config for config in configs if config not in needs)
    return kept, tuple((config.label, reason) for config in needs)


def model_room(options: SweepOptions) -> int:
    """Most tokens of a sequence that servers are started with; the model may have fewer."""
    return options.max_model_len or ROOM_TOKENS + max(options.context)


def attached_options(options: SweepOptions) -> dict[str, Any]:
    """What an attached backend is made with; settings that would need a new start are refused."""
    for name, flag in _RELAUNCH.items():
        if getattr(options, name) is not None:
            raise UsageError(
                f"{flag} is decided when a server starts, and --base-url {options.base_url} runs already",
                hint="leave the flag out, or let spectune start the server: leave --base-url out",
            )
    from spectune.cli.inputs import template_of

    check_sampling(options)
    return {
        "base_url": options.base_url,
        "baseline_url": options.baseline_url,
        "model": options.model,
        "trace_s": trace_times(options),
        "chat_template": template_of(options),
        "progress": say,
    }


def check_sampling(options: SweepOptions) -> None:
    """UsageError for what servers do not do while they speculate: plain decoding must not use it either."""
    if options.min_p > 0 and any(method != "off" for method in options.method):
        raise UsageError(
            f"--min-p {options.min_p:g}: {options.backend} ignores or refuses min_p while it speculates",
            hint="leave it out: the arms have to sample alike",
        )
    if options.load_format != "auto":
        raise UsageError(f"--load-format {options.load_format} is for the reference engine")
    if options.quantization is not None:
        raise UsageError(
            f"--quantization {options.quantization} is for the reference engine",
            hint="give a server its own flag through --extra-server-args",
        )


def launch_lines(backend: LaunchedBackend, points: tuple[Point, ...]) -> list[str]:
    """The exact command of every start, in their order, for --dry-run; the port is chosen at the start."""
    lines = []
    for number, launch in enumerate(backend.plan(points), start=1):
        command = backend.command(launch, port=0, served_model="spectune-ID")
        words = [f"{name}={shlex.quote(value)}" for name, value in sorted(command.environment.items())]
        words += ["PORT" if word == "0" else shlex.quote(word) for word in command.argv]
        lines += [f"start {number}: {launch.points[0].config.label}", f"  {' '.join(words)}"]
    return lines


def start_line(plan: SweepPlan, work_s: float | None, *, is_eager: bool) -> str:
    """Number of starts, and minutes where they are known (`work_s`), before anything is started."""
    starts = num_starts(plan)
    if work_s is None:
        return f"{starts} starts; how long they and the requests take is not known for this engine"
    start_s = EAGER_START_S if is_eager else COMPILED_START_S
    return (
        f"{starts} starts of about {start_s:.0f} s, then about {duration(work_s)} of requests for the default "
        f"target on two cores: about {duration(starts_s(plan, is_eager=is_eager) + work_s)}"
    )


def num_starts(plan: SweepPlan) -> int:
    """Servers that a plan starts; conversations are answered in one of their own."""
    several = any(len(prompt.turns) > 1 for prompt in plan.workload.prompts)
    return len(plan.configs) * plan.repeats + plan.is_bracketed + several


def starts_s(plan: SweepPlan, *, is_eager: bool) -> float:
    """Estimated seconds until all starts of a plan were ready."""
    return num_starts(plan) * (EAGER_START_S if is_eager else COMPILED_START_S)

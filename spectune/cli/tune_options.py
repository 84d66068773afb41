"""The settings of `spectune tune` and `spectune profile`: those of a sweep, a larger space, and a budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spectune.cli.options import changed, setting
from spectune.cli.sweep_options import SweepOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions(SweepOptions):
    """Shapes, loads, and how long rounds are timed."""

    num_tokens: tuple[int, ...] = changed(
        SweepOptions, "num_tokens", default=(1, 2, 3, 4, 5, 6, 8), help="Chain lengths and tree depths."
    )
    topk: tuple[int, ...] = changed(SweepOptions, "topk", default=(1, 2, 4))
    num_draft_tokens: tuple[int, ...] = changed(SweepOptions, "num_draft_tokens", default=(4, 8, 16))
    profile_seconds: float = setting(
        80.0,
        "--profile-seconds",
        section="measurement",
        minimum=0,
        help="Seconds for timing rounds; every shape gets four rounds at least.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions(ProfileOptions):
    """What is wanted, within which limits, at which cost."""

    objective: str = setting(
        "tpot",
        "--objective",
        section="search",
        choices=("tpot", "throughput", "goodput", "pareto"),
        help="'tpot' (fastest token), 'throughput' (most tokens within the limits), 'goodput' (most requests "
        "that keep --goodput) or 'pareto' (the front of token time and throughput).",
    )
    max_tpot_ms: float | None = setting(
        None,
        "--max-tpot-ms",
        section="search",
        kind=float,
        minimum=0.001,
        help="Leave out what cannot stay below this mean time per token.",
    )
    max_memory_gb: float | None = setting(
        None,
        "--max-memory-gb",
        section="search",
        kind=float,
        minimum=0.001,
        help="Leave out what needs more for weights, keys and values.",
    )
    budget: float = setting(
        10.0,
        "--budget",
        section="search",
        minimum=0,
        help="Minutes for measuring finalists; a stage that has begun is finished.",
    )
    finalists: int = setting(
        4, "--finalists", section="search", minimum=1, help="Configurations measured at each load."
    )
    epsilon: float = setting(
        0.02,
        "--epsilon",
        section="search",
        minimum=0,
        maximum=0.5,
        help="A finalist leaves when it cannot be faster than the best by more than this share.",
    )
    trace_prompts: int = setting(
        32, "--trace-prompts", section="workload", minimum=2, help="Prompts of the traced pass."
    )
    trace: str | None = setting(
        None, "--trace", section="search", help="Use this trace (file or directory of `spectune trace`)."
    )
    surface: str | None = setting(
        None, "--surface", section="search", help="Use this time surface (of `spectune profile`)."
    )
    knob: tuple[str, ...] = setting(
        (),
        "--knob",
        section="search",
        kind=str,
        help="Engine settings outside the model, searched with Optuna after the finalists: "
        "prefill_chunk=128:512, several comma separated.",
    )
    num_trials: int = setting(
        12, "--num-trials", section="search", minimum=1, help="Combinations of knobs to measure."
    )
    storage: str | None = setting(
        None, "--storage", section="search", help="Optuna storage of the knobs, e.g. sqlite:///study.db."
    )
    num_prompts: int = changed(
        SweepOptions, "num_prompts", default=8, help="Requests of each finalist in a stage."
    )
    min_blocks: int = changed(
        SweepOptions, "min_blocks", default=3, help="Least blocks of batch-size requests of a stage."
    )
    max_tokens: int = changed(SweepOptions, "max_tokens", default=64)


QUICK_TUNE: dict[str, Any] = {
    "batch_size": "1,4,16",
    "max_tokens": 48,
    "finalists": 3,
    "trace_prompts": 24,
    "budget": 2,
    "profile_seconds": 45,
}
"""Sized for an answer within six minutes on two cores; a flag that is given still wins."""

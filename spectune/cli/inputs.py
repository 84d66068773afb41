"""From settings to what a sweep runs on: workload, backend, plan, and an estimate of its time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from spectune.cli.arrivals import check_trace, open_loads
from spectune.cli.console import say
from spectune.cli.prompts import reading_of
from spectune.cli.servers import attached_options, is_serving, server_options, without_absent_methods
from spectune.errors import UsageError

if TYPE_CHECKING:
    from spectune.cli.sweep_options import SweepOptions
    from spectune.records import Backend, Cell, SpecConfig
    from spectune.tune.plan import SweepPlan
    from spectune.tune.space import Pruned
    from spectune.workload.workload import Workload

# Seconds per token of a sequence of the default target on two cores, about the same with and without
# speculation: 27 ms alone, 53 ms each of 16 together, taken as linear between.
TOKEN_S = 0.025
TOKEN_PER_SEQUENCE_S = 0.0018
# Loading the target and the head.
START_S = 15.0
# Tokens that n-gram lookup matches; written out because engines have other defaults.
NGRAM_WINDOW = {"prompt_lookup_max": 5, "prompt_lookup_min": 1}


def read_workload(options: SweepOptions) -> Workload:
    """The prompts, with one sentence on what was left out.

    As many as the largest cell needs: a prompt asked again says little new about other prompts.
    """
    from spectune.workload.read import load_workload

    if options.workload and options.dataset_path:
        raise UsageError(f"--workload {options.workload} and --dataset-path {options.dataset_path}: give one")
    repeats = 1 if is_serving(options) else options.num_runs  # a start is repeated on the same prompts
    largest_cell = max(options.batch_size) * options.min_blocks * repeats
    workload = load_workload(
        options.dataset_path or options.workload,
        categories=options.categories or None,
        num_prompts=max(options.num_prompts * repeats, largest_cell),
        seed=options.seed,
        **reading_of(options),
    )
    say(workload.accounting)
    return workload


def open_backend(options: SweepOptions, run: Path | None = None) -> Backend:
    """The backend that the settings name. `run` is the directory of the run, for logs of servers."""
    from spectune.backend import create_backend

    if is_serving(options):
        if options.base_url is not None:
            return create_backend("attached", **attached_options(options))
        return create_backend(options.backend, **server_options(options, run))
    if options.base_url is not None:
        raise UsageError(f"--base-url needs a serving engine, not --backend {options.backend}")
    return create_backend(options.backend, **backend_options(options))


def backend_options(options: SweepOptions) -> dict[str, Any]:
    """Arguments of the backends that run in this process."""
    if options.backend == "simulated":
        if options.chat_template is not None:
            raise UsageError("--chat-template needs a target, --backend simulated has none")
        return {"truth": options.simulated_truth, "seed": options.seed}
    return {
        "model": options.model,
        "draft_model": head_of(options),
        "chat_template": template_of(options),
        "load_format": options.load_format,
        "dtype": options.dtype,
        "device": options.device,
        "quantization": options.quantization,
        "kernels": options.kernels,
        "progress": say,
    }


def template_of(options: SweepOptions) -> Path | None:
    """The file of --chat-template; UsageError if there is none."""
    if options.chat_template is None:
        return None
    path = Path(options.chat_template).expanduser()
    if not path.is_file():
        raise UsageError(f"--chat-template {options.chat_template} is not a file")
    return path


def head_of(options: SweepOptions) -> str | None:
    """The draft head: the given one, or the shipped one for the default target; None for no eagle3.

    A path stays as it was typed and a shipped head stays a name, so that a run names no machine's folder.
    """
    from spectune.backend.heads import DEFAULT_HEAD, head_folder, shipped_heads

    if options.backend == "simulated" or "eagle3" not in options.method:
        return options.draft_model
    if "draft_model" in options.method:
        raise UsageError(
            "--method eagle3 and draft_model need different --draft-model", hint="give each a run of its own"
        )
    if options.draft_model is None and options.model is not None:
        raise UsageError(
            f"--method eagle3 on --model {options.model} needs --draft-model",
            hint="give the directory of an EAGLE-3 head for this target, or use --method ngram",
        )
    if options.draft_model is None:
        if DEFAULT_HEAD not in shipped_heads():
            raise UsageError(
                "no EAGLE-3 head is installed for the default target",
                hint="train one: spectune train eagle3 --output-dir head, then --draft-model head",
            )
        return DEFAULT_HEAD
    if not head_folder(options.draft_model).is_dir():
        names = ", ".join(shipped_heads()) or "none is installed"
        raise UsageError(
            f"--draft-model {options.draft_model} is not a directory",
            hint=f"heads that come with spectune: {names}",
        )
    return options.draft_model


def plan_of(options: SweepOptions, workload: Workload, backend: Backend) -> SweepPlan:
    """Arms, cells and repeats, with what was pruned and why."""
    from spectune.backend.attached import AttachedBackend
    from spectune.records import Sampling
    from spectune.tune.plan import plan_sweep
    from spectune.tune.repeats import without_repeats
    from spectune.tune.space import production_configs, split_unsupported, standby_configs
    from spectune.workload.context import context_text

    if isinstance(backend, AttachedBackend):
        configs = backend.configs()
        pruned: Pruned = ()
    else:
        configs, pruned = _space(options)
    configs, absent = without_absent_methods(options, configs)
    pruned = (*pruned, *absent)
    if is_serving(options) and options.base_url is None and options.standby:
        configs = (*configs, *standby_configs(configs))
    if options.production:
        configs = (*configs, *_production(options, production_configs(configs)))
    configs, unsupported = split_unsupported(configs, getattr(backend, "unsupported", None))
    pruned = (*pruned, *unsupported)
    plan = plan_sweep(
        backend,
        workload,
        configs,
        batch_sizes=options.batch_size,
        context_tokens=options.context,
        temperatures=options.temperature,
        sampling=Sampling(
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
            seed=options.seed,
            max_tokens=options.max_tokens,
            ignore_eos=options.ignore_eos,
        ),
        num_prompts=options.num_prompts,
        min_blocks=options.min_blocks,
        repeats=options.num_boots if is_serving(options) else options.num_runs,
        pruned=pruned,
        context_text=context_text(workload) if any(options.context) else "",
        open_loads=open_loads(options),
    )
    plan = plan if options.repeat_prompts else without_repeats(plan)
    check_trace(options, plan)
    return plan


def _production(options: SweepOptions, configs: tuple[SpecConfig, ...]) -> tuple[SpecConfig, ...]:
    if is_serving(options) and options.base_url is None:
        return configs
    raise UsageError(
        "--production starts servers with other flags",
        hint="--backend vllm or sglang without --base-url",
    )


def _space(options: SweepOptions) -> tuple[tuple[SpecConfig, ...], Pruned]:
    from spectune.tune.space import TREE_METHODS, build_space

    has_window = options.backend != "sglang"  # its n-grams come from a trie
    return build_space(
        options.method,
        options.num_tokens,
        options.topk,
        options.num_draft_tokens,
        options={"ngram": NGRAM_WINDOW} if has_window else {},
        draft_model=head_of(options),
        tree_methods=TREE_METHODS if has_window else frozenset({"eagle3", "ngram", "draft_model"}),
    )


def work_s(plan: SweepPlan) -> float:
    """Estimated seconds for the default target on two cores; one more block an arm is calibration."""
    blocks = sum(
        _block_s(plan, point.cell) * plan.num_cell_requests(point.cell) / point.cell.batch_size
        for point in plan.points
    )
    calibration = sum(_block_s(plan, cell) for cell in plan.cells) * len(plan.configs)
    return START_S + blocks + calibration


def _block_s(plan: SweepPlan, cell: Cell) -> float:
    if cell.request_rate is not None:  # a batch of arrivals takes as long as they take to arrive
        return cell.batch_size / cell.request_rate
    return plan.sampling.max_tokens * (TOKEN_S + TOKEN_PER_SEQUENCE_S * cell.batch_size)

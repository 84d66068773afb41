"""`spectune policy verify`: serve with a policy at its edges, and withdraw it if it loses."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spectune.cli.console import print_json, say
from spectune.cli.outputs import write_text
from spectune.errors import UsageError

if TYPE_CHECKING:
    from spectune.measure.policy_verify import Serves
    from spectune.policy.verification import Verification
    from spectune.records import Backend, Chooser, SpecConfig
    from spectune.records.policy_load import LoadSample, PolicyArm, PolicyLoad

VERDICT = "verification.json"
SERVES = ("reference", "vllm", "simulated")
EXITS = {"kept": 0, "withdrawn": 3, "inconclusive": 4}


def verify(
    source: Annotated[Path, typer.Argument(help="Run directory or policy.json.", metavar="RUN|FILE")],
    backend: Annotated[
        str, typer.Option("--backend", help="What serves: reference, vllm or simulated.")
    ] = "reference",
    model: Annotated[
        str | None, typer.Option("--model", help="Target; the default one if not given.")
    ] = None,
    draft_model: Annotated[
        str | None, typer.Option("--draft-model", help="Draft head; the policy's own if not given.")
    ] = None,
    engine_python: Annotated[
        str | None, typer.Option("--engine-python", help="Interpreter of an environment that has vllm.")
    ] = None,
    num_tokens: Annotated[
        str,
        typer.Option("--num-tokens", help="Further chains that the policy is held against.", metavar="K,..."),
    ] = "",
    batch_size: Annotated[
        str, typer.Option("--batch-size", help="Further loads, beside those of the edges.", metavar="N,...")
    ] = "",
    max_batch_size: Annotated[
        int | None, typer.Option("--max-batch-size", min=1, help="Largest load; the largest measured one.")
    ] = None,
    num_runs: Annotated[
        int, typer.Option("--num-runs", min=1, help="Runs of every arm under every load.")
    ] = 5,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=4, help="Tokens of every request.")] = 32,
    max_seconds: Annotated[
        float | None,
        typer.Option("--max-seconds", min=1, help="Stop after so long; the same command goes on."),
    ] = None,
    simulated_truth: Annotated[
        str | None, typer.Option("--simulated-truth", help="Declared costs for --backend simulated.")
    ] = None,
    switch_rounds: Annotated[
        float, typer.Option("--switch-rounds", min=0, help="Simulated: plain rounds that each switch costs.")
    ] = 0.0,
    online: Annotated[
        bool,
        typer.Option(
            "--online", help="Serve with a chooser that learns, from this run's times, in place of the table."
        ),
    ] = False,
    output_dir: Annotated[
        Path | None,
        typer.Option("--output-dir", "-o", help="Samples and verdict; goes on with what is there."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON.")] = False,
) -> None:
    """Serve with a policy one below, at and one above every edge, on a ramp and on a mixed load.

    It is paired with every configuration of it throughout and with an engine that cannot speculate. A
    policy that loses more than 5% to the best of them anywhere, or falls below 0.98 of off, is withdrawn
    (exit code 3) and static advice is given; 4 says that the noise leaves it open or runs are missing.
    """
    from spectune.cli.policy import read_policy
    from spectune.cli.policy_samples import check_same_verification, digest_of
    from spectune.cli.policy_tables import print_verification
    from spectune.policy.file import check_engine
    from spectune.policy.verification import unmeasured_places

    policy = read_policy(source)
    if backend not in SERVES:
        raise UsageError(f"--backend {backend} cannot be verified with", hint=f"one of {', '.join(SERVES)}")
    check_engine(policy, backend)
    if online and backend != "reference":
        raise UsageError(f"--online runs in the reference engine, not with --backend {backend}")
    folder = output_dir or Path(f"runs/verify-{datetime.now():%Y-%m-%d-%H%M%S}")
    check_same_verification(
        folder,
        {
            "policy": digest_of(policy),
            "backend": backend,
            "model": model,
            "draft_model": draft_model,
            "max_tokens": max_tokens,
            "simulated_truth": simulated_truth,
            "switch_rounds": switch_rounds,
            "online": online,
        },
    )
    if backend == "vllm":
        from spectune.cli.policy_serve import serve_vllm

        samples, is_complete = serve_vllm(
            policy,
            folder,
            model=model,
            draft_model=draft_model,
            engine_python=engine_python,
            max_batch_size=max_batch_size,
            batch_sizes=_numbers(batch_size, "--batch-size"),
            num_runs=num_runs,
            max_tokens=max_tokens,
            max_seconds=max_seconds,
        )
    else:
        samples, is_complete = serve_here(
            policy,
            folder,
            backend=backend,
            model=model,
            draft_model=draft_model,
            further=_numbers(num_tokens, "--num-tokens"),
            batch_sizes=_numbers(batch_size, "--batch-size"),
            max_batch_size=max_batch_size,
            num_runs=num_runs,
            max_tokens=max_tokens,
            max_seconds=max_seconds,
            simulated_truth=simulated_truth,
            switch_rounds=switch_rounds,
            chooser=learner_of(source, policy) if online else table_of(policy),
        )
    found = conclude(
        policy, samples, folder, backend=backend, is_complete=is_complete, stamps_policy=not online
    )
    if as_json:
        print_json(_document(found, is_complete, is_simulated=backend == "simulated"))
    else:
        print_verification(found, is_simulated=backend == "simulated")
    if places := unmeasured_places(policy, found):
        sizes = ",".join(map(str, places))
        say(f"not measured there, only inferred: spectune sweep --batch-size {sizes} decides it")
    say(f"samples and verdict: {folder}")
    if not is_complete:
        say("not all runs are done: the same command with this --output-dir goes on")
    raise typer.Exit(EXITS[found.verdict] if is_complete or found.verdict == "withdrawn" else 4)


def serve_here(
    policy: dict[str, Any],
    folder: Path,
    *,
    backend: str,
    model: str | None,
    draft_model: str | None,
    further: Sequence[int],
    batch_sizes: Sequence[int],
    max_batch_size: int | None,
    num_runs: int,
    max_tokens: int,
    max_seconds: float | None,
    simulated_truth: str | None,
    switch_rounds: float,
    chooser: Callable[[], Chooser],
    loads: Sequence[PolicyLoad] | None = None,
    categories: Sequence[str] | None = None,
) -> tuple[list[LoadSample], bool]:
    """Samples of an engine of this process, old and new, and whether all are there.

    `loads` replace those that follow from the policy; `categories` restrict the prompts.
    """
    from spectune.backend import create_backend
    from spectune.cli.policy_samples import append_sample, read_samples
    from spectune.measure.policy_verify import requests_by_load, serve_in_turn
    from spectune.measure.requests import RequestBuilder
    from spectune.policy.file import check_validity
    from spectune.policy.verify_loads import arms_of
    from spectune.records import Sampling
    from spectune.workload import load_workload

    head = draft_model or head_of(policy)
    settings: dict[str, Any] = {"truth": simulated_truth} if backend == "simulated" else {}
    if backend == "reference":
        measured = policy["validity"]
        settings = {
            "model": model,
            "draft_model": head,
            "device": "cpu" if measured["device"] == "cpu" else "cuda",
            "dtype": measured["dtype"],
            "progress": say,
        }
    engine = create_backend(backend, **settings)
    check_validity(policy, engine.fingerprint())
    arms = arms_of(policy, chains_of(policy, further))
    loads = loads or loads_of(policy, max_batch_size, batch_sizes, max_tokens)
    server = server_of(engine, arms, max(load.peak for load in loads), switch_rounds, chooser)
    temperature = float(policy["validity"]["temperatures"][0])
    asked = requests_by_load(
        RequestBuilder(engine),
        load_workload(None, categories=categories).prompts,
        Sampling(temperature=temperature),
    )
    samples = read_samples(folder)
    done = {(sample.load, sample.repeat, sample.arm) for sample in samples}
    for sample in serve_in_turn(
        server,
        arms,
        loads,
        asked,
        repeats=num_runs,
        done=done,
        warms_each_load=engine.fingerprint().is_gpu,
        max_seconds=max_seconds,
        say=say,
    ):
        append_sample(folder, sample)
        samples.append(sample)
    return samples, len(samples) >= len(arms) * len(loads) * num_runs


def loads_of(
    policy: dict[str, Any], max_batch_size: int | None, further: Sequence[int], max_tokens: int
) -> list[PolicyLoad]:
    """Steady loads around every edge, a ramp, and a mixed load."""
    from spectune.policy.verify_loads import mixed, ramp, steady, steady_sizes

    top = max_batch_size or int(policy["validity"]["batch"][1])
    loads = [steady(size, max_tokens) for size in steady_sizes(policy, top, further)]
    return [*loads, ramp(top, max_tokens), mixed(policy, top, max_tokens)] if top > 1 else loads


def server_of(
    engine: Backend,
    arms: Sequence[PolicyArm],
    batch_size: int,
    switch_rounds: float,
    chooser: Callable[[], Chooser],
) -> Serves:
    """The engine with a fresh chooser for every serving of the policy."""
    from spectune.backend.simulated import SimulatedBackend

    if isinstance(engine, SimulatedBackend):
        from spectune.measure.policy_verify_simulated import SimulatedServer

        return SimulatedServer(engine.truth, chooser=chooser, switch_rounds=switch_rounds)
    from spectune.backend.reference import ReferenceBackend
    from spectune.measure.policy_verify_reference import ReferenceServer, one_method

    assert isinstance(engine, ReferenceBackend)
    configs = [arm.config for arm in arms if arm.config is not None]
    return ReferenceServer(
        engine,
        method=one_method(configs),
        scratch=max(configs, key=lambda config: config.size),
        chooser=chooser,
        batch_size=batch_size,
    )


def table_of(policy: dict[str, Any]) -> Callable[[], Chooser]:
    """Choosers that run the policy's own table."""
    from spectune.policy.chooser import PolicyChooser

    temperature = float(policy["validity"]["temperatures"][0])
    return lambda: PolicyChooser(policy, temperature=temperature)


def learner_of(source: Path, policy: dict[str, Any]) -> Callable[[], Chooser]:
    """Choosers that start from the run's round times and acceptance and learn while they serve."""
    import time

    from spectune.policy.learner import LearningChooser, measured_accepted
    from spectune.policy.summary import summarize
    from spectune.policy.verify_loads import arms_of
    from spectune.store import RunStore

    if not source.is_dir():
        raise UsageError(f"--online needs the run directory of a sweep, {source} is a file")
    store = RunStore.open(source)
    surface, accepted = store.surface(), measured_accepted(summarize(store).cells)
    configs = [arm.config for arm in arms_of(policy) if arm.config is not None]
    return lambda: LearningChooser(surface, accepted, configs, clock=time.perf_counter)


def head_of(policy: dict[str, Any]) -> str | None:
    """The draft head that the policy was measured with."""
    heads = {cell["config"]["draft_model"] for cell in policy["cells"] if cell["config"] != "off"}
    named = heads - {None} or {policy["validity"]["draft"]}
    head: str | None = named.pop()
    return head


def chains_of(policy: dict[str, Any], depths: Sequence[int]) -> list[SpecConfig]:
    """Further chains of the policy's own drafter."""
    from dataclasses import replace

    from spectune.policy.file import config_of

    own = [config_of(cell["config"]) for cell in policy["cells"] if cell["config"] != "off"]
    if depths and not own:
        raise UsageError("--num-tokens: the policy never speculates, so its drafter is not known")
    return [replace(own[0], num_steps=k, topk=1, num_draft_tokens=k + 1) for k in depths]


def conclude(
    policy: dict[str, Any],
    samples: list[LoadSample],
    folder: Path,
    *,
    backend: str,
    is_complete: bool = True,
    stamps_policy: bool = True,
) -> Verification:
    """The verdict, written beside the samples, and with it the policy if that is what was served.

    A part of the runs cannot keep a policy.
    """
    from spectune.policy.verification import unfinished, with_router_advice, with_verification
    from spectune.policy.verification import verify as judge

    found = with_router_advice(policy, judge(samples, parts_up_to=4))
    if not is_complete:
        found = unfinished(found)
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / VERDICT, _document(found, is_complete, is_simulated=backend == "simulated"))
    if stamps_policy:
        _write(folder / "policy.json", with_verification(policy, found, backend))
    return found


def _write(file: Path, value: Any) -> None:
    write_text(file, json.dumps(value, indent=1, allow_nan=False) + "\n", "--output-dir")


def _document(found: Verification, is_complete: bool, *, is_simulated: bool) -> dict[str, Any]:
    from spectune.policy.verification import document

    return {
        "schema_version": 1,
        "is_simulated": is_simulated,
        "is_complete": is_complete,
        **document(found),
    }


def _numbers(text: str, flag: str) -> list[int]:
    try:
        values = [int(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise UsageError(f"{flag} {text}: not whole numbers", hint=f"for example {flag} 1,3") from error
    if any(value < 1 for value in values):
        raise UsageError(f"{flag} {text}: need 1 or more")
    return values

"""`spectune policy simulate`: what a policy saves on a traffic mix or trace, from measured speeds."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spectune.cli.console import print_json
from spectune.errors import UsageError

if TYPE_CHECKING:
    from spectune.policy.simulate import Simulation
    from spectune.policy.speed_table import SpeedTable
    from spectune.records.traffic import TrafficRequest


def simulate(
    runs: Annotated[
        list[Path], typer.Argument(help="Run directories whose speeds are used.", metavar="RUN...")
    ],
    policy: Annotated[
        Path | None, typer.Option("--policy", help="Policy to simulate; built from the runs if not given.")
    ] = None,
    mix: Annotated[
        str | None, typer.Option("--mix", help="Shares of categories.", metavar="NAME=SHARE,...")
    ] = None,
    arrivals: Annotated[
        Path | None,
        typer.Option("--arrivals", help="A trace instead: JSON lines of timestamp, category, output_tokens."),
    ] = None,
    request_rate: Annotated[
        float | None, typer.Option("--request-rate", min=0, help="Requests a second of the mix.")
    ] = None,
    burstiness: Annotated[
        float, typer.Option("--burstiness", min=0.01, help="1 is Poisson, below it burstier.")
    ] = 1.0,
    num_requests: Annotated[int, typer.Option("--num-prompts", min=1, help="Requests of the mix.")] = 2000,
    output_tokens: Annotated[
        int | None,
        typer.Option("--output-tokens", min=1, help="Length of answers; the measured mean if not given."),
    ] = None,
    max_batch_size: Annotated[
        int | None, typer.Option("--max-batch-size", min=1, help="Most requests together.")
    ] = None,
    usd_per_gpu_hour: Annotated[
        float | None, typer.Option("--usd-per-gpu-hour", min=0, help="Your price; no money without it.")
    ] = None,
    num_gpus: Annotated[int, typer.Option("--num-gpus", min=1, help="Devices of the deployment.")] = 1,
    training_gpu_hours: Annotated[
        float, typer.Option("--training-gpu-hours", min=0, help="Hours that training a head took.")
    ] = 0.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the mix.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Play traffic against measured speeds: time and money saved, and regret against an oracle.

    Every measured configuration serves the same requests throughout, beside the policy and an oracle that
    picks the fastest of every moment. Decode time only: prefill and idle time are the same for all.
    """
    from spectune.policy.simulate import simulate as play
    from spectune.policy.speed_table import speed_table
    from spectune.policy.summary import summarize
    from spectune.store import RunStore

    stores = [RunStore.open(run) for run in runs]
    table = speed_table([summarize(store) for store in stores])
    document = _policy_of(policy, stores)
    traffic = _traffic(mix, arrivals, request_rate, burstiness, num_requests, output_tokens, seed)
    known = table.categories
    if mix is not None and known and (wrong := {one.category for one in traffic} - known):
        raise UsageError(
            f"--mix: {', '.join(sorted(wrong))} is no category of these runs",
            hint=f"known: {', '.join(sorted(known))}",
        )
    found = play(
        document,
        table,
        traffic,
        max_batch_size=max_batch_size,
        usd_per_gpu_hour=usd_per_gpu_hour,
        num_gpus=num_gpus,
        training_gpu_hours=training_gpu_hours,
    )
    is_simulated = bool(document["validity"]["is_simulated"])
    if as_json:
        print_json({"schema_version": 1, "is_simulated_engine": is_simulated, **asdict(found)})
    else:
        _show(found, table, traffic, is_simulated=is_simulated)


def _policy_of(policy: Path | None, stores: list[Any]) -> dict[str, Any]:
    from spectune.cli.policy import read_policy
    from spectune.policy.build import build_from_runs

    return build_from_runs(stores) if policy is None else read_policy(policy)


def _traffic(
    mix: str | None,
    arrivals: Path | None,
    request_rate: float | None,
    burstiness: float,
    num_requests: int,
    output_tokens: int | None,
    seed: int,
) -> tuple[TrafficRequest, ...]:
    from dataclasses import replace

    from spectune.workload.traffic import mixed_traffic, parse_mix, read_traffic

    if (mix is None) == (arrivals is None):
        raise UsageError("give --mix with --request-rate, or --arrivals", hint="--mix chat=.6,code=.4")
    if arrivals is not None:
        traffic = read_traffic(arrivals)
    elif not request_rate:
        raise UsageError("--mix needs --request-rate", hint="requests a second, for example --request-rate 2")
    else:
        assert mix is not None
        traffic = mixed_traffic(
            parse_mix(mix), num_requests, request_rate=request_rate, burstiness=burstiness, seed=seed
        )
    if output_tokens is None:
        return traffic
    return tuple(replace(one, num_output_tokens=one.num_output_tokens or output_tokens) for one in traffic)


def _show(
    found: Simulation, table: SpeedTable, traffic: tuple[TrafficRequest, ...], *, is_simulated: bool
) -> None:
    from spectune.cli.tables import print_table, print_wrapped

    if is_simulated:
        print("SIMULATED engine: its speeds are declared, not measured")
    off = found.of("off")
    print_wrapped(
        f"played, not served: {len(traffic)} requests, {off.num_tokens:,} tokens over {traffic[-1].arrival_s:,.0f} s "
        f"against speeds measured at context {table.context_tokens}, T={table.temperature:g}; decode time only"
    )
    rows = [
        (
            one.name,
            f"{one.busy_s:,.1f}",
            f"{off.busy_s / one.busy_s:.3f}x",
            f"{one.mean_batch:.1f}",
            f"{one.latency_s:.2f}",
            f"{one.wait_s:.2f}",
            ", ".join(f"{label} {share:.0%}" for label, share in one.share_by_config),
        )
        for one in found.served
    ]
    print_table(("choice", "busy s", "over off", "batch", "latency s", "waited s", "of the busy time"), rows)
    print_wrapped(
        f"the policy saves {1 - 1 / found.speedup:.1%} of the decode time ({found.speedup:.3f}x); regret against "
        f"the oracle {found.regret:.1%}; best static choice: {found.best_static}"
    )
    if found.money is None:
        return
    money = found.money
    print_wrapped(
        f"at your price: {money.usd_per_mtok_plain:.3f} USD a million tokens without, {money.usd_per_mtok_policy:.3f} "
        f"with the policy; {money.usd_saved:.4f} USD saved on this traffic"
    )
    if money.training_breakeven_gpu_hours is not None:
        print_wrapped(
            f"a trained head has paid for itself after {money.training_breakeven_gpu_hours:,.0f} plain serving "
            "GPU hours of such traffic"
        )
    elif found.speedup <= 1:
        print_wrapped("training a head never pays on this traffic: the policy saves no time")

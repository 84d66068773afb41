"""Settings of loads that arrive by the clock: from flags to the cells of a plan and the times of a trace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from spectune.errors import UsageError

if TYPE_CHECKING:
    from spectune.cli.sweep_options import SweepOptions
    from spectune.tune.plan import OpenLoad, SweepPlan

DRAWN = ("poisson", "constant")


def open_loads(options: SweepOptions) -> tuple[OpenLoad, ...]:
    """One load for each --request-rate; a trace without one is replayed as it was recorded."""
    from spectune.tune.plan import OpenLoad
    from spectune.workload.arrivals import trace_rate

    check_goodput(options)
    is_trace = options.arrivals not in DRAWN
    if options.burstiness is not None and (options.arrivals != "poisson" or not options.request_rate):
        raise UsageError(
            f"--burstiness {options.burstiness:g} shapes random arrivals",
            hint="give --request-rate and leave --arrivals out",
        )
    if options.arrivals == "constant" and not options.request_rate:
        raise UsageError("--arrivals constant needs --request-rate", hint="for example --request-rate 2")
    kind = "trace" if is_trace else options.arrivals
    if options.burstiness is not None:
        kind = "gamma"
    rates = options.request_rate or ((trace_rate(trace_times(options)),) if is_trace else ())
    return tuple(OpenLoad(request_rate=rate, arrivals=kind, burstiness=options.burstiness) for rate in rates)


def trace_times(options: SweepOptions) -> tuple[float, ...]:
    """Arrivals of the trace file, seconds from its first; empty where none is replayed."""
    from spectune.workload.arrivals import read_arrivals

    if options.arrivals in DRAWN:
        return ()
    if not Path(options.arrivals).is_file():
        raise UsageError(
            f"--arrivals {options.arrivals} is neither {' nor '.join(DRAWN)} nor a file",
            hint="a trace is JSON lines with timestamp_s, timestamp_ms, timestamp or arrival_s",
        )
    return read_arrivals(options.arrivals)


def check_trace(options: SweepOptions, plan: SweepPlan) -> None:
    """UsageError for a trace that ends before the requests of a cell do."""
    times = trace_times(options)
    for cell in plan.cells:
        if cell.arrivals == "trace" and len(times) < plan.num_cell_requests(cell):
            raise UsageError(
                f"--arrivals {options.arrivals} holds {len(times)} arrivals, {plan.num_cell_requests(cell)} "
                "requests are asked",
                hint="a longer trace, or fewer --num-prompts and --min-blocks",
            )


def check_goodput(options: SweepOptions) -> None:
    """UsageError for promises that cannot be read, before anything runs."""
    from spectune.metrics.goodput import parse_goodput

    if options.goodput:
        parse_goodput(options.goodput)

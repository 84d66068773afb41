"""`spectune theory ...`: calculators. Each prints its formulas, its inputs and its results."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from spectune.cli.console import print_json
from spectune.errors import UsageError

app = typer.Typer(no_args_is_help=True, help="Calculate speedup, break-even, floors and cost.")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Alpha = Annotated[float | None, typer.Option("--alpha", help="Acceptance rate of one draft token, 0..1.")]
AcceptanceLength = Annotated[
    float | None, typer.Option("--acceptance-length", help="Tokens per step, the target's own included.")
]
NumTokens = Annotated[
    int, typer.Option("--num-tokens", "--num-speculative-tokens", min=0, help="Draft tokens per step.")
]
DraftCost = Annotated[float, typer.Option("--draft-cost", help="c: one draft step / one plain step.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One calculated number. `formula` comes from the docstring of the function that calculated it."""

    name: str
    value: float | int | str | None
    formula: str | None = None


def result(name: str, function: Callable[..., Any], *args: float | int, scale: float = 1.0) -> Result:
    """Calls the function and keeps the first line of its docstring as the formula."""
    value = function(*args)
    lines = (inspect.getdoc(function) or "").splitlines()
    scaled = value * scale if isinstance(value, float) else value
    return Result(name=name, value=scaled, formula=lines[0].rstrip(".") if lines else None)


def show(inputs: dict[str, Any], results: Sequence[Result], *, as_json: bool) -> None:
    """Inputs, then each result with its formula."""
    if as_json:
        formulas = {item.name: item.formula for item in results if item.formula}
        print_json(
            {"inputs": inputs, "results": {item.name: item.value for item in results}, "formulas": formulas}
        )
        return
    given = ", ".join(f"{name} {value:g}" for name, value in inputs.items() if value is not None)
    print(f"given: {given}")
    for item in results:
        print(f"{item.name} = {_number(item.value)}" + (f"    {item.formula}" if item.formula else ""))


def _number(value: float | int | str | None) -> str:
    if value is None:
        return "never"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@app.command(
    epilog="Example: spectune theory speedup --alpha 0.8 --num-tokens 4 --draft-cost 0.1 --verify-cost 1.2"
)
def speedup(
    num_tokens: NumTokens,
    draft_cost: DraftCost,
    alpha: Alpha = None,
    acceptance_length: AcceptanceLength = None,
    verify_cost: Annotated[
        float, typer.Option("--verify-cost", help="v: verifying all tokens / one plain step.")
    ] = 1.0,
    other_cost: Annotated[float, typer.Option("--other-cost", help="o: the rest / one plain step.")] = 0.0,
    as_json: Json = False,
) -> None:
    """Speedup from acceptance and from what draft and verification cost."""
    from spectune.theory import speedup as formulas

    results: list[Result] = []
    if (alpha is None) == (acceptance_length is None):
        raise UsageError("give either --alpha or --acceptance-length")
    if alpha is not None:
        results += [
            result("tokens per step", formulas.expected_tokens, alpha, num_tokens),
            result("ideal speedup", formulas.ideal_speedup, alpha, num_tokens, draft_cost),
            result("operations over plain", formulas.ops_factor, alpha, num_tokens, draft_cost),
        ]
        acceptance_length = formulas.expected_tokens(alpha, num_tokens)
    assert acceptance_length is not None
    results.append(
        result(
            "speedup",
            formulas.speedup_from_ratios,
            acceptance_length,
            num_tokens,
            draft_cost,
            verify_cost,
            other_cost,
        )
    )
    inputs = {
        "alpha": alpha,
        "acceptance length": acceptance_length,
        "K": num_tokens,
        "c": draft_cost,
        "v": verify_cost,
        "o": other_cost,
    }
    show(inputs, results, as_json=as_json)


@app.command(
    "break-even",
    epilog="Example: spectune theory break-even --plain-ms 27 --draft-ms 6 --verify-ms 33 --acceptance-length 1.6",
)
def break_even(
    plain_ms: Annotated[float, typer.Option("--plain-ms", help="One plain round.")],
    draft_ms: Annotated[float, typer.Option("--draft-ms", help="Whole draft phase of a round.")],
    verify_ms: Annotated[float, typer.Option("--verify-ms", help="Verification of a round.")],
    other_ms: Annotated[float, typer.Option("--other-ms", help="Rest of a round.")] = 0.0,
    acceptance_length: AcceptanceLength = None,
    per_token_ms: Annotated[
        float | None,
        typer.Option(
            "--per-token-ms", help="What one more token adds to a pass: gives the break-even batch."
        ),
    ] = None,
    num_tokens: Annotated[
        int | None, typer.Option("--num-tokens", "--num-speculative-tokens", help="Draft tokens per step.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Acceptance length, and batch size, at which speculation is as fast as none."""
    from spectune.theory import speedup as formulas

    times_s = [value / 1e3 for value in (plain_ms, draft_ms, verify_ms, other_ms)]
    results = [result("break-even acceptance length", formulas.break_even_acceptance_length, *times_s)]
    if acceptance_length is not None:
        results.append(result("speedup", formulas.general_speedup, acceptance_length, *times_s))
        cause = formulas.slowdown_cause(acceptance_length, *times_s)
        results.append(Result(name="verdict", value=cause or "speculation is faster here"))
    if per_token_ms is not None:
        if acceptance_length is None or num_tokens is None:
            raise UsageError("--per-token-ms needs --acceptance-length and --num-tokens")
        fixed_s = times_s[0] - per_token_ms / 1e3
        results.append(
            result(
                "break-even batch",
                formulas.break_even_batch,
                acceptance_length,
                num_tokens,
                fixed_s,
                per_token_ms / 1e3,
                times_s[1],
            )
        )
    inputs = {
        "plain ms": plain_ms,
        "draft ms": draft_ms,
        "verify ms": verify_ms,
        "other ms": other_ms,
        "acceptance length": acceptance_length,
        "per token ms": per_token_ms,
        "K": num_tokens,
    }
    show(inputs, results, as_json=as_json)


@app.command("optimal-k", epilog="Example: spectune theory optimal-k --alpha 0.7 --draft-cost 0.1")
def optimal_k(
    alpha: Annotated[float, typer.Option("--alpha", help="Acceptance rate of one draft token, 0..1.")],
    draft_cost: DraftCost,
    max_num_tokens: Annotated[
        int, typer.Option("--max-num-tokens", min=1, max=256, help="Largest K to try.")
    ] = 16,
    as_json: Json = False,
) -> None:
    """Number of draft tokens with the largest ideal speedup; 0 means do not speculate."""
    from spectune.theory import speedup as formulas

    best = result("optimal K", formulas.optimal_gamma, alpha, draft_cost, max_num_tokens)
    assert isinstance(best.value, int)
    results = [best, result("ideal speedup", formulas.ideal_speedup, alpha, best.value, draft_cost)]
    if alpha > draft_cost:
        results.append(result("guaranteed speedup", formulas.min_guarantee, alpha, draft_cost))
    show({"alpha": alpha, "c": draft_cost, "largest K": max_num_tokens}, results, as_json=as_json)


@app.command(
    epilog="Example: spectune theory floor --weight-gb 16 --bandwidth-gb-s 3350 --acceptance-length 2.5"
)
def floor(
    weight_gb: Annotated[float, typer.Option("--weight-gb", help="Weights read every round, 1e9 bytes.")],
    bandwidth_gb_s: Annotated[float, typer.Option("--bandwidth-gb-s", help="Memory bandwidth, 1e9 bytes/s.")],
    kv_gb: Annotated[float, typer.Option("--kv-gb", help="Cached keys and values of all sequences.")] = 0.0,
    acceptance_length: Annotated[
        float, typer.Option("--acceptance-length", help="Tokens per step, the target's own included.")
    ] = 1.0,
    measured_ms: Annotated[
        float | None, typer.Option("--measured-ms", help="Measured round: gives the share of the bandwidth.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Least time of a round and of a token that reading the memory allows."""
    from spectune.theory import roofline

    read = (weight_gb * 1e9, kv_gb * 1e9, bandwidth_gb_s * 1e9)
    results = [
        result("floor of a round, ms", roofline.floor_round_s, *read, scale=1e3),
        result("floor of a token, ms", roofline.floor_tpot, *read, acceptance_length, scale=1e3),
    ]
    if measured_ms is not None:
        share = result("bandwidth share", roofline.mbu, read[0] + read[1], measured_ms / 1e3, read[2])
        results.append(share)
    inputs = {
        "weights GB": weight_gb,
        "kv GB": kv_gb,
        "bandwidth GB/s": bandwidth_gb_s,
        "acceptance length": acceptance_length,
        "measured ms": measured_ms,
    }
    show(inputs, results, as_json=as_json)


@app.command(
    epilog="Example: spectune theory cost --usd-per-gpu-hour 2.5 --tokens-per-s 900 --speedup 1.3 --training-gpu-hours 200"
)
def cost(
    usd_per_gpu_hour: Annotated[float, typer.Option("--usd-per-gpu-hour", help="Your price.")],
    tokens_per_s: Annotated[
        float, typer.Option("--tokens-per-s", help="Plain output throughput of the deployment.")
    ],
    speedup: Annotated[
        float | None, typer.Option("--speedup", help="Throughput gain at equal latency goals.")
    ] = None,
    training_gpu_hours: Annotated[
        float | None, typer.Option("--training-gpu-hours", help="What the draft head costs to train.")
    ] = None,
    num_gpus: Annotated[int, typer.Option("--num-gpus", min=1, help="GPUs of the deployment.")] = 1,
    utilisation: Annotated[
        float, typer.Option("--utilisation", help="Share of time under load, 0..1.")
    ] = 1.0,
    as_json: Json = False,
) -> None:
    """Dollars per million output tokens, what speculation saves, and when a head has paid for itself."""
    from spectune.theory import cost as formulas

    plain = result(
        "USD per Mtok, plain", formulas.usd_per_mtok, usd_per_gpu_hour, tokens_per_s, num_gpus, utilisation
    )
    results = [plain]
    if speedup is not None:
        assert isinstance(plain.value, float)
        results.append(result("USD saved per Mtok", formulas.saving_per_mtok, plain.value, speedup))
    if training_gpu_hours is not None:
        if speedup is None:
            raise UsageError("--training-gpu-hours needs --speedup")
        hours = result(
            "plain GPU hours to break even", formulas.breakeven_gpu_hours, training_gpu_hours, speedup
        )
        results.append(hours)
    inputs = {
        "USD/GPU h": usd_per_gpu_hour,
        "tokens/s": tokens_per_s,
        "speedup": speedup,
        "training GPU h": training_gpu_hours,
        "GPUs": num_gpus,
        "utilisation": utilisation,
    }
    show(inputs, results, as_json=as_json)

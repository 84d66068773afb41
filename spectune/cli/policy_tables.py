"""Policies and what serving them showed, as tables on stdout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from spectune.cli.tables import print_table, print_wrapped

if TYPE_CHECKING:
    from spectune.policy.verification import Verification
    from spectune.records import Interval


def print_policy(policy: Mapping[str, Any]) -> None:
    """What runs where and why, what it holds for, how long switches wait, what serving it showed."""
    _print_validity(policy)
    rows = [
        (
            _range(cell["batch"]),
            _range(cell["context_tokens"]),
            _range(cell["temperature"]),
            cell["category"] or "all",
            _label(cell["config"]),
            _ratio(cell["speedup"], *(cell["speedup_ci"] or (None, None))),
            str(cell["num_steps"]) if cell["num_steps"] else "-",
            cell["source"],
        )
        for cell in policy["cells"]
    ]
    print_table(("batch", "context", "T", "category", "run", "speedup", "steps", "why"), rows)
    print(f"anywhere else: {_label(policy['fallback'])}")
    _print_switching(policy)
    _print_verified(policy)


def _print_validity(policy: Mapping[str, Any]) -> None:
    validity = policy["validity"]
    if validity["is_simulated"]:
        print("SIMULATED: declared costs, not for deployment")
    print_wrapped(
        f"measured in {policy['source_run']} on {validity['engine']} ({validity['engine_version']}), target "
        f"{validity['target']}, draft {validity['draft'] or 'none'}, {validity['device']}, {validity['dtype']}, "
        f"tensor parallel size {validity['tensor_parallel_size']}, {validity['threads']} threads; prompts of "
        f"{validity['workload']}; valid for nothing else"
    )


def _print_switching(policy: Mapping[str, Any]) -> None:
    deadband = policy.get("deadband")
    if deadband and deadband["edges"]:
        waits = "; ".join(
            f"{edge['from']} to {edge['to']}: {edge['rounds']} round{'s' if edge['rounds'] > 1 else ''}"
            for edge in deadband["edges"]
        )
        word = "assumed" if deadband["is_assumed"] else "measured"
        print_wrapped(
            f"switches wait: {waits} (a switch costs {deadband['switch_cost_rounds']:.2g} plain rounds, {word})"
        )
    if policy.get("max_loss"):
        print_wrapped(f"up to {policy['max_loss']:.0%} of a place's speedup was given up for fewer edges")
    for one in policy.get("standby", ()):
        cost = _ratio(one["cost"], *(one["cost_ci"] or (None, None)))
        print_wrapped(
            f"drafting nothing with {one['method']} loaded costs {cost} the time at batch {one['batch']}"
        )


def _print_verified(policy: Mapping[str, Any]) -> None:
    told = policy.get("verification")
    if told is None:
        print("not verified: spectune policy verify serves with it")
        return
    print_wrapped(f"served on {told['engine']}: {told['verdict']}")
    for reason in told["reasons"]:
        print_wrapped(f"  {reason}")
    if told["advice"]:
        print_wrapped(f"instead: {told['advice']}")


def print_verification(found: Verification, *, is_simulated: bool) -> None:
    """One row a load: the policy against off and against the best static arm."""
    if is_simulated:
        print("SIMULATED: declared costs and a clock of its own")
    rows = [
        (
            load.load,
            _interval(load.over_off),
            load.best_static or "-",
            _interval(load.over_best),
            str(load.num_runs),
            load.verdict,
        )
        for load in found.loads
    ]
    print_table(("load", "policy over off", "best static", "policy over it", "runs", "verdict"), rows)
    for reason in found.reasons:
        print_wrapped(reason)
    if found.switch_cost_rounds is not None:
        print_wrapped(f"a switch to more speculation took {found.switch_cost_rounds:.2f} plain rounds")
    print_wrapped(f"policy {found.verdict}" + (f": {found.advice}" if found.advice else ""))


def _interval(ratio: Interval | None) -> str:
    return "-" if ratio is None else _ratio(ratio.value, ratio.low, ratio.high)


def _ratio(value: float | None, low: float | None, high: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}x" if low is None or high is None else f"{value:.2f}x [{low:.2f}, {high:.2f}]"


def _range(bounds: Sequence[float | None] | None) -> str:
    if bounds is None:
        return "any"
    low, high = bounds
    if high is None:
        return f"from {low:g}"
    return f"{low:g}" if low == high else f"{low:g}-{high:g}"


def _label(value: Any) -> str:
    from spectune.policy.file import config_of

    return config_of(value).label

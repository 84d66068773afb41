"""From a path or a built-in name to a Workload: read, drop with reasons, filter, sample, fingerprint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from spectune.errors import WorkloadError
from spectune.records import Prompt
from spectune.workload.folder import CALIBRATION_FILE, built_in_names, prompt_files, workloads_folder
from spectune.workload.rows import read_rows
from spectune.workload.sample import stratified
from spectune.workload.shapes import Unusable, parse_row
from spectune.workload.workload import Workload, workload_digest

CALIBRATION_PER_CATEGORY = 2


def load_workload(
    path_or_name: str | Path | None,
    *,
    categories: Sequence[str] | None = None,
    num_prompts: int | None = None,
    seed: int = 0,
) -> Workload:
    """Prompts of a file, of a folder of files, or of a built-in set (None is all of ours).

    A built-in name wins over a file of the same name; write `./chat` for the file. Raises
    WorkloadError (exit 2) for whatever cannot be read; rows that cannot be asked are counted with
    their reason. Fewer prompts than `num_prompts` are never filled up by repeating.
    """
    if num_prompts is not None and num_prompts < 1:
        raise WorkloadError(f"--num-prompts {num_prompts} asks for no prompt", hint="use at least 1")
    source, name = _locate(path_or_name)
    reading = _read_prompts(source)
    chosen = _of_categories(reading, categories, source)
    ordered = stratified(chosen, seed=seed)
    prompts = tuple(ordered[:num_prompts])
    return Workload(
        name=name,
        prompts=prompts,
        digest=workload_digest(prompts),
        calibration=_calibration(source, prompts, spare=ordered[len(prompts) :]),
        dropped=tuple(reading.dropped),
        num_rows=reading.num_rows,
        num_filtered=len(reading.prompts) - len(chosen),
        num_available=len(chosen),
        num_requested=num_prompts,
        ignored_keys=tuple(sorted(reading.ignored_keys)),
        source=source,
    )


@dataclass(slots=True)
class _Reading:
    """What reading has found so far."""

    prompts: list[Prompt] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    num_rows: int = 0
    ignored_keys: set[str] = field(default_factory=set)
    place_by_digest: dict[str, str] = field(default_factory=dict)
    seen_ids: set[str] = field(default_factory=set)


def _locate(path_or_name: str | Path | None) -> tuple[Path, str]:
    """Folder or file of the prompts, and the workload's name."""
    if path_or_name is None or path_or_name == "default":
        return workloads_folder(), "default"
    if isinstance(path_or_name, str) and path_or_name in built_in_names():
        return workloads_folder() / f"{path_or_name}.jsonl", path_or_name
    path = Path(path_or_name).expanduser()
    if not path.exists():
        raise WorkloadError(
            f"no workload {path_or_name}: neither a file, a folder nor a built-in set",
            hint=f"built-in: {', '.join(built_in_names())}",
        )
    return path, path.resolve().name


def _read_prompts(source: Path) -> _Reading:
    files = prompt_files(source) if source.is_dir() else [source]
    if not files:
        raise WorkloadError(f"{source}: the folder holds no .jsonl or .json file")
    reading = _Reading()
    for path in files:
        _read_file(path, reading)
    if not reading.prompts:
        reasons = Counter(line.split(": ", 1)[1] for line in reading.dropped)
        told = "; ".join(f"{reason} ({count})" for reason, count in reasons.most_common(5))
        raise WorkloadError(f"{source}: none of {reading.num_rows} rows can be asked: {told}")
    return reading


def _read_file(path: Path, reading: _Reading) -> None:
    for line, value in read_rows(path):
        place = f"{path.name}, line {line}"
        reading.num_rows += 1
        try:
            row = parse_row(value)
        except WorkloadError as error:
            raise WorkloadError(f"{path}, line {line}: {error.message}", hint=error.hint) from error
        if isinstance(row, Unusable):
            reading.dropped.append(f"{place}: {row.reason}")
            continue
        prompt = Prompt(
            prompt_id=_unique_id(row.row_id or f"{path.stem}-{line}", place, reading.seen_ids),
            category=row.category or path.stem,
            turns=row.turns,
            system=row.system,
            max_tokens=row.max_tokens,
        )
        # A prompt asked twice finds a warm cache, so the second one would measure something else.
        first = reading.place_by_digest.setdefault(prompt.digest, place)
        if first != place:
            reading.dropped.append(f"{place}: the same prompt as {first}")
            continue
        reading.prompts.append(prompt)
        reading.ignored_keys |= row.ignored_keys


def _unique_id(row_id: str, place: str, seen_ids: set[str]) -> str:
    unique = row_id if row_id not in seen_ids else f"{row_id} ({place})"
    seen_ids.add(unique)
    return unique


def _of_categories(reading: _Reading, categories: Sequence[str] | None, source: Path) -> list[Prompt]:
    if categories is None:
        return reading.prompts
    present = sorted({prompt.category for prompt in reading.prompts})
    if missing := [category for category in categories if category not in present]:
        raise WorkloadError(
            f"{source}: no prompt of category {', '.join(missing)}",
            hint=f"categories there: {', '.join(present)}",
        )
    return [prompt for prompt in reading.prompts if prompt.category in categories]


def _calibration(source: Path, prompts: Sequence[Prompt], spare: Sequence[Prompt]) -> tuple[Prompt, ...]:
    """Prompts for warm-up and timing: never a measured one.

    The calibration file beside the prompts; else those that were not sampled, whose lengths are the
    right ones, up to two a category; else the built-in calibration file.
    """
    own = (source if source.is_dir() else source.parent) / CALIBRATION_FILE
    if not own.is_file() and spare:
        return tuple(_first_of_each_category(spare, CALIBRATION_PER_CATEGORY))
    measured = {prompt.digest for prompt in prompts}
    wanted = {prompt.category for prompt in prompts}
    for file in (own, workloads_folder() / CALIBRATION_FILE):
        found = _read_prompts(file).prompts if file.is_file() else []
        unmeasured = [prompt for prompt in found if prompt.digest not in measured]
        if unmeasured:
            same_category = [prompt for prompt in unmeasured if prompt.category in wanted]
            return tuple(same_category or unmeasured)
    return ()


def _first_of_each_category(prompts: Sequence[Prompt], number: int) -> Iterator[Prompt]:
    taken: Counter[str] = Counter()
    for prompt in prompts:
        taken[prompt.category] += 1
        if taken[prompt.category] <= number:
            yield prompt

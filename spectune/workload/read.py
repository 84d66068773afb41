"""From a path, a hub id or a built-in name to a Workload: read, drop with reasons, filter, sample."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from spectune.errors import WorkloadError
from spectune.records import Prompt
from spectune.workload.containers import rows_of, split_format
from spectune.workload.folder import CALIBRATION_FILE, built_in_names, prompt_files, workloads_folder
from spectune.workload.hub import hub_id, hub_rows
from spectune.workload.rows import BadRow, Rows
from spectune.workload.sample import SPARE_PER_CATEGORY, Candidate, Sampler
from spectune.workload.shapes import Row, Unusable, parse_row
from spectune.workload.synthetic import SYNTHETIC_KEY
from spectune.workload.workload import NUM_PLACES, Workload, workload_digest

MAX_UNREADABLE_FRACTION = 0.01
"""A few torn lines of a long log are left out and counted; more of them are a wrong file."""
RESERVE = 16
"""Prompts drawn beyond a quarter more, in case some do not fit."""
_HOPELESS = 100  # unreadable rows after which a file that is mostly so is not read to its end


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where prompts come from: files, or a data set of the hub."""

    name: str
    files: tuple[Path, ...] = ()
    folder: Path | None = None
    hub: str | None = None
    subset: str | None = None
    split: str | None = None


def load_workload(
    path_or_name: str | Path | None,
    *,
    categories: Sequence[str] | None = None,
    num_prompts: int | None = None,
    seed: int = 0,
    formats: Sequence[str] = (),
    strict: bool = False,
    subset: str | None = None,
    split: str | None = None,
    fits: Callable[[Prompt], str | None] | None = None,
) -> Workload:
    """Prompts of a file, of a folder of files, of a hub id, or of a built-in set (None is all of ours).

    A built-in name wins over a file of the same name; write `./chat` for the file. Raises
    WorkloadError (exit 2) for whatever cannot be read; rows that cannot be asked are counted with
    their reason, with `strict` the first one is an error. Fewer prompts than `num_prompts` are never
    filled up by repeating. `fits` says of a prompt why it cannot run, or None; it is asked for the drawn
    prompts only, with a few more drawn to take the place of those that do not fit.
    """
    if num_prompts is not None and num_prompts < 1:
        raise WorkloadError(f"--num-prompts {num_prompts} asks for no prompt", hint="use at least 1")
    source = locate(path_or_name, subset=subset, split=split)
    size = num_prompts if num_prompts is None or fits is None else num_prompts + num_prompts // 4 + RESERVE
    reading = Reading(source, size, seed=seed, formats=formats, strict=strict, categories=categories)
    for _ in reading.rows():
        pass
    sample, spare = reading.sampler.draw()
    if fits is not None:
        sample, spare = reading.fitting([*sample, *spare], fits, num_prompts)
    prompts = tuple(reading.named(sample))
    return Workload(
        name=source.name,
        prompts=prompts,
        digest=workload_digest(prompts),
        calibration=_calibration(source, prompts, spare=[candidate.prompt for candidate in spare]),
        dropped=tuple(reading.dropped),
        num_dropped_by_reason=dict(reading.num_dropped_by_reason),
        num_rows=reading.num_rows,
        num_filtered=reading.num_filtered,
        num_available=reading.num_available,
        num_requested=num_prompts,
        ignored_keys=tuple(sorted(reading.ignored_keys)),
        source=source.folder or (source.files[0] if source.files else None),
        is_synthetic=reading.is_synthetic,
    )


def locate(path_or_name: str | Path | None, *, subset: str | None = None, split: str | None = None) -> Source:
    """Files of the prompts, or the hub id, and the workload's name."""
    if path_or_name is None or path_or_name == "default":
        return _of_path(workloads_folder(), "default")
    if isinstance(path_or_name, str) and path_or_name in built_in_names():
        return _of_path(workloads_folder() / f"{path_or_name}.jsonl", path_or_name)
    path = Path(path_or_name).expanduser()
    try:
        exists = path.exists()
    except (OSError, ValueError) as error:  # a name too long, a NUL byte
        raise WorkloadError(f"no workload {str(path_or_name)[:200]!r}: {error}") from error
    if exists:
        return _of_path(path, path.resolve().name)
    if name := hub_id(str(path_or_name)):
        return Source(name=name, hub=name, subset=subset, split=split)
    raise WorkloadError(
        f"no workload {path_or_name}: neither a file, a folder nor a built-in set",
        hint=f"built-in: {', '.join(built_in_names())}",
    )


def _of_path(path: Path, name: str) -> Source:
    if not path.is_dir():
        return Source(name=name, files=(path,))
    files = tuple(prompt_files(path))
    if not files:
        raise WorkloadError(f"{path}: the folder holds no .jsonl or .json file")
    return Source(name=name, files=files, folder=path)


@dataclass(slots=True)
class Reading:
    """One pass over a source: what is asked goes to the sampler, everything else is counted."""

    source: Source
    num_prompts: int | None = None
    seed: int = 0
    formats: Sequence[str] = ()
    strict: bool = False
    categories: Sequence[str] | None = None
    dropped: list[str] = field(default_factory=list)
    num_dropped_by_reason: Counter[str] = field(default_factory=Counter)
    num_rows: int = 0
    num_filtered: int = 0
    num_available: int = 0
    num_unreadable: int = 0
    is_synthetic: bool = False
    ignored_keys: set[str] = field(default_factory=set)
    sampler: Sampler = field(init=False)
    _place_by_digest: dict[bytes, int] = field(default_factory=dict)
    _first_unreadable: WorkloadError | None = None
    _present: set[str] = field(default_factory=set)

    _names: list[str] = field(init=False)
    _stems: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.sampler = Sampler(self.num_prompts, seed=self.seed)
        self._names = [path.name for path in self.source.files] or [self.source.name]
        self._stems = [path.stem for path in self.source.files] or [self.source.name.split("/")[-1]]

    def rows(self) -> Iterator[tuple[Row, Prompt]]:
        """Read everything; yields each row that can be asked. WorkloadError where nothing can be."""
        container, shape = split_format(self.formats)
        for index, (name, rows) in enumerate(self._tables(container)):
            count = 0
            for line, value in rows:
                count += 1
                self.num_rows += 1
                row = self._parse(value, name, line, shape)
                if row is not None and (prompt := self._prompt(row, index, line)) is not None:
                    yield row, prompt
            if count == 0:
                raise WorkloadError(f"{name}: the file holds no rows")
        self._check()

    def fitting(
        self, drawn: Sequence[Candidate], fits: Callable[[Prompt], str | None], size: int | None
    ) -> tuple[list[Candidate], list[Candidate]]:
        """The first `size` candidates that fit, and the other ones; what does not fit is counted."""
        kept: list[Candidate] = []
        for candidate in drawn:
            reason = fits(candidate.prompt)
            if reason is None:
                kept.append(candidate)
                continue
            index, line = candidate.place
            self.num_available -= 1
            self._drop(self._names[index], line, reason, reason)
        if not kept:
            raise WorkloadError(f"{self.source.name}: none of {len(drawn)} prompts can run: {reason}")
        return kept[:size], [] if size is None else kept[size:]

    def named(self, candidates: Sequence[Candidate]) -> Iterator[Prompt]:
        """The prompts of a sample; of two rows with one id the later one gets its place as well."""
        seen: set[str] = set()
        new_ids: dict[tuple[int, int], str] = {}
        for candidate in sorted(candidates, key=lambda candidate: candidate.place):
            index, line = candidate.place
            row_id = candidate.prompt.prompt_id
            new_ids[candidate.place] = (
                row_id if row_id not in seen else f"{row_id} ({self._names[index]}, line {line})"
            )
            seen.add(new_ids[candidate.place])
        for candidate in candidates:
            prompt, row_id = candidate.prompt, new_ids[candidate.place]
            if row_id == prompt.prompt_id:
                yield prompt
            else:
                yield Prompt(
                    prompt_id=row_id,
                    category=prompt.category,
                    turns=prompt.turns,
                    system=prompt.system,
                    max_tokens=prompt.max_tokens,
                )

    def _tables(self, container: str | None) -> Iterator[tuple[str, Rows]]:
        source = self.source
        if source.hub is not None:
            yield source.hub, hub_rows(source.hub, subset=source.subset, split=source.split)
        for path in source.files:
            yield str(path), rows_of(path, container)

    def _parse(self, value: object, file: str, line: int, shape: str | None) -> Row | None:
        """The row; None for one that is left out."""
        if isinstance(value, BadRow):
            column = "" if value.column is None else f", column {value.column}"
            self._unreadable(WorkloadError(f"{file}, line {line}{column}: {value.message}", hint=value.hint))
            return None
        try:
            row = parse_row(value, shape)
        except WorkloadError as error:
            self._unreadable(WorkloadError(f"{file}, line {line}: {error.message}", hint=error.hint))
            return None
        if isinstance(row, Unusable):
            self._drop(file, line, row.kind, row.reason)
            return None
        return row

    def _prompt(self, row: Row, index: int, line: int) -> Prompt | None:
        stem = self._stems[index]
        prompt = Prompt(
            prompt_id=row.row_id or f"{stem}-{line}",
            category=row.category or stem,
            turns=row.turns,
            system=row.system,
            max_tokens=row.max_tokens,
        )
        digest = prompt.digest
        key = bytes.fromhex(digest[:32])
        place = index << 40 | line
        # A prompt asked twice finds a warm cache, so the second one would measure something else.
        first = self._place_by_digest.setdefault(key, place)
        if first != place:
            at = f"{self._names[first >> 40]}, line {first & (1 << 40) - 1}"
            self._drop(
                self._names[index], line, "the same prompt as an earlier row", f"the same prompt as {at}"
            )
            return None
        if row.ignored_keys:
            self.ignored_keys |= row.ignored_keys
            self.is_synthetic = self.is_synthetic or SYNTHETIC_KEY in row.ignored_keys
        if self.categories is not None and prompt.category not in self.categories:
            self._present.add(prompt.category)
            self.num_filtered += 1
            return None
        self._present.add(prompt.category)
        self.num_available += 1
        self.sampler.add(prompt, digest, (index, line))
        return prompt

    def _drop(self, file: str, line: int, kind: str, reason: str) -> None:
        if self.strict:
            raise WorkloadError(f"{file}, line {line}: {reason}", hint="without --strict the row is left out")
        self.num_dropped_by_reason[kind] += 1
        if len(self.dropped) < NUM_PLACES:
            self.dropped.append(f"{Path(file).name}, line {line}: {reason}")

    def _unreadable(self, error: WorkloadError) -> None:
        if self.strict:
            raise error
        self.num_unreadable += 1
        self._first_unreadable = self._first_unreadable or error
        self.num_dropped_by_reason["the row cannot be read"] += 1
        if len(self.dropped) < NUM_PLACES:
            self.dropped.append(error.message)
        if self.num_unreadable >= _HOPELESS and 2 * self.num_unreadable > self.num_rows:
            raise self._first_unreadable

    def _check(self) -> None:
        if (
            self._first_unreadable is not None
            and self.num_unreadable > MAX_UNREADABLE_FRACTION * self.num_rows
        ):
            raise self._first_unreadable
        where = self.source.folder or (self.source.files or (self.source.name,))[0]
        if not self.num_available and not self.num_filtered:
            reasons = "; ".join(
                f"{reason} ({count})" for reason, count in self.num_dropped_by_reason.most_common(5)
            )
            raise WorkloadError(f"{where}: none of {self.num_rows} rows can be asked: {reasons}")
        if missing := [category for category in self.categories or () if category not in self._present]:
            raise WorkloadError(
                f"{where}: no prompt of category {', '.join(missing)}",
                hint=f"categories there: {', '.join(sorted(self._present)[:50])}",
            )


def _calibration(source: Source, prompts: Sequence[Prompt], *, spare: Sequence[Prompt]) -> tuple[Prompt, ...]:
    """Prompts for warm-up and timing: never a measured one.

    The calibration file beside the prompts; else those that were not sampled, whose lengths are the
    right ones, up to two a category; else the built-in calibration file.
    """
    beside = source.folder or (source.files[0].parent if source.files else None)
    own = None if beside is None else beside / CALIBRATION_FILE
    if (own is None or not own.is_file()) and spare:
        return tuple(_first_of_each_category(spare, SPARE_PER_CATEGORY))
    measured = {prompt.digest for prompt in prompts}
    wanted = {prompt.category for prompt in prompts}
    for file in (own, workloads_folder() / CALIBRATION_FILE):
        found = _all_prompts(file) if file is not None and file.is_file() else []
        unmeasured = [prompt for prompt in found if prompt.digest not in measured]
        if unmeasured:
            same_category = [prompt for prompt in unmeasured if prompt.category in wanted]
            return tuple(same_category or unmeasured)
    return ()


def _all_prompts(file: Path) -> list[Prompt]:
    """Prompts of a file in the order of its rows."""
    return [prompt for _, prompt in Reading(Source(name=file.name, files=(file,))).rows()]


def _first_of_each_category(prompts: Sequence[Prompt], number: int) -> Iterator[Prompt]:
    taken: Counter[str] = Counter()
    for prompt in prompts:
        taken[prompt.category] += 1
        if taken[prompt.category] <= number:
            yield prompt

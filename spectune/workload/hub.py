"""Rows of a data set on the Hugging Face hub, through the `datasets` library, which is an extra."""

from __future__ import annotations

import re
from typing import Any

from spectune.errors import BackendMissing, DownloadFailed, WorkloadError
from spectune.workload.containers import SUFFIXES
from spectune.workload.rows import Rows
from spectune.workload.shapes import QUESTION_KEYS

PREFIX = "hf:"
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SPLITS = ("test", "validation", "train")  # evaluation rows before those that heads were trained on


def hub_id(name: str) -> str | None:
    """The hub id that --dataset-path names: `hf:owner/name`, or `owner/name` that is no file name."""
    if name.startswith(PREFIX):
        return name.removeprefix(PREFIX)
    is_file_name = name.lower().endswith(tuple(SUFFIXES))
    return name if _ID.fullmatch(name) and not is_file_name else None


def hub_rows(name: str, *, subset: str | None = None, split: str | None = None) -> Rows:
    """Rows of a split, numbered from 1, streamed. BackendMissing without `datasets`."""
    try:
        import datasets
    except ModuleNotFoundError as missing:
        raise BackendMissing(
            f"--dataset-path {name} is no local file; reading it from the hub needs datasets",
            hint="pip install 'spectune[hub]', or give a file",
        ) from missing
    library: Any = datasets
    try:
        chosen = split or _split(name, list(library.get_dataset_split_names(name, subset)))
        stream = library.load_dataset(name, subset, split=chosen, streaming=True)
        for number, row in enumerate(stream, start=1):
            yield (
                number,
                {key: value for key, value in row.items() if value is not None or key in QUESTION_KEYS},
            )
    except WorkloadError:
        raise
    except Exception as error:  # network, authorisation, configuration: no common base
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DownloadFailed(
            f"--dataset-path {name} could not be read from the hub: {first}"[:500],
            hint="check the name, --hf-subset, --hf-split and the network, or give a file",
        ) from error


def _split(name: str, splits: list[str]) -> str:
    """The only split, else test, validation or train in this order."""
    if len(splits) == 1:
        return splits[0]
    for split in _SPLITS:
        if split in splits:
            return split
    raise WorkloadError(
        f"--dataset-path {name} has the splits {', '.join(splits)}", hint="name one with --hf-split"
    )

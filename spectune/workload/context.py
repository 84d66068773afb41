"""Long real prose that is put before a prompt when a point asks for more context."""

from __future__ import annotations

from spectune.errors import WorkloadError
from spectune.workload.folder import CONTEXT_FILE, workloads_folder
from spectune.workload.workload import Workload


def context_text(workload: Workload) -> str:
    """Prose to cut a context prefix from: the workload folder's own long_context.txt, else ours.

    Real text and never repeated: random or repeated tokens change what a drafter can guess.
    """
    path = workloads_folder() / CONTEXT_FILE
    if workload.source is not None and (own := workload.source / CONTEXT_FILE).is_file():
        path = own
    try:
        return path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"{path}: cannot be read as UTF-8 text: {error}") from error

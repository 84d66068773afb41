"""Where spectune's own prompts lie: inside an installed wheel, or beside the package in a checkout."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from spectune.errors import WorkloadError

CALIBRATION_FILE = "calibration.jsonl"
CONTEXT_FILE = "long_context.txt"


def workloads_folder() -> Path:
    """Folder of the built-in prompts."""
    package = Path(str(files("spectune")))
    for folder in (package / "_workloads", package.parent / "workloads"):
        if (folder / CALIBRATION_FILE).is_file():
            return folder
    raise WorkloadError(
        f"the built-in prompts are missing beside {package}",
        hint="reinstall spectune, or name a prompt file with --workload FILE",
    )


def prompt_files(folder: Path) -> list[Path]:
    """Prompt files of a folder by name, the calibration file excluded."""
    found = [path for path in folder.iterdir() if path.suffix in {".jsonl", ".json"} and path.is_file()]
    return sorted(path for path in found if path.name != CALIBRATION_FILE)


def built_in_names() -> tuple[str, ...]:
    """Names that load_workload takes in place of a path: `default` and each built-in category."""
    return ("default", *(path.stem for path in prompt_files(workloads_folder())))

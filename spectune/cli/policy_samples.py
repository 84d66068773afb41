"""Samples of a policy that is verified, kept beside what they are samples of."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from spectune.cli.outputs import write_text
from spectune.errors import UsageError
from spectune.records.policy_load import LoadSample

SAMPLES, IDENTITY = "samples.jsonl", "verifying.json"


def digest_of(policy: dict[str, Any]) -> str:
    """Hash of what a policy does and where it holds; what was said of it is left out."""
    told = {name: policy.get(name) for name in ("cells", "fallback", "deadband", "validity")}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


def check_same_verification(folder: Path, identity: dict[str, Any]) -> None:
    """Samples of another policy, engine or setting are not gone on with; UsageError naming what differs."""
    file = folder / IDENTITY
    if not file.exists() or not (folder / SAMPLES).exists():  # nothing was measured for what stands there
        write_text(file, json.dumps(identity, indent=1) + "\n", "--output-dir")
        return
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{file} is damaged: {error}", hint="another --output-dir starts anew") from error
    if differing := sorted(name for name in identity if known.get(name) != identity[name]):
        raise UsageError(
            f"--output-dir {folder} holds samples of another verification: {', '.join(differing)} differ",
            hint="another --output-dir starts anew",
        )


def read_samples(folder: Path) -> list[LoadSample]:
    """Samples of an earlier part of the same verification."""
    file = folder / SAMPLES
    if not file.exists():
        return []
    data = file.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):  # a kill in the middle of a line: that sample is measured again
        write_text(file, whole.decode(), "--output-dir")
    lines = [line for line in whole.decode().split("\n") if line.strip()]
    try:
        return [LoadSample.from_dict(json.loads(line)) for line in lines]
    except ValueError as error:
        raise UsageError(f"{file} is damaged: {error}", hint="another --output-dir starts anew") from error


def append_sample(folder: Path, sample: LoadSample) -> None:
    """One line, on disk before the next sample is measured."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / SAMPLES).open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(sample.to_dict()) + "\n")

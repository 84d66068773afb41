"""An emitted text in, the same as a script or as arguments of a container out."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

FORMS = ("text", "serve.sh", "kubernetes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Emitted:
    """The parts of an emitted text: sentences, files to write, and the words of one command."""

    notes: tuple[str, ...]
    files: tuple[tuple[str, str], ...]
    words: tuple[str, ...]


def parts_of(text: str) -> Emitted:
    """Comments, here-documents and the command of an emitted text; the inverse of what emitters write."""
    notes: list[str] = []
    files: list[tuple[str, str]] = []
    words: list[str] = []
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith("# "):
            notes.append(line.removeprefix("# "))
        elif line.startswith("cat > "):
            name = line.removeprefix("cat > ").split(" <<")[0]
            body: list[str] = []
            for inner in lines:
                if inner == "EOF":
                    break
                body.append(inner)
            files.append((name, "\n".join(body)))
        elif line.strip():
            words += shlex.split(line)
    return Emitted(notes=tuple(notes), files=tuple(files), words=tuple(words))


def as_script(text: str) -> str:
    """A `serve.sh`: further arguments of the script are added to the command."""
    parts = parts_of(text)
    lines = ["#!/usr/bin/env bash", "set -euo pipefail", *(f"# {note}" for note in parts.notes)]
    if parts.files:
        lines.append('cd "$(dirname "$0")"')
    for name, body in parts.files:
        lines += [f"cat > {name} <<'EOF'", body, "EOF"]
    return "\n".join([*lines, f'exec {shlex.join(parts.words)} "$@"'])


def as_kubernetes(text: str) -> str:
    """`command` and `args` of a container as YAML, and a ConfigMap for every file that it reads.

    JSON strings are YAML strings, so nothing of the engine's own JSON has to be escaped by hand.
    """
    parts = parts_of(text)
    lines = [f"# {note}" for note in parts.notes]
    lines += ["containers:", "  - name: server", "    image: IMAGE"]
    lines += _list("command", _program(parts.words), 4) + _list("args", _arguments(parts), 4)
    if parts.files:
        lines += ["    volumeMounts:", "      - {name: settings, mountPath: /settings}"]
        lines += ["volumes:", "  - name: settings", "    configMap: {name: spectune-settings}"]
        lines += ["---", "apiVersion: v1", "kind: ConfigMap", "metadata: {name: spectune-settings}", "data:"]
        lines += [f"  {name}: {json.dumps(body)}" for name, body in parts.files]
    return "\n".join(lines)


def _program(words: Sequence[str]) -> list[str]:
    count = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    starts_module = tuple(words[:2]) == ("python", "-m")
    return list(words[: 3 if starts_module else min(count, 1)])


def _arguments(parts: Emitted) -> list[str]:
    names = {name for name, _ in parts.files}
    rest = parts.words[len(_program(parts.words)) :]
    return [f"/settings/{word}" if word in names else word for word in rest]


def _list(name: str, items: Sequence[str], indent: int) -> list[str]:
    pad = " " * indent
    return [f"{pad}{name}:", *(f"{pad}  - {json.dumps(item)}" for item in items)]

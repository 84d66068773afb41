"""Sweeps over servers in processes of their own, on a stand-in for vLLM."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from spectune.backend.processes import PROC
from spectune.store import RunStore

STAND_IN = Path(__file__).parent / "mock_vllm.py"
WORKLOAD = "\n".join(
    json.dumps({"prompt": f"Tell me about the number {i} in a few words.", "category": "facts"})
    for i in range(8)
)


def write_model(folder: Path) -> Path:
    """A directory with the config and the tokenizer of a model, and no weights."""
    import tokenizers

    config = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8, "model_type": "other"}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    vocab = {chr(code): code - 32 for code in range(32, 127)}
    tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[])).save(str(folder / "tokenizer.json"))
    return folder


def sweep_words(
    model: Path, folder: Path, *more: str, truth: dict[str, Any] | None = None, words: str = ""
) -> list[str]:
    """A small sweep into `folder`/run; `truth` and `words` go to the stand-in."""
    prompts = folder / "prompts.jsonl"
    if not prompts.exists():
        prompts.write_text(WORKLOAD + "\n", encoding="utf-8")
    declared = json.dumps({"output_tokens": 12, "step_s": 0.002} | (truth or {}), separators=(",", ":"))
    launcher = f"{sys.executable} {STAND_IN} --truth '{declared}' {words} {{args}}"
    return [
        "sweep", "--backend", "vllm", "--server-cmd", launcher, "--model", str(model), "--method", "ngram",
        "--num-tokens", "3", "--topk", "1", "--max-concurrency", "2", "--dataset-path", str(prompts),
        "--num-prompts", "8", "--min-blocks", "2", "--max-tokens", "12", "--output-dir", str(folder / "run"),
        *more,
    ]  # fmt: skip


def spectune(*argv: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "spectune", *argv], capture_output=True, text=True, check=False
    )


def counts(run: Path) -> dict[str, Any]:
    """Everything of a run that is no time: outcomes, texts and steps of every point."""
    store = RunStore.open(run)
    return {
        point_id: (
            outcome.status,
            sorted(
                (index, r.request_id, r.output_ids, len(r.steps))
                for index, block in store.blocks(point_id).items()
                for r in block.requests
            ),
        )
        for point_id, outcome in store.outcomes().items()
    }


def left_over(run: Path) -> list[str]:
    """Stand-ins that were started by the sweep into `run` and still live, by the folder of its own logs.

    Other tests run stand-ins on this machine at the same time: a server is recognised by the session
    that its log names, not by what it is.
    """
    found = []
    for log in (run / "servers").glob("*.log"):
        for name in re.findall(r"--served-model-name (spectune-[0-9a-f]+)", log.read_text(encoding="utf-8")):
            found += [name for words in command_lines() if name in words]
    return found


def command_lines() -> list[list[str]]:
    """The words of every living process that may be read."""
    lines = []
    for folder in PROC.glob("[0-9]*"):
        try:
            lines.append((folder / "cmdline").read_bytes().decode(errors="replace").split("\0"))
        except OSError:
            continue
    return lines

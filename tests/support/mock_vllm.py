"""A stand-in for the command that starts vLLM: the same arguments, the mock server behind them.

    python mock_vllm.py [--truth JSON] [--misbehave KIND] ARGUMENTS OF VLLM

`truth` is declared behaviour of the mock server; `by_method` in it overrides by speculative method
("off", "eagle3", ...). Misbehaviours: `bad_flag`, `no_model`, `no_memory` (as vLLM says it, then exit),
`no_memory_once` (a file remembers), `no_memory_later` (says it and goes on: declare the death as a fault),
`never_ready`, `workers` (two workers that outlive the server and do
not listen to SIGTERM), `wrong_name` (serves another model).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from spectune.backend.mock_server.running import listen
from spectune.backend.mock_server.settings import MockSettings

SAID = {
    "bad_flag": "api_server.py: error: unrecognized arguments: --nonsense",
    "no_model": "OSError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/nowhere'.",
    "no_memory": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
}
DEAF = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--truth", type=json.loads, default={})
    parser.add_argument("--misbehave", default="")
    parser.add_argument("--memory", type=Path)
    parser.add_argument("--served-model-name", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--speculative-config", type=json.loads)
    arguments, _ = parser.parse_known_args()
    misbehave(arguments)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(listen(settings_of(arguments), "127.0.0.1", arguments.port, started=lambda server: None))


def settings_of(arguments: argparse.Namespace) -> MockSettings:
    """The declared truth with what the command line asks for."""
    truth: dict[str, Any] = dict(arguments.truth)
    by_method = truth.pop("by_method", {})
    spec = arguments.speculative_config
    truth |= by_method.get("off" if spec is None else spec["method"], {})
    truth |= {"model": arguments.served_model_name, "max_num_seqs": arguments.max_num_seqs, **truth}
    truth["has_prefix_cache"] = arguments.enable_prefix_caching
    if arguments.misbehave == "wrong_name":
        truth["model"] = "somebody-else"
    if spec is not None:
        truth["num_tokens"] = spec["num_speculative_tokens"]
        truth["schedule"] = spec.get("num_speculative_tokens_per_batch_size", [])
    return MockSettings.from_dict(truth)


def misbehave(arguments: argparse.Namespace) -> None:
    """End as vLLM would, or leave something behind."""
    kind = arguments.misbehave
    if kind == "no_memory_once" and arguments.memory.exists():
        return
    if kind == "no_memory_once":
        arguments.memory.touch()
        kind = "no_memory"
    if kind == "no_memory_later":
        if arguments.speculative_config is not None:  # the draft takes the rest
            print(SAID["no_memory"], flush=True)
        return
    if kind in SAID:
        print(SAID[kind], flush=True)
        sys.exit(1)
    if kind == "never_ready":
        time.sleep(600)
    if kind == "workers":
        first = subprocess.Popen([sys.executable, "-c", DEAF])
        # the second is re-parented at once: its own parent ends
        command = f"import os, subprocess, sys; subprocess.Popen([sys.executable, '-c', {DEAF!r}])"
        subprocess.run([sys.executable, "-c", command], check=True)
        print(f"workers of {os.getpid()}: {first.pid}", flush=True)


if __name__ == "__main__":
    main()

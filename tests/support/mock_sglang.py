"""A stand-in for the command that starts SGLang: the same arguments, the mock server behind them.

    python mock_sglang.py [--truth JSON] [--misbehave KIND] ARGUMENTS OF SGLANG

`truth` is declared behaviour of the mock server; `by_algorithm` in it overrides by algorithm ("off",
"EAGLE3", "NGRAM", ...). Misbehaviours: `bad_flag`, `no_memory` (as SGLang says it, then exit),
`wrong_name` (serves another model), `forty_eight` (admits 48 requests at most whatever was asked for),
`other_steps` (resolves num_steps to another number).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

from spectune.backend.mock_server.running import listen
from spectune.backend.mock_server.settings import MockSettings

SAID = {
    "bad_flag": "launch_server.py: error: unrecognized arguments: --nonsense",
    "no_memory": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
}


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--truth", type=json.loads, default={})
    parser.add_argument("--misbehave", default="")
    parser.add_argument("--served-model-name", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-running-requests", type=int)
    parser.add_argument("--context-length", type=int, default=2048)
    parser.add_argument("--disable-radix-cache", action="store_true")
    parser.add_argument("--speculative-algorithm")
    parser.add_argument("--speculative-num-steps", type=int)
    parser.add_argument("--speculative-eagle-topk", type=int)
    parser.add_argument("--speculative-num-draft-tokens", type=int)
    parser.add_argument("--speculative-adaptive", action="store_true")
    parser.add_argument("--speculative-adaptive-config", type=Path)
    arguments, _ = parser.parse_known_args()
    if arguments.misbehave in SAID:
        print(SAID[arguments.misbehave], flush=True)
        sys.exit(1)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(listen(settings_of(arguments), "127.0.0.1", arguments.port, started=lambda server: None))


def settings_of(arguments: argparse.Namespace) -> MockSettings:
    """The declared truth with what the command line asks for."""
    truth: dict[str, Any] = dict(arguments.truth)
    algorithm = arguments.speculative_algorithm
    truth |= truth.pop("by_algorithm", {}).get(algorithm or "off", {})
    limit = arguments.max_running_requests or (256 if algorithm is None else 48)
    limit = min(limit, 48) if arguments.misbehave == "forty_eight" else limit
    truth = {
        "face": "sglang",
        "model": "somebody-else" if arguments.misbehave == "wrong_name" else arguments.served_model_name,
        "max_num_seqs": limit,
        "max_model_len": arguments.context_length,
        "has_prefix_cache": not arguments.disable_radix_cache,
        **truth,
    }
    if algorithm is None:
        return MockSettings.from_dict(truth)
    steps = arguments.speculative_num_steps + (arguments.misbehave == "other_steps")
    truth |= {
        "num_tokens": steps,
        "topk": arguments.speculative_eagle_topk,
        "num_draft_tokens": arguments.speculative_num_draft_tokens,
        "schedule": schedule_of(arguments.speculative_adaptive_config)
        if arguments.speculative_adaptive
        else [],
        "server_info": {"speculative_algorithm": algorithm, **truth.get("server_info", {})},
    }
    return MockSettings.from_dict(truth)


def schedule_of(file: Path) -> list[list[int]]:
    """A file of one depth a key as (first, last, depth) rows."""
    document = json.loads(file.read_text(encoding="utf-8"))
    keys = sorted(int(key) for key in document)
    ends = [*(key - 1 for key in keys[1:]), 10**6]
    return [[key, end, document[str(key)]["candidate_steps"][0]] for key, end in zip(keys, ends, strict=True)]


if __name__ == "__main__":
    main()

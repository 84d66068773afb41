"""What a running SGLang server says it was started with: /server_info in, a configuration out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spectune.backend.server_api import server_info
from spectune.backend.sglang_support import ALGORITHMS
from spectune.errors import EngineFailure
from spectune.records import SpecConfig

METHODS = {algorithm: method for method, algorithm in ALGORITHMS.items()}


def sglang_info(base_url: str) -> dict[str, Any] | None:
    """/server_info of an SGLang server; None for any other (vLLM's development route has no such fields)."""
    try:
        info = server_info(base_url)
    except EngineFailure:
        return None
    return info if "speculative_algorithm" in info and "internal_states" in info else None


def config_of(info: Mapping[str, Any]) -> SpecConfig:
    """What the server speculates with. A depth that it changes while it serves is told as an option."""
    algorithm = info.get("speculative_algorithm")
    if algorithm is None:
        return SpecConfig.off()
    numbers = [info.get(f"speculative_{name}") for name in ("num_steps", "eagle_topk", "num_draft_tokens")]
    steps, topk, tokens = (value if isinstance(value, int) else None for value in numbers)
    if not steps or not topk or not tokens:
        raise EngineFailure(
            f"the server runs {algorithm} and tells no depth, topk and draft tokens: {numbers}"
        )
    is_adaptive = bool(info.get("speculative_adaptive"))
    return SpecConfig(
        method=METHODS.get(str(algorithm), str(algorithm).lower()),
        num_steps=steps,
        topk=topk,
        num_draft_tokens=tokens,
        options=(("adaptive", "on"),) if is_adaptive else (),
    )

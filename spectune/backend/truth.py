"""What a simulated engine declares about itself: costs, acceptance, lengths, noise.

The default values are declared, not measured: roughly what a 135M model does on two CPU cores. They
are a stage for tests and demonstrations and say nothing about any real machine.
"""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from spectune.errors import UsageError
from spectune.records import Method, SpecConfig

DEFAULT = "default"

ByCategory = Mapping[str, tuple[float, ...]]


def _default_plain() -> dict[int, float]:
    return {1: 0.026, 4: 0.031, 16: 0.041}


def _default_hazards() -> dict[str, ByCategory]:
    return {
        Method.EAGLE3.value: {
            DEFAULT: (0.50, 0.40, 0.35, 0.30),
            "chat": (0.45, 0.35, 0.30, 0.28, 0.26),
            "code": (0.60, 0.50, 0.45, 0.42, 0.40),
            "creative": (0.35, 0.26, 0.22, 0.20),
            "json_extraction": (0.62, 0.54, 0.50, 0.47),
            "math": (0.55, 0.47, 0.42, 0.38),
        },
        Method.NGRAM.value: {
            DEFAULT: (0.30, 0.45, 0.50),
            "chat": (0.15, 0.30, 0.35),
            "code": (0.40, 0.55, 0.60),
            "creative": (0.08, 0.20, 0.25),
            "json_extraction": (0.45, 0.60, 0.62),
            "rag": (0.42, 0.58, 0.60),
            "summarization": (0.40, 0.55, 0.60),
        },
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedTruth:
    """Declared costs in seconds and declared acceptance probabilities.

    A round of B sequences costs
        draft   draft_round_s + D · (draft_step_s + draft_beam_s · (topk - 1))
        verify  plain_s(B) + context_s_per_token · kv tokens + verify_s_per_token · extra · B
        other   other_s + other_s_per_sequence · B
    where `extra` is the largest number of drafted tokens verified for a sequence of the round (a
    batch is padded to it) and plain_s is linear between the declared batch sizes.

    Depth j of a chain is accepted with hazards[method][category][j], given depth j-1; the last value
    repeats. A tree of mean breadth w = min(topk, (N-1)/D) turns h into 1 - (1-h)·(1-tree_gain)^(w-1).
    Sampling at temperature T scales h by max(0, 1 - temperature_loss · T). `proposal_rate` is the
    probability that a method proposes at all in a step.

    Seconds vary at three levels: `boot_noise_sd` from start to start of the engine, `request_noise_sd`
    from request to request, `noise_sd` from round to round and part to part (standard deviations of
    logarithms). `text_flip_rate` is the share of requests whose text leaves plain decoding's somewhere.
    """

    plain_s_by_batch: Mapping[int, float] = field(default_factory=_default_plain)
    context_s_per_token: float = 2.0e-6
    prefill_s_per_token: float = 1.2e-3
    verify_s_per_token: float = 1.2e-3
    draft_round_s: Mapping[str, float] = field(
        default_factory=lambda: {Method.EAGLE3.value: 0.0, Method.NGRAM.value: 3.0e-4}
    )
    draft_step_s: Mapping[str, float] = field(
        default_factory=lambda: {Method.EAGLE3.value: 3.0e-3, Method.NGRAM.value: 0.0}
    )
    draft_beam_s: float = 3.0e-4
    other_s: float = 4.0e-4
    other_s_per_sequence: float = 5.0e-5
    hazards: Mapping[str, ByCategory] = field(default_factory=_default_hazards)
    proposal_rate: Mapping[str, float] = field(
        default_factory=lambda: {Method.EAGLE3.value: 1.0, Method.NGRAM.value: 0.5}
    )
    tree_gain: float = 0.25
    temperature_loss: float = 0.25
    output_tokens: Mapping[str, int] = field(
        default_factory=lambda: {DEFAULT: 120, "chat": 140, "code": 160, "math": 110, "summarization": 80}
    )
    output_tokens_spread: float = 0.4
    noise_sd: float = 0.01
    request_noise_sd: float = 0.0
    boot_noise_sd: float = 0.0
    text_flip_rate: float = 0.0
    vocab_size: int = 49152
    peak_memory_bytes: int = 600_000_000

    def __post_init__(self) -> None:
        if not self.plain_s_by_batch or min(self.plain_s_by_batch) < 1:
            raise UsageError("simulated truth: plain_s_by_batch needs batch sizes from 1 on")
        if min(self.plain_s_by_batch.values()) <= 0:
            raise UsageError("simulated truth: plain_s_by_batch needs positive seconds")
        for name in _SECONDS:
            if not _is_amount(getattr(self, name)):
                raise UsageError(f"simulated truth: {name} is {getattr(self, name)}, need 0 or more")
        for name in _BY_NAME:
            for key, value in getattr(self, name).items():
                if not _is_amount(value):
                    raise UsageError(f"simulated truth: {name}.{key} is {value}, need 0 or more")
        for name in _SHARES:
            if not _is_share(getattr(self, name)):
                raise UsageError(f"simulated truth: {name} is {getattr(self, name)}, need 0 to 1")
        for method, by_category in self.hazards.items():
            if DEFAULT not in by_category:
                raise UsageError(f"simulated truth: hazards.{method} needs the category {DEFAULT}")
            for category, hazards in by_category.items():
                if not hazards or not all(_is_share(hazard) for hazard in hazards):
                    raise UsageError(
                        f"simulated truth: hazards.{method}.{category} is {list(hazards)}, "
                        "need probabilities of 0 to 1"
                    )
        if DEFAULT not in self.output_tokens:
            raise UsageError(f"simulated truth: output_tokens needs the category {DEFAULT}")

    @property
    def digest(self) -> str:
        """12 hex digits that change with any declared value."""
        text = json.dumps(asdict(self), sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def plain_s(self, batch_size: int) -> float:
        """Seconds of a plain step at no context; beyond the table the last slope goes on."""
        sizes = sorted(self.plain_s_by_batch)
        if len(sizes) == 1:
            return self.plain_s_by_batch[sizes[0]]
        right = min(max(bisect_right(sizes, batch_size), 1), len(sizes) - 1)
        low, high = sizes[right - 1], sizes[right]
        low_s, high_s = self.plain_s_by_batch[low], self.plain_s_by_batch[high]
        slope = (high_s - low_s) / (high - low)
        return max(low_s + slope * (batch_size - low), min(self.plain_s_by_batch.values()))

    def draft_s(self, config: SpecConfig) -> float:
        """Seconds of drafting in one round."""
        if config.is_off:
            return 0.0
        step = self.draft_step_s.get(config.method, 0.0) + self.draft_beam_s * (config.topk - 1)
        return self.draft_round_s.get(config.method, 0.0) + config.num_steps * step

    def verify_s(self, batch_size: int, extra: int, kv_tokens: int) -> float:
        """Seconds of verifying `extra` drafts beside the root of every sequence of a batch."""
        tokens_s = self.verify_s_per_token * extra * batch_size
        return self.plain_s(batch_size) + self.context_s_per_token * kv_tokens + tokens_s

    def acceptance(self, config: SpecConfig, category: str, temperature: float) -> tuple[float, ...]:
        """P(depth j accepted | depth j-1 accepted) for every depth that the config can accept."""
        if config.is_off or config.method not in self.hazards:
            return ()
        by_category = self.hazards[config.method]
        declared = by_category.get(category, by_category[DEFAULT])
        scale = max(0.0, 1.0 - self.temperature_loss * temperature)
        breadth = min(float(config.topk), (config.num_draft_tokens - 1) / config.num_steps)
        miss = (1.0 - self.tree_gain) ** (breadth - 1.0)
        chain = (declared[min(depth, len(declared) - 1)] * scale for depth in range(config.max_accepted))
        return tuple(1.0 - (1.0 - hazard) * miss for hazard in chain)


_SECONDS = (
    "context_s_per_token",
    "prefill_s_per_token",
    "verify_s_per_token",
    "draft_beam_s",
    "other_s",
    "other_s_per_sequence",
    "output_tokens_spread",
    "noise_sd",
    "request_noise_sd",
    "boot_noise_sd",
)
_BY_NAME = ("draft_round_s", "draft_step_s", "proposal_rate", "output_tokens")
_SHARES = ("tree_gain", "temperature_loss", "text_flip_rate")


def load_truth(path: str | Path | None) -> SimulatedTruth:
    """The declared truth of a YAML or JSON file; a key replaces the whole default of that key."""
    if path is None:
        return SimulatedTruth()
    import yaml

    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--simulated-truth {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"--simulated-truth {path} is neither YAML nor JSON: {error}") from error
    if not isinstance(data, dict):
        raise UsageError(f"--simulated-truth {path} holds no keys")
    known = [f.name for f in fields(SimulatedTruth)]
    for key in data:
        if key not in known:
            raise UsageError(f"--simulated-truth {path}: unknown key {key}", hint=", ".join(known))
    try:
        return SimulatedTruth(**{key: _typed(key, value) for key, value in data.items()})
    except (TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"--simulated-truth {path}: {error}") from error


def _typed(key: str, value: Any) -> Any:
    """The value of a file as the field holds it (JSON has no integer keys, YAML no tuples)."""
    if key == "plain_s_by_batch":
        return {int(batch_size): float(seconds) for batch_size, seconds in value.items()}
    if key == "hazards":
        return {
            method: {category: tuple(map(float, hazards)) for category, hazards in by_category.items()}
            for method, by_category in value.items()
        }
    if key == "output_tokens":
        return {category: int(count) for category, count in value.items()}
    if isinstance(value, dict):
        return {name: float(number) for name, number in value.items()}
    return int(value) if key in ("vocab_size", "peak_memory_bytes") else float(value)


def _is_amount(value: float) -> bool:
    return math.isfinite(value) and value >= 0.0


def _is_share(value: float) -> bool:
    return 0.0 <= value <= 1.0

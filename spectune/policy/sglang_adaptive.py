"""SGLang's adaptive policy, evaluated: which depth it runs at which batch size after which acceptance.

A second implementation of what SGLang 0.5.23 does in srt/speculative/adaptive_spec_params.py, so that an
emitted file can be judged without a server. A test holds it equal to SGLang's own class.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spectune.errors import UsageError

EMA_ALPHA = 0.2
UPDATE_INTERVAL = 5
WARMUP_BATCHES = 10
UP_HYSTERESIS = 0.0
DOWN_HYSTERESIS = -0.25
CEILING_COEFF = 0.0

KNOBS = (
    "ema_alpha",
    "update_interval",
    "warmup_batches",
    "up_hysteresis",
    "down_hysteresis",
    "ceiling_coeff",
)


@dataclass(slots=True, kw_only=True)
class Slot:
    """One batch-size key: its candidates, its knobs and what it has seen.

    `ema` is the smoothed mean of accepted drafts a request; it starts at steps - 1.
    """

    candidates: tuple[int, ...]
    steps: int
    ema: float
    ema_alpha: float
    update_interval: int
    warmup_batches: int
    up_hysteresis: float
    down_hysteresis: float
    ceiling_coeff: float
    num_batches: int = 0

    @classmethod
    def read(cls, entry: Mapping[str, Any], initial_steps: int) -> Slot:
        candidates = tuple(sorted(set(entry["candidate_steps"])))
        steps = initial_steps if initial_steps in candidates else candidates[len(candidates) // 2]
        return cls(
            candidates=candidates,
            steps=steps,
            ema=float(steps - 1),
            ema_alpha=entry.get("ema_alpha", EMA_ALPHA),
            update_interval=entry.get("update_interval", UPDATE_INTERVAL),
            warmup_batches=entry.get("warmup_batches", WARMUP_BATCHES),
            up_hysteresis=entry.get("up_hysteresis", UP_HYSTERESIS),
            down_hysteresis=entry.get("down_hysteresis", DOWN_HYSTERESIS),
            ceiling_coeff=entry.get("ceiling_coeff", CEILING_COEFF),
        )

    def observe(self, accepted: Sequence[int]) -> bool:
        """One verified batch: accepted drafts of each request. Whether the depth changed.

        Rounds without drafts say nothing of acceptance. The first `warmup_batches` decide nothing, then
        every `update_interval`-th does.
        """
        if not accepted:
            return False
        if self.steps > 0:
            mean = sum(accepted) / len(accepted)
            self.ema = (1 - self.ema_alpha) * self.ema + self.ema_alpha * mean
        self.num_batches += 1
        since = self.num_batches - self.warmup_batches
        if since <= 0 or since % self.update_interval:
            return False
        before, self.steps = self.steps, self._next()
        return self.steps != before

    def _next(self) -> int:
        place = self.candidates.index(self.steps)
        if self.steps == 0:
            return self._after_off(place)
        lower = self._descend(place)
        target = self.candidates[lower if lower < place else self._climb(place)]
        ceiling = max(1, math.ceil(self.ema * self.ceiling_coeff))
        if self.ceiling_coeff > 0 and ceiling < target <= self.steps:
            below = [depth for depth in self.candidates if depth <= ceiling]
            return below[-1] if below else self.candidates[0]
        return target

    def _after_off(self, place: int) -> int:
        """Nothing is learnt while nothing is drafted, so the next depth is tried."""
        target = self.candidates[min(place + 1, len(self.candidates) - 1)]
        if target > 0 and self.ema < 0:
            self.ema = float(target - 1)
        return target

    def _descend(self, place: int) -> int:
        """Down while the mean is at or below half a draft under the lower depth, shifted by the knob."""
        while place > 0:
            lower = self.candidates[place - 1]
            threshold = (0.5 if lower == 0 else lower - 0.5) + self.down_hysteresis
            if self.ema > threshold:
                break
            place -= 1
        return place

    def _climb(self, place: int) -> int:
        """Up while the mean is above half a draft under the own depth, shifted by the knob."""
        while place < len(self.candidates) - 1:
            if self.ema <= self.candidates[place] - 0.5 + self.up_hysteresis:
                break
            place += 1
        return place


class AdaptivePolicy:
    """The file of `--speculative-adaptive-config`, running.

    Args:
        document: the file; keys that are whole numbers are batch sizes, others are knobs for all of them.
        initial_steps: `--speculative-num-steps`.
        captured: batch sizes of captured graphs; a batch is padded up to the next one. None: no graphs.
    """

    def __init__(
        self, document: Mapping[str, Any], *, initial_steps: int, captured: Sequence[int] | None = None
    ) -> None:
        entries = check_adaptive(document)
        shared = {name: value for name, value in document.items() if not name.isdigit()}
        self._slots = {key: Slot.read({**shared, **entries[key]}, initial_steps) for key in sorted(entries)}
        self._captured = sorted(captured) if captured else None

    @property
    def candidate_steps(self) -> list[int]:
        """Every depth that some key may run."""
        return sorted({depth for slot in self._slots.values() for depth in slot.candidates})

    def steps(self, batch_size: int) -> int:
        """The depth that runs now at a batch size."""
        return self._slot(batch_size).steps

    def observe(self, batch_size: int, accepted: Sequence[int]) -> int | None:
        """One verified batch; the new depth if it changed."""
        slot = self._slot(batch_size)
        return slot.steps if slot.observe(accepted) else None

    def _slot(self, batch_size: int) -> Slot:
        """Padded to the next captured size, then the largest key that is not above it, else the first."""
        padded = pad(batch_size, self._captured)
        keys = list(self._slots)
        return self._slots[keys[max(0, bisect.bisect_right(keys, padded) - 1)]]


def pad(batch_size: int, captured: Sequence[int] | None) -> int:
    """The next captured size; the batch itself above all of them or without graphs."""
    if not captured:
        return batch_size
    place = bisect.bisect_left(captured, batch_size)
    return captured[place] if place < len(captured) else batch_size


def captured_sizes(max_running_requests: int) -> list[int]:
    """Batch sizes that SGLang 0.5.23 captures where it speculates and nothing else was said.

    Every size to 8, every 2nd to 32, every 4th from 40 to 64, every 8th from 72 to 256, every 16th from
    272 on, and the limit itself.
    """
    steps = [
        *range(1, 9), *range(10, 33, 2), *range(40, 65, 4), *range(72, 257, 8),
        *range(272, max_running_requests + 1, 16),
    ]  # fmt: skip
    sizes = [size for size in steps if size <= max_running_requests]
    return sizes if max_running_requests in sizes else [*sizes, max_running_requests]


def check_adaptive(document: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """The entries by batch size; UsageError for what SGLang refuses or, worse, ignores."""
    entries: dict[int, Mapping[str, Any]] = {}
    for key, entry in document.items():
        if not key.isdigit():
            if key not in KNOBS:
                raise UsageError(f"adaptive config: {key} is neither a batch size nor a knob", hint=_knobs())
            continue
        steps = entry.get("candidate_steps") if isinstance(entry, Mapping) else None
        if not isinstance(steps, list) or not steps or not all(map(_is_depth, steps)):
            raise UsageError(f"adaptive config: candidate_steps of {key} is {steps!r}, not a list of depths")
        if unknown := sorted(set(entry) - {*KNOBS, "candidate_steps"}):
            raise UsageError(f"adaptive config: {key} has no knob {unknown[0]}", hint=_knobs())
        entries[int(key)] = entry
    if not entries:
        raise UsageError("adaptive config: no batch size", hint='such as {"1": {"candidate_steps": [3]}}')
    return entries


def _is_depth(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _knobs() -> str:
    return f"knobs are {', '.join(KNOBS)}"

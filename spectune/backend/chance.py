"""Chance of a simulated engine: what depends on the text, and what differs from start to start.

Acceptance is a function of the position in the text, as for a drafter that is pure in its prefix: two
runs over one text draw the same coins wherever they both stand. Times vary at three levels: the start
of the engine, the request, the round.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from spectune.backend.truth import SimulatedTruth

_MASK = (1 << 64) - 1
_GOLDEN, _LANE = 0x9E3779B97F4A7C15, 0xD1342543DE82EF95
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def key_of(*parts: object) -> int:
    """64-bit key of a stream of coins."""
    text = "|".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def coin(key: int, position: int, lane: int) -> float:
    """Uniform in [0, 1) at a position of a text; `lane` tells coins of one position apart (splitmix64)."""
    x = (key + position * _GOLDEN + lane * _LANE) & _MASK
    x = ((x ^ (x >> 30)) * _MIX_1) & _MASK
    x = ((x ^ (x >> 27)) * _MIX_2) & _MASK
    return ((x ^ (x >> 31)) >> 11) * 2.0**-53


@dataclass(slots=True)
class Noise:
    """How much slower than declared a block of one start runs.

    Args:
        stream: name of the start and block: equal streams repeat the same noise.
        start: name of the start alone.
    """

    truth: SimulatedTruth
    stream: str
    start: str
    _rounds: random.Random = field(init=False)
    _start_factor: float = field(init=False)

    def __post_init__(self) -> None:
        self._rounds = random.Random(self.stream)
        chance = random.Random(f"{self.start}|start")
        self._start_factor = math.exp(chance.gauss(0.0, self.truth.boot_noise_sd))

    def of_request(self, request_id: str) -> float:
        """Factor of all rounds that a request takes part in."""
        sd = self.truth.request_noise_sd
        return math.exp(random.Random(f"{self.stream}|{request_id}").gauss(0.0, sd)) if sd else 1.0

    def of_round(self, requests: Sequence[float]) -> float:
        """Factor of a round of requests with these factors; parts of a round add their own to it."""
        return self._start_factor * math.fsum(requests) / len(requests)

    def of_part(self) -> float:
        """Factor of one part of one round."""
        return math.exp(self._rounds.gauss(0.0, self.truth.noise_sd))

    def flip(self, request_id: str, num_tokens: int) -> int | None:
        """Output index from which this start writes another text, as near ties under rounding do."""
        if not self.truth.text_flip_rate or num_tokens < 2:
            return None
        chance = random.Random(f"{self.stream}|{request_id}|flip")
        return chance.randrange(1, num_tokens) if chance.random() < self.truth.text_flip_rate else None

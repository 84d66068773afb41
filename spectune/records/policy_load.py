"""What a policy is served under when it is verified, and what one serving of it took."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from spectune.errors import UsageError
from spectune.records.config import SpecConfig

POLICY, OFF = "policy", "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoad:
    """A load that does the same work for every arm.

    `levels` are (requests that run at once, tokens emitted until the next level); the last level holds
    to the end. `is_steady` loads have one level and are timed at that level alone.
    """

    name: str
    levels: tuple[tuple[int, int], ...]
    num_requests: int
    max_tokens: int

    @property
    def is_steady(self) -> bool:
        return len(self.levels) == 1

    @property
    def peak(self) -> int:
        """Most requests that run at once."""
        return max(level for level, _ in self.levels)

    def limit(self, num_emitted: int) -> int:
        """Requests that may run once so many tokens have been emitted."""
        for level, num_tokens in self.levels:
            if num_emitted < num_tokens:
                return level
            num_emitted -= num_tokens
        return self.levels[-1][0]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyArm:
    """What serves a load: the policy, one configuration throughout, or an engine that cannot speculate."""

    label: str
    config: SpecConfig | None = None  # None for the policy

    @classmethod
    def policy(cls) -> PolicyArm:
        return cls(label=POLICY)

    @classmethod
    def static(cls, config: SpecConfig) -> PolicyArm:
        return cls(label=config.label, config=config)

    @property
    def is_policy(self) -> bool:
        return self.config is None

    @property
    def is_off(self) -> bool:
        return self.config is not None and self.config.is_off


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPart:
    """Decode rounds of one batch size and configuration, with the draft's share of prefills right before
    them, added up."""

    batch_size: int
    config: str
    num_rounds: int
    seconds: float
    num_emitted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSample:
    """One arm under one load once. Samples of one `repeat` decoded the same requests.

    `seconds` are those that the arms may differ in, for all tokens of the load; `tpot_s` is the time per
    token of a sequence at the level of a steady load, None for others. Engines that tell no rounds leave
    `parts` empty. `switch_s` is what the first round after each switch to more speculation took beyond
    the rounds after it, summed over `num_switches`. `boot` numbers the starts of a server.
    """

    load: str
    arm: str
    repeat: int
    seconds: float
    num_tokens: int
    tpot_s: float | None
    parts: tuple[LoadPart, ...] = ()
    num_switches: int = 0
    switch_s: float | None = None
    boot: int = 0

    def by_batch_size(self, most: int) -> dict[int, tuple[float, float]]:
        """Tokens of each sequence, and seconds, of the rounds of each batch size up to `most`."""
        sums: dict[int, tuple[float, float]] = {}
        for part in self.parts:
            if part.batch_size <= most and part.num_emitted:
                tokens, seconds = sums.get(part.batch_size, (0.0, 0.0))
                sums[part.batch_size] = (
                    tokens + part.num_emitted / part.batch_size,
                    seconds + part.seconds,
                )
        return sums

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LoadSample:
        try:
            parts = tuple(LoadPart(**part) for part in data["parts"])
            return cls(**{**data, "parts": parts})
        except (KeyError, TypeError) as error:
            raise UsageError(f"not a sample of a verification: {error}") from error

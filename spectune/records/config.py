"""What is tuned: one way to speculate."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from spectune.errors import InfeasibleConfig

OPTION = str | int | float | bool


class Method(enum.StrEnum):
    """How drafts are made. The strings are vLLM's."""

    OFF = "off"
    EAGLE3 = "eagle3"
    NGRAM = "ngram"
    SUFFIX = "suffix"
    DRAFT_MODEL = "draft_model"


def chain_or_tree_pool(num_steps: int, topk: int) -> int:
    """Number of drafted candidates of a beam tree: topk + (D-1)·topk² (EAGLE-2, section 4)."""
    return topk + (num_steps - 1) * topk * topk


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecConfig:
    """One way to speculate: what the tuner chooses and the engine runs in one round.

    A chain of K is `num_steps=K, topk=1, num_draft_tokens=K+1`. Raises InfeasibleConfig for a tree
    that cannot be built: N-1 > topk + (D-1)·topk².
    """

    method: str
    num_steps: int = 0
    topk: int = 0
    num_draft_tokens: int = 1
    draft_model: str | None = None
    options: tuple[tuple[str, OPTION], ...] = ()

    def __post_init__(self) -> None:
        if self.method == Method.OFF:
            if (self.num_steps, self.topk, self.num_draft_tokens) != (0, 0, 1):
                raise InfeasibleConfig("method off takes no num-tokens, topk or num-draft-tokens")
            return
        if self.num_steps < 1 or self.topk < 1 or self.num_draft_tokens < 2:
            raise InfeasibleConfig(
                f"{self.method}: num-tokens {self.num_steps}, topk {self.topk}, "
                f"num-draft-tokens {self.num_draft_tokens}: need at least 1, 1 and 2"
            )
        if self.topk == 1 and self.num_draft_tokens != self.num_steps + 1:
            raise InfeasibleConfig(
                f"a chain of {self.num_steps} verifies {self.num_steps + 1} tokens, "
                f"not --num-draft-tokens {self.num_draft_tokens}"
            )
        pool = chain_or_tree_pool(self.num_steps, self.topk)
        if self.num_draft_tokens - 1 > pool:
            raise InfeasibleConfig(
                f"num-draft-tokens {self.num_draft_tokens} needs {self.num_draft_tokens - 1} drafted "
                f"nodes, but num-tokens {self.num_steps} with topk {self.topk} drafts {pool}"
            )

    @classmethod
    def off(cls) -> SpecConfig:
        """Plain decoding: a candidate in every search."""
        return cls(method=Method.OFF.value)

    @classmethod
    def chain(cls, method: str, num_tokens: int, **kwargs: Any) -> SpecConfig:
        """A chain of `num_tokens` drafts."""
        return cls(method=method, num_steps=num_tokens, topk=1, num_draft_tokens=num_tokens + 1, **kwargs)

    @property
    def is_off(self) -> bool:
        return self.method == Method.OFF

    @property
    def is_chain(self) -> bool:
        return self.topk == 1

    @property
    def is_tree(self) -> bool:
        return self.topk > 1

    @property
    def is_standby(self) -> bool:
        """Launched with speculation and kept at no drafts: what being able to speculate costs."""
        return bool(self.option("standby", False))

    @property
    def is_production(self) -> bool:
        """Served as in production, prefix cache and chunked prefill on: measured to say what they change."""
        return bool(self.option("production", False))

    @property
    def is_probe(self) -> bool:
        """Measured to explain the others, never a candidate."""
        return self.is_standby or self.is_production

    @property
    def max_accepted(self) -> int:
        """Most drafts that one step can accept: min(D, N-1)."""
        return min(self.num_steps, self.num_draft_tokens - 1)

    @property
    def size(self) -> tuple[int, int, int]:
        """Order of preference among equals: fewer verified tokens, fewer draft steps, smaller topk."""
        return (self.num_draft_tokens, self.num_steps, self.topk)

    @property
    def label(self) -> str:
        """Short name for tables: `off`, `eagle3 K=3`, `eagle3 D=5 k=4 N=16`."""
        if self.is_off:
            return "off"
        options = dict(self.options)
        if options.pop("standby", False):
            return f"{self.method} standby (launched for K={self.num_steps}, drafts nothing)"
        suffix = " as in production" if options.pop("production", False) else ""
        window = [options.pop(f"prompt_lookup_{end}", None) for end in ("min", "max")]
        extra = f" n={window[0]}-{window[1]}" if None not in window else ""
        extra += "".join(f" {name}={value}" for name, value in options.items())
        if self.is_chain:
            return f"{self.method} K={self.num_steps}{extra}{suffix}"
        return f"{self.method} D={self.num_steps} k={self.topk} N={self.num_draft_tokens}{extra}{suffix}"

    def option(self, name: str, default: Any = None) -> Any:
        """Value of an option such as the n-gram window."""
        return dict(self.options).get(name, default)

    def to_dict(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "num_steps": self.num_steps,
            "topk": self.topk,
            "num_draft_tokens": self.num_draft_tokens,
            "draft_model": self.draft_model,
            "options": dict(self.options),
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> SpecConfig:
        known = {"method", "num_steps", "topk", "num_draft_tokens", "draft_model", "options"}
        if unknown := set(data) - known:
            raise InfeasibleConfig(f"unknown keys in a SpecConfig: {', '.join(sorted(unknown))}")
        return cls(**{**data, "options": tuple(sorted(data.get("options", {}).items()))})

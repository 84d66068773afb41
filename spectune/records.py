"""The frozen nouns that travel between stages, the protocols that join the stacks, the glossary.

Glossary
    target, draft        the model that decides; the thing that proposes
    SpecConfig           what is tuned; `SpecConfig.off()` is plain decoding
    num_steps (D)        depth of the draft tree; for a chain the number of draft tokens K
    topk (k)             children per expanded node
    num_draft_tokens (N) tokens verified per sequence and round, the root included
    step                 one verification of one sequence after its first token
    round                one turn of the whole batch
    acceptance length    1 + accepted / steps, pooled over steps, the target's own token included
    tpot                 (e2e - ttft) / (output tokens - 1)
    cell                 the conditions that arms share: batch size, context, temperature, workload
    arm                  one SpecConfig inside a cell
    block                the smallest group of prompts that all arms of a cell decode in turn

Seconds, bytes and fractions 0..1 only; None means "not observed", never 0 or NaN.
"""

from __future__ import annotations

import enum
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from spectune.errors import InfeasibleConfig

SCHEMA_VERSION = 1

OPTION = str | int | float | bool


class Method(enum.StrEnum):
    """How drafts are made. The strings are vLLM's."""

    OFF = "off"
    EAGLE3 = "eagle3"
    NGRAM = "ngram"


class Status(enum.StrEnum):
    """What became of a point (design rule: every outcome has one)."""

    OK = "ok"
    FAILED = "failed"
    INFEASIBLE = "infeasible"
    OOM = "oom"
    CAPPED = "capped"
    SUSPECT = "suspect"
    INCONCLUSIVE = "inconclusive"
    NOT_COMPARABLE = "not_comparable"


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
        extra = "".join(f" {name}={value}" for name, value in self.options)
        if self.is_chain:
            return f"{self.method} K={self.num_steps}{extra}"
        return f"{self.method} D={self.num_steps} k={self.topk} N={self.num_draft_tokens}{extra}"

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the target's distribution is warped and when a request ends."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int = 128
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One workload row. `turns` are the user's turns, run as a conversation."""

    prompt_id: str
    category: str
    turns: tuple[str, ...]
    system: str | None = None
    max_tokens: int | None = None

    @property
    def digest(self) -> str:
        return hashlib.sha256(
            json.dumps([self.system, list(self.turns)], ensure_ascii=False).encode()
        ).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt made ready for an engine: token ids with the chat template applied.

    `request_id` names the prompt and its sample number, never its arrival order, so that seeded
    sampling does not depend on scheduling.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    category: str
    sampling: Sampling
    prompt_text: str = ""


class Cut(enum.StrEnum):
    """Why fewer tokens were emitted than accepted + 1."""

    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One verification of one sequence after its first token (off steps included).

    `num_verified` counts the drafted tokens that the target really scored (the root excluded);
    `num_proposed` those that were drafted, discarded ones included.
    """

    num_proposed: int
    num_verified: int
    num_accepted: int
    num_emitted: int
    cut: str | None = None

    def __post_init__(self) -> None:
        if self.num_accepted > self.num_verified or self.num_verified > self.num_proposed:
            raise ValueError(f"accepted <= verified <= proposed is broken: {self}")
        full = self.num_accepted + 1
        if self.cut is None and self.num_emitted != full:
            raise ValueError(f"an uncut step emits accepted + 1: {self}")
        if self.cut is not None and not 1 <= self.num_emitted <= full:
            raise ValueError(f"a cut step emits between 1 and accepted + 1: {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRecord:
    """One turn of the whole batch. The prefill of a new slot is a round of its own."""

    kind: str  # "prefill" or "decode"
    batch_size: int
    kv_tokens: int
    config: str  # SpecConfig.label
    start_s: float
    draft_s: float
    verify_s: float
    other_s: float
    num_emitted: int = 0

    @property
    def total_s(self) -> float:
        return self.draft_s + self.verify_s + self.other_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """What happened to one request. A failed request carries `error` and no latency.

    `arrival_s` is when the request was handed to a free slot (closed loop) or sent; times are
    seconds on one clock per run. `chunk_s` are the arrival times of output chunks: a chunk may hold
    several tokens.
    """

    request_id: str
    category: str
    num_prompt_tokens: int
    output_ids: tuple[int, ...]
    arrival_s: float
    first_token_s: float | None
    finish_s: float | None
    finish_reason: str | None
    chunk_s: tuple[float, ...] = ()
    steps: tuple[StepRecord, ...] = ()
    error: str | None = None

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_ids)

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def e2e_s(self) -> float | None:
        return None if self.finish_s is None else self.finish_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """(e2e - ttft) / (output tokens - 1); None for fewer than two tokens."""
        if self.first_token_s is None or self.finish_s is None or self.num_output_tokens < 2:
            return None
        return (self.finish_s - self.first_token_s) / (self.num_output_tokens - 1)

    def broken_identity(self) -> str | None:
        """Name of the counting identity that this record breaks, or None.

        output_tokens = 1 + Σ num_emitted.
        """
        if self.error is not None:
            return None
        emitted = 1 + sum(step.num_emitted for step in self.steps)
        if emitted != self.num_output_tokens:
            return f"output_tokens {self.num_output_tokens} != 1 + emitted {emitted - 1}"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The conditions that all arms of a comparison share."""

    batch_size: int
    context_tokens: int
    temperature: float

    @property
    def label(self) -> str:
        return f"batch {self.batch_size}, context {self.context_tokens}, T={self.temperature:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One arm in one cell in one repeat: the unit that is run, saved and resumed."""

    config: SpecConfig
    cell: Cell
    workload_hash: str
    sampling: Sampling
    repeat: int = 0

    @property
    def canonical(self) -> dict[str, Any]:
        return {
            "config": self.config.to_dict(),
            "cell": asdict(self.cell),
            "workload_hash": self.workload_hash,
            "sampling": asdict(self.sampling),
            "repeat": self.repeat,
        }

    @property
    def point_id(self) -> str:
        """Hash of the canonical point, 16 hex digits."""
        text = json.dumps(self.canonical, sort_keys=True, default=list)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def label(self) -> str:
        return f"{self.config.label} @ {self.cell.label}"

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Point:
        sampling = {**data["sampling"], "stop": tuple(data["sampling"]["stop"])}
        return cls(
            config=SpecConfig.from_dict(data["config"]),
            cell=Cell(**data["cell"]),
            workload_hash=data["workload_hash"],
            sampling=Sampling(**sampling),
            repeat=data["repeat"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PointOutcome:
    """The line of points.jsonl: what became of a point and why."""

    point: Point
    status: Status
    reason: str | None = None
    num_requests: int = 0
    num_failed: int = 0
    reached_batch: float | None = None
    peak_memory_bytes: int | None = None
    duration_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockResult:
    """What a backend returns for one block of requests of one arm."""

    requests: tuple[RequestRecord, ...]
    rounds: tuple[RoundRecord, ...]
    duration_s: float
    peak_memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTimes:
    """Calibrated seconds of one decode round of an arm in a cell (medians, other prompts)."""

    draft_s: float
    verify_s: float
    other_s: float
    num_rounds: int

    @property
    def total_s(self) -> float:
        return self.draft_s + self.verify_s + self.other_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a backend can do; the sweep asks before it plans."""

    name: str
    methods: tuple[str, ...]
    has_trees: bool
    has_rounds: bool
    is_simulated: bool = False
    max_batch_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One engine start that serves one or more points. Attaching starts nothing."""

    points: tuple[Point, ...]
    settings: tuple[tuple[str, OPTION], ...] = ()
    attach_url: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """Everything that must be equal for two runs to be comparable."""

    backend: str
    engine_version: str
    target: str
    draft: str | None
    device: str
    dtype: str
    threads: int
    settings: dict[str, OPTION] = field(default_factory=dict)
    is_simulated: bool = False
    weight_bytes: int | None = None
    draft_weight_bytes: int | None = None
    kv_bytes_per_token: int | None = None
    read_bandwidth_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A point estimate with a confidence interval; `low`/`high` are None when n is too small."""

    value: float
    low: float | None
    high: float | None
    n: int
    level: float = 0.95

    def __post_init__(self) -> None:
        for name in ("value", "low", "high"):
            number = getattr(self, name)
            if number is not None and not math.isfinite(number):
                raise ValueError(f"{name} of an interval is {number}")


# Protocols ---------------------------------------------------------------------------------------


class Session(Protocol):
    """An open engine. `run` decodes one block of requests at the point's batch size."""

    def run(self, point: Point, requests: Sequence[Request]) -> BlockResult: ...


@runtime_checkable
class Backend(Protocol):
    """One door to every engine."""

    def capabilities(self) -> Capabilities: ...

    def plan(self, points: Sequence[Point]) -> list[Launch]: ...

    def open(self, launch: Launch) -> AbstractContextManager[Session]: ...

    def fingerprint(self) -> Fingerprint: ...

    def encode(self, prompt: Prompt, context_text: str, context_tokens: int) -> tuple[int, ...]:
        """Token ids of the prompt under the chat template, `context_tokens` of text before it."""
        ...


class Chooser(Protocol):
    """Picks the configuration of the next round."""

    def choose(self, *, batch_size: int, context_tokens: int, acceptance_ema: float | None) -> SpecConfig: ...


class Measure(Protocol):
    """Runs arms and returns their results; handed to the pure stack by cli/."""

    def __call__(self, points: Sequence[Point]) -> Iterator[tuple[PointOutcome, BlockResult]]: ...


Clock = Callable[[], float]


def with_repeat(point: Point, repeat: int) -> Point:
    """The same point in another repeat."""
    return replace(point, repeat=repeat)

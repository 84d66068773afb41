"""What an engine says about itself, and the protocols that join the stacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from spectune.records.config import OPTION, SpecConfig
from spectune.records.point import BlockResult, Point, PointOutcome
from spectune.records.request import Prompt, Request, Sampling

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a backend can do; the sweep asks before it plans."""

    name: str
    methods: tuple[str, ...]
    has_trees: bool
    has_rounds: bool
    is_simulated: bool = False
    max_batch_size: int | None = None
    has_keyed_sampling: bool = False  # equal seeds give equal texts with and without speculation
    has_boots: bool = False
    """Each arm is an engine start of its own, and load comes as requests at a concurrency: arms cannot
    take turns block by block, so plain decoding is started before and after them."""


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

    @property
    def is_gpu(self) -> bool:
        """Whether an engine of this process runs on a GPU, whose name `device` is then."""
        return self.device not in ("cpu", "simulated")


NEAR_TIE = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.5}
"""Gaps of two logits that rounding may turn over, by number format: a few steps of the format at the size
of a top logit (16 to 32)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """How far the two best tokens were apart in (perturbed) logits, and what still is a near tie."""

    value: float
    tolerance: float


class Session(Protocol):
    """An open engine. `run` decodes one block of requests at the point's batch size."""

    def run(self, point: Point, requests: Sequence[Request]) -> BlockResult: ...

    def gap(self, request: Request, output_ids: Sequence[int], index: int) -> Gap | None:
        """Gap where plain decoding chose output token `index` after output_ids[:index]; None where
        the engine cannot tell."""
        ...


@runtime_checkable
class LoadSession(Session, Protocol):
    """An open server. `stream` keeps `point.cell.batch_size` requests in flight."""

    def stream(self, point: Point, requests: Sequence[Request], fillers: Sequence[Request]) -> BlockResult:
        """All of `requests`, each decoded at full load from its first token to its last; `fillers`
        fill the slots before the first and after the last of them and are not in the result."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    """One answer of a conversation; empty where there is none. `prompt_ids` are the ids that the server's
    own chat template gave, None where it does not tell them."""

    text: str
    prompt_ids: tuple[int, ...] | None = None


@runtime_checkable
class Converses(Protocol):
    """A session with a chat route of its own."""

    def converse(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[ChatAnswer]:
        """Answers to the turns that the prompts ask, in their order."""
        ...


@runtime_checkable
class Replays(Protocol):
    """A session that can be made to emit given texts: acceptance without a text of its own."""

    def replay(
        self, point: Point, requests: Sequence[Request], texts: Mapping[str, Sequence[int]]
    ) -> BlockResult:
        """The block with the given output ids by request id."""
        ...


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SideArm:
    """An arm of a comparison of two engines: `side` says which one decodes it (base or head)."""

    side: str
    point: Point


class MeasureSides(Protocol):
    """Starts the engines of all sides, decodes every block of all arms in turn, stops the engines.

    One call is one start: what differs from start to start is in the spread of several calls. Yields
    (arm, block index, result); handed to the pure stack by cli/.
    """

    def __call__(
        self, arms: Sequence[SideArm], *, start: int
    ) -> Iterator[tuple[SideArm, int, BlockResult]]: ...

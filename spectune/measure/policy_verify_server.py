"""vLLM servers as arms of a verification: one start an arm, all loads in it, plain decoding first and last.

What is served is the emitted JSON itself; only the path of the draft is filled in.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from spectune.backend.heads import head_folder
from spectune.backend.server import ServerCommand
from spectune.backend.vllm import VllmBackend
from spectune.errors import EngineFailure, UsageError
from spectune.measure.policy_verify import sample_of
from spectune.records import (
    BlockResult,
    Cell,
    Launch,
    LoadSession,
    Point,
    Request,
    RequestRecord,
    Sampling,
    Session,
    SpecConfig,
)
from spectune.records.policy_load import LoadSample, PolicyArm, PolicyLoad

FLAG = "--speculative-config"
START_S = 60.0
"""A start that leaves less than this of the time is not worth it."""

BootKey = tuple[str, int, str, int]
"""(load, repeat, arm, start)"""


class EmittedVllm(VllmBackend):
    """A server that runs an emitted `--speculative-config` as it is written.

    Args:
        document: the emitted JSON.
        further: arguments of `VllmBackend`.
    """

    def __init__(self, document: Mapping[str, Any], **further: Any) -> None:
        super().__init__(**further)
        self._document = dict(document)

    def command(self, launch: Launch, *, port: int, served_model: str) -> ServerCommand:
        """The command of a static chain with the emitted JSON in its place."""
        command = super().command(launch, port=port, served_model=served_model)
        words = list(command.argv)
        if FLAG not in words:
            raise UsageError("the launched command has no --speculative-config to put the policy into")
        document = dict(self._document)
        if "model" in document and launch.points[0].config.draft_model is not None:
            document["model"] = str(head_folder(launch.points[0].config.draft_model))
        words[words.index(FLAG) + 1] = json.dumps(document)
        return ServerCommand(
            argv=tuple(words),
            port=command.port,
            served_model=command.served_model,
            environment=command.environment,
        )


def serve_starts(
    backend_of: Callable[[PolicyArm], VllmBackend],
    lead: SpecConfig,
    arms: Sequence[PolicyArm],
    loads: Sequence[PolicyLoad],
    requests_of: Callable[[PolicyLoad, int], Sequence[Request]],
    *,
    repeats: int,
    done: Collection[BootKey] = (),
    is_bracketed: bool = True,
    max_seconds: float | None = None,
    clock: Callable[[], float] = time.monotonic,
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[LoadSample]:
    """Samples of every start in the order of `arms`, then once more of the first of them (plain decoding)
    unless `is_bracketed` is false.

    What is in `done` is left out, a start that lacks nothing too. Ends before `max_seconds` are over.
    """
    started = clock()

    def left() -> float:
        return float("inf") if max_seconds is None else max_seconds - (clock() - started)

    for boot, arm in enumerate([*arms, *(arms[:1] if is_bracketed else ())]):
        missing = [
            (load, repeat)
            for repeat in range(repeats)
            for load in loads
            if (load.name, repeat, arm.label, boot) not in done
        ]
        if not missing:
            continue
        if left() < START_S:
            return
        config = arm.config or lead
        launch = Launch(points=(_point(config, 1, missing[0][0].max_tokens),))
        with backend_of(arm).open(launch) as session:
            top = max(load.peak for load in loads)
            warm = requests_of(loads[-1], 0)[: 2 * top]
            session.run(_point(config, top, loads[-1].max_tokens), warm)
            for load, repeat in missing:
                if left() < 0:
                    return
                say(f"{load.name}, run {repeat + 1} of {repeats}: {arm.label}")
                block = serve_load(session, config, load, requests_of(load, repeat))
                yield sample_of(block, load, arm, repeat, boot=boot)


def serve_load(
    session: Session, config: SpecConfig, load: PolicyLoad, requests: Sequence[Request]
) -> BlockResult:
    """A steady load at its concurrency throughout; a changing one level by level, each drained before the
    next, so that the batch falls through every size below."""
    if load.is_steady:
        if not isinstance(session, LoadSession):
            raise EngineFailure("the engine cannot keep a load up")
        return session.stream(_point(config, load.peak, load.max_tokens), requests, requests)
    queue = list(requests)
    records: list[RequestRecord] = []
    seconds = 0.0
    for level, num_tokens in load.levels:
        count = max(level, num_tokens // load.max_tokens)
        own, queue = queue[:count], queue[count:]
        block = session.run(_point(config, level, load.max_tokens), own)
        records += block.requests
        seconds += _wall_s(block)
    return BlockResult(requests=tuple(records), rounds=(), duration_s=seconds)


def _wall_s(block: BlockResult) -> float:
    """First arrival to last token: requests of one level are sent at once and end one by one."""
    ends = [request.finish_s for request in block.requests if request.finish_s is not None]
    if not ends:
        raise EngineFailure(f"no request of a level ended: {block.requests[0].error or 'no reason was told'}")
    return max(ends) - min(request.arrival_s for request in block.requests)


def _point(config: SpecConfig, concurrency: int, max_tokens: int) -> Point:
    cell = Cell(batch_size=concurrency, context_tokens=0, temperature=0.0)
    return Point(
        config=config,
        cell=cell,
        workload_hash="policy verification",
        sampling=Sampling(max_tokens=max_tokens, ignore_eos=True),
    )

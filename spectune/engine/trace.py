"""Drafts along a given text: what our drafter would propose, and have accepted, at its prefixes.

A lossless configuration never changes the text, and a drafter that is pure in its prefix proposes
the same there however the text was reached. So a text that any engine wrote can be replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spectune.engine.running import RowView
from spectune.engine.scheduler import Engine
from spectune.engine.tree import DraftPool
from spectune.errors import UsageError
from spectune.records import BlockResult, Request, SpecConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TracePoint:
    """Candidates at one prefix: `num_outputs` tokens of the output precede the first draft."""

    num_outputs: int
    pools: tuple[DraftPool, ...]  # one row each, in the order of the asked topks


def replay_text(
    engine: Engine, requests: Sequence[Request], texts: dict[str, Sequence[int]], config: SpecConfig
) -> BlockResult:
    """Step records of `config` along given output ids (by request id) instead of the target's own.

    Raises UsageError for a request without a text or with an empty one.
    """
    for request in requests:
        if not texts.get(request.request_id):
            raise UsageError(f"request {request.request_id} has no output text to replay")
    return engine.generate(requests, config, forced_text=texts)


def trace(
    engine: Engine,
    requests: Sequence[Request],
    texts: dict[str, Sequence[int]],
    topks: Sequence[int],
    depth: int,
) -> dict[str, list[TracePoint]]:
    """Candidates of every topk down to `depth` at every position of every text."""
    if engine.drafter is None:
        raise UsageError("a trace needs a drafter")
    drafter = engine.drafter
    points: dict[str, list[TracePoint]] = {request.request_id: [] for request in requests}
    # the deepest tree sizes the drafter's scratch; off rounds visit every prefix
    widest = max(topks)
    num_nodes = depth + 1 if widest == 1 else widest + 1
    scratch = SpecConfig(method="trace", num_steps=depth, topk=widest, num_draft_tokens=num_nodes)

    def look(rows: Sequence[RowView]) -> None:
        pools = drafter.expand([row.slot for row in rows], topks, depth)
        for index, row in enumerate(rows):
            own = tuple(_row(pool, index) for pool in pools)
            points[row.request_id].append(TracePoint(num_outputs=row.num_outputs, pools=own))

    engine.generate(requests, forced_text=texts, on_round=look, scratch=scratch)
    return points


def _row(pool: DraftPool, index: int) -> DraftPool:
    one = slice(index, index + 1)
    return DraftPool(pool.topk, pool.tokens[one], pool.parents[one], pool.depths[one], pool.log_scores[one])

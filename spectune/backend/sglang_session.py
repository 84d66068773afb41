"""Requests of a point at an SGLang server; where they tell no acceptance, what the server itself says.

The server's own mean is the weaker source: it holds every round since the last flush, ramp and fillers
among them, and says nothing of positions. So it becomes a note, never steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from spectune.backend.server_api import scrape, server_info
from spectune.backend.server_session import ServerSession
from spectune.backend.sglang_acceptance import mean_length_of
from spectune.errors import EngineFailure
from spectune.records import BlockResult, Point, Request

ACTIVE_STEPS = "sglang:spec_num_steps"
"""Gauge of the depth that runs now: how an adaptive server is watched."""


class SglangSession(ServerSession):
    """Runs points on one server; it is flushed before each stream."""

    def stream(self, point: Point, requests: Sequence[Request], fillers: Sequence[Request]) -> BlockResult:
        """See `LoadSession.stream`."""
        return self._with_fallback(super().stream(point, requests, fillers), is_plain=point.config.is_off)

    def active_steps(self) -> int | None:
        """Depth of the drafts that the server makes now; None where it does not tell."""
        value = scrape(self.address.url).total(ACTIVE_STEPS, {"model_name": self.address.served_model})
        return None if value is None else round(value)

    def _with_fallback(self, block: BlockResult, *, is_plain: bool) -> BlockResult:
        tells = any(record.steps for record in block.requests)
        if is_plain or tells or block.load is None or not any(r.error is None for r in block.requests):
            return block
        try:
            length = mean_length_of(server_info(self.address.url), was_flushed=True)
        except EngineFailure:
            length = None
        own = "it tells no mean either" if length is None else f"its own mean is {length:.2f} tokens a round"
        note = (
            f"the server's requests tell no acceptance (a version before spec_verify_ct, or metrics off); {own} "
            "since the flush before the load, fillers included: not compared with other arms"
        )
        return replace(block, load=replace(block.load, notes=(*block.load.notes, note)))

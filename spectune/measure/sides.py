"""Two engines side by side: started together, warmed, the same blocks decoded in turn, stopped."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

from spectune.errors import UsageError
from spectune.measure.door import Door
from spectune.measure.requests import Block
from spectune.records import Backend, BlockResult, Launch, Point, Replays, Request, SideArm


class Sides:
    """`MeasureSides` over backends: one call starts every side anew, in this process or another.

    Args:
        backends: the engine of each side; one backend may serve several.
        blocks: requests that every arm decodes, in turn: A B, B A, ... and the other way round in the
            next start.
        calibration: decoded first by every arm and thrown away, so that no arm is timed cold.
        texts: output ids by request id that the arms are made to emit instead of their own text.
    """

    def __init__(
        self,
        backends: Mapping[str, Backend],
        blocks: Sequence[Block],
        calibration: Block = (),
        *,
        texts: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self._backends, self._blocks, self._calibration = dict(backends), tuple(blocks), calibration
        self._texts = texts

    def __call__(self, arms: Sequence[SideArm], *, start: int) -> Iterator[tuple[SideArm, int, BlockResult]]:
        with contextlib.ExitStack() as stack:
            # an engine for each arm, also on one side: a server holds one configuration
            doors = {
                arm: stack.enter_context(Door(self._backends[arm.side], Launch(points=(arm.point,))))
                for arm in arms
            }
            for arm in arms if self._texts is None else ():
                if self._calibration:
                    doors[arm].run(arm.point, self._calibration)
            for index, block in enumerate(self._blocks):
                is_forward = (index + start) % 2 == 0
                for arm in arms if is_forward else tuple(reversed(arms)):
                    yield arm, index, self._decode(doors[arm], arm.point, block)

    def _decode(self, door: Door, point: Point, block: Sequence[Request]) -> BlockResult:
        if self._texts is None:
            return door.run(point, block)
        session = door.open()
        if not isinstance(session, Replays):
            raise UsageError("this backend cannot replay recorded text", hint="--backend reference can")
        return session.replay(point, block, self._texts)

"""Where an arm's output leaves plain decoding: a near tie under rounding, or a lossy engine.

Each token comes from the same rule in both arms, so a difference is honest only where the two best
tokens were so close that rounding decides. The engine tells that gap on plain decoding's own text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from spectune.metrics.latency import is_success
from spectune.records import BlockResult, Gap, Point, Request

NUM_CHECKED = 2
"""Differing outputs of a point whose gap is looked up, the earliest differences first."""

AskGap = Callable[[Request, Sequence[int], int], Gap | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Outputs that differ from plain decoding: how many, and the gaps at the earliest differences.

    `gaps` are (request id, token index, gap), as far as the engine could tell.
    """

    num_differing: int
    num_shared: int
    earliest: int
    gaps: tuple[tuple[str, int, Gap], ...]

    @property
    def mismatch(self) -> str | None:
        """What proves the arm lossy, or None."""
        for name, index, gap in self.gaps:
            if gap.value > gap.tolerance:
                return (
                    f"output of request {name} leaves plain decoding at token {index}, where the two best "
                    f"tokens are {gap.value:.3g} apart (near ties end at {gap.tolerance:g}): not lossless"
                )
        return None

    @property
    def text(self) -> str:
        """The caution for people."""
        count = f"{self.num_differing} of {self.num_shared} outputs differ from plain decoding"
        if not self.gaps:
            return f"{count}, the earliest at token {self.earliest}; the engine cannot tell how close a tie it was"
        _, index, gap = self.gaps[0]
        return (
            f"{count}, the earliest at token {index}, where the two best tokens are {gap.value:.3g} apart: "
            f"{'a near tie' if gap.value <= gap.tolerance else 'no near tie'} (limit {gap.tolerance:g})"
        )


def find_divergence(
    point: Point,
    blocks: Mapping[int, BlockResult],
    off: Mapping[int, BlockResult],
    requests: Mapping[str, Request],
    ask_gap: AskGap,
) -> Divergence | None:
    """Compare the outputs that both arms finished; None where all are equal.

    Drafts drawn at random change which sample is drawn, not its distribution: such arms are not
    compared.
    """
    if point.config.is_off or point.config.option("draft_sampling", "greedy") != "greedy":
        return None
    plain = _outputs(off)
    ours = {name: ids for name, ids in _outputs(blocks).items() if name in plain}
    differing = sorted(
        (first_difference(ids, plain[name]), name) for name, ids in ours.items() if ids != plain[name]
    )
    if not differing:
        return None
    asked = [
        (name, index, ask_gap(requests[name], plain[name], index))
        for index, name in differing[:NUM_CHECKED]
        if name in requests and index < len(plain[name])
    ]
    return Divergence(
        num_differing=len(differing),
        num_shared=len(ours),
        earliest=differing[0][0],
        gaps=tuple((name, index, gap) for name, index, gap in asked if gap is not None),
    )


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Index of the first token that differs; the shorter length where one continues the other."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))


def _outputs(blocks: Mapping[int, BlockResult]) -> dict[str, tuple[int, ...]]:
    return {
        request.request_id: request.output_ids
        for block in blocks.values()
        for request in block.requests
        if is_success(request)
    }

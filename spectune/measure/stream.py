"""What a server did with all requests of a point, cut into one block a request: the unit of pairing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from spectune.measure.requests import Block
from spectune.records import BlockResult, RequestRecord


def split_by_block(blocks: Mapping[int, Block], result: BlockResult) -> dict[int, BlockResult]:
    """The result of each block by its index; seconds are shared by the time that requests held a slot."""
    by_id = {record.request_id: record for record in result.requests}
    held = {name: _held_s(record) for name, record in by_id.items()}
    total = sum(held.values())
    parts = {}
    for index, block in blocks.items():
        own = tuple(by_id[request.request_id] for request in block)
        share = sum(held[record.request_id] for record in own) / total if total > 0 else 0.0
        parts[index] = replace(result, requests=own, duration_s=result.duration_s * share)
    return parts


def _held_s(record: RequestRecord) -> float:
    return record.e2e_s or 0.0

"""Records to lines and back: a block is one gzip member of header, requests, rounds and end.

Steps and rounds are arrays under the column names of the header, so that a file stays small and
readable by `zcat`.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from spectune.errors import StoreError
from spectune.records import (
    BlockResult,
    LoadRecord,
    Point,
    PointOutcome,
    RequestRecord,
    RoundRecord,
    Status,
    StepRecord,
)
from spectune.store.strict_json import dump_strict

STEP_COLUMNS = ("num_proposed", "num_verified", "num_accepted", "num_emitted", "cut")
ROUND_COLUMNS = (
    "kind",
    "batch_size",
    "kv_tokens",
    "config",
    "start_s",
    "draft_s",
    "verify_s",
    "other_s",
    "num_emitted",
    "stolen_s",
)
REQUEST_FIELDS = (
    "request_id",
    "category",
    "num_prompt_tokens",
    "output_ids",
    "arrival_s",
    "first_token_s",
    "finish_s",
    "finish_reason",
    "chunk_s",
    "error",
)


def pack_block(index: int, block: BlockResult) -> bytes:
    """One complete gzip member."""
    header = {
        "line": "block",
        "index": index,
        "duration_s": block.duration_s,
        "peak_memory_bytes": block.peak_memory_bytes,
        **({} if block.load is None else {"load": asdict(block.load)}),
        "step_columns": STEP_COLUMNS,
        "round_columns": ROUND_COLUMNS,
    }
    lines = [dump_strict(header, where=f"block {index}")]
    for request in block.requests:
        row: dict[str, Any] = {"line": "request"}
        row.update({name: getattr(request, name) for name in REQUEST_FIELDS})
        if request.scheduled_s is not None:
            row["scheduled_s"] = request.scheduled_s
        row["steps"] = [[getattr(step, name) for name in STEP_COLUMNS] for step in request.steps]
        lines.append(dump_strict(row, where=f"request {request.request_id}"))
    for i, turn in enumerate(block.rounds):
        lines.append(dump_strict([getattr(turn, name) for name in ROUND_COLUMNS], where=f"round {i}"))
    lines.append(
        dump_strict(
            {"line": "end", "num_requests": len(block.requests), "num_rounds": len(block.rounds)},
            where="end",
        )
    )
    return gzip.compress(("\n".join(lines) + "\n").encode(), compresslevel=5, mtime=0)


def unpack_blocks(data: bytes, *, where: str) -> dict[int, BlockResult]:
    """All blocks of a file; StoreError naming `where` if any part is damaged."""
    try:
        text = gzip.decompress(data).decode()
        return _read_lines(text.split("\n")[:-1])
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, IndexError) as error:
        raise StoreError(f"{where} is damaged: {str(error) or type(error).__name__}") from error


def _read_lines(lines: Iterable[str]) -> dict[int, BlockResult]:
    blocks: dict[int, BlockResult] = {}
    header: dict[str, Any] | None = None
    requests: list[RequestRecord] = []
    rounds: list[RoundRecord] = []
    for text in lines:
        row = json.loads(text)
        if isinstance(row, dict) and row["line"] == "block":
            if header is not None:
                raise ValueError(f"block {header['index']} has no end line")
            header, requests, rounds = row, [], []
        elif header is None:
            raise ValueError("a line stands outside a block")
        elif isinstance(row, list):
            rounds.append(RoundRecord(**dict(zip(header["round_columns"], row, strict=True))))
        elif row["line"] == "request":
            requests.append(_request(row, header["step_columns"]))
        elif (row["num_requests"], row["num_rounds"]) != (len(requests), len(rounds)):
            raise ValueError(f"block {header['index']} lacks lines")
        else:
            blocks[header["index"]] = BlockResult(
                requests=tuple(requests),
                rounds=tuple(rounds),
                duration_s=header["duration_s"],
                peak_memory_bytes=header["peak_memory_bytes"],
                load=_load(header.get("load")),
            )
            header = None
    if header is not None:
        raise ValueError(f"block {header['index']} has no end line")
    return blocks


def _load(row: dict[str, Any] | None) -> LoadRecord | None:
    return None if row is None else LoadRecord(**{**row, "notes": tuple(row["notes"])})


def _request(row: dict[str, Any], step_columns: list[str]) -> RequestRecord:
    values = {name: row[name] for name in REQUEST_FIELDS}
    values["output_ids"] = tuple(values["output_ids"])
    values["chunk_s"] = tuple(values["chunk_s"])
    steps = tuple(StepRecord(**dict(zip(step_columns, step, strict=True))) for step in row["steps"])
    return RequestRecord(**values, steps=steps, scheduled_s=row.get("scheduled_s"))


def outcome_to_dict(outcome: PointOutcome) -> dict[str, Any]:
    """The line of points.jsonl, the id first."""
    row = {name: value for name, value in asdict(outcome).items() if name != "point"}
    return {"point_id": outcome.point.point_id, **row, "point": outcome.point.canonical}


def outcome_from_dict(row: dict[str, Any]) -> PointOutcome:
    """The reverse; ValueError if the id does not belong to the point."""
    values = {name: value for name, value in row.items() if name not in ("point_id", "point", "status")}
    point = Point.from_dict(row["point"])
    if point.point_id != row["point_id"]:
        raise ValueError(f"point_id {row['point_id']} does not belong to its point")
    return PointOutcome(point=point, status=Status(row["status"]), **values)

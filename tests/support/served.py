"""Requests at a server made by hand, with every time and count written down."""

from __future__ import annotations

from typing import Any

from spectune.records import FailureKind, Request, Sampling, ServedRequest, TokenSource


def served(
    request_id: str = "r",
    *,
    sent_s: float = 0.0,
    chunks: tuple[float, ...] = (0.5, 1.0, 1.5),
    num_tokens: int | None = 3,
    scheduled_s: float | None = None,
    **changes: Any,
) -> ServedRequest:
    """A success: sent at `sent_s`, output at `chunks` (absolute seconds), ended with the last of them."""
    values: dict[str, Any] = {
        "request_id": request_id,
        "category": "chat",
        "scheduled_s": sent_s if scheduled_s is None else scheduled_s,
        "sent_s": sent_s,
        "ended_s": chunks[-1] if chunks else sent_s,
        "first_token_s": chunks[0] if chunks else None,
        "finish_s": chunks[-1] if chunks else None,
        "finish_reason": "length",
        "num_prompt_tokens": 10,
        "num_output_tokens": num_tokens,
        "token_source": None if num_tokens is None else TokenSource.USAGE,
        "chunk_s": chunks,
    }
    return ServedRequest(**{**values, **changes})


def failed(
    request_id: str = "f", *, kind: FailureKind = FailureKind.HTTP, sent_s: float = 0.0, ended_s: float = 0.1
) -> ServedRequest:
    """A failure with its reason."""
    return ServedRequest(
        request_id=request_id,
        category="chat",
        scheduled_s=sent_s,
        sent_s=sent_s,
        ended_s=ended_s,
        failure=kind,
        error="HTTP 500: declared failure",
    )


def asked(index: int = 0, *, max_tokens: int = 16, **sampling: Any) -> Request:
    """A request of 20 prompt tokens, different for every index."""
    return Request(
        request_id=f"r{index}",
        prompt_ids=tuple(range(100 * index, 100 * index + 20)),
        prompt_text=f"question {index}",
        category="chat",
        sampling=Sampling(max_tokens=max_tokens, **sampling),
    )

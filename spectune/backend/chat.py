"""Turns of conversations asked at a server's chat route, which writes its own template around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from spectune.backend.client import run_requests
from spectune.backend.payload import ClientOptions, Endpoint
from spectune.backend.prompts import chat_messages
from spectune.errors import EngineFailure
from spectune.records import ChatAnswer, FailureKind, Prompt, Request, Sampling
from spectune.workload.arrivals import ClosedLoop

CONCURRENCY = 8


def chat_answers(
    url: str,
    served_model: str,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    options: ClientOptions,
) -> list[ChatAnswer]:
    """The answer to the turn that each prompt asks, after the turns and answers before it.

    A turn that the server refuses or answers with nothing has an empty text: its conversation ends there.
    EngineFailure where the server cannot be reached at all.
    """
    by_id = {f"turn-{i}": prompt for i, prompt in enumerate(prompts)}
    requests = [
        Request(request_id=name, prompt_ids=(), category=prompt.category, sampling=sampling)
        for name, prompt in by_id.items()
    ]
    chat = replace(
        options,
        endpoint=Endpoint.CHAT,
        messages=lambda request: chat_messages(by_id[request.request_id]),
    )
    done = run_requests(url, served_model, requests, ClosedLoop(concurrency=CONCURRENCY), chat)
    if done and all(one.failure in (FailureKind.CONNECTION, FailureKind.NOT_FOUND) for one in done):
        raise EngineFailure(f"{url} answers no chat: {done[0].error}")
    return [ChatAnswer(text=one.text if one.is_success else "", prompt_ids=one.prompt_ids) for one in done]

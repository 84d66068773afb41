"""vLLM's routes over the declared engine, fields and order as vLLM 0.32 sends them.

Every answer that can carry it says that it is simulated.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from spectune.backend.mock_server.engine import Engine, MockSequence, words
from spectune.backend.mock_server.http import HttpAnswer, HttpRequest
from spectune.backend.mock_server.metrics_page import metrics_page
from spectune.backend.mock_server.settings import MockSettings

VERSION = "0.32.0"
LABEL = "simulated by spectune mock-server"
HANG_S = 3600.0


class Shape:
    """How an answer ends: what an engine puts into its last events."""

    stop_field = "stop_reason"

    def ends(
        self, settings: MockSettings, asked: Asked, sequence: MockSequence, num_tokens: int
    ) -> list[dict[str, Any]]:
        """Fields of the events after the finish; of a whole body all of them together."""
        counts = {"usage": usage(sequence, num_tokens)} if asked.includes_usage else {}
        return [{**counts, **spec_report(settings, sequence)}] if counts else []

    def stop_value(self, sequence: MockSequence) -> Any:
        """What ended an answer besides its finish reason."""
        return None


class VllmFace:
    """Answers one connection's requests."""

    shape = Shape()

    def __init__(self, settings: MockSettings) -> None:
        self._settings = settings
        self._engine = Engine(settings)
        self._num_asked = 0

    async def answer(self, request: HttpRequest, answer: HttpAnswer) -> None:
        """Route one request."""
        route = (request.method, request.path)
        if route == ("GET", "/health"):
            await answer.send(200 if self._engine.is_up else 503, b"")
        elif route == ("GET", "/version"):
            told = {"version": f"{VERSION}+simulated", "is_simulated": True, "note": LABEL}
            await answer.send_json(200, told)
        elif route == ("GET", "/v1/models"):
            await self._models(answer)
        elif route == ("GET", "/metrics"):
            page = metrics_page(self._settings, self._engine)
            await answer.send(200, page.encode(), "text/plain; version=0.0.4; charset=utf-8")
        elif route == ("POST", "/reset_prefix_cache"):
            self._engine.reset_cache()
            await answer.send(200, b"")
        elif route in (("POST", "/v1/completions"), ("POST", "/v1/chat/completions")):
            await self._generate(request, answer, is_chat=request.path.endswith("chat/completions"))
        else:
            await answer.send_json(404, {"detail": "Not Found"})

    async def _models(self, answer: HttpAnswer) -> None:
        if not self._engine.is_up and "models_before_health" not in self._settings.quirks:
            await answer.send_json(503, error_body("the engine is starting", 503))
            return
        card = {
            "id": self._settings.model,
            "object": "model",
            "owned_by": LABEL,
            "root": self._settings.model,
            "max_model_len": self._settings.max_model_len,
        }
        await answer.send_json(200, {"object": "list", "data": [card]})

    async def _generate(self, request: HttpRequest, answer: HttpAnswer, *, is_chat: bool) -> None:
        index, self._num_asked = self._num_asked, self._num_asked + 1
        try:
            body = request.json()
            asked = Asked.read(body, self._settings, is_chat=is_chat)
        except (ValueError, KeyError, TypeError) as error:
            await answer.send_json(400, error_body(f"bad request: {error}", 400))
            return
        fault = self._fault(index, body)
        refused = self._refusal(asked, fault)
        if refused is not None:
            await answer.send_json(refused["error"]["code"], refused)
            return
        sequence = self._engine.sequence(asked.prompt, asked.max_tokens, ignores_eos=asked.ignores_eos)
        try:
            if asked.is_streaming:
                await _Stream(self._settings, self._engine, asked, answer, fault, self.shape).run(sequence)
            else:
                await self._whole(asked, sequence, answer, fault)
        except ConnectionError:
            answer.is_closing = True

    def _fault(self, index: int, body: Mapping[str, Any]) -> str | None:
        """The failure of this request: its own wish, or what the settings declare."""
        wished = body.get("mock_fault")
        if isinstance(wished, str):
            return wished
        return next((fault.kind for fault in self._settings.faults if fault.hits(index)), None)

    def _refusal(self, asked: Asked, fault: str | None) -> dict[str, Any] | None:
        if not self._engine.is_up:
            return error_body("the engine is starting", 503)
        if asked.model != self._settings.model or fault == "http_404":
            return error_body(f"The model `{asked.model}` does not exist.", 404, "NotFoundError")
        if fault in ("http_400", "http_500"):
            return error_body(f"declared failure {fault}", int(fault.removeprefix("http_")))
        return None

    async def _whole(
        self, asked: Asked, sequence: MockSequence, answer: HttpAnswer, fault: str | None
    ) -> None:
        ids: list[int] = []
        async for step in self._engine.decode(sequence):
            ids += step
            if fault is not None:
                await fail(fault, answer)
                if answer.is_closing:
                    return
        if fault == "malformed":
            await answer.send(200, b"{not json")
            return
        if fault == "error_in_stream":
            await answer.send_json(200, error_body("declared failure", 500))
            return
        if fault in ("empty", "truncated"):
            ids = []
        choice = asked.choice(words(ids), is_delta=False, quirks=self._settings.quirks)
        choice |= {
            "finish_reason": None if fault == "truncated" else sequence.finish_reason,
            self.shape.stop_field: self.shape.stop_value(sequence),
        }
        if asked.wants_ids:
            choice["token_ids"] = ids
            choice["prompt_token_ids"] = list(sequence.prompt_ids)
        if asked.num_logprobs and not asked.is_chat:
            choice["logprobs"] = logprobs(ids, self._settings.top_gap, asked.num_logprobs)
        body: dict[str, Any] = {**asked.head(is_chunk=False), "choices": [choice]}
        for end in self.shape.ends(self._settings, replace(asked, includes_usage=True), sequence, len(ids)):
            body |= end
        await answer.send_json(200, body)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a body asks for."""

    model: str
    prompt: str | tuple[int, ...]
    max_tokens: int
    is_chat: bool
    is_streaming: bool
    includes_usage: bool
    continuous_usage: bool
    wants_ids: bool
    ignores_eos: bool
    wants_details: bool = False
    num_logprobs: int = 0

    @classmethod
    def read(cls, body: Any, settings: MockSettings, *, is_chat: bool) -> Asked:
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or 16
        stream_options = body.get("stream_options") or {}
        return cls(
            model=body["model"],
            prompt=_chat_text(body["messages"]) if is_chat else _prompt(body["prompt"]),
            max_tokens=int(limit),
            is_chat=is_chat,
            is_streaming=bool(body.get("stream")),
            includes_usage=bool(stream_options.get("include_usage")),
            continuous_usage=bool(stream_options.get("continuous_usage_stats")),
            wants_ids=bool(body.get("return_token_ids")) and "no_token_ids" not in settings.quirks,
            ignores_eos=bool(body.get("ignore_eos")),
            wants_details=bool(body.get("return_spec_tokens_details")),
            num_logprobs=int(body.get("logprobs") or 0),
        )

    def head(self, *, is_chunk: bool) -> dict[str, Any]:
        kind = "text_completion"
        if self.is_chat:
            kind = "chat.completion.chunk" if is_chunk else "chat.completion"
        return {"id": "cmpl-simulated", "object": kind, "created": 0, "model": self.model}

    def choice(self, text: str, *, is_delta: bool, quirks: frozenset[str]) -> dict[str, Any]:
        """The text in the shape of the route."""
        if not self.is_chat:
            return {"index": 0, "text": text}
        told: dict[str, Any] = {"content": text}
        if "reasoning" in quirks:
            told = {"reasoning_content": text, "content": None}
        if is_delta:
            return {"index": 0, "delta": told}
        return {"index": 0, "message": {"role": "assistant", **told}}


class _Stream:
    """One streamed answer: one event a step."""

    def __init__(
        self,
        settings: MockSettings,
        engine: Engine,
        asked: Asked,
        answer: HttpAnswer,
        fault: str | None,
        shape: Shape,
    ) -> None:
        self._shape = shape
        self._settings = settings
        self._engine = engine
        self._asked = asked
        self._answer = answer
        self._fault = fault
        self._end = b"\r\n\r\n" if "crlf" in settings.quirks else b"\n\n"

    async def run(self, sequence: MockSequence) -> None:
        """Role, steps, finish, usage, end mark; or the declared failure on the way."""
        answer, settings, asked = self._answer, self._settings, self._asked
        answer.start_stream()
        if "ping" in settings.quirks:
            await answer.write(b": ping" + self._end)
        if self._fault == "empty":
            await self._finish()
            return
        if asked.is_chat:
            role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            await self._event({**asked.head(is_chunk=True), "choices": [role]})
        is_first = True
        async for ids in self._engine.decode(sequence):
            await self._step(sequence, ids, is_first=is_first)
            if self._fault is not None:
                await fail(self._fault, answer)
                if answer.is_closing or self._fault in ("truncated", "error_in_stream", "malformed"):
                    return
            is_first = False
        if settings.quirks.isdisjoint(("no_usage", "usage_with_finish")):
            for end in self._shape.ends(settings, asked, sequence, sequence.num_output):
                await self._event({**asked.head(is_chunk=True), "choices": [], **end})
        await self._finish()

    async def _step(self, sequence: MockSequence, ids: list[int], *, is_first: bool) -> None:
        asked, quirks = self._asked, self._settings.quirks
        choice = asked.choice(words(ids), is_delta=True, quirks=quirks)
        is_last = sequence.num_emitted == sequence.num_output
        choice["finish_reason"] = sequence.finish_reason if is_last else None
        if is_last and (value := self._shape.stop_value(sequence)) is not None:
            choice[self._shape.stop_field] = value
        if asked.wants_ids:
            choice["token_ids"] = ids
            if is_first and not asked.is_chat:
                choice["prompt_token_ids"] = list(sequence.prompt_ids)
        chunk: dict[str, Any] = {**asked.head(is_chunk=True), "choices": [choice]}
        if asked.wants_ids and is_first and asked.is_chat:
            chunk["prompt_token_ids"] = list(sequence.prompt_ids)
        if "usage_in_every_chunk" in quirks:
            chunk["usage"] = usage(sequence, sequence.num_output if is_last else 0)
        elif asked.continuous_usage:
            chunk["usage"] = usage(sequence, sequence.num_emitted)
        elif is_last and "usage_with_finish" in quirks:
            chunk |= {"usage": usage(sequence, sequence.num_output), **spec_report(self._settings, sequence)}
        await self._event(chunk)

    async def _event(self, chunk: dict[str, Any]) -> None:
        await self._answer.write(b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + self._end)

    async def _finish(self) -> None:
        await self._answer.write(b"data: [DONE]" + self._end)
        await self._answer.end_stream()


async def fail(fault: str, answer: HttpAnswer) -> None:
    """A failure in mid-answer, after some output."""
    if fault == "reset":
        answer.reset()
    elif fault == "hang":
        await asyncio.sleep(HANG_S)
        answer.cut()
    elif fault == "die":
        os._exit(1)
    elif fault == "truncated":
        await answer.end_stream()
    elif fault == "malformed":
        await answer.write(b"data: {not json\n\n")
        await answer.end_stream()
    elif fault == "error_in_stream":
        text = json.dumps(error_body("declared failure in mid-stream", 500))
        await answer.write(f"data: {text}\n\n".encode())
        await answer.write(b"data: [DONE]\n\n")
        await answer.end_stream()


def error_body(message: str, code: int, kind: str = "SimulatedError") -> dict[str, Any]:
    """vLLM's error object."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def usage(sequence: MockSequence, num_tokens: int) -> dict[str, Any]:
    """Token counts; cached prompt tokens are told, as vLLM does when asked for prompt token details."""
    num_prompt = len(sequence.prompt_ids)
    return {
        "prompt_tokens": num_prompt,
        "total_tokens": num_prompt + num_tokens,
        "completion_tokens": num_tokens,
        "prompt_tokens_details": {"cached_tokens": sequence.num_cached},
    }


def logprobs(ids: Sequence[int], gap: float, count: int) -> dict[str, Any]:
    """The declared gap at every token, under token ids."""
    top = [{f"token_id:{token + i}": -0.1 - gap * i for i in range(count)} for token in ids]
    return {
        "tokens": [f"token_id:{token}" for token in ids],
        "token_logprobs": [-0.1] * len(ids),
        "top_logprobs": top,
        "text_offset": [0] * len(ids),
    }


def spec_report(settings: MockSettings, sequence: MockSequence) -> dict[str, Any]:
    """metrics.speculative_decoding of a finished request, or nothing."""
    if not settings.speculates or not settings.has_detailed_metrics:
        return {}
    num_steps, num_accepted = len(sequence.accepted), sum(sequence.accepted)
    num_drafted = sum(sequence.drafted)
    histogram: Any = [sequence.accepted.count(j) for j in range(settings.num_tokens + 1)]
    if "sparse_histogram" in settings.quirks:
        histogram = {str(j): count for j, count in enumerate(histogram) if count}
    report = {
        "mean_acceptance_length": 1 + num_accepted / num_steps if num_steps else 1.0,
        "draft_acceptance_rate": num_accepted / num_drafted if num_drafted else 0.0,
        "acceptance_histogram": histogram,
        "num_spec_steps": num_steps,
        "num_accepted_draft_tokens": num_accepted,
        "num_draft_tokens": num_drafted,
        "num_spec_tokens": settings.num_tokens,
    }
    if num_steps and "sparse_histogram" not in settings.quirks:
        report |= {"per_step_accepted": sequence.accepted, "per_step_drafted": sequence.drafted}
    return {"metrics": {"speculative_decoding": report}}


def _prompt(prompt: Any) -> str | tuple[int, ...]:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and all(isinstance(item, int) for item in prompt):
        return tuple(prompt)
    raise ValueError("prompt is neither a text nor a list of token ids")


def _chat_text(messages: Any) -> str:
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)

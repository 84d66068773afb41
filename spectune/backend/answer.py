"""The JSON chunks of one answer in, one ServedRequest out; knows nothing of sockets.

Times come from chunks, token counts from usage. Whatever is not a complete answer with output is a
failure with its kind and reason.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from spectune.backend.sglang_acceptance import report_of
from spectune.errors import EngineFailure, UsageError
from spectune.metrics.per_request import steps_from_report
from spectune.records import Cut, FailureKind, Request, ServedRequest, StepRecord, TokenSource

DONE = "[DONE]"
ABORTED = ("abort", "error")
TEXT_LIMIT = 300
"""Characters of a server's message that are kept."""


class AnswerFailure(Exception):
    """Why an answer is none; becomes the failure of its request, never leaves the client."""

    def __init__(self, kind: FailureKind, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason


@dataclass(slots=True)
class Answer:
    """What has arrived of one answer."""

    text: list[str] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    prompt_ids: tuple[int, ...] | None = None
    chunk_s: list[float] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)
    finish_s: float | None = None
    finish_reason: str | None = None
    stop_reason: Any = None
    usage: dict[str, Any] | None = None
    report: dict[str, Any] | None = None
    report_doubt: str | None = None
    has_ids: bool = False

    def take_text(self, data: str, now_s: float) -> bool:
        """One event's data; True for the end mark."""
        if data.strip() == DONE:
            return True
        try:
            chunk = json.loads(data)
        except ValueError as error:
            raise AnswerFailure(FailureKind.MALFORMED, f"not JSON: {shorten(data)}") from error
        self.take(chunk, now_s)
        return False

    def take(self, chunk: Any, now_s: float) -> None:
        """One chunk of a stream, or a whole body."""
        if not isinstance(chunk, dict):
            raise AnswerFailure(FailureKind.MALFORMED, f"not an object: {shorten(json.dumps(chunk))}")
        if (message := error_message(chunk)) is not None:
            raise AnswerFailure(FailureKind.ERROR_IN_STREAM, message)
        if isinstance(usage := chunk.get("usage"), dict):
            self.usage = usage
        if isinstance(metrics := chunk.get("metrics"), dict):
            report = metrics.get("speculative_decoding")
            self.report = report if isinstance(report, dict) else self.report
        if isinstance(extension := chunk.get("sglext"), dict):
            self._take_details(extension.get("spec_tokens_details"))
        self._take_prompt_ids(chunk)
        choices = chunk.get("choices") or ()
        if not isinstance(choices, list | tuple):
            raise AnswerFailure(FailureKind.MALFORMED, f"choices are {shorten(json.dumps(choices))}")
        for choice in choices:
            if not isinstance(choice, dict):
                raise AnswerFailure(FailureKind.MALFORMED, f"a choice is {shorten(json.dumps(choice))}")
            if choice.get("index", 0) == 0:
                self._take_choice(choice, now_s)

    def build(
        self,
        request: Request,
        *,
        scheduled_s: float,
        sent_s: float,
        ended_s: float,
        is_streamed: bool = True,
    ) -> ServedRequest:
        """The record of a complete answer; AnswerFailure if it has no output or no finish."""
        if self.finish_reason in ABORTED:
            raise AnswerFailure(FailureKind.ERROR_IN_STREAM, f"the server ended it with {self.finish_reason}")
        if not self.chunk_s:
            raise AnswerFailure(FailureKind.EMPTY, self._why_empty())
        if self.finish_reason is None:
            raise AnswerFailure(FailureKind.TRUNCATED, "the answer has no finish reason")
        num_tokens, source = self._count()
        has_all_ids = self.has_ids and len(self.output_ids) == num_tokens
        steps, why_not = self._steps(num_tokens)
        return ServedRequest(
            request_id=request.request_id,
            category=request.category,
            scheduled_s=scheduled_s,
            sent_s=sent_s,
            ended_s=ended_s,
            first_token_s=self.chunk_s[0] if is_streamed else None,
            finish_s=self.finish_s,
            finish_reason=self.finish_reason,
            num_prompt_tokens=_count_of(self.usage, "prompt_tokens"),
            num_output_tokens=num_tokens,
            token_source=source,
            text="".join(self.text),
            prompt_ids=self.prompt_ids,
            output_ids=tuple(self.output_ids) if has_all_ids else None,
            chunk_s=tuple(self.chunk_s) if is_streamed else (),
            chunk_tokens=tuple(self.chunk_tokens) if has_all_ids and is_streamed else None,
            is_streamed=is_streamed,
            steps=steps,
            steps_reason=why_not,
            num_cached_tokens=_count_of((self.usage or {}).get("prompt_tokens_details"), "cached_tokens"),
        )

    def _take_details(self, details: Any) -> None:
        """SGLang's counts of this request, in vLLM's shape; counts that contradict each other say so."""
        if not isinstance(details, dict):
            return
        try:
            self.report = report_of(details)
        except EngineFailure as error:
            self.report, self.report_doubt = None, error.message

    def _take_prompt_ids(self, holder: dict[str, Any]) -> None:
        if self.prompt_ids is None and isinstance(ids := holder.get("prompt_token_ids"), list):
            self.prompt_ids = tuple(ids)

    def _take_choice(self, choice: dict[str, Any], now_s: float) -> None:
        self._take_prompt_ids(choice)
        text = _text_of(choice)
        ids = choice.get("token_ids")
        ids = ids if isinstance(ids, list) else []
        if text or ids:
            self.text.append(text)
            self.output_ids += ids
            self.has_ids = self.has_ids or bool(ids)
            self.chunk_s.append(now_s)
            self.chunk_tokens.append(len(ids))
            self.finish_s = now_s
        if choice.get("finish_reason") is not None:
            self.finish_reason = str(choice["finish_reason"])
            matched = choice.get("matched_stop")  # SGLang: a stop string, or the id of an end token
            self.stop_reason = matched if isinstance(matched, str) else choice.get("stop_reason")
            self.finish_s = now_s

    def _why_empty(self) -> str:
        counted = _count_of(self.usage, "completion_tokens")
        if counted:
            return f"no output received: {counted} tokens were counted, none of them is text"
        return "no output received"

    def _count(self) -> tuple[int | None, TokenSource | None]:
        counted = _count_of(self.usage, "completion_tokens")
        if counted:  # 0 beside output is a counter that was never filled
            return counted, TokenSource.USAGE
        if self.has_ids:
            return len(self.output_ids), TokenSource.TOKEN_IDS
        return None, None

    def _steps(self, num_tokens: int | None) -> tuple[tuple[StepRecord, ...] | None, str | None]:
        if self.report is None or num_tokens is None:
            return None, self.report_doubt
        cut = Cut.LENGTH
        if self.finish_reason != "length":
            cut = Cut.EOS if self.stop_reason is None else Cut.STOP
        try:
            return steps_from_report(
                self.report,
                num_output_tokens=num_tokens,
                cut=cut,
                chunk_tokens=self._event_tokens(num_tokens),
            ), None
        except (EngineFailure, UsageError) as error:
            return None, error.message
        except (TypeError, ValueError) as error:
            return None, f"the server's report of drafts is damaged: {error}"

    def _event_tokens(self, num_tokens: int) -> list[int] | None:
        """Tokens of the events that carried some, where their ids account for every token of a stream."""
        if not self.has_ids or len(self.output_ids) != num_tokens or len(self.chunk_s) < 2:
            return None
        return [count for count in self.chunk_tokens if count > 0]


def error_message(chunk: dict[str, Any]) -> str | None:
    """The message of an error object, however deep it lies; None for anything else."""
    error = chunk.get("error")
    if error is None and chunk.get("object") == "error":
        error = chunk
    if error is None or error is False:
        return None
    if isinstance(error, dict):
        message = error.get("message")
        return shorten(str(message)) if message else shorten(json.dumps(error))
    return shorten(str(error))


def shorten(text: str) -> str:
    """One line of at most TEXT_LIMIT characters."""
    line = " ".join(text.split())
    return line if len(line) <= TEXT_LIMIT else f"{line[:TEXT_LIMIT]}..."


def _text_of(choice: dict[str, Any]) -> str:
    """Everything that a choice says: text, content, reasoning, refusal, arguments of tool calls."""
    told = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
    if not isinstance(told, dict):
        raise AnswerFailure(FailureKind.MALFORMED, f"a delta is {shorten(json.dumps(told))}")
    reasoning = told.get("reasoning_content") or told.get("reasoning")
    parts = [reasoning, told.get("content"), told.get("refusal")]
    for call in told.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, dict) else None
        parts += [function.get("name"), function.get("arguments")] if isinstance(function, dict) else []
    return "".join(_plain(part) for part in parts)


def _plain(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, list):
        return "".join(str(piece.get("text") or "") for piece in part if isinstance(piece, dict))
    return ""


def _count_of(holder: Any, name: str) -> int | None:
    value = holder.get(name) if isinstance(holder, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None

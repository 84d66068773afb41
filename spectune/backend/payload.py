"""A request as the JSON body of a server. Every sampling setting is sent, none is left to a default.

Servers fill what is absent from the model's generation config, so an unsent temperature is not 0.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from spectune.records import Request, Sampling

Messages = list[dict[str, str]]


class Endpoint(enum.StrEnum):
    """Which route of the OpenAI protocol is asked."""

    COMPLETIONS = "completions"
    CHAT = "chat"

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self is Endpoint.CHAT else "/v1/completions"


class Dialect(enum.StrEnum):
    """Which fields beyond OpenAI's own a server takes."""

    OPENAI = "openai"
    VLLM = "vllm"
    SGLANG = "sglang"


def user_message(request: Request) -> Messages:
    """The prompt's text as one message of the user."""
    return [{"role": "user", "content": request.prompt_text}]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """How requests are put and how long an answer may take.

    Args:
        endpoint: completions sends `prompt_ids` where there are any, else the text; chat sends messages.
        has_token_ids: ask for the ids of prompt and output (vLLM's return_token_ids).
        connect_timeout_s, silence_timeout_s, timeout_s: longest wait for a connection, for the next
            byte, for the whole answer.
        extra_body: fields added to every body, last.
        messages: the chat of a request.
    """

    endpoint: Endpoint = Endpoint.COMPLETIONS
    dialect: Dialect = Dialect.VLLM
    is_streaming: bool = True
    has_token_ids: bool = True
    connect_timeout_s: float = 10.0
    silence_timeout_s: float = 120.0
    timeout_s: float = 600.0
    headers: Mapping[str, str] = field(default_factory=dict)
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    messages: Callable[[Request], Messages] = user_message


def request_body(request: Request, served_model: str, options: ClientOptions) -> dict[str, Any]:
    """The body of one request."""
    body: dict[str, Any] = {"model": served_model, "n": 1}
    if options.endpoint is Endpoint.CHAT:
        body["messages"] = options.messages(request)
    else:
        body["prompt"] = list(request.prompt_ids) if request.prompt_ids else request.prompt_text
    body |= sampling_fields(request.sampling, options.dialect)
    limit = "max_completion_tokens" if options.endpoint is Endpoint.CHAT else "max_tokens"
    body[limit] = body.pop("max_tokens")
    body["seed"] = request_seed(request)
    if options.is_streaming:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if options.has_token_ids and _tells_ids(options):
        body["return_token_ids"] = True
    if options.dialect is Dialect.SGLANG:
        body["return_spec_tokens_details"] = True
    return {**body, **options.extra_body}


def _tells_ids(options: ClientOptions) -> bool:
    """Whether the server takes the wish for token ids; SGLang refuses it in a streamed chat."""
    is_streamed_chat = options.endpoint is Endpoint.CHAT and options.is_streaming
    return options.dialect is Dialect.VLLM or (options.dialect is Dialect.SGLANG and not is_streamed_chat)


def sampling_fields(sampling: Sampling, dialect: Dialect = Dialect.VLLM) -> dict[str, Any]:
    """Every sampling setting under the server's names; belongs into the fingerprint of a run."""
    fields: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "max_tokens": sampling.max_tokens,
    }
    if sampling.stop:
        fields["stop"] = list(sampling.stop)
    if dialect is not Dialect.OPENAI:
        fields |= {
            # all tokens are 0 in vLLM and -1 in SGLang, which refuses 0
            "top_k": -1 if dialect is Dialect.SGLANG and sampling.top_k == 0 else sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": 1.0,
            "ignore_eos": sampling.ignore_eos,
        }
    return fields


def request_seed(request: Request) -> int:
    """A seed of the request's own, 31 bits: equal in every arm, different between samples of a prompt."""
    text = f"{request.sampling.seed}|{request.request_id}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1

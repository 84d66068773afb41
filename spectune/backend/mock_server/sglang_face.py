"""SGLang's routes over the declared engine, fields as SGLang 0.5.23 sends them.

Every answer that can carry it says that it is simulated.
"""

from __future__ import annotations

from typing import Any

from spectune.backend.mock_server.engine import EOS, MockSequence, words
from spectune.backend.mock_server.http import HttpAnswer, HttpRequest
from spectune.backend.mock_server.metrics_page import sglang_metrics_page
from spectune.backend.mock_server.settings import MockSettings
from spectune.backend.mock_server.vllm_face import LABEL, Asked, Shape, VllmFace, error_body, usage

VERSION = "0.5.23"

META_INFO = (
    "id",
    "finish_reason",
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "e2e_latency",
)
"""Fields of meta_info that this face fills."""

SPEC_DETAILS = (
    "spec_accept_rate",
    "spec_accept_length",
    "spec_num_correct_drafts",
    "spec_num_proposed_drafts",
    "spec_verify_ct",
    "spec_correct_drafts_histogram",
)
"""The same in meta_info and in spec_tokens_details."""

SERVER_INFO = (
    "model_path",
    "served_model_name",
    "max_running_requests",
    "disable_radix_cache",
    "speculative_algorithm",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
)
"""Resolved arguments that this face tells; more through the settings."""

INTERNAL_STATE = (
    "effective_max_running_requests_per_dp",
    "last_gen_throughput",
    "memory_usage",
    "avg_spec_accept_length",
)


class SglangShape(Shape):
    """sglext in an event of its own, then usage; matched_stop instead of stop_reason."""

    stop_field = "matched_stop"

    def ends(
        self, settings: MockSettings, asked: Asked, sequence: MockSequence, num_tokens: int
    ) -> list[dict[str, Any]]:
        ends: list[dict[str, Any]] = []
        if asked.wants_details and (details := spec_details(settings, sequence, num_tokens)):
            ends.append({"sglext": {"spec_tokens_details": details}})
        if asked.includes_usage:
            ends.append({"usage": usage(sequence, num_tokens)})
        return ends

    def stop_value(self, sequence: MockSequence) -> Any:
        return EOS if sequence.finish_reason == "stop" else None


class SglangFace(VllmFace):
    """Answers one connection's requests as SGLang does."""

    shape = SglangShape()

    def __init__(self, settings: MockSettings) -> None:
        super().__init__(settings)
        self._flushed = (0, 0)  # steps and accepted drafts at the last flush

    async def answer(self, request: HttpRequest, answer: HttpAnswer) -> None:
        """Route one request."""
        route = (request.method, request.path)
        if request.path == "/health_generate":
            await answer.send(200 if self._engine.is_up else 503, b"")
        elif route in (("GET", "/server_info"), ("GET", "/get_server_info")):
            await answer.send_json(200, self._info())
        elif request.path == "/flush_cache":
            self._engine.reset_cache()
            counters = self._engine.counters
            self._flushed = (counters.num_steps, counters.num_accepted)
            await answer.send(200, b"Cache flushed.\n", "text/plain")
        elif route == ("GET", "/metrics"):
            page = sglang_metrics_page(self._settings, self._engine)
            await answer.send(200, page.encode(), "text/plain; version=0.0.4; charset=utf-8")
        elif route == ("POST", "/generate"):
            await self._native(request, answer)
        elif route in (("GET", "/version"), ("POST", "/reset_prefix_cache")):
            await answer.send_json(404, {"detail": "Not Found"})
        elif request.path == "/v1/chat/completions" and refuses_ids(request):
            message = "return_token_ids is not supported with streaming on /v1/chat/completions"
            await answer.send_json(400, error_body(message, 400))
        elif request.path.endswith("completions") and (reason := bad_top_k(request)) is not None:
            await answer.send_json(400, error_body(reason, 400))
        else:
            await super().answer(request, answer)

    async def _native(self, request: HttpRequest, answer: HttpAnswer) -> None:
        """/generate, not streamed: text, ids and meta_info."""
        try:
            body = request.json()
            prompt = body["input_ids"] if "input_ids" in body else body["text"]
            params = body.get("sampling_params") or {}
            sequence = self._engine.sequence(
                prompt,
                int(params.get("max_new_tokens", 16)),
                ignores_eos=bool(params.get("ignore_eos")),
            )
        except (ValueError, KeyError, TypeError) as error:
            await answer.send_json(400, error_body(f"bad request: {error}", 400))
            return
        ids: list[int] = []
        async for step in self._engine.decode(sequence):
            ids += step
        meta = meta_info(self._settings, sequence, len(ids))
        await answer.send_json(200, {"text": words(ids), "output_ids": ids, "meta_info": meta})

    def _info(self) -> dict[str, Any]:
        settings, counters = self._settings, self._engine.counters
        state: dict[str, Any] = {
            "effective_max_running_requests_per_dp": settings.max_num_seqs,
            "last_gen_throughput": 0.0,
            "memory_usage": {"token_capacity": settings.max_model_len * settings.max_num_seqs},
        }
        steps, accepted = counters.num_steps - self._flushed[0], counters.num_accepted - self._flushed[1]
        if settings.speculates and steps:
            state["avg_spec_accept_length"] = 1 + accepted / steps
        told: dict[str, Any] = {
            "model_path": settings.model,
            "served_model_name": settings.model,
            "max_running_requests": settings.max_num_seqs,
            "disable_radix_cache": not settings.has_prefix_cache,
            "speculative_algorithm": "EAGLE3" if settings.speculates else None,
            "speculative_num_steps": settings.num_tokens if settings.speculates else None,
            "speculative_eagle_topk": settings.topk if settings.speculates else None,
            "speculative_num_draft_tokens": settings.width if settings.speculates else None,
        }
        return {
            **told,
            "internal_states": [state],
            **settings.server_info,
            "version": f"{VERSION}+simulated",
            "is_simulated": True,
            "note": LABEL,
        }


def spec_details(settings: MockSettings, sequence: MockSequence, num_tokens: int) -> dict[str, Any]:
    """SGLang's counts of a finished request; nothing where no step was verified.

    Steps without drafts count as verifications, the proposed ones are of the width at the start, and
    the length has the prefill's token in it: as SGLang computes them.
    """
    if not settings.speculates or not sequence.num_steps or not settings.has_detailed_metrics:
        return {}
    accepted = [*sequence.accepted, *[0] * (sequence.num_steps - len(sequence.accepted))]
    proposed = sequence.num_steps * (settings.width - 1)
    return {
        "spec_accept_rate": sum(accepted) / proposed,
        "spec_accept_length": num_tokens / sequence.num_steps,
        "spec_num_correct_drafts": sum(accepted),
        "spec_num_proposed_drafts": proposed,
        "spec_verify_ct": sequence.num_steps,
        "spec_correct_drafts_histogram": [accepted.count(j) for j in range(max(accepted) + 1)],
    }


def meta_info(settings: MockSettings, sequence: MockSequence, num_tokens: int) -> dict[str, Any]:
    """meta_info of a finished request of /generate."""
    reason: dict[str, Any] = {"type": sequence.finish_reason}
    reason |= {"matched": EOS} if sequence.finish_reason == "stop" else {"length": num_tokens}
    return {
        "id": "simulated",
        "finish_reason": reason,
        "prompt_tokens": len(sequence.prompt_ids),
        "completion_tokens": num_tokens,
        "cached_tokens": sequence.num_cached,
        "e2e_latency": 0.0,
        **spec_details(settings, sequence, num_tokens),
    }


def refuses_ids(request: HttpRequest) -> bool:
    """SGLang takes return_token_ids in a streamed chat for an error."""
    body = _body(request)
    return bool(body.get("stream")) and bool(body.get("return_token_ids"))


def bad_top_k(request: HttpRequest) -> str | None:
    """SGLang's words for a top_k of 0, which is vLLM's for all tokens."""
    top_k = _body(request).get("top_k")
    if isinstance(top_k, int) and top_k < 1 and top_k != -1:
        return f"top_k must be -1 (disable) or at least 1, got {top_k}."
    return None


def _body(request: HttpRequest) -> dict[str, Any]:
    try:
        body = request.json()
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}

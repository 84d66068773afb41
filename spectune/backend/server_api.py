"""What a serving engine tells about itself, asked once: health, version, models, counters.

Plain synchronous calls; anything that cannot be had raises EngineFailure with the address and reason.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import httpx

from spectune.backend.client import LOOPBACK, ClientOptions, Dialect, run_requests, server_root
from spectune.backend.prometheus import Scrape, parse_exposition
from spectune.backend.server_words import VLLM_WORDS
from spectune.errors import EngineFailure, UsageError
from spectune.records import Request, Sampling, ServedRequest
from spectune.workload.arrivals import ClosedLoop

TIMEOUT_S = 10.0
GAP_TIMEOUT_S = 60.0


def is_healthy(base_url: str, *, timeout_s: float = TIMEOUT_S) -> bool:
    """Whether /health answers 200. Not enough to measure: see `is_ready`."""
    try:
        return _get(base_url, "/health", timeout_s).status_code == httpx.codes.OK
    except EngineFailure:
        return False


def is_ready(base_url: str, served_model: str, *, timeout_s: float = TIMEOUT_S) -> bool:
    """Whether /health answers 200 and a completion of one token succeeds."""
    return is_healthy(base_url, timeout_s=timeout_s) and (
        probe(base_url, served_model, timeout_s=timeout_s).is_success
    )


def probe(
    base_url: str,
    served_model: str,
    *,
    timeout_s: float = TIMEOUT_S,
    dialect: Dialect = Dialect.VLLM,
) -> ServedRequest:
    """A completion of one token, asked under the name that the load will use."""
    request = Request(
        request_id="probe",
        prompt_ids=(),
        prompt_text="Hello",
        category="probe",
        sampling=Sampling(max_tokens=1, ignore_eos=True),
    )
    options = ClientOptions(
        connect_timeout_s=timeout_s,
        silence_timeout_s=timeout_s,
        timeout_s=timeout_s,
        has_token_ids=False,
        dialect=dialect,
    )
    return run_requests(base_url, served_model, [request], ClosedLoop(concurrency=1), options)[0]


def engine_version(base_url: str) -> dict[str, Any]:
    """The object of /version: vLLM's has `version`, spectune's mock server also `is_simulated`."""
    return _json(base_url, "/version")


def server_info(base_url: str) -> dict[str, Any]:
    """The object of SGLang's /server_info: resolved arguments, state, version.

    Its acceptance lengths count since the start or the last flush, never for a window.
    """
    return _json(base_url, "/server_info")


def served_models(base_url: str) -> tuple[str, ...]:
    """The names in /v1/models; requests must use one of them letter for letter."""
    listed = _json(base_url, "/v1/models").get("data")
    names = tuple(str(row["id"]) for row in listed or () if isinstance(row, dict) and "id" in row)
    if not names:
        raise EngineFailure(f"{server_root(base_url)}/v1/models lists no model")
    return names


def check_served_model(base_url: str, served_model: str | None) -> str:
    """The name to ask for: the given one, or the only one served. UsageError names both sides."""
    names = served_models(base_url)
    if served_model in names:
        return str(served_model)
    if served_model is None and len(names) == 1:
        return names[0]
    asked = "no model was named" if served_model is None else f"{served_model} is not served"
    raise UsageError(
        f"{asked} at {server_root(base_url)}, which serves {', '.join(names)}",
        hint="name one of the served models",
    )


def scrape(base_url: str) -> Scrape:
    """The counters of /metrics at this moment."""
    response = _get(base_url, "/metrics", TIMEOUT_S)
    if response.status_code != httpx.codes.OK:
        raise EngineFailure(f"{response.url} answered HTTP {response.status_code}")
    return parse_exposition(response.text)


def reset_prefix_cache(base_url: str, path: str = VLLM_WORDS.reset_path) -> bool:
    """Empty the prefix cache; False where the server has no such route (vLLM: VLLM_SERVER_DEV_MODE=1)."""
    with _http(TIMEOUT_S, base_url) as http:
        try:
            status = http.post(server_root(base_url) + path).status_code
        except httpx.HTTPError as error:
            raise EngineFailure(f"{server_root(base_url)}{path}: {_why(error)}") from error
    return status == httpx.codes.OK


def next_gap(base_url: str, served_model: str, ids: Sequence[int]) -> float | None:
    """Log-probability of the likeliest token after `ids` less that of the second; None where the server
    does not tell both.

    vLLM 0.32, /v1/completions with `logprobs`; keys are ids there, because two tokens may have one text.
    """
    body = {
        "model": served_model,
        "prompt": list(ids),
        "max_tokens": 1,
        "temperature": 0.0,
        "logprobs": 2,
        "return_tokens_as_token_ids": True,
    }
    url = f"{server_root(base_url)}/v1/completions"
    try:
        with _http(GAP_TIMEOUT_S, base_url) as http:
            told = http.post(url, json=body).json()
        first, second = sorted(told["choices"][0]["logprobs"]["top_logprobs"][0].values())[-2:][::-1]
        gap = float(first) - float(second)
    except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError, AttributeError):
        return None
    return gap if math.isfinite(gap) else None


def _json(base_url: str, path: str) -> dict[str, Any]:
    response = _get(base_url, path, TIMEOUT_S)
    if response.status_code != httpx.codes.OK:
        raise EngineFailure(f"{response.url} answered HTTP {response.status_code}")
    try:
        body = response.json()
    except ValueError as error:
        raise EngineFailure(f"{response.url} did not answer JSON: {error}") from error
    if not isinstance(body, dict):
        raise EngineFailure(f"{response.url} did not answer an object")
    return body


def _get(base_url: str, path: str, timeout_s: float) -> httpx.Response:
    url = server_root(base_url) + path
    with _http(timeout_s, base_url) as http:
        try:
            return http.get(url)
        except httpx.HTTPError as error:
            raise EngineFailure(f"{url}: {_why(error)}") from error


def _http(timeout_s: float, base_url: str) -> httpx.Client:
    return httpx.Client(timeout=timeout_s, trust_env=httpx.URL(base_url).host not in LOOPBACK)


def _why(error: Exception) -> str:
    return str(error) or type(error).__name__

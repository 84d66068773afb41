"""`spectune mock-server`: a simulated serving engine to try clients and sweeps against."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spectune.cli.console import say
from spectune.errors import UsageError

if TYPE_CHECKING:
    from spectune.backend.mock_server import MockServer, MockSettings


def mock_server(
    *,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port to listen on; 0 takes a free one.")] = 8000,
    model: Annotated[
        str, typer.Option("--model", "--served-model-name", help="Name that requests must ask for.")
    ] = "mock-model",
    engine: Annotated[
        str, typer.Option("--engine", help="Whose protocol is spoken: vllm or sglang.")
    ] = "vllm",
    topk: Annotated[
        int, typer.Option("--topk", "--speculative-eagle-topk", help="Told by sglang: children a node.")
    ] = 1,
    num_draft_tokens: Annotated[
        int | None,
        typer.Option(
            "--num-draft-tokens",
            "--speculative-num-draft-tokens",
            help="Told by sglang: tokens a step verifies, the root included; those of a chain if not given.",
        ),
    ] = None,
    num_tokens: Annotated[
        int, typer.Option("--num-tokens", "--num-speculative-tokens", help="Drafts of every step; 0: none.")
    ] = 0,
    speculative_config: Annotated[
        str | None,
        typer.Option("--speculative-config", "-sc", help="vLLM's JSON; num_speculative_tokens are read."),
    ] = None,
    acceptance: Annotated[
        str,
        typer.Option(
            "--acceptance", help="Acceptance of draft 1, 2, ... given the ones before; the last holds."
        ),
    ] = "0.7",
    prefill_ms: Annotated[float, typer.Option("--prefill-ms", help="Until the first token.")] = 0.0,
    step_ms: Annotated[float, typer.Option("--step-ms", help="Of a decode step.")] = 0.0,
    step_ms_per_sequence: Annotated[
        float, typer.Option("--step-ms-per-sequence", help="More of a step for each running sequence.")
    ] = 0.0,
    draft_ms: Annotated[float, typer.Option("--draft-ms", help="More of a step for each draft.")] = 0.0,
    output_tokens: Annotated[
        int | None, typer.Option("--output-tokens", help="Where answers end by themselves.")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option("--max-num-seqs", help="Sequences decoded together.")] = 256,
    prefix_caching: Annotated[
        bool,
        typer.Option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            help="Known beginnings of prompts cost nothing.",
        ),
    ] = True,
    start_delay_s: Annotated[
        float, typer.Option("--start-delay-s", help="How long /health answers 503 at first.")
    ] = 0.0,
    fail: Annotated[
        list[str] | None,
        typer.Option(
            "--fail",
            help="KIND, KIND@N (request N alone) or KIND@N+ (from N on): http_400, http_404, http_500, "
            "error_in_stream, empty, truncated, reset, hang, malformed, die.",
        ),
    ] = None,
    quirk: Annotated[
        list[str] | None, typer.Option("--quirk", help="An oddity of the stream, for example ping or crlf.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of acceptance.")] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the address as JSON on stdout once it listens.")
    ] = False,
) -> None:
    """Serve vLLM's or SGLang's protocol with declared times and acceptance; simulated, needs no model.

    Routes: /health, /version, /v1/models, /v1/completions, /v1/chat/completions, /metrics and
    /reset_prefix_cache. Without any time declared it answers as fast as it can.
    """
    from spectune.backend.mock_server.running import announce, listen
    from spectune.backend.mock_server.settings import Fault, MockSettings

    drafts, schedule = _speculation(speculative_config, num_tokens)
    settings = MockSettings(
        model=model,
        face=engine,
        topk=topk,
        num_draft_tokens=num_draft_tokens,
        num_tokens=drafts,
        schedule=schedule,
        acceptance=_fractions(acceptance),
        prefill_s=prefill_ms / 1e3,
        step_s=step_ms / 1e3,
        step_s_per_sequence=step_ms_per_sequence / 1e3,
        draft_s=draft_ms / 1e3,
        output_tokens=output_tokens,
        max_num_seqs=max_num_seqs,
        has_prefix_cache=prefix_caching,
        start_delay_s=start_delay_s,
        faults=tuple(Fault.parse(text) for text in fail or ()),
        quirks=frozenset(quirk or ()),
        seed=seed,
    )

    def started(server: MockServer) -> None:
        if as_json:
            announce(server)
        say(_greeting(server, settings))

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(listen(settings, host, port, started=started))


def _greeting(server: MockServer, settings: MockSettings) -> str:
    drafts = f"{settings.num_tokens} drafts a step" if settings.speculates else "no speculation"
    return f"simulated server: {server.url}, model {server.model}, {drafts}; end it with Ctrl-C"


def _fractions(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(
            f"--acceptance {text} is not a list of fractions", hint="for example 0.8,0.6"
        ) from error


def _speculation(text: str | None, num_tokens: int) -> tuple[int, tuple[tuple[int, int, int], ...]]:
    """Drafts and schedule from vLLM's JSON, or else from the flag."""
    if text is None:
        return num_tokens, ()
    try:
        config: dict[str, Any] = json.loads(text)
        drafts = int(config["num_speculative_tokens"])
        rows = config.get("num_speculative_tokens_per_batch_size") or ()
        return drafts, tuple((int(a), int(b), int(k)) for a, b, k in rows)
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"--speculative-config {text} cannot be read: {error}",
            hint='for example {"method": "ngram", "num_speculative_tokens": 3}',
        ) from error

"""/metrics as vLLM and as SGLang export them; one series an engine in vLLM."""

from __future__ import annotations

from spectune.backend.mock_server.engine import Engine
from spectune.backend.mock_server.settings import MockSettings


def metrics_page(settings: MockSettings, engine: Engine) -> str:
    """The text exposition; counts are spread over the declared number of engines."""
    counters = engine.counters
    lines = ["# simulated by spectune mock-server"]
    for name, value in (
        ("prompt_tokens", counters.prompt_tokens),
        ("generation_tokens", counters.generation_tokens),
        ("prefix_cache_queries", counters.cache_queries),
        ("prefix_cache_hits", counters.cache_hits),
        ("num_preemptions", 0),
    ):
        lines += _counter(settings, f"vllm:{name}", value, counters.created)
    for name, value in (
        ("num_requests_running", engine.num_running),
        ("num_requests_waiting", engine.num_waiting),
    ):
        lines += [f"# TYPE vllm:{name} gauge"]
        lines += [
            f"vllm:{name}{_labels(settings, index)} {float(share)}"
            for index, share in enumerate(_shares(value, settings.num_engines))
        ]
    for name, seconds in (
        ("request_queue_time_seconds", counters.queue_s),
        ("e2e_request_latency_seconds", counters.life_s),
    ):
        labels = _labels(settings, 0)
        lines += [f"# TYPE vllm:{name} histogram", f"vllm:{name}_sum{labels} {seconds!r}"]
        lines += [f"vllm:{name}_count{labels} {float(counters.num_requests)}"]
    if settings.speculates:
        for name, value in (
            ("drafts", counters.num_drafts),
            ("draft_tokens", counters.num_draft_tokens),
            ("accepted_tokens", counters.num_accepted),
        ):
            lines += _counter(settings, f"vllm:spec_decode_num_{name}", value, counters.created)
        for position, value in enumerate(counters.accepted_per_position):
            name = "vllm:spec_decode_num_accepted_tokens_per_pos"
            lines += _counter(settings, name, value, counters.created, position=position)
    return "\n".join(lines) + "\n"


def sglang_metrics_page(settings: MockSettings, engine: Engine) -> str:
    """SGLang's counters and gauges; its gauges of speculation say nothing of a window."""
    counters = engine.counters
    labels = f'{{engine_type="unified",model_name="{_escaped(settings.model)}"}}'
    lines = ["# simulated by spectune mock-server"]
    for name, value in (
        ("prompt_tokens", counters.prompt_tokens),
        ("generation_tokens", counters.generation_tokens),
        ("cached_tokens", counters.cache_hits),
        ("num_requests", counters.num_requests),
        ("num_retracted_requests", 0),
        ("spec_verify_calls", counters.num_steps if settings.speculates else 0),
    ):
        lines += [
            f"# TYPE sglang:{name}_total counter",
            f"sglang:{name}_total{labels} {float(value)}",
        ]
    for name, seconds in (
        ("queue_time_seconds", counters.queue_s),
        ("e2e_request_latency_seconds", counters.life_s),
    ):
        lines += [f"# TYPE sglang:{name} histogram", f"sglang:{name}_sum{labels} {seconds!r}"]
        lines += [f"sglang:{name}_count{labels} {float(counters.num_requests)}"]
    gauges: list[tuple[str, float]] = [
        ("num_running_reqs", engine.num_running),
        ("num_queue_reqs", engine.num_waiting),
    ]
    if settings.speculates:
        gauges += [
            ("spec_num_steps", settings.drafts_for(engine.num_running)),
            ("spec_num_draft_tokens", settings.width),
        ]
        if counters.num_steps:
            gauges.append(("spec_accept_length", 1 + counters.num_accepted / counters.num_steps))
    for name, level in gauges:
        lines += [f"# TYPE sglang:{name} gauge", f"sglang:{name}{labels} {float(level)}"]
    return "\n".join(lines) + "\n"


def _counter(
    settings: MockSettings, name: str, value: int, created: float, *, position: int | None = None
) -> list[str]:
    lines = [f"# HELP {name}_total simulated", f"# TYPE {name}_total counter"] if not position else []
    for index, share in enumerate(_shares(value, settings.num_engines)):
        labels = _labels(settings, index, position)
        lines += [f"{name}_total{labels} {float(share)}", f"{name}_created{labels} {created!r}"]
    return lines


def _shares(value: int, num_engines: int) -> list[int]:
    """`value` in whole parts that sum to it."""
    each, rest = divmod(value, num_engines)
    return [each + (index < rest) for index in range(num_engines)]


def _labels(settings: MockSettings, index: int, position: int | None = None) -> str:
    model = _escaped(settings.model)
    place = "" if position is None else f',position="{position}"'
    return f'{{engine="{index}",model_name="{model}"{place}}}'


def _escaped(model: str) -> str:
    return model.replace("\\", "\\\\").replace('"', '\\"')

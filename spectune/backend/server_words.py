"""What an engine calls the counters and routes that every measurement reads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerWords:
    """Names of series in /metrics and of the route that empties the prefix cache.

    `has_spec_counters` says whether counters tell what was drafted; without them only requests do.
    """

    queue_s: str
    life_s: str
    preemptions: str
    cache_queries: str
    cache_hits: str
    reset_path: str
    has_spec_counters: bool = True


VLLM_WORDS = ServerWords(
    queue_s="vllm:request_queue_time_seconds_sum",
    life_s="vllm:e2e_request_latency_seconds_sum",
    preemptions="vllm:num_preemptions_total",
    cache_queries="vllm:prefix_cache_queries_total",
    cache_hits="vllm:prefix_cache_hits_total",
    reset_path="/reset_prefix_cache",
)
SGLANG_WORDS = ServerWords(
    queue_s="sglang:queue_time_seconds_sum",
    life_s="sglang:e2e_request_latency_seconds_sum",
    preemptions="sglang:num_retracted_requests_total",
    cache_queries="sglang:prompt_tokens_total",
    cache_hits="sglang:cached_tokens_total",
    reset_path="/flush_cache",
    has_spec_counters=False,  # gauges of the last decode iterations: not what a window did
)

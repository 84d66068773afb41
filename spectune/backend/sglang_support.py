"""What SGLang 0.5.23 can run: a configuration and the server's settings in, a reason or None out.

Sources: srt/arg_groups/speculative_hook.py and srt/speculative/eagle_utils.py of the wheel. A point with
a reason is listed and never launched.
"""

from __future__ import annotations

from spectune.records import Method, SpecConfig, chain_or_tree_pool

ALGORITHMS = {
    Method.EAGLE3.value: "EAGLE3",
    Method.NGRAM.value: "NGRAM",
    Method.DRAFT_MODEL.value: "STANDALONE",
}
MODEL_METHODS = (Method.EAGLE3.value, Method.DRAFT_MODEL.value)
TREE_METHODS = frozenset(ALGORITHMS)

PAGED_TREE_BACKENDS = ("flashinfer", "fa3", "triton")
"""Attention backends that verify a tree with pages of several tokens."""
PAGED_NGRAM_BACKENDS = ("flashinfer",)
CHAIN_ONLY_BACKENDS = ("trtllm_mha",)
MAX_TRIE_DEPTH = 18
"""Longest branch of the n-gram trie, SGLang's default."""


def unsupported(
    config: SpecConfig,
    *,
    attention_backend: str | None = None,
    page_size: int | None = None,
    has_dp_attention: bool = False,
) -> str | None:
    """Why SGLang cannot run `config` with these settings of the server, or None."""
    if config.is_off:
        return None
    if config.method not in ALGORITHMS:
        known = ", ".join(ALGORITHMS)
        return f"sglang has no method {config.method}, it has {known}"
    if reason := infeasible(config.num_steps, config.topk, config.num_draft_tokens):
        return reason
    if config.method in (Method.NGRAM, Method.DRAFT_MODEL) and has_dp_attention:
        return f"{ALGORITHMS[config.method]} does not run with attention data parallelism"
    if config.method == Method.NGRAM and config.num_steps > MAX_TRIE_DEPTH:
        return f"the trie of NGRAM is {MAX_TRIE_DEPTH} tokens deep, not {config.num_steps}"
    if (config.is_standby or config.option("adaptive")) and not can_adapt(config):
        return (
            f"sglang changes the depth while it serves for EAGLE3 chains only, not for {_kind(config)}: "
            "no start that drafts nothing"
        )
    return _unsupported_tree(config, attention_backend, page_size or 1)


def infeasible(num_steps: int, topk: int, num_draft_tokens: int) -> str | None:
    """Why the tree builder cannot build it, or None. It takes the best N-1 of topk + (D-1)·topk² nodes."""
    pool = chain_or_tree_pool(num_steps, topk)
    if num_draft_tokens - 1 > pool:
        return f"needs {num_draft_tokens - 1} drafted nodes, depth {num_steps} with topk {topk} drafts {pool}"
    if topk == 1 and num_draft_tokens != num_steps + 1:
        return f"a chain of {num_steps} verifies {num_steps + 1} tokens, not {num_draft_tokens}"
    return None


def can_adapt(config: SpecConfig) -> bool:
    """Whether SGLang can switch between depths of this configuration while it serves."""
    return config.method == Method.EAGLE3 and config.is_chain


def _unsupported_tree(config: SpecConfig, backend: str | None, page_size: int) -> str | None:
    if not config.is_tree:
        return None
    if config.method != Method.NGRAM and backend in CHAIN_ONLY_BACKENDS:
        return f"attention backend {backend} verifies chains only, topk {config.topk} is a tree"
    allowed = PAGED_NGRAM_BACKENDS if config.method == Method.NGRAM else PAGED_TREE_BACKENDS
    if page_size > 1 and backend not in allowed:
        return (
            f"topk {config.topk} with page size {page_size} runs on {', '.join(allowed)}, "
            f"not on {backend or 'the default attention backend'}"
        )
    return None


def _kind(config: SpecConfig) -> str:
    return f"the tree {config.label}" if config.is_tree else ALGORITHMS.get(config.method, config.method)

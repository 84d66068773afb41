"""The grid of configurations: off first, one chain per K, trees crossed and pruned with a reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from spectune.errors import UsageError
from spectune.records import OPTION, Method, SpecConfig, chain_or_tree_pool

Pruned = tuple[tuple[str, str], ...]

TREE_METHODS = frozenset({Method.EAGLE3.value})


def build_space(
    methods: Sequence[str],
    num_tokens: Sequence[int],
    topk: Sequence[int] = (1,),
    num_draft_tokens: Sequence[int] = (),
    options: Mapping[str, Mapping[str, OPTION]] | None = None,
    draft_model: str | None = None,
    tree_methods: frozenset[str] = TREE_METHODS,
) -> tuple[tuple[SpecConfig, ...], Pruned]:
    """All configurations worth running, `off` first, and (label, reason) of those that are not.

    topk=1 gives one chain per K with N=K+1 whatever `num_draft_tokens` says; topk > 1 crosses
    K x topk x N and drops what cannot be built, N-1 > topk + (K-1)·topk², and what would be a smaller
    tree at more draft cost, K > N-1. `options` maps a method to its options; `draft_model` is the
    head of eagle3.
    """
    _check_axes(methods, num_tokens, topk, num_draft_tokens)
    configs: dict[SpecConfig, None] = {SpecConfig.off(): None}
    pruned: dict[str, str] = {}
    for method in methods:
        if method == Method.OFF:
            continue
        extra = tuple(sorted((options or {}).get(method, {}).items()))
        head = draft_model if method in (Method.EAGLE3, Method.DRAFT_MODEL) else None
        for k in topk:
            if k == 1:
                for depth in num_tokens:
                    configs[SpecConfig.chain(method, depth, draft_model=head, options=extra)] = None
                continue
            for depth in num_tokens:
                for nodes in num_draft_tokens:
                    reason = prune_reason(method, depth, k, nodes, tree_methods)
                    if reason is not None:
                        pruned[f"{method} D={depth} k={k} N={nodes}"] = reason
                        continue
                    tree = SpecConfig(
                        method=method,
                        num_steps=depth,
                        topk=k,
                        num_draft_tokens=nodes,
                        draft_model=head,
                        options=extra,
                    )
                    configs[tree] = None
    return tuple(configs), tuple(pruned.items())


def standby_configs(configs: Sequence[SpecConfig]) -> tuple[SpecConfig, ...]:
    """For each method with a model of its own its longest chain on standby: started, drafting nothing.

    Methods without one do nothing while they draft nothing.
    """
    longest: dict[str, SpecConfig] = {}
    for config in configs:
        if config.draft_model is None or config.is_tree:
            continue
        known = longest.get(config.method)
        if known is None or config.num_steps > known.num_steps:
            longest[config.method] = config
    return tuple(replace(config, options=(("standby", True), *config.options)) for config in longest.values())


def production_configs(configs: Sequence[SpecConfig]) -> tuple[SpecConfig, ...]:
    """The longest chain of each method once more, served as in production; beside itself it shows what
    prefix cache and chunked prefill change."""
    longest: dict[str, SpecConfig] = {}
    for config in configs:
        if config.is_off or config.is_tree or config.is_probe:
            continue
        known = longest.get(config.method)
        if known is None or config.num_steps > known.num_steps:
            longest[config.method] = config
    return tuple(
        replace(config, options=tuple(sorted((("production", True), *config.options))))
        for config in longest.values()
    )


def split_unsupported(
    configs: Sequence[SpecConfig], unsupported: Callable[[SpecConfig], str | None] | None
) -> tuple[tuple[SpecConfig, ...], Pruned]:
    """The configurations that an engine can run, and (label, reason) of those that it cannot."""
    if unsupported is None:
        return tuple(configs), ()
    reasons = {config: unsupported(config) for config in configs}
    refused = tuple((config.label, reason) for config, reason in reasons.items() if reason is not None)
    return tuple(config for config, reason in reasons.items() if reason is None), refused


def prune_reason(
    method: str,
    num_steps: int,
    topk: int,
    num_draft_tokens: int,
    tree_methods: frozenset[str] = TREE_METHODS,
) -> str | None:
    """Why a tree is not worth a launch, or None."""
    if method not in tree_methods:
        return f"{method} drafts chains only, topk {topk} has no meaning"
    pool = chain_or_tree_pool(num_steps, topk)
    if num_draft_tokens - 1 > pool:
        return f"needs {num_draft_tokens - 1} drafted nodes, depth {num_steps} with topk {topk} drafts {pool}"
    if num_steps > num_draft_tokens - 1:
        return (
            f"{num_draft_tokens - 1} drafted nodes never reach depth {num_steps}: the same tree as "
            f"num-tokens {num_draft_tokens - 1} at more draft cost"
        )
    return None


def _check_axes(
    methods: Sequence[str],
    num_tokens: Sequence[int],
    topk: Sequence[int],
    num_draft_tokens: Sequence[int],
) -> None:
    known = [method.value for method in Method]
    for method in methods:
        if method not in known:
            raise UsageError(f"--method {method} is not known", hint=f"one of: {', '.join(known)}")
    speculates = any(method != Method.OFF for method in methods)
    if speculates and (not num_tokens or not topk):
        raise UsageError("--num-tokens and --topk need at least one value each")
    for flag, values, least in (
        ("--num-tokens", num_tokens, 1),
        ("--topk", topk, 1),
        ("--num-draft-tokens", num_draft_tokens, 2),
    ):
        for value in values:
            if value < least:
                raise UsageError(f"{flag} {value} is below {least}")
    if speculates and any(k > 1 for k in topk) and not num_draft_tokens:
        raise UsageError(
            f"--topk {max(topk)} drafts a tree, which needs --num-draft-tokens",
            hint="for example --num-draft-tokens 8,16 (the root included)",
        )

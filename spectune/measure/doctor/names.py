"""Names that engines gave and took away: flags, JSON fields, and what each calls the draft length K.

Known versions are listed; one that is not listed is said to be unsupported, never guessed. Sources: the
argument parsers of vLLM 0.32 and 0.33 and SGLang 0.5.23, and the release notes of the others.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from spectune.errors import UsageError

Version = tuple[int, ...]

DRAFT_LENGTH_NAMES: tuple[tuple[str, Version, Version, str], ...] = (
    # engine, first version, first version that is not known, its name of K
    ("vllm", (0, 32), (0, 34), "num_speculative_tokens"),
    ("sglang", (0, 5, 23), (0, 5, 24), "speculative_num_steps"),
    ("trtllm", (1, 0), (1, 3), "num_nextn_predict_layers"),
    ("trtllm", (1, 3), (1, 4), "max_draft_len"),
    ("llama.cpp", (4300,), (8000,), "draft-max"),
    ("llama.cpp", (11000,), (12000,), "spec-draft-n-max"),
)
"""TensorRT-LLM's older name is that of its MTP heads; llama.cpp counts builds."""

RENAMED_FLAGS: dict[str, dict[str, str]] = {
    "vllm": {
        "speculative-model": '"model" in --speculative-config',
        "num-speculative-tokens": '"num_speculative_tokens" in --speculative-config',
        "speculative-draft-tensor-parallel-size": '"draft_tensor_parallel_size" in --speculative-config',
        "speculative-max-model-len": '"max_model_len" in --speculative-config',
        "speculative-model-quantization": '"quantization" in --speculative-config',
        "speculative-disable-by-batch-size": '"num_speculative_tokens_per_batch_size" in --speculative-config',
        "ngram-prompt-lookup-max": '"prompt_lookup_max" in --speculative-config',
        "ngram-prompt-lookup-min": '"prompt_lookup_min" in --speculative-config',
        "spec-decoding-acceptance-method": '"rejection_sample_method" in --speculative-config',
        "speculative-disable-mqa-scorer": "nothing: it has no successor",
        "typical-acceptance-sampler-posterior-threshold": "nothing: typical acceptance is gone",
        "typical-acceptance-sampler-posterior-alpha": "nothing: typical acceptance is gone",
        "use-v2-block-manager": "nothing: there is one block manager",
    },
    "sglang": {
        "num-speculative-tokens": "--speculative-num-steps",
        "speculative-model": "--speculative-draft-model-path",
        "speculative-config": "--speculative-algorithm, --speculative-draft-model-path and the three numbers",
        "eagle-topk": "--speculative-eagle-topk",
        "num-draft-tokens": "--speculative-num-draft-tokens",
        "speculative-num-speculative-tokens": "--speculative-num-steps",
    },
    "llama.cpp": {
        "draft-max": "--spec-draft-n-max",
        "draft": "--spec-draft-n-max",
        "draft-n": "--spec-draft-n-max",
        "draft-min": "--spec-draft-n-min",
        "draft-n-min": "--spec-draft-n-min",
        "draft-p-min": "--spec-draft-p-min",
        "draft-p-split": "--spec-draft-p-split",
    },
    "trtllm": {
        "num_nextn_predict_layers": "max_draft_len",
        "acceptance_window": "acceptance_rate_window_size",
        "acceptance_length_threshold": "acceptance_rate_threshold",
    },
}

VLLM_METHODS = (
    "ngram", "draft_model", "suffix", "custom_class", "eagle", "eagle3", "extract_hidden_states",
    "dflash", "dspark", "ngram_gpu", "mtp",
)  # fmt: skip
VLLM_REMOVED_METHODS = {"medusa": (0, 33), "mlp_speculator": (0, 33)}
_VLLM_KEYS = """
    method model num_speculative_tokens num_speculative_tokens_per_batch_size draft_tensor_parallel_size
    quantization moe_backend attention_backend kv_cache_dtype max_model_len revision code_revision
    draft_load_config enforce_eager disable_padded_drafter_batch disable_eagle_block_drop
    disable_lookahead_block_hashes draft_lm_head_quantization use_local_argmax_reduction
    use_heterogeneous_vocab prompt_lookup_max prompt_lookup_min parallel_drafting
    suffix_decoding_max_tree_depth suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor
    suffix_decoding_min_token_prob rejection_sample_method synthetic_acceptance_rates
    synthetic_acceptance_length draft_sample_method enable_adaptive_verification dspark_draft_topk
    xpress_topc fly_window_size fly_entropy_threshold fly_entropy_top_k
"""
VLLM_KEYS = frozenset(_VLLM_KEYS.split())
VLLM_RENAMED_KEYS = {
    "tensor_parallel_size": "draft_tensor_parallel_size",
    "speculative_model": "model",
    "draft_model": "model",
    "disable_by_batch_size": "num_speculative_tokens_per_batch_size",
    "speculative_disable_by_batch_size": "num_speculative_tokens_per_batch_size",
    "ngram_prompt_lookup_max": "prompt_lookup_max",
    "ngram_prompt_lookup_min": "prompt_lookup_min",
    "acceptance_method": "rejection_sample_method",
    "speculative_token_tree": "nothing: vLLM drafts chains only",
    "n_predict": "num_speculative_tokens",
}
SGLANG_ALGORITHMS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM", "DFLASH", "DSPARK", "UNO")
_SGLANG_FLAGS = """
    speculative-algorithm speculative-draft-model-path speculative-draft-model
    speculative-draft-model-revision speculative-draft-load-format speculative-draft-model-quantization
    speculative-num-steps speculative-eagle-topk speculative-num-draft-tokens
    speculative-accept-threshold-single speculative-accept-threshold-acc speculative-use-rejection-sampling
    speculative-use-block-verification speculative-token-map speculative-attention-mode
    speculative-draft-attention-backend speculative-draft-kv-cache-dtype speculative-moe-runner-backend
    speculative-moe-a2a-backend speculative-dsa-topk-backend speculative-draft-window-size
    speculative-draft-sink-size speculative-adaptive speculative-adaptive-config
    speculative-ngram-min-bfs-breadth speculative-ngram-max-bfs-breadth speculative-ngram-match-type
    speculative-ngram-max-trie-depth speculative-ngram-capacity speculative-ngram-external-corpus-path
    speculative-ngram-external-sam-budget speculative-ngram-external-corpus-max-tokens
    speculative-dflash-block-size speculative-domino-candidate-pool-size speculative-dspark-block-size
    speculative-dspark-sps-table-path speculative-dspark-confidence-sts-path
    speculative-dspark-align-verify-tokens-to-graph-tier
"""
SGLANG_FLAGS = frozenset(_SGLANG_FLAGS.split())


def parse_version(text: str) -> Version:
    """Leading numbers of a version: `0.32.0+cpu` is (0, 32, 0), `b11000` is (11000,)."""
    match = re.match(r"[vb]?(\d+(?:\.\d+)*)", text.strip())
    if match is None:
        raise UsageError(f"--engine-version {text!r} is no version", hint="such as 0.33.0 or b11000")
    return tuple(int(part) for part in match.group(1).split("."))


def draft_length_name(engine: str, version: str) -> str:
    """What this version of the engine calls the draft length K. UsageError for one that is not known."""
    parsed = parse_version(version)
    known = [entry for entry in DRAFT_LENGTH_NAMES if entry[0] == engine]
    for _, first, end, name in known:
        if first <= parsed < end:
            return name
    ranges = ", ".join(f"{_text(first)} to below {_text(end)}" for _, first, end, _ in known)
    raise UsageError(
        f"unsupported version: {engine} {version}",
        hint=f"known: {ranges or 'no version of it'}",
    )


def _text(version: Version) -> str:
    return ".".join(map(str, version))


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that a misspelt one probably means."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.75)
    return found[0] if found else None

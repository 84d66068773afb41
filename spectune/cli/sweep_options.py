"""The settings of `spectune sweep`, grouped as in spectune.yaml, and the small preset of --quick."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spectune.cli.options import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """Everything that a sweep can be told; lists are comma separated on the command line."""

    model: str | None = setting(
        None,
        "--model",
        "--model-path",
        section="model",
        help="Target: a Hugging Face directory, a GGUF file or a hub id of the Llama family; "
        "SmolLM2-135M-Instruct is fetched if none is given.",
    )
    draft_model: str | None = setting(
        None,
        "--draft-model",
        "--speculative-draft-model-path",
        section="model",
        help="Directory of the EAGLE-3 head, or the name of one that comes with spectune "
        "(default for the default target: smollm2-135m-eagle3).",
    )
    load_format: str = setting(
        "auto",
        "--load-format",
        section="model",
        choices=("auto", "safetensors", "dummy"),
        help="A GGUF file is 'auto'; 'dummy' runs the shape with random weights, for cost measurements only.",
    )
    dtype: str = setting(
        "auto",
        "--dtype",
        section="model",
        choices=("auto", "bfloat16", "float16", "float32"),
        help="Number format of the weights.",
    )
    backend: str = setting(
        "reference",
        "--backend",
        section="backend",
        help="What decodes: 'reference' (own engine) or 'simulated' (declared costs, own clock).",
    )
    device: str = setting(
        "cpu", "--device", section="backend", choices=("cpu", "cuda"), help="Where the engine runs."
    )
    simulated_truth: str | None = setting(
        None,
        "--simulated-truth",
        section="backend",
        help="YAML or JSON file of declared costs and acceptance for --backend simulated.",
    )
    method: tuple[str, ...] = setting(
        ("eagle3", "ngram"), "--method", section="search", help="Ways to draft: eagle3, ngram."
    )
    num_tokens: tuple[int, ...] = setting(
        (1, 3, 5),
        "--num-tokens",
        "--num-speculative-tokens",
        "--num-steps",
        "--speculative-num-steps",
        section="search",
        minimum=1,
        help="Chain lengths; tree depths where topk > 1.",
    )
    topk: tuple[int, ...] = setting(
        (1, 4),
        "--topk",
        "--eagle-topk",
        "--speculative-eagle-topk",
        section="search",
        minimum=1,
        help="Children per expanded node of the draft tree; 1 is a chain.",
    )
    num_draft_tokens: tuple[int, ...] = setting(
        (8, 16),
        "--num-draft-tokens",
        "--speculative-num-draft-tokens",
        section="search",
        minimum=2,
        help="Tokens verified per sequence and round, the root included; trees only.",
    )
    batch_size: tuple[int, ...] = setting(
        (1, 4, 16),
        "--batch-size",
        "--max-concurrency",
        section="load",
        minimum=1,
        help="Sequences decoded together.",
    )
    context: tuple[int, ...] = setting(
        (0,),
        "--context",
        "--context-tokens",
        section="load",
        minimum=0,
        help="Tokens of real text put before every prompt.",
    )
    temperature: tuple[float, ...] = setting(
        (0.0,), "--temperature", section="sampling", minimum=0, help="0 is greedy."
    )
    top_k: int = setting(0, "--top-k", section="sampling", minimum=0, help="Sampling top-k; 0 keeps all.")
    top_p: float = setting(1.0, "--top-p", section="sampling", minimum=0, maximum=1, help="Nucleus sampling.")
    min_p: float = setting(0.0, "--min-p", section="sampling", minimum=0, maximum=1, help="Min-p sampling.")
    max_tokens: int = setting(
        128,
        "--max-tokens",
        "--random-output-len",
        section="sampling",
        minimum=2,
        help="Most output tokens of a request.",
    )
    ignore_eos: bool = setting(
        False, "--ignore-eos", section="sampling", help="Decode to --max-tokens whatever the target says."
    )
    workload: str | None = setting(
        None, "--workload", "--dataset-name", section="workload", help="Name of a built-in prompt set."
    )
    dataset_path: str | None = setting(
        None,
        "--dataset-path",
        section="workload",
        help="Own prompts, JSONL or JSON: Spec-Bench, ShareGPT, OpenAI messages or vLLM custom rows.",
    )
    categories: tuple[str, ...] = setting(
        (), "--categories", section="workload", kind=str, help="Only these categories of the prompts."
    )
    num_prompts: int = setting(
        32,
        "--num-prompts",
        section="workload",
        minimum=1,
        help="Requests of each arm in a cell, evenly over the categories; large batches need more.",
    )
    seed: int = setting(
        0, "--seed", section="workload", minimum=0, help="Seed of prompt choice and sampling."
    )
    num_runs: int = setting(
        1, "--num-runs", section="measurement", minimum=1, help="Repeats of the whole grid."
    )
    min_blocks: int = setting(
        4,
        "--min-blocks",
        section="measurement",
        minimum=2,
        help="Least blocks of batch-size requests that arms decode in turn in a cell.",
    )
    output_dir: str | None = setting(
        None, "--output-dir", "-o", section="output", help="Run directory; runs/<date-time> if not given."
    )


QUICK: dict[str, Any] = {
    "num_tokens": "1,3",
    "topk": "1,4",
    "num_draft_tokens": "8",
    "batch_size": "1,4,16",
    "num_prompts": 16,
    "max_tokens": 32,
    "min_blocks": 6,
    "num_runs": 1,
}
"""Sized for a first answer on two cores in minutes; a flag that is given still wins.

16 prompts are two of each built-in category: one to predict from, one to measure.
"""

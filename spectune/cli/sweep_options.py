"""The settings of `spectune sweep`, grouped as in spectune.yaml, and the small preset of --quick."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spectune.cli.options import setting
from spectune.cli.server_settings import ServerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions(ServerSettings):
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
    chat_template: str | None = setting(
        None,
        "--chat-template",
        section="model",
        help="File of a Jinja chat template to use instead of the target's own.",
    )
    dtype: str = setting(
        "auto",
        "--dtype",
        section="model",
        choices=("auto", "bfloat16", "float16", "float32"),
        help="Number format of the weights.",
    )
    quantization: str | None = setting(
        None,
        "--quantization",
        section="model",
        choices=("int8",),
        help="Round the target's weights to 8 bits (reference engine on a CPU): another model, whose "
        "speculation pays elsewhere. Lossless relative to itself.",
    )
    kernels: str = setting(
        "auto",
        "--kernels",
        section="backend",
        choices=("auto", "plain"),
        help="'auto' takes the compiled passes on CPUs and captured graphs of static shapes on CUDA (never "
        "yet run on a GPU), 'plain' the operators of torch alone.",
    )
    backend: str = setting(
        "reference",
        "--backend",
        section="backend",
        help="What decodes: 'reference' (own engine), 'vllm' or 'sglang' (servers that are started for it) or "
        "'simulated' (declared costs, own clock).",
    )
    device: str = setting(
        "cpu", "--device", section="backend", choices=("cpu", "cuda"), help="Where the engine runs."
    )
    request_rate: tuple[float, ...] = setting(
        (),
        "--request-rate",
        section="load",
        kind=float,
        minimum=1e-6,
        help="Serving engines: also measure at these requests a second, which arrive whether or not the server "
        "keeps up.",
    )
    arrivals: str = setting(
        "poisson",
        "--arrivals",
        section="load",
        help="With --request-rate: poisson or constant; or a file of JSON lines with timestamps to replay.",
    )
    burstiness: float | None = setting(
        None,
        "--burstiness",
        section="load",
        kind=float,
        minimum=1e-6,
        help="With --request-rate: below 1 arrivals come in bursts, above 1 more evenly than Poisson's.",
    )
    goodput: tuple[str, ...] = setting(
        (),
        "--goodput",
        section="load",
        kind=str,
        help="Promises in milliseconds, ttft:200,tpot:20,e2el:5000: requests a second that keep all of them.",
    )
    num_boots: int = setting(
        1,
        "--num-boots",
        section="measurement",
        minimum=1,
        help="Starts of every arm at a serving engine; from 3 on their spread is in the intervals.",
    )
    simulated_truth: str | None = setting(
        None,
        "--simulated-truth",
        section="backend",
        help="YAML or JSON file of declared costs and acceptance for --backend simulated.",
    )
    method: tuple[str, ...] = setting(
        ("eagle3", "ngram"),
        "--method",
        section="search",
        help="Ways to draft: eagle3, ngram; with vllm also suffix, with both servers draft_model.",
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
        help="Own prompts: JSONL, JSON, CSV, parquet or text, a folder of them, or a hub id; Spec-Bench, "
        "ShareGPT, OpenAI messages, vLLM custom, HumanEval or GSM8K rows.",
    )
    dataset_format: tuple[str, ...] = setting(
        (),
        "--dataset-format",
        section="workload",
        kind=str,
        help="Kind of file (json, csv, parquet, text), shape of its rows (prompt, turns, openai, sharegpt, "
        "humaneval, gsm8k), or both; detected if not given.",
    )
    hf_subset: str | None = setting(
        None, "--hf-subset", section="workload", help="Subset of a data set on the hub."
    )
    hf_split: str | None = setting(
        None, "--hf-split", section="workload", help="Split of a data set on the hub; test, else train."
    )
    strict: bool = setting(
        False, "--strict", section="workload", help="Stop at the first row that cannot be asked."
    )
    repeat_prompts: bool = setting(
        False,
        "--repeat-prompts",
        section="workload",
        help="Ask prompts again where a cell needs more than there are; the run is marked.",
    )
    allow_synthetic: bool = setting(
        False,
        "--allow-synthetic",
        section="workload",
        help="Decide and write a policy from synthetic prompts as well.",
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

QUICK_SERVER: dict[str, Any] = {
    **QUICK,
    "num_tokens": "3",
    "topk": "1",
    "batch_size": "1,4",
    "num_prompts": 24,
    "max_tokens": 48,
}
"""The same for serving engines, where every arm is a start: one chain length, two loads."""

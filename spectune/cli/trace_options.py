"""The settings of `spectune trace`: what is decoded once, and the space that must be answerable."""

from __future__ import annotations

from dataclasses import dataclass

from spectune.cli.options import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """Flags have the names they have in `spectune sweep`."""

    model: str | None = setting(
        None,
        "--model",
        "--model-path",
        section="model",
        help="Target: a Hugging Face directory, a GGUF file or a hub id; SmolLM2-135M-Instruct if not given.",
    )
    draft_model: str | None = setting(
        None,
        "--draft-model",
        "--speculative-draft-model-path",
        section="model",
        help="Directory of the EAGLE-3 head, or the name of one that comes with spectune.",
    )
    dtype: str = setting(
        "auto",
        "--dtype",
        section="model",
        choices=("auto", "bfloat16", "float16", "float32"),
        help="Number format of the weights.",
    )
    device: str = setting(
        "cpu", "--device", section="backend", choices=("cpu", "cuda"), help="Where the engine runs."
    )
    method: tuple[str, ...] = setting(
        ("eagle3", "ngram"),
        "--method",
        section="search",
        choices=("eagle3", "ngram"),
        help="Drafters to trace: eagle3, ngram.",
    )
    num_tokens: tuple[int, ...] = setting(
        (1, 2, 3, 4, 5, 6, 7, 8),
        "--num-tokens",
        "--num-speculative-tokens",
        "--num-steps",
        "--speculative-num-steps",
        section="search",
        minimum=1,
        maximum=32,
        help="Chain lengths and tree depths.",
    )
    topk: tuple[int, ...] = setting(
        (1, 2, 4, 8),
        "--topk",
        "--eagle-topk",
        "--speculative-eagle-topk",
        section="search",
        minimum=1,
        maximum=64,
        help="Children per expanded node; beams of different topk do not nest, each is traced.",
    )
    num_draft_tokens: tuple[int, ...] = setting(
        (4, 8, 16, 32),
        "--num-draft-tokens",
        "--speculative-num-draft-tokens",
        section="search",
        minimum=2,
        help="Verified tokens of a tree, root included; every number up to the largest is answered.",
    )
    vocab_slices: tuple[int, ...] = setting(
        (),
        "--vocab-slices",
        section="search",
        kind=int,
        minimum=1,
        help="Also rank children within the lowest N ids of the draft vocabulary (static trees only).",
    )
    batch_size: int = setting(
        16, "--batch-size", "--max-concurrency", section="load", minimum=1, help="Texts decoded together."
    )
    temperature: float = setting(0.0, "--temperature", section="sampling", minimum=0, help="0 is greedy.")
    top_k: int = setting(0, "--top-k", section="sampling", minimum=0, help="Sampling top-k; 0 keeps all.")
    top_p: float = setting(1.0, "--top-p", section="sampling", minimum=0, maximum=1, help="Nucleus sampling.")
    min_p: float = setting(0.0, "--min-p", section="sampling", minimum=0, maximum=1, help="Min-p sampling.")
    max_tokens: int = setting(
        128, "--max-tokens", section="sampling", minimum=1, help="Most output tokens of a request."
    )
    ignore_eos: bool = setting(
        False, "--ignore-eos", section="sampling", help="Decode to --max-tokens whatever the target says."
    )
    workload: str | None = setting(
        None, "--workload", "--dataset-name", section="workload", help="Name of a built-in prompt set."
    )
    dataset_path: str | None = setting(
        None, "--dataset-path", section="workload", help="Own prompts, in the shapes that sweep reads."
    )
    categories: tuple[str, ...] = setting(
        (), "--categories", section="workload", kind=str, help="Only these categories of the prompts."
    )
    num_prompts: int = setting(32, "--num-prompts", section="workload", minimum=1, help="Prompts to decode.")
    seed: int = setting(
        0, "--seed", section="workload", minimum=0, help="Seed of prompt choice and sampling."
    )
    output_dir: str | None = setting(
        None,
        "--output-dir",
        "-o",
        section="output",
        help="Where trace.npz goes; runs/<date-time>-trace if not given.",
    )

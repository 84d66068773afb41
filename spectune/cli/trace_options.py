"""The settings of `spectune trace`: what is decoded once, and the space that must be answerable."""

from __future__ import annotations

from dataclasses import dataclass

from spectune.cli.options import changed, setting
from spectune.cli.sweep_options import SweepOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """Flags have the names they have in `spectune sweep`."""

    model: str | None = changed(SweepOptions, "model")
    draft_model: str | None = changed(SweepOptions, "draft_model")
    dtype: str = changed(SweepOptions, "dtype")
    device: str = changed(SweepOptions, "device")
    method: tuple[str, ...] = changed(
        SweepOptions, "method", choices=("eagle3", "ngram"), help="Drafters to trace: eagle3, ngram."
    )
    num_tokens: tuple[int, ...] = changed(
        SweepOptions,
        "num_tokens",
        default=(1, 2, 3, 4, 5, 6, 7, 8),
        maximum=32,
        help="Chain lengths and tree depths.",
    )
    topk: tuple[int, ...] = changed(
        SweepOptions,
        "topk",
        default=(1, 2, 4, 8),
        maximum=64,
        help="Children per expanded node; beams of different topk do not nest, each is traced.",
    )
    num_draft_tokens: tuple[int, ...] = changed(
        SweepOptions,
        "num_draft_tokens",
        default=(4, 8, 16, 32),
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
    top_k: int = changed(SweepOptions, "top_k")
    top_p: float = changed(SweepOptions, "top_p")
    min_p: float = changed(SweepOptions, "min_p")
    max_tokens: int = changed(SweepOptions, "max_tokens", minimum=1)
    ignore_eos: bool = changed(SweepOptions, "ignore_eos")
    workload: str | None = changed(SweepOptions, "workload")
    dataset_path: str | None = changed(
        SweepOptions, "dataset_path", help="Own prompts, in the shapes that sweep reads."
    )
    categories: tuple[str, ...] = changed(SweepOptions, "categories")
    num_prompts: int = changed(SweepOptions, "num_prompts", help="Prompts to decode.")
    seed: int = changed(SweepOptions, "seed")
    output_dir: str | None = changed(
        SweepOptions, "output_dir", help="Where trace.npz goes; runs/<date-time>-trace if not given."
    )

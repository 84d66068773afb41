"""How a sweep reads its prompts: formats, what fits the context, and that none is asked twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from spectune.cli.console import say
from spectune.errors import SpectuneError

if TYPE_CHECKING:
    from spectune.cli.sweep_options import SweepOptions
    from spectune.records import Prompt

FRAME_TOKENS = 32
"""Room for the sentence that frames a context."""


def reading_of(options: SweepOptions) -> dict[str, Any]:
    """Keywords of load_workload from the settings."""
    return {
        "formats": options.dataset_format,
        "strict": options.strict,
        "subset": options.hf_subset,
        "split": options.hf_split,
        "fits": fit_of(options),
    }


def fit_of(options: SweepOptions) -> Callable[[Prompt], str | None] | None:
    """Says of a prompt why it cannot run (None if it can), from its length in the target's own tokens.

    Only where the target's files are at hand: elsewhere the engine itself refuses.
    """
    if options.backend == "simulated" or options.base_url is not None:
        return None
    try:
        return _fit(options)
    except (SpectuneError, ModuleNotFoundError):
        return None  # opening the backend names what is wrong with the target


def _fit(options: SweepOptions) -> Callable[[Prompt], str | None]:
    from spectune.engine.resolve import resolve_model
    from spectune.engine.target_config import TargetConfig
    from spectune.engine.tokenizer import Tokenizer
    from spectune.workload.fit import fits

    folder = resolve_model(options.model, progress=say)
    tokenizer = Tokenizer.from_dir(folder)
    longest = max(options.context)
    return fits(
        tokenizer.encode_chat,
        limit=options.max_model_len or TargetConfig.from_dir(folder).max_position_embeddings,
        max_tokens=options.max_tokens,
        num_draft_tokens=max(options.num_tokens),
        context_tokens=longest + FRAME_TOKENS if longest else 0,
    )

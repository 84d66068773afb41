"""How a sweep reads its prompts: formats, what fits the context, and that none is asked twice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spectune.cli.console import say
from spectune.errors import SpectuneError, UsageError

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
    from spectune.backend.prompts import load_tokenizer
    from spectune.cli.inputs import template_of
    from spectune.engine.resolve import resolve_model
    from spectune.workload.fit import fits

    folder = resolve_model(options.model, progress=say)
    tokenizer = load_tokenizer(folder, template_of(options))
    longest = max(options.context)
    return fits(
        tokenizer.encode_chat,
        limit=_limit(options, folder),
        max_tokens=options.max_tokens,
        num_draft_tokens=max(options.num_tokens),
        context_tokens=longest + FRAME_TOKENS if longest else 0,
    )


def _limit(options: SweepOptions, folder: Path) -> int:
    """Most tokens of a sequence: the target's, and at a serving engine what it is started with."""
    from spectune.backend.vllm_model import model_limit
    from spectune.cli.servers import is_serving, model_room

    limits = [model_limit(folder), options.max_model_len]
    if is_serving(options):
        limits.append(model_room(options))
    known = [limit for limit in limits if limit is not None]
    if not known:
        raise UsageError(f"{folder} does not say how many tokens a sequence may have")
    return min(known)

"""A trace on the reference engine: the recorders that a set of configurations asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spectune.backend.heads import head_folder
from spectune.draft.along_text import HeadAlongText
from spectune.draft.checkpoint import load_head
from spectune.draft.ngram import NgramDrafter
from spectune.engine.trace_path import TraceSpace
from spectune.engine.trace_record import HeadRecorder, LookupRecorder, Recorder, record
from spectune.errors import UsageError
from spectune.records import Method, Request, SpecConfig
from spectune.store.trace_file import Trace

if TYPE_CHECKING:
    from spectune.backend.reference import ReferenceBackend


def reference_trace(
    backend: ReferenceBackend,
    draft_model: str | None,
    requests: Sequence[Request],
    configs: Sequence[SpecConfig],
    about: Mapping[str, Mapping[str, Any]],
    *,
    parts_dir: Path,
    batch_size: int,
    on_part: Callable[[int, int], None] | None,
) -> Trace:
    """Decode the requests once, plainly, and record every drafter of `configs` along the texts."""
    return record(
        backend.engine(SpecConfig.off(), batch_size),
        requests,
        recorders_of(backend, draft_model, configs),
        {name: dict(value) for name, value in about.items()},
        group_size=2 * batch_size,
        parts_dir=parts_dir,
        on_part=on_part,
    )


def recorders_of(
    backend: ReferenceBackend,
    draft_model: str | None,
    configs: Sequence[SpecConfig],
    *,
    vocab_slices: Sequence[int] = (),
) -> list[Recorder]:
    """A recorder for every drafter of `configs`, deep and wide enough for all of them.

    `vocab_slices` are sizes of the draft vocabulary that are recorded beside the whole one. Raises
    UsageError where a head is missing or topk exceeds its vocabulary.
    """
    recorders: list[Recorder] = []
    heads = [config for config in configs if config.method == Method.EAGLE3]
    if heads:
        recorders.append(_head_recorder(backend, draft_model, heads, vocab_slices))
    for options in dict.fromkeys(c.options for c in configs if c.method == Method.NGRAM):
        own = [c for c in configs if c.method == Method.NGRAM and c.options == options]
        windows = {f"window_{end}": v for end in ("min", "max") if (v := _window(options, end)) is not None}
        recorders.append(
            LookupRecorder(
                NgramDrafter(backend.target.device, **windows),
                method=Method.NGRAM.value,
                options=options,
                max_steps=max(c.num_steps for c in own),
            )
        )
    return recorders


def _window(options: tuple[tuple[str, Any], ...], end: str) -> int | None:
    value = dict(options).get(f"prompt_lookup_{end}")
    return None if value is None else int(value)


def _head_recorder(
    backend: ReferenceBackend,
    draft_model: str | None,
    heads: Sequence[SpecConfig],
    vocab_slices: Sequence[int],
) -> Recorder:
    if draft_model is None:
        raise UsageError("method eagle3 needs --draft-model", hint="give the folder of an EAGLE-3 head")
    backend.drafter(Method.EAGLE3)  # the head's own layer ids become the target's
    head = load_head(head_folder(draft_model), backend.target.config)
    whole = head.config.draft_vocab_size
    topks = tuple(sorted({config.topk for config in heads}))
    if topks[-1] > whole:
        raise UsageError(f"--topk {topks[-1]} exceeds the draft vocabulary of {whole}")
    space = TraceSpace(
        topks=topks,
        max_steps=max(config.num_steps for config in heads),
        max_draft_tokens=max(config.num_draft_tokens for config in heads),
        vocab_slices=(whole, *(size for size in vocab_slices if size < whole)),
    )
    along = HeadAlongText(head, backend.target, num_children=topks[-1] + 1, vocab_slices=space.vocab_slices)
    return HeadRecorder(along, space, method=Method.EAGLE3.value, draft_model=draft_model)

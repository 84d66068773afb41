"""Do draft and target mean the same tokens: vocabulary sizes, tokenizer contents, the draft's own map."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from spectune.draft.inspect import HeadFacts, ModelFacts
from spectune.measure.doctor.findings import NO_ACCEPTANCE, Finding, error, fine, note, warning

MIN_TELLING = 64
"""Entries of a map from which on a rise at every one is no chance."""

MAX_PADDING = 1024
"""Rows by which two matrices for one tokenizer differ at most: they are rounded up to powers of two."""


def check_vocabulary(head: HeadFacts, target: ModelFacts) -> Iterator[Finding]:
    """Sizes, contents and the map of the draft vocabulary."""
    yield from check_tokens(head, target)
    yield from check_sizes(head, target)
    yield from check_map(head)


def check_sizes(head: HeadFacts, target: ModelFacts) -> Iterator[Finding]:
    """vocab_size of both; a tail of padding is harmless."""
    own, theirs = head.vocab_size, target.vocab_size
    if own is None or theirs is None or own == theirs:
        if own is not None and own == theirs:
            yield fine("vocabulary", f"vocabulary of {own} tokens")
        return
    real = None if target.token_by_id is None else max(target.token_by_id, default=-1) + 1
    drafted = -1 if head.d2t is None or not head.d2t.size else int(head.d2t[-1]) + head.d2t.size - 1
    is_padding = real is not None and min(own, theirs) >= real > drafted
    if is_padding and abs(own - theirs) <= MAX_PADDING:
        yield note(
            "vocabulary",
            f"vocab_size {own} of the draft and {theirs} of the target differ by padding only: "
            f"the tokenizer has {real} tokens",
        )
        return
    yield error(
        "vocabulary",
        f"vocab_size is {own} for the draft and {theirs} for the target",
        signature="a shape error while loading, or " + NO_ACCEPTANCE,
        fix="this draft was made for another target or tokenizer",
    )


def check_tokens(head: HeadFacts, target: ModelFacts) -> Iterator[Finding]:
    """Token strings by id, where the draft brings a tokenizer of its own."""
    own, theirs = head.token_by_id, target.token_by_id
    if theirs is None:
        yield note("tokenizer", f"{target.path} has no tokenizer.json, so contents were not compared")
        return
    if own is None:
        return  # a head has none and is fed with the target's ids
    first = first_difference(own, theirs)
    sizes = f"{len(own)} and {len(theirs)} tokens"
    if first is not None:
        ours, other = own.get(first), theirs.get(first)
        yield error(
            "tokenizer",
            f"id {first} is {ours!r} for the draft and {other!r} for the target ({sizes})",
            signature=NO_ACCEPTANCE,
            fix="take a draft with the target's tokenizer (vLLM: use_heterogeneous_vocab for draft models)",
        )
    elif len(own) != len(theirs):
        yield note("tokenizer", f"the same tokens up to a tail: {sizes}")
    else:
        yield fine("tokenizer", f"the same {len(own)} tokens")


def first_difference(own: Mapping[int, str], theirs: Mapping[int, str]) -> int | None:
    """The smallest id that both have with different tokens, or that lies inside one and is missing there."""
    common = min(max(own, default=-1), max(theirs, default=-1))
    return next(
        (token_id for token_id in range(common + 1) if own.get(token_id) != theirs.get(token_id)), None
    )


def check_map(head: HeadFacts) -> Iterator[Finding]:
    """d2t holds offsets: target id = i + d2t[i], rising, inside the vocabulary, in agreement with t2d."""
    size, vocab = head.draft_vocab_size, head.vocab_size
    if size is None or vocab is None or not head.is_eagle3:
        return
    if head.d2t is None:
        if size < vocab:
            yield error(
                "vocabulary-map",
                f"draft_vocab_size {size} is below vocab_size {vocab}, and there is no tensor d2t",
                signature=NO_ACCEPTANCE + "; every draft is a wrong token",
                fix="export the head with d2t and t2d of its own training",
            )
        return
    if size == vocab:
        yield warning(
            "vocabulary-map",
            "d2t is there although the draft has the whole vocabulary",
            signature="vLLM refuses the tensor; other engines ignore it",
            fix="remove d2t and t2d from the file",
        )
        return
    if head.d2t.shape != (size,):
        yield error(
            "vocabulary-map",
            f"d2t has {list(head.d2t.shape)} entries, draft_vocab_size is {size}",
            signature="a shape error while loading",
            fix="d2t or config.json is of another head",
        )
        return
    ids = np.arange(size) + head.d2t
    if not bool((np.diff(ids) > 0).all()) or int(ids[0]) < 0 or int(ids[-1]) >= vocab:
        is_absolute = bool((np.diff(head.d2t) > 0).all()) and int(head.d2t[-1]) < vocab
        looks = ": it holds absolute ids" if is_absolute else ""
        yield error(
            "vocabulary-map",
            f"i + d2t[i] does not rise within 0..{vocab - 1}{looks}",
            signature="acceptance near zero although everything loads",
            fix="d2t holds offsets: write d2t[i] = target id - i",
        )
        return
    if size >= MIN_TELLING and bool((np.diff(head.d2t) > 0).all()):
        # an offset rises only where a token is left out: not one pair of neighbours would be kept
        yield error(
            "vocabulary-map",
            "d2t rises at every entry: it holds absolute ids, although i + d2t[i] stays within the vocabulary",
            signature=NO_ACCEPTANCE + "; every draft is a wrong token",
            fix="d2t holds offsets: write d2t[i] = target id - i",
        )
        return
    if head.t2d is not None and (
        head.t2d.shape != (vocab,) or int(head.t2d.sum()) != size or not head.t2d[ids].all()
    ):
        yield error(
            "vocabulary-map",
            f"t2d flags {int(head.t2d.sum())} tokens that are not those of d2t",
            signature="engines that use t2d draft wrong tokens, others do not",
            fix="one of the two maps was made anew (fine-tuning?); export both from one run",
        )
        return
    yield fine("vocabulary-map", f"{size} of {vocab} tokens can be drafted")

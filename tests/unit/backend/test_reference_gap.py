"""The engine tells how close a tie plain decoding had at a given output token."""

from __future__ import annotations

import torch

from spectune.backend.reference import ReferenceBackend
from spectune.records import Launch
from tests.support.toys import request, tiny_target


def test_gap_is_the_distance_of_the_two_best_tokens_on_the_given_text() -> None:
    """The gap equals the one of a teacher-forced pass over prompt and text, written out here."""
    backend = ReferenceBackend()
    target = tiny_target()
    backend.__dict__.update(target=target, tokenizer=None)
    ask, text = request("r", [5, 9, 31]), [17, 40, 3, 8]

    with backend.open(Launch(points=())) as session:
        gap = session.gap(ask, text, 2)

    ids = torch.tensor([[5, 9, 31, 17, 40]])
    with torch.inference_mode():
        hidden, _ = target.forward_text(ids, torch.tensor([5]))
        best = target.logits(hidden)[0, -1].topk(2).values
    assert gap is not None
    assert abs(float(best[0] - best[1]) - gap.value) < 1e-4
    assert gap.tolerance == 1e-3


def test_gap_of_the_first_token_is_unknown() -> None:
    """The first token comes from prefill, which every arm shares."""
    backend = ReferenceBackend()
    backend.__dict__.update(target=tiny_target(), tokenizer=None)

    with backend.open(Launch(points=())) as session:
        assert session.gap(request("r", [5, 9]), [17, 40], 0) is None

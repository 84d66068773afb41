"""Requests of a cell: balanced order, whole blocks, ids that name prompt and sample."""

from __future__ import annotations

import pytest

from spectune.measure.requests import RequestBuilder, in_turn, num_blocks
from spectune.records import Cell, Prompt, Sampling


class Encoder:
    """Counts how often a prompt is encoded."""

    def __init__(self):
        self.calls = []

    def encode(self, prompt, context_text, context_tokens):
        self.calls.append((prompt.prompt_id, context_tokens))
        return (len(context_text),) * context_tokens + (1, 2)


def prompt(name, category="chat", **kwargs):
    return Prompt(prompt_id=name, category=category, turns=(name,), **kwargs)


def cell(batch_size=1, context_tokens=0, temperature=0.0):
    return Cell(batch_size=batch_size, context_tokens=context_tokens, temperature=temperature)


PROMPTS = [prompt("a"), prompt("b"), prompt("c"), prompt("x", "code"), prompt("m", "math")]


@pytest.mark.parametrize(
    ("batch_size", "num_prompts", "blocks"),
    [(1, 24, 24), (4, 24, 6), (16, 24, 4), (5, 24, 5), (1, 2, 4)],
)
def test_num_blocks_covers_the_prompts_and_is_at_least_four(batch_size, num_prompts, blocks):
    """Enough whole blocks for all prompts, and never fewer than four."""
    assert num_blocks(batch_size, num_prompts=num_prompts) == blocks


def test_in_turn_alternates_categories_until_they_run_out():
    """a x m, then what is left of the longest category."""
    assert [p.prompt_id for p in in_turn(PROMPTS)] == ["a", "x", "m", "b", "c"]


def test_blocks_reuse_prompts_under_a_higher_sample_number():
    """Eight requests of five prompts: three are asked a second time as another sample."""
    blocks = RequestBuilder(Encoder()).blocks(PROMPTS, cell(2), Sampling(), count=4)

    ids = [request.request_id for block in blocks for request in block]
    assert [len(block) for block in blocks] == [2, 2, 2, 2]
    assert [name.endswith("-0") for name in ids] == [True] * 5 + [False] * 3
    assert ids[0] == f"{PROMPTS[0].digest[:12]}-0"
    assert ids[5] == f"{PROMPTS[0].digest[:12]}-1"


def test_blocks_of_repeats_never_share_a_request_id():
    """The second repeat goes on with the prompts that the first did not reach."""
    builder = RequestBuilder(Encoder())

    first, second = (
        [
            r.request_id
            for block in builder.blocks(PROMPTS, cell(), Sampling(), count=4, repeat=n)
            for r in block
        ]
        for n in (0, 1)
    )

    assert not set(first) & set(second)
    assert second[0] == f"{PROMPTS[2].digest[:12]}-0"


def test_blocks_equal_prompts_get_sample_numbers_of_their_own():
    """The same question twice in a workload is two samples, not one request id twice."""
    twice = [prompt("a"), Prompt(prompt_id="other", category="chat", turns=("a",))]

    (block,) = RequestBuilder(Encoder()).blocks(twice, cell(2), Sampling(), count=1)

    assert [request.request_id[-2:] for request in block] == ["-0", "-1"]


def test_blocks_take_the_cell_s_temperature_and_the_prompt_s_limit():
    """Temperature comes from the cell; a prompt may ask for fewer tokens, never for more."""
    prompts = [prompt("a", max_tokens=5), prompt("b", max_tokens=500), prompt("c")]

    (block,) = RequestBuilder(Encoder()).blocks(
        prompts, cell(3, temperature=0.7), Sampling(max_tokens=50), count=1
    )

    assert [request.sampling.max_tokens for request in block] == [5, 50, 50]
    assert {request.sampling.temperature for request in block} == {0.7}


def test_blocks_encode_a_prompt_once_per_context():
    """Arms, samples and repeats share the encoded prompt."""
    encoder = Encoder()
    builder = RequestBuilder(encoder, "text")

    for context in (0, 3):
        (block, *_) = builder.blocks([prompt("a")], cell(2, context), Sampling(), count=3)

    assert encoder.calls == [("a", 0), ("a", 3)]
    assert block[0].prompt_ids == (4, 4, 4, 1, 2)


def test_calibration_is_short_and_never_cut_by_the_model():
    """Calibration times need full batches: at most 32 tokens, no end of sequence, no stop strings."""
    sampling = Sampling(max_tokens=200, stop=("END",))

    block = RequestBuilder(Encoder()).calibration([prompt("a")], cell(3), sampling)

    assert len(block) == 6  # at least four prompts, in whole batches
    assert {(r.sampling.max_tokens, r.sampling.ignore_eos, r.sampling.stop) for r in block} == {
        (32, True, ())
    }

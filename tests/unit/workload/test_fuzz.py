"""Properties of the readers over generated rows and bytes."""

from __future__ import annotations

import json
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from spectune.errors import WorkloadError
from spectune.records import Prompt
from spectune.workload import load_workload
from spectune.workload.sample import Sampler, stratified
from spectune.workload.shapes import Row, Unusable, parse_row

KEYS = ("prompt", "turns", "messages", "conversations", "question", "answer", "task_id", "output_tokens",
        "category", "system", "role", "from", "content", "value", "id")  # fmt: skip
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
VALUES = st.recursive(
    LEAVES | st.sampled_from(["user", "assistant", "human", "gpt"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=4), inner, max_size=5)
    ),
    max_leaves=12,
)


@given(VALUES | st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=6))
@settings(max_examples=100, deadline=None)
def test_any_value_is_a_row_a_reason_or_a_named_error(value: Any) -> None:
    """No JSON value brings the shape reader down."""
    with suppress(WorkloadError):
        assert isinstance(parse_row(value), Row | Unusable)


@given(st.binary(max_size=200), st.sampled_from(["jsonl", "csv", "txt", "parquet", "dat"]))
@settings(max_examples=150, deadline=None)
def test_any_bytes_are_prompts_or_a_named_error(data: bytes, suffix: str) -> None:
    """No bytes under any suffix bring the readers down."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"f.{suffix}"
        path.write_bytes(data)
        with suppress(WorkloadError):
            assert load_workload(path).prompts


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.text(min_size=1)), max_size=40),
    st.integers(1, 12),
    st.integers(0, 3),
)
@settings(max_examples=100, deadline=None)
def test_streaming_sample_is_the_prefix_of_the_whole_order(
    rows: list[tuple[str, str]], size: int, seed: int
) -> None:
    """Pruning while reading keeps exactly what sorting everything would choose, and the spare ones."""
    prompts = {
        prompt.digest: prompt
        for i, (category, text) in enumerate(rows)
        for prompt in [Prompt(prompt_id=str(i), category=category, turns=(text,))]
    }
    sampler = Sampler(size, seed=seed)
    sampler._limit = size + 1  # prune all the time, not only after thousands

    for i, (digest, prompt) in enumerate(prompts.items()):
        sampler.add(prompt, digest, (0, i))
        sampler._limit = max(size + 1, len(sampler._held) + 1)

    whole = stratified(prompts.values(), seed=seed)
    sample, spare = sampler.draw()
    expected: list[Prompt] = []
    for prompt in whole[size:]:
        if sum(one.category == prompt.category for one in expected) < 2:
            expected.append(prompt)
    assert [one.prompt for one in sample] == whole[:size]
    assert [one.prompt for one in spare] == expected


@given(st.text(min_size=1).filter(lambda text: text.strip()))
@settings(max_examples=100, deadline=None)
def test_digest_of_a_prompt_is_that_of_its_json(text: str) -> None:
    """The quick digest is sha256 of the JSON text that json.dumps writes."""
    import hashlib

    try:
        expected = json.dumps([None, [text]], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return
    prompt = Prompt(prompt_id="p", category="c", turns=(text,))

    assert prompt.digest == hashlib.sha256(expected).hexdigest()

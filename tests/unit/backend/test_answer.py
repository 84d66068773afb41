"""Chunks of an answer become one record: counts from usage, times from chunks, failures named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from spectune.backend.answer import Answer, AnswerFailure, error_message
from spectune.records import FailureKind, ServedRequest, StepRecord, TokenSource
from tests.support.served import asked

USAGE = {"prompt_tokens": 20, "completion_tokens": 5, "total_tokens": 25}
REPORT = {"num_spec_tokens": 3, "per_step_accepted": [1, 1], "per_step_drafted": [3, 3]}


def text(content: str, *, finish: str | None = None, ids: list[int] | None = None) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "text": content, "finish_reason": finish}
    return {"choices": [choice if ids is None else {**choice, "token_ids": ids}]}


def delta(finish: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


def read(chunks: list[Any], *, first_s: float = 1.0) -> ServedRequest:
    """The record of chunks that arrived a second apart; asked for at 0, sent at 0.5."""
    answer = Answer()
    for i, chunk in enumerate(chunks):
        answer.take(chunk, first_s + i)
    return answer.build(asked(), scheduled_s=0.0, sent_s=0.5, ended_s=99.0)


def test_tokens_come_from_usage_and_times_from_chunks() -> None:
    """Three chunks of five tokens: the time per token divides by four, not by two."""
    record = read([text("a b"), text("c"), text("d e", finish="length"), {"choices": [], "usage": USAGE}])

    assert (5, TokenSource.USAGE) == (record.num_output_tokens, record.token_source)
    assert (1.0, 2.0, 3.0) == record.chunk_s
    assert 0.5 == record.ttft_s
    assert 0.5 == record.tpot_s


@pytest.mark.parametrize(
    "chunks",
    [
        [text("a"), text("b", finish="stop"), {"choices": [], "usage": USAGE}],
        [text("a"), {**text("b", finish="stop"), "usage": USAGE}],
        [
            {**text("a"), "usage": {**USAGE, "completion_tokens": 0}},
            {**text("b", finish="stop"), "usage": USAGE},
        ],
        [text("a"), {**text("b", finish="stop"), "usage": USAGE}, {"choices": [], "usage": None}],
        [text("a"), {"choices": None, "usage": USAGE}, text("b", finish="stop")],
    ],
    ids=["last chunk", "with the finish", "zeros until the last", "null afterwards", "choices null"],
)
def test_usage_is_the_last_that_is_told(chunks: list[Any]) -> None:
    """Wherever a server puts the usage, the count is the same and empty choices break nothing."""
    assert 5 == read(chunks).num_output_tokens


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_content": "hm", "content": None},
        {"reasoning": "hm"},
        {"refusal": "no", "content": None},
        {"content": "hi"},
        {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": "{"}}]},
    ],
    ids=["reasoning_content", "reasoning", "refusal", "content", "tool call"],
)
def test_first_token_is_the_first_output_of_any_kind(fields: dict[str, Any]) -> None:
    """A role alone is no output; reasoning with null content is."""
    record = read(
        [delta(role="assistant", content=""), delta(**fields), delta("stop"), {"choices": [], "usage": USAGE}]
    )

    assert 2.0 == record.first_token_s
    assert 3.0 == record.finish_s
    assert (2.0,) == record.chunk_s


def test_unknown_count_is_none_and_never_the_limit() -> None:
    """Without usage and ids nobody knows how many tokens there were."""
    record = read([text("a"), text("b", finish="length")])

    assert record.is_success
    assert (None, None, None) == (record.num_output_tokens, record.token_source, record.tpot_s)


def test_token_ids_count_where_usage_is_missing() -> None:
    """Ids are tokens, whatever the number of chunks."""
    record = read([text("a", ids=[1, 2]), text("b", ids=[3], finish="stop")])

    assert (3, TokenSource.TOKEN_IDS) == (record.num_output_tokens, record.token_source)
    assert ((1, 2, 3), (2, 1)) == (record.output_ids, record.chunk_tokens)


def test_ids_that_do_not_account_for_every_token_are_not_kept() -> None:
    """A parser that holds text back loses ids: what each chunk weighed is then unknown."""
    record = read([text("a", ids=[1, 2]), text("b", ids=[3], finish="stop"), {"choices": [], "usage": USAGE}])

    assert (5, None, None) == (record.num_output_tokens, record.output_ids, record.chunk_tokens)
    assert "the server sent no token ids" == record.to_record().error


def test_steps_come_from_the_final_chunk() -> None:
    """Per-request counts ride on a chunk without choices; 5 tokens = 1 + two steps of two."""
    tail = {"choices": [], "usage": USAGE, "metrics": {"speculative_decoding": REPORT}}
    record = read([text("a", ids=[1]), text("b", ids=[2, 3]), text("c", ids=[4, 5], finish="length"), tail])
    step = StepRecord(num_proposed=3, num_verified=3, num_accepted=1, num_emitted=2)

    assert (step, step) == record.steps
    assert record.to_record().broken_identity() is None


def test_contradicting_steps_are_left_out_with_the_reason() -> None:
    """Counts that cannot make the tokens do not spoil the latency of the request."""
    report = {**REPORT, "per_step_accepted": [3, 3]}
    tail = {
        "choices": [],
        "usage": {**USAGE, "completion_tokens": 3},
        "metrics": {"speculative_decoding": report},
    }
    record = read([text("a"), text("b", finish="stop"), tail])

    assert record.is_success
    assert record.steps is None
    assert "3 output tokens are 6 fewer" in (record.steps_reason or "")


@pytest.mark.parametrize(
    ("chunks", "kind", "reason"),
    [
        ([], FailureKind.EMPTY, "no output received"),
        ([{"choices": [], "usage": {**USAGE, "completion_tokens": 0}}], FailureKind.EMPTY, "no output received"),
        ([text("", finish="stop"), {"usage": USAGE}], FailureKind.EMPTY, "5 tokens were counted"),
        ([text("a"), text("b")], FailureKind.TRUNCATED, "no finish reason"),
        ([text("a"), {"error": {"message": "engine died", "code": 500}}], FailureKind.ERROR_IN_STREAM, "engine died"),
        ([text("a"), {"error": "engine died"}], FailureKind.ERROR_IN_STREAM, "engine died"),
        ([text("a"), {"object": "error", "message": "engine died"}], FailureKind.ERROR_IN_STREAM, "engine died"),
        ([text("a"), text("", finish="abort")], FailureKind.ERROR_IN_STREAM, "abort"),
        ([["a"]], FailureKind.MALFORMED, "not an object"),
        ([{"choices": ["a"]}], FailureKind.MALFORMED, "a choice is"),
        ([{"choices": [{"delta": "a"}]}], FailureKind.MALFORMED, "a delta is"),
    ],
    ids=[
        "nothing", "usage only", "no text", "no finish", "error object", "error text", "error of old servers",
        "aborted", "list", "choice", "delta",
    ],
)  # fmt: skip
def test_what_is_no_answer_is_a_failure(chunks: list[Any], kind: FailureKind, reason: str) -> None:
    """Each way in which a 200 answer can be none has its kind and reason."""
    with pytest.raises(AnswerFailure, match=reason) as raised:
        read(chunks)

    assert kind is raised.value.kind


def test_end_mark_ends_and_bad_json_is_malformed() -> None:
    """[DONE] is no JSON and ends the answer; anything else that is no JSON is a failure."""
    answer = Answer()

    assert answer.take_text(" [DONE]", 1.0)
    assert not answer.take_text(json.dumps(text("a")), 1.0)
    with pytest.raises(AnswerFailure, match="not JSON"):
        answer.take_text("{not json", 2.0)


def test_first_token_at_the_moment_of_sending_is_refused() -> None:
    """A time to first token of zero is impossible and never becomes a record."""
    with pytest.raises(ValueError, match="first token at or before"):
        read([text("a", finish="stop")], first_s=0.5)


def test_whole_body_has_no_first_token_and_no_time_per_token() -> None:
    """An answer that came in one piece says nothing of when its tokens were made."""
    answer = Answer()
    answer.take({**text("a b", finish="stop"), "usage": USAGE}, 3.0)
    record = answer.build(asked(), scheduled_s=0.0, sent_s=0.5, ended_s=3.0, is_streamed=False)

    assert record.is_success
    assert (None, None, 2.5) == (record.ttft_s, record.tpot_s, record.e2e_s)


def test_long_messages_are_kept_in_one_short_line() -> None:
    """A server's page of HTML does not flood the report."""
    told = error_message({"error": {"message": "a\n" * 1000}})

    assert told is not None
    assert told.startswith("a a a")
    assert len(told) == 303

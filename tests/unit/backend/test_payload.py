"""Bodies: every sampling setting is sent, so that no server default decides."""

from __future__ import annotations

from spectune.backend.payload import (
    ClientOptions,
    Dialect,
    Endpoint,
    request_body,
    request_seed,
    sampling_fields,
)
from spectune.records import Sampling
from tests.support.served import asked


def test_completion_sends_every_sampling_setting() -> None:
    """A model's own generation config (temperature 0.6, repetition penalty) changes nothing."""
    request = asked(max_tokens=7, temperature=0.0, ignore_eos=True, stop=("\n",))

    body = request_body(request, "name", ClientOptions())

    assert body == {
        "model": "name",
        "n": 1,
        "prompt": list(range(20)),
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "max_tokens": 7,
        "stop": ["\n"],
        "ignore_eos": True,
        "seed": request_seed(request),
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }


def test_chat_sends_messages_and_the_new_name_of_the_limit() -> None:
    """The chat route takes messages and max_completion_tokens."""
    body = request_body(asked(3), "name", ClientOptions(endpoint=Endpoint.CHAT, has_token_ids=False))

    assert [{"role": "user", "content": "question 3"}] == body["messages"]
    assert 16 == body["max_completion_tokens"]
    assert {"prompt", "max_tokens", "return_token_ids"}.isdisjoint(body)


def test_plain_openai_servers_get_openai_fields_only() -> None:
    """Servers that refuse unknown fields are asked in the protocol that they know."""
    fields = sampling_fields(Sampling(), Dialect.OPENAI)

    assert {"temperature", "top_p", "presence_penalty", "frequency_penalty", "max_tokens"} == set(fields)


def test_seed_is_the_requests_own_and_the_same_in_every_arm() -> None:
    """Samples of a prompt differ, repetitions of a request do not."""
    assert request_seed(asked(1)) == request_seed(asked(1))
    assert request_seed(asked(1)) != request_seed(asked(2))
    assert request_seed(asked(1)) != request_seed(asked(1, seed=5))


def test_extra_fields_come_last() -> None:
    """The user's own fields win over ours."""
    assert 0.5 == request_body(asked(), "m", ClientOptions(extra_body={"temperature": 0.5}))["temperature"]

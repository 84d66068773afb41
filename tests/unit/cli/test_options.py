"""Settings: one declaration gives flags, defaults and errors."""

from __future__ import annotations

from typing import Any

import pytest

from spectune.cli.options import as_text, parse_settings, settings_of
from spectune.cli.sweep_options import SweepOptions
from spectune.errors import UsageError

SETTINGS = settings_of(SweepOptions)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        pytest.param("num_tokens", "1, 3,5", (1, 3, 5), id="list-with-spaces"),
        pytest.param("num_tokens", "3,3,1", (3, 1), id="repeated-item-once"),
        pytest.param("num_tokens", [2, 4], (2, 4), id="yaml-list"),
        pytest.param("num_tokens", 7, (7,), id="yaml-number-is-a-list-of-one"),
        pytest.param("temperature", "0,0.7", (0.0, 0.7), id="floats"),
        pytest.param("top_p", "0.95", 0.95, id="float"),
        pytest.param("ignore_eos", True, True, id="switch"),
        pytest.param("model", None, None, id="absent-model"),
        pytest.param("categories", [], (), id="no-category-means-all"),
    ],
)
def test_setting_usable_value_is_typed(name: str, text: Any, expected: Any) -> None:
    """Text of a flag and nodes of YAML become the same typed values."""
    assert expected == SETTINGS[name].parse(text, source="--flag")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        pytest.param("num_tokens", "0", "--num-tokens: 0 is below the minimum of 1", id="too-small"),
        pytest.param("num_tokens", "1,x", "--num-tokens: 'x' is not a whole number", id="not-a-number"),
        pytest.param("num_tokens", "1.5", "--num-tokens: '1.5' is not a whole number", id="fraction"),
        pytest.param("num_tokens", [1.5], "--num-tokens: 1.5 is not a whole number", id="yaml-fraction"),
        pytest.param("num_tokens", [True], "--num-tokens: True is not a whole number", id="yaml-boolean"),
        pytest.param("num_tokens", "1,,3", "--num-tokens: '1,,3' has an empty item", id="empty-item"),
        pytest.param("num_tokens", [], "--num-tokens: [] has an empty item", id="empty-list"),
        pytest.param("top_p", "1.2", "--top-p: 1.2 is above the maximum of 1", id="too-large"),
        pytest.param("temperature", "nan", "--temperature: 'nan' is not a number", id="nan"),
        pytest.param("device", "tpu", "--device: 'tpu' is not one of cpu, cuda", id="unknown-choice"),
        pytest.param("ignore_eos", "yes", "--ignore-eos: 'yes' is not true or false", id="text-for-switch"),
    ],
)
def test_setting_unusable_value_names_flag_and_value(name: str, value: Any, message: str) -> None:
    """A value that cannot be used is a usage error with the flag and the value in it."""
    with pytest.raises(UsageError) as caught:
        SETTINGS[name].parse(value, source=SETTINGS[name].flags[0])

    assert message == caught.value.message


def test_parse_settings_layers_later_one_wins() -> None:
    """A later layer overrides an earlier one, and a name in no layer keeps its default."""
    options = parse_settings(SweepOptions, {"seed": 1, "max_tokens": 16}, {"seed": "2"})

    assert (2, 16, (1, 3, 5)) == (options.seed, options.max_tokens, options.num_tokens)


@pytest.mark.parametrize(
    ("value", "expected"), [((1, 3), "1,3"), ((0.0, 0.7), "0,0.7"), (True, "true"), ("eagle3", "eagle3")]
)
def test_as_text_value_is_typed_as_on_the_command_line(value: Any, expected: str) -> None:
    """Defaults are shown in help as a person would type them."""
    assert expected == as_text(value)


@pytest.mark.parametrize(
    ("name", "aliases"),
    [
        ("num_tokens", {"--num-speculative-tokens", "--num-steps", "--speculative-num-steps"}),
        ("topk", {"--eagle-topk", "--speculative-eagle-topk"}),
        ("num_draft_tokens", {"--speculative-num-draft-tokens"}),
        ("batch_size", {"--max-concurrency"}),
        ("draft_model", {"--speculative-draft-model-path"}),
    ],
)
def test_settings_engine_spellings_are_aliases(name: str, aliases: set[str]) -> None:
    """The spellings of vLLM and SGLang work."""
    assert aliases <= set(SETTINGS[name].flags)

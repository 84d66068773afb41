"""spectune.yaml: reading, template and the published schema."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from spectune.cli.config import SCHEMA_FILE, read_config, schema_document, template_text
from spectune.cli.options import parse_settings
from spectune.cli.sweep_options import SweepOptions
from spectune.errors import UsageError

PUBLISHED = json.loads(resources.files("spectune.cli").joinpath(SCHEMA_FILE).read_text("utf-8"))


def test_schema_published_file_is_current() -> None:
    """The published schema is the one that follows from the settings."""
    assert schema_document() == PUBLISHED


def test_schema_is_a_valid_schema() -> None:
    """Other tools can load the published schema."""
    jsonschema.Draft202012Validator.check_schema(PUBLISHED)


def test_template_is_valid_and_gives_the_defaults(tmp_path: Path) -> None:
    """The template passes the schema, and sweeping with it changes nothing."""
    path = tmp_path / "spectune.yaml"
    path.write_text(template_text(), encoding="utf-8")

    values, _ = read_config(path)

    jsonschema.validate(yaml.safe_load(template_text()), PUBLISHED)
    assert SweepOptions() == parse_settings(SweepOptions, values)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        pytest.param("[1]", "expected sections, found list", id="no-sections"),
        pytest.param("a: {b: 1", "not YAML", id="broken-yaml"),
        pytest.param("schema_version: 9", "schema_version 9, this spectune reads 1", id="other-version"),
        pytest.param("serach: {}", "unknown section 'serach'", id="unknown-section"),
        pytest.param("search: 3", "section search holds no settings", id="section-without-settings"),
        pytest.param("search: {num_token: 3}", "unknown setting search.num_token", id="unknown-setting"),
        pytest.param("load: {num_tokens: 3}", "unknown setting load.num_tokens", id="wrong-section"),
    ],
)
def test_read_config_unusable_file_is_named(tmp_path: Path, document: str, message: str) -> None:
    """A file that cannot be used is a usage error with the file and the key in it."""
    path = tmp_path / "spectune.yaml"
    path.write_text(document, encoding="utf-8")

    with pytest.raises(UsageError) as caught:
        read_config(path)

    assert f"--config {path}: " in caught.value.message
    assert message in caught.value.message


@pytest.mark.parametrize(
    "content",
    [
        {"search": {"num_tokens": [1, 2]}},
        {"search": {"num_tokens": 3}},
        {"search": {"num_tokens": 0}},
        {"search": {"num_tokens": []}},
        {"search": {"num_tokens": ["x"]}},
        {"model": {"device": "cpu"}},
        {"backend": {"device": "tpu"}},
        {"sampling": {"top_p": 1.5}},
        {"sampling": {"ignore_eos": True}},
        {"sampling": {"ignore_eos": 1}},
        {"workload": {"categories": []}},
        {"model": {"model": None}},
        {"model": {"model": ""}},
    ],
    ids=str,
)
def test_read_config_accepts_what_the_schema_accepts(tmp_path: Path, content: dict[str, Any]) -> None:
    """An editor with the schema and the command agree on what is valid."""
    path = tmp_path / "spectune.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")

    try:
        parse_settings(SweepOptions, read_config(path)[0])
        is_accepted = True
    except UsageError:
        is_accepted = False

    assert jsonschema.Draft202012Validator(PUBLISHED).is_valid(content) == is_accepted

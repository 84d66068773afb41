"""spectune.yaml: read it, print a template, print its JSON schema. Every flag overrides the file."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import typer

from spectune.cli.options import Setting, settings_of
from spectune.cli.sweep_options import SweepOptions
from spectune.errors import UsageError

SCHEMA_FILE = "spectune.schema.json"
CONFIG_VERSION = 1

app = typer.Typer(no_args_is_help=True, help="The configuration file spectune.yaml.")


@app.command(epilog="Example: spectune config template > spectune.yaml")
def template(
    as_json: Annotated[bool, typer.Option("--json", help="The same settings as JSON.")] = False,
) -> None:
    """Print a spectune.yaml with every setting, its default and what it means."""
    if as_json:
        from spectune.cli.console import print_json

        print_json(default_document())
    else:
        print(template_text(), end="")


@app.command(epilog="Example: spectune config schema > spectune.schema.json")
def schema(
    as_json: Annotated[bool, typer.Option("--json", help="The default: a schema is JSON.")] = True,
) -> None:
    """Print the JSON schema of spectune.yaml."""
    print(resources.files("spectune.cli").joinpath(SCHEMA_FILE).read_text(encoding="utf-8"), end="")


def read_config(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Settings by name, and for each the place in the file that errors should name."""
    import yaml

    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path}: cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"--config {path}: not YAML: {' '.join(str(error).split())}") from error
    document = {} if document is None else document
    if not isinstance(document, dict):
        raise UsageError(f"--config {path}: expected sections, found {type(document).__name__}")
    version = document.pop("schema_version", CONFIG_VERSION)
    if version != CONFIG_VERSION or isinstance(version, bool):
        raise UsageError(f"--config {path}: schema_version {version!r}, this spectune reads {CONFIG_VERSION}")
    return _flatten(document, path)


def _flatten(document: dict[str, Any], path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    sections = settings_by_section()
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for section, content in document.items():
        if section not in sections:
            hint = f"sections: {', '.join(sections)}"
            raise UsageError(f"--config {path}: unknown section {section!r}", hint=hint)
        if not isinstance(content, dict):
            raise UsageError(f"--config {path}: section {section} holds no settings")
        for name, value in content.items():
            if name not in sections[section]:
                hint = f"settings of {section}: {', '.join(sections[section])}"
                raise UsageError(f"--config {path}: unknown setting {section}.{name}", hint=hint)
            values[name] = value
            sources[name] = f"{path}: {section}.{name}"
    return values, sources


def settings_by_section() -> dict[str, dict[str, Setting]]:
    """Settings as they are grouped in the file."""
    sections: dict[str, dict[str, Setting]] = {}
    for name, spec in settings_of(SweepOptions).items():
        sections.setdefault(spec.section, {})[name] = spec
    return sections


def default_document() -> dict[str, Any]:
    """The whole file with every default."""
    body = {
        section: {name: _plain(spec.default) for name, spec in settings.items()}
        for section, settings in settings_by_section().items()
    }
    return {"schema_version": CONFIG_VERSION, **body}


def template_text() -> str:
    """The default document as commented YAML."""
    lines = [
        "# Settings of `spectune sweep --config spectune.yaml`; every flag overrides them.",
        f"# yaml-language-server: $schema={SCHEMA_FILE}",
        f"schema_version: {CONFIG_VERSION}",
    ]
    for section, settings in settings_by_section().items():
        lines.append(f"{section}:")
        for name, spec in settings.items():
            lines.append(f"  # {spec.help}")
            lines.append(f"  {name}: {json.dumps(_plain(spec.default))}")
    return "\n".join(lines) + "\n"


def schema_document() -> dict[str, Any]:
    """JSON schema of the file, derived from the settings; the published copy is compared by a test."""
    sections = {
        section: {
            "type": "object",
            "additionalProperties": False,
            "properties": {name: _schema_of(spec) for name, spec in settings.items()},
        }
        for section, settings in settings_by_section().items()
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "spectune.yaml",
        "type": "object",
        "additionalProperties": False,
        "properties": {"schema_version": {"const": CONFIG_VERSION}, **sections},
    }


def schema_text() -> str:
    """The published schema, as text."""
    return json.dumps(schema_document(), indent=2) + "\n"


def _schema_of(spec: Setting) -> dict[str, Any]:
    item: dict[str, Any] = {
        "type": {int: "integer", float: "number", bool: "boolean", str: "string"}[spec.kind]
    }
    if spec.kind is str:
        item["minLength"] = 1
    if spec.choices:
        item["enum"] = list(spec.choices)
    if spec.minimum is not None:
        item["minimum"] = spec.minimum
    if spec.maximum is not None:
        item["maximum"] = spec.maximum
    described = {"description": spec.help, "default": _plain(spec.default)}
    if spec.is_list:
        return {
            **described,
            "anyOf": [item, {"type": "array", "items": item, "minItems": min(1, len(spec.default))}],
        }
    if spec.is_nullable:
        return {**described, "anyOf": [item, {"type": "null"}]}
    return {**described, **item}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value

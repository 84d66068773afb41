"""One declaration per setting: its flags, its place in spectune.yaml, its default and its help.

`SweepOptions` is the single source; flags, the published schema, the config template and the manifest
are derived from it. Values come from flags (text) or YAML; what cannot be used is a UsageError that
names the flag or key and the value.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Annotated, Any

import typer

from spectune.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How one setting is spelled and checked."""

    flags: tuple[str, ...]
    section: str
    kind: type
    is_list: bool
    default: Any
    help: str
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    is_nullable: bool = False

    def parse(self, value: Any, *, source: str) -> Any:
        """The typed value of a flag's text or a YAML node; `source` names it in errors."""
        if value is None and self.is_nullable:
            return None
        if not self.is_list:
            return self._parse_item(value, source)
        items = [item.strip() for item in value.split(",")] if isinstance(value, str) else value
        items = list(items) if isinstance(items, list | tuple) else [items]
        if items == [] and self.default == ():
            return ()
        if not items or "" in items:
            raise UsageError(f"{source}: {value!r} has an empty item", hint="give a comma-separated list")
        return tuple(dict.fromkeys(self._parse_item(item, source) for item in items))

    def _parse_item(self, value: Any, source: str) -> Any:
        item = self._convert(value)
        if item is None:
            noun = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[self.kind]
            raise UsageError(f"{source}: {value!r} is not {noun}")
        if self.choices and item not in self.choices:
            raise UsageError(f"{source}: {value!r} is not one of {', '.join(self.choices)}")
        if self.minimum is not None and item < self.minimum:
            raise UsageError(f"{source}: {value} is below the minimum of {self.minimum:g}")
        if self.maximum is not None and item > self.maximum:
            raise UsageError(f"{source}: {value} is above the maximum of {self.maximum:g}")
        return item

    def _convert(self, value: Any) -> Any:
        if self.kind is bool:
            return value if isinstance(value, bool) else None
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            return None
        if self.kind is str:
            return value if isinstance(value, str) and value else None
        try:
            number = self.kind(value) if not isinstance(value, float) or self.kind is float else None
        except ValueError:
            return None
        return number if number is not None and math.isfinite(number) else None


def setting(
    default: Any,
    *flags: str,
    section: str,
    help: str,
    kind: type | None = None,
    **limits: Any,
) -> Any:
    """A dataclass field that carries its Setting."""
    is_list = isinstance(default, tuple)
    sample = default[0] if is_list and default else default
    spec = Setting(
        flags=flags,
        section=section,
        kind=kind or (str if sample is None else type(sample)),
        is_list=is_list,
        default=default,
        help=help,
        is_nullable=default is None,
        **limits,
    )
    return field(default=default, metadata={"setting": spec})


def changed(options: type, name: str, **changes: Any) -> Any:
    """The setting `name` of `options` for another command: another default, help or limit, the same flags."""
    spec = replace(settings_of(options)[name], **changes)
    return field(default=spec.default, metadata={"setting": spec})


def settings_of(options: type) -> dict[str, Setting]:
    """Settings by field name, in declaration order."""
    return {item.name: item.metadata["setting"] for item in fields(options) if "setting" in item.metadata}


def parse_settings(
    options: type, *layers: Mapping[str, Any], sources: Mapping[str, str] | None = None
) -> Any:
    """Typed options from layers of values, later layers win; a name absent everywhere keeps its default."""
    known = settings_of(options)
    merged: dict[str, Any] = {}
    for layer in layers:
        merged.update(layer)
    typed = {
        name: known[name].parse(value, source=(sources or {}).get(name, known[name].flags[0]))
        for name, value in merged.items()
    }
    return options(**typed)


def with_flags(options: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: the command's `**flags` become one command-line option per setting, None if not given."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [
            parameter
            for parameter in inspect.signature(command, eval_str=True).parameters.values()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        added = [_flag_parameter(name, spec) for name, spec in settings_of(options).items()]
        signature = inspect.Signature([*own, *added])
        command.__signature__ = signature  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
        return command

    return decorate


def _flag_parameter(name: str, spec: Setting) -> inspect.Parameter:
    flags = list(spec.flags)
    if spec.kind is bool:
        flags = [f"{flag}/--no-{flag.removeprefix('--')}" for flag in flags]
    option = typer.Option(
        *flags,
        help=_help_with_default(spec),
        metavar=None if spec.kind is bool else _metavar(spec),
        rich_help_panel=spec.section.capitalize(),
        show_default=False,
    )
    kind: Any = bool if spec.kind is bool else str
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def _metavar(spec: Setting) -> str:
    if spec.choices and not spec.is_list:
        return "|".join(spec.choices)
    noun = {int: "N", float: "X", str: "TEXT"}[spec.kind]
    return f"{noun},..." if spec.is_list else noun


def _help_with_default(spec: Setting) -> str:
    if spec.default is None or spec.default == () or spec.default is False:
        return spec.help
    return f"{spec.help.rstrip('.')} (default {as_text(spec.default)})."


def as_text(value: Any) -> str:
    """The value as it is typed on the command line."""
    if isinstance(value, tuple | list):
        return ",".join(as_text(item) for item in value)
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def defaults_of(options: type) -> dict[str, Any]:
    """Default value by field name."""
    return {item.name: item.default for item in fields(options) if item.default is not MISSING}

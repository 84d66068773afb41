"""Values become text: units, escaping, and what stands in for a value that was not observed.

Seconds and fractions come in, milliseconds and percent go out. Nothing here ever prints 0 or nan for
an absent value: it returns `Missing` with the reason.
"""

from __future__ import annotations

import html
import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spectune.records import Interval, SpecConfig

DASH = "\N{EM DASH}"
TIMES = "\N{MULTIPLICATION SIGN}"
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


class Html(str):
    """Text that is markup already: it is not escaped again."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """A value that was not observed, and why."""

    reason: str


Value = str | Missing  # Html is a str


def escape(value: object) -> Html:
    """HTML-escaped text; control characters that no document may hold become the replacement mark."""
    if isinstance(value, Html):
        return value
    return Html(html.escape(_CONTROL.sub("\N{REPLACEMENT CHARACTER}", str(value)), quote=True))


def one_line(value: object, limit: int = 200) -> str:
    """Text on one line, shortened in the middle, for chart labels and titles."""
    text = " ".join(_CONTROL.sub("\N{REPLACEMENT CHARACTER}", str(value)).split())
    if len(text) <= limit:
        return text
    head = limit * 2 // 3
    return f"{text[:head]}\N{HORIZONTAL ELLIPSIS}{text[-(limit - head - 1) :]}"


def dash(reason: str) -> Html:
    """The em dash of an absent value, with the reason as its tooltip and for screen readers."""
    why = escape(reason)
    return Html(f'<span class="none" title="{why}" aria-label="not observed: {why}">{DASH}</span>')


def is_number(value: object) -> bool:
    """True for a finite number; False for None, NaN and infinity."""
    return isinstance(value, int | float) and math.isfinite(value)


def number(value: float | None, why: str, *, digits: int = 2, suffix: str = "") -> Value:
    """A number with fixed decimals, or Missing."""
    if value is None:
        return Missing(reason=why)
    if not math.isfinite(value):
        return Missing(reason="the value is not a finite number")
    return f"{value:,.{digits}f}{suffix}"


def milliseconds(value_s: float | None, why: str) -> Value:
    """Seconds as milliseconds with about three significant digits."""
    if value_s is None or not math.isfinite(value_s):
        return number(value_s, why)
    value = value_s * 1e3
    digits = 1 if abs(value) >= 100 else 2 if abs(value) >= 1 else 3
    return number(value, why, digits=digits)


def percent(fraction: float | None, why: str, *, digits: int = 0, signed: bool = False) -> Value:
    """A fraction 0..1 as percent."""
    if fraction is None or not math.isfinite(fraction):
        return number(fraction, why)
    sign = "+" if signed and fraction > 0 else ""
    return f"{sign}{fraction * 100:.{digits}f}%".replace("-", "\N{MINUS SIGN}")


def speedup(interval: Interval | None, why: str) -> Value:
    """A speedup with its interval: `1.62x (1.55 to 1.69)`; says so when there is no interval."""
    if interval is None:
        return Missing(reason=why)
    value = f"<strong>{interval.value:.2f}{TIMES}</strong>"
    if interval.low is None or interval.high is None:
        return Html(f'{value} <span class="ci">no interval, n={interval.n}</span>')
    return Html(f'{value} <span class="ci">({interval.low:.2f} to {interval.high:.2f})</span>')


def speedup_text(value: float | None, bounds: Sequence[float] | None, why: str) -> Value:
    """The same from a plain number and its bounds, as imported rows hold them."""
    if value is None:
        return Missing(reason=why)
    low, high = bounds or (None, None)
    return speedup(Interval(value=value, low=low, high=high, n=1), why)


def config_html(config: SpecConfig | None, why: str = "none") -> Value:
    """A configuration's label in code type; plain decoding named in words."""
    if config is None:
        return Missing(reason=why)
    return (
        Html("off&nbsp;(plain&nbsp;decoding)")
        if config.is_off
        else Html(f"<code>{escape(config.label)}</code>")
    )


def strict_json(value: Any) -> str:
    """Indented strict JSON: non-finite numbers become null, unknown types their text."""

    def clean(item: Any) -> Any:
        if hasattr(item, "item") and callable(item.item):  # a numpy scalar
            item = item.item()
        if isinstance(item, float):
            return item if math.isfinite(item) else None
        if isinstance(item, Mapping):
            return {str(key): clean(part) for key, part in item.items()}
        if isinstance(item, list | tuple | set | frozenset):
            return [clean(part) for part in item]
        return item if item is None or isinstance(item, str | int | bool) else str(item)

    return json.dumps(clean(value), indent=2, ensure_ascii=False, allow_nan=False)


def flatten(value: Any, prefix: str = "") -> list[tuple[str, str | None]]:
    """Nested facts as (dotted name, text) rows; an argument vector becomes one command line."""
    if isinstance(value, Mapping) and value:
        return [
            row
            for key, part in value.items()
            for row in flatten(part, f"{prefix}.{key}" if prefix else str(key))
        ]
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        if prefix.rpartition(".")[2] in {"argv", "command_line", "command"}:
            return [(prefix, shlex.join(str(part) for part in value))]
        if any(isinstance(part, Mapping) for part in value):
            return [row for index, part in enumerate(value) for row in flatten(part, f"{prefix}.{index}")]
        return [(prefix, ", ".join(str(part) for part in value) or None)]
    if value is None or value == {} or value == "" or (isinstance(value, float) and not is_number(value)):
        return [(prefix, None)]
    return [(prefix, str(value))]

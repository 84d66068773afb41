"""Figures become inline SVG: the chart style, the palette and the cleaning. Loads nothing, no pyplot."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from spectune.report.text import Html, escape, one_line

INK = "#1b2430"
MUTED = "#5b6675"
RULE = "#d9dee5"
GOOD = "#00795a"
BAD = "#b84a00"
DRAFT, VERIFY, OTHER = "#e69f00", "#0072b2", "#9aa4b1"
WIDTH_IN = 9.2
LABEL_LIMIT = 28

# Okabe-Ito without its yellow, which vanishes on white, then two of Tol's muted set.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#882255", "#332288")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")
_LINES = ("-", "--", "-.", (0, (1, 1.2)))
_FONTS = "system-ui,-apple-system,Segoe UI,Roboto,Helvetica,Arial,sans-serif"

_STYLE: Any = {  # Any: matplotlib types its keys as one long Literal
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9.0,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": "#aab3be",
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "text.color": INK,
    "grid.color": RULE,
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.8,
    "lines.markersize": 6.5,
    "legend.frameon": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmStyle:
    """How an arm is drawn in every chart of a report: colour, marker and dash, so never colour alone."""

    colour: str
    marker: str
    dash: Any

    @property
    def text_colour(self) -> str:
        """The colour darkened until it reads as text on white."""
        parts = (int(self.colour[start : start + 2], 16) for start in (1, 3, 5))
        return "#" + "".join(f"{round(part * 0.66):02x}" for part in parts)


Styles = dict[str, ArmStyle]


def arm_styles(labels: Iterable[str]) -> Styles:
    """One style for each distinct label, in order of first appearance."""
    return {
        label: ArmStyle(
            colour=_COLOURS[index % len(_COLOURS)],
            marker=_MARKERS[index % len(_MARKERS)],
            dash=_LINES[index // len(_COLOURS) % len(_LINES)],
        )
        for index, label in enumerate(dict.fromkeys(labels))
    }


def spread(positions: Sequence[float], gap: float) -> list[float]:
    """Positions moved apart until neighbours differ by `gap`, the order and the centre kept."""
    order = sorted(range(len(positions)), key=lambda index: positions[index])
    placed = [positions[index] for index in order]
    for _ in range(100):
        moved = False
        for low in range(len(placed) - 1):
            overlap = gap - (placed[low + 1] - placed[low])
            if overlap > gap * 1e-3:
                placed[low] -= overlap / 2
                placed[low + 1] += overlap / 2
                moved = True
        if not moved:
            break
    result = [0.0] * len(positions)
    for rank, index in enumerate(order):
        result[index] = placed[rank]
    return result


def new_figure(height_in: float, *, width_in: float = WIDTH_IN) -> Figure:
    """An empty figure in the report's style, with its labels kept inside."""
    with matplotlib.rc_context(_STYLE):
        return Figure(figsize=(width_in, height_in), layout="constrained")


def chart_style() -> Any:
    """The rc context in which every axes is made and saved."""
    return matplotlib.rc_context(_STYLE)


def chart_html(
    figure: Figure, name: str, caption: str, *, is_simulated: bool, mark: str = "SIMULATED"
) -> Html:
    """The figure as `<figure>` with inline SVG and caption; simulated data is stamped with `mark`."""
    with chart_style():
        if is_simulated:
            figure.text(
                0.5,
                0.5,
                mark,
                ha="center",
                va="center",
                fontsize=54,
                color="#b3261e",
                alpha=0.13,
                rotation=14,
                fontweight="bold",
            )
        svg = inline_svg(figure, name, caption)
    tag = f'<span class="sim-tag">{escape(mark)}</span> ' if is_simulated else ""
    return Html(
        f'<figure class="chart" id="chart-{name}"><div class="card">{svg}</div>'
        f"<figcaption>{tag}{escape(caption)}</figcaption></figure>"
    )


def inline_svg(figure: Figure, name: str, label: str) -> str:
    """SVG for an HTML page: no prolog, DTD, metadata or namespace addresses; ids prefixed by `name`."""
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    root = ElementTree.fromstring(buffer.getvalue())
    for parent in list(root.iter()):
        for child in list(parent):
            if _local(child.tag) in {"metadata", "style"}:
                parent.remove(child)
    for element in root.iter():
        element.tag = _local(element.tag)
        element.attrib = {
            _local(key): _prefixed(_local(key), value, name) for key, value in element.attrib.items()
        }
    width = float(root.attrib.pop("width").removesuffix("pt"))
    root.attrib.pop("height")
    root.attrib.pop("version", None)
    root.attrib.update(
        {"role": "img", "aria-label": one_line(label), "style": f"max-width:{width * 1.45:.0f}px"}
    )
    return ElementTree.tostring(root, encoding="unicode", method="html")


def _local(name: str) -> str:
    return name.rpartition("}")[2]


def _prefixed(attribute: str, value: str, name: str) -> str:
    if attribute == "id":
        return f"{name}-{value}"
    if attribute == "href":
        return f"#{name}-{value.removeprefix('#')}"
    if attribute == "style":
        value = value.replace("'DejaVu Sans'", _FONTS)
    return re.sub(r"url\(#", f"url(#{name}-", value)

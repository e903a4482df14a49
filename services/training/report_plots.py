"""The report's plots, as inline SVG whose colours are CSS variables of the page.

Called by `report.py` alone. matplotlib draws with placeholder colours, each of which becomes
`var(--…)`: one picture serves a light and a dark page.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

_VARIABLES = {"#010101": "--text", "#020202": "--muted", "#030303": "--grid"}
_VARIABLES |= {f"#0404{i:02x}": f"--series-{i}" for i in range(8)}
_TEXT, _MUTED, _GRID = list(_VARIABLES)[:3]
_SERIES = list(_VARIABLES)[3:]
_STYLE: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "rollart", "text.parse_math": False, "font.size": 9.0,
    "font.family": "sans-serif", "text.color": _TEXT, "axes.labelcolor": _MUTED, "axes.edgecolor": _GRID,
    "xtick.color": _GRID, "ytick.color": _GRID, "xtick.labelcolor": _MUTED, "ytick.labelcolor": _MUTED,
    "grid.color": _GRID, "grid.linewidth": 0.6, "axes.grid": True, "axes.grid.axis": "y",
    "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False,
    "axes.spines.left": False, "ytick.major.size": 0.0, "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round", "axes.xmargin": 0.02, "axes.labelpad": 7.0,
}  # fmt: skip

Points = Sequence[tuple[float, float | None]]
SMOOTHED_FROM = 12
"""A noisy series of at least this many points is drawn faint under its moving average."""


@dataclass(frozen=True)
class Series:
    """One line of a plot."""

    label: str
    points: Points
    marks: Points = ()
    """Single values drawn as discs, with their number beside them."""


@dataclass(frozen=True)
class Plot:
    """A drawn plot, with what the page says around it."""

    title: str
    note: str
    svg: str
    legend: list[tuple[str, str]] = field(default_factory=list)
    """(label, CSS variable) of each series."""
    wide: bool = False
    """Takes the page's whole width."""


def lines(
    title: str,
    series: Sequence[Series],
    *,
    note: str,
    x_label: str,
    y_label: str,
    y_range: tuple[float, float] | None = None,
    smooth: bool = False,
    wide: bool = False,
) -> Plot | None:
    """Lines over a common axis; None where there is nothing to draw."""
    series = [one for one in series if _known(one.points) or _known(one.marks)]
    if not series:
        return None
    with matplotlib.rc_context(_STYLE):
        figure, axes = _figure(x_label, y_label, wide=wide)
        for index, one in enumerate(series):
            colour = _SERIES[index % len(_SERIES)]
            points = _known(one.points)
            if smooth and len(points) >= SMOOTHED_FROM:
                axes.plot(*_columns(points), color=colour, alpha=0.28, linewidth=1.0)
                points = _moving_average(points)
            axes.plot(*_columns(points), color=colour, marker="o" if len(points) < 3 else "", markersize=3)
        if y_range:
            axes.set_ylim(*y_range)
        elif min(y for one in series for _, y in _known(one.points) or [(0.0, 0.0)]) >= 0:
            axes.set_ylim(bottom=0)
        _mark(axes, series)
        legend = [(one.label, _variable(i)) for i, one in enumerate(series)]
        return Plot(title, note, _svg(figure), legend, wide)


def stacked(title: str, parts: Mapping[str, Points], *, note: str, x_label: str, y_label: str) -> Plot | None:
    """Bars of parts on top of each other, one bar for each x."""
    labels = [label for label, points in parts.items() if points]
    if not labels:
        return None
    with matplotlib.rc_context(_STYLE):
        figure, axes = _figure(x_label, y_label, wide=True)
        bottom: dict[float, float] = {}
        for index, label in enumerate(labels):
            xs, ys = _columns(_known(parts[label]))
            axes.bar(
                xs, ys, width=0.85, bottom=[bottom.get(x, 0.0) for x in xs], color=_SERIES[index], linewidth=0
            )
            for x, y in zip(xs, ys, strict=True):
                bottom[x] = bottom.get(x, 0.0) + y
        legend = [(label, _variable(i)) for i, label in enumerate(labels)]
        return Plot(title, note, _svg(figure), legend, wide=True)


def bars(title: str, values: Mapping[str, int], *, note: str, x_label: str, y_label: str) -> Plot | None:
    """One bar for each name, with its count and share above it."""
    total = sum(values.values())
    if not total:
        return None
    with matplotlib.rc_context(_STYLE):
        figure, axes = _figure(x_label, y_label, wide=False)
        drawn = axes.bar(list(values), list(values.values()), width=0.7, color=_SERIES[0], linewidth=0)
        texts = [f"{count:,}\n{count / total:.0%}" for count in values.values()]
        axes.bar_label(drawn, labels=texts, color=_TEXT, padding=2, fontsize=8)
        axes.set_ylim(top=max(values.values()) * 1.22)
        if len(values) < 4:
            axes.set_xlim(-0.5 - (4 - len(values)) / 2, len(values) - 0.5 + (4 - len(values)) / 2)
        return Plot(title, note, _svg(figure))


def _figure(x_label: str, y_label: str, *, wide: bool) -> tuple[Figure, Any]:
    figure = Figure(figsize=(10.4 if wide else 5.1, 2.75), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.ticklabel_format(axis="y", scilimits=(-3, 6))
    if x_label == "step":
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=True))
    return figure, axes


def _mark(axes: Any, series: Sequence[Series]) -> None:
    """Discs with their numbers beside them: on the outer side, pushed apart where they would overlap."""
    marks: dict[float, list[tuple[float, str]]] = {}
    for index, one in enumerate(series):
        for x, y in _known(one.marks):
            marks.setdefault(x, []).append((y, _SERIES[index % len(_SERIES)]))
    if not marks:
        return
    every_x = [x for one in series for x, _ in [*_known(one.points), *_known(one.marks)]]
    low, high = min(every_x), max(every_x)
    pad = 0.15 * ((high - low) or 1.0)
    axes.set_xlim(low - pad, high + pad)
    gap = 0.085 * (axes.get_ylim()[1] - axes.get_ylim()[0])
    for x, values in marks.items():
        left = x <= (low + high) / 2
        floor = -math.inf
        for y, colour in sorted(values):
            floor = max(y, floor + gap)
            axes.plot([x], [y], "o", color=colour, markersize=6.5, clip_on=False, zorder=5)
            axes.annotate(
                f"{y:.3f}", (x, floor), xytext=(-7 if left else 7, 0), textcoords="offset points",
                ha="right" if left else "left", va="center", fontweight="bold", color=colour,
                annotation_clip=False,
            )  # fmt: skip


def _svg(figure: Figure) -> str:
    """The <svg> element alone, scaling with its column, colours replaced by variables."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    for placeholder, variable in _VARIABLES.items():
        svg = svg.replace(placeholder, f"var({variable})")
    return re.sub(r"font(-family)?: ?[^;\"]*sans-serif", _own_font, svg)


def _own_font(match: re.Match[str]) -> str:
    size = re.search(r"[\d.]+px", match[0])
    if match[1]:
        return "font-family: inherit"
    weight = "bold " if "bold" in match[0] else ""
    return f"font: {weight}{size[0] if size else '9px'} var(--font)"


def _known(points: Points) -> list[tuple[float, float]]:
    return [(x, y) for x, y in points if y is not None and math.isfinite(y)]


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _moving_average(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Mean over a centred window of about a tenth of the series, shorter at the ends."""
    half = max(1, len(points) // 20)
    averaged = []
    for index, (x, _) in enumerate(points):
        near = points[max(0, index - half) : index + half + 1]
        averaged.append((x, sum(y for _, y in near) / len(near)))
    return averaged


def _variable(index: int) -> str:
    return _VARIABLES[_SERIES[index % len(_SERIES)]]

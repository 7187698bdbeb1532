# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Plots as SVG text, drawn by matplotlib."""

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_SIZE_INCHES = (5.6, 3.2)
_MAX_POINTS = 1000


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Curves and bars over one horizontal axis."""

    title: str
    x_label: str
    y_label: str
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]] = field(default_factory=dict)
    """Label -> (x, y); points that are not finite are left out."""
    bars: Mapping[str, tuple[Sequence[float], Sequence[float]]] = field(default_factory=dict)
    """The same as bars; those of one x stand on top of one another."""
    bar_width: float = 0.8
    """On the horizontal axis."""


def svg(plot: Plot) -> str:
    """The plot as one SVG element; long curves are thinned out. One plot gives the same text at every call."""
    # Imported here: a program that draws nothing starts faster.
    import matplotlib
    from matplotlib.figure import Figure

    # Text stays text, and the identifiers inside depend on the plot alone.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": plot.title, "font.size": 8}):
        figure = Figure(figsize=_SIZE_INCHES)
        # Room for ten digits of eight points; a layout that is computed takes as long as the plot.
        figure.subplots_adjust(left=0.16, right=0.97, top=0.9, bottom=0.16)
        axes = figure.add_subplot(title=plot.title, xlabel=plot.x_label, ylabel=plot.y_label)
        axes.grid(color="#e3e6ea")
        axes.ticklabel_format(useOffset=False)
        tops: dict[float, float] = {}
        for label, curve in plot.bars.items():
            if points := _points(*curve):
                xs, heights = zip(*points, strict=True)
                axes.bar(xs, heights, plot.bar_width, [tops.get(x, 0.0) for x in xs], label=_plain(label))
                tops |= {x: tops.get(x, 0.0) + height for x, height in points}
        for number, (label, curve) in enumerate(plot.curves.items()):
            if points := _points(*curve):
                marker = "o" if len(points) < 20 else ""
                axes.plot(*zip(*points, strict=True), label=_plain(label), marker=marker, markersize=3, gid=f"curve-{number}")
        if len(plot.curves) + len(plot.bars) > 1 and (axes.lines or axes.patches):
            axes.legend()
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    whole = text.getvalue()
    return whole[whole.index("<svg") :]


def _plain(label: str) -> str:
    return label.replace("$", r"\$")


def _points(xs: Sequence[float], ys: Sequence[float]) -> list[tuple[float, float]]:
    """Finite points; of too many, evenly spaced ones and the last."""
    finite = [(x, y) for x, y in zip(xs, ys, strict=True) if math.isfinite(x) and math.isfinite(y)]
    stride = math.ceil(len(finite) / _MAX_POINTS) or 1
    return finite[::stride] if not finite or (len(finite) - 1) % stride == 0 else [*finite[::stride], finite[-1]]

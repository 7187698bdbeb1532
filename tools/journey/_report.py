# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The journey as one self-contained page."""

import html
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; color: #1c2024; background: #fff }
h1 { font-size: 1.6rem } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
table { border-collapse: collapse; width: 100% } td, th { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid #e3e6ea }
td:last-child { font-variant-numeric: tabular-nums }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(28rem, 1fr)); gap: 1rem } svg { width: 100%; height: auto }
pre { background: #f5f6f8; padding: .8rem; overflow-x: auto; border-radius: 4px }
"""


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Curves over one horizontal axis."""

    title: str
    x_label: str
    y_label: str
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    """Label -> (x, y)."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """Measured facts, and text the model wrote."""

    title: str
    facts: Sequence[tuple[str, str]]
    text: str = ""


def write_report(path: Path, title: str, sections: Sequence[Section], plots: Sequence[Plot]) -> None:
    """Write the page; it needs no network and no other file."""
    parts = [f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{html.escape(title)}</title><style>{_STYLE}</style>"]
    parts.append(f"<h1>{html.escape(title)}</h1><div class='plots'>")
    parts += [f"<figure>{_svg(plot)}</figure>" for plot in plots]
    parts.append("</div>")
    for section in sections:
        rows = "".join(f"<tr><td>{html.escape(name)}</td><td>{html.escape(value)}</td></tr>" for name, value in section.facts)
        text = f"<pre>{html.escape(section.text)}</pre>" if section.text else ""
        parts.append(f"<h2>{html.escape(section.title)}</h2><table>{rows}</table>{text}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(parts), encoding="utf-8")


def _svg(plot: Plot) -> str:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 3.2), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    for label, (x, y) in plot.curves.items():
        axes.plot(x, y, label=label, linewidth=1.4, marker="o" if len(x) < 20 else None, markersize=3)
    axes.set(title=plot.title, xlabel=plot.x_label, ylabel=plot.y_label)
    axes.grid(alpha=0.25)
    if len(plot.curves) > 1:
        axes.legend(fontsize=8)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    # The XML prologue does not belong inside a page.
    return buffer.getvalue().partition("<svg")[1] + buffer.getvalue().partition("<svg")[2]

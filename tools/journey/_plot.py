# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Line plots as SVG text."""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_WIDTH, _HEIGHT = 560, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 30, 44
_COLORS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2", "#be185d", "#65a30d")
_MAX_POINTS = 1000


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Curves over one horizontal axis."""

    title: str
    x_label: str
    y_label: str
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    """Label -> (x, y); points that are not finite are left out."""


def svg(plot: Plot) -> str:
    """The plot as one SVG element; long curves are thinned out."""
    curves = {label: _points(*curve) for label, curve in plot.curves.items()}
    xs = _ticks([x for points in curves.values() for x, _ in points])
    ys = _ticks([y for points in curves.values() for _, y in points])

    def at(x: float, y: float) -> tuple[float, float]:
        right, down = (x - xs[0]) / (xs[-1] - xs[0]), (ys[-1] - y) / (ys[-1] - ys[0])
        return _LEFT + right * (_WIDTH - _LEFT - _RIGHT), _TOP + down * (_HEIGHT - _TOP - _BOTTOM)

    parts = [f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_WIDTH} {_HEIGHT}' font-family='sans-serif' font-size='11'>"]
    parts.append(_text(_WIDTH / 2, 18, plot.title, "middle", "font-weight='bold' font-size='13'"))
    for tick in xs:
        x, bottom = at(tick, ys[0])
        parts.append(f"<path d='M{x:.1f} {_TOP}V{bottom:.1f}' stroke='#e3e6ea'/>" + _text(x, bottom + 15, f"{tick:g}", "middle"))
    for tick in ys:
        left, y = at(xs[0], tick)
        parts.append(f"<path d='M{left:.1f} {y:.1f}H{_WIDTH - _RIGHT}' stroke='#e3e6ea'/>" + _text(left - 6, y + 4, f"{tick:.6g}", "end"))
    parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 8, plot.x_label, "middle"))
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    parts.append(_text(14, middle, plot.y_label, "middle", f"transform='rotate(-90 14 {middle})'"))
    for number, (label, points) in enumerate(curves.items()):
        color = _COLORS[number % len(_COLORS)]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in points))
        parts.append(f"<polyline points='{line}' fill='none' stroke='{color}' stroke-width='1.5'/>")
        if len(points) < 20:
            parts += [f"<circle cx='{x:.1f}' cy='{y:.1f}' r='2.5' fill='{color}'/>" for x, y in (at(*point) for point in points)]
        if len(curves) > 1:
            y = _TOP + 14 + 15 * number
            parts.append(
                f"<path d='M{_WIDTH - 120} {y - 4}h16' stroke='{color}' stroke-width='2'/>" + _text(_WIDTH - 100, y, label, "start")
            )
    return "".join(parts) + "</svg>"


def _text(x: float, y: float, words: str, anchor: str, more: str = "") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' fill='#1c2024' {more}>{html.escape(words)}</text>"


def _points(xs: Sequence[float], ys: Sequence[float]) -> list[tuple[float, float]]:
    """Finite points; of too many, evenly spaced ones and the last."""
    found = [(x, y) for x, y in zip(xs, ys, strict=True) if math.isfinite(x) and math.isfinite(y)]
    stride = math.ceil(len(found) / _MAX_POINTS) or 1
    return found[::stride] if not found or (len(found) - 1) % stride == 0 else [*found[::stride], found[-1]]


def _ticks(values: Sequence[float]) -> list[float]:
    """Three to seven round numbers, the first at or below all values and the last at or above them."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if high == low:
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [number * step for number in range(first, last + 1)]

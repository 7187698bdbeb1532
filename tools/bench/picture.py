# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The README's picture: training speed beside peers, drawn from result files.

python -m tools.bench.picture docs/benchmarks/train.json docs/benchmarks/dense_step.json \\
    --output docs/benchmarks/train.svg

Reads the results of ``tools.bench.train`` and of ``tools.bench.dense_step`` with peers. Of each work the fastest run of each side counts.
"""

import argparse
import html
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_WIDTH, _LEFT, _RIGHT, _BAR, _GAP, _TOP = 720, 190, 110, 16, 18, 46
_COLORS = ("#2563eb", "#9ca3af", "#d1d5db", "#e5b567")
_OURS = "mcore"


def bars(files: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Work -> who -> tokens a second and GPU; works without both sides are left out."""
    found: dict[str, dict[str, float]] = {}
    for work, who, speed in (bar for file in files for bar in _measured(file)):
        best = found.setdefault(work, {})
        best[who] = max(speed, best.get(who, 0.0))
    return {work: best for work, best in found.items() if _OURS in best and len(best) > 1}


def _measured(file: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    gpus = file["machine"]["num_gpus"]
    for row in file["rows"]:
        if "by" in row:
            if "tokens_per_s" in row:
                yield _named(row["model"], row["gpus"]), row["by"], row["tokens_per_s"]
        elif "tokens_per_s_per_gpu" in row:
            narrow = any(flag.startswith("fp8=") and flag != "fp8=none" for flag in row["flags"])
            yield _named(row["model"] + ("-fp8" if narrow else ""), row["gpus"]), _OURS, row["tokens_per_s_per_gpu"]
    for row in file.get("peers", []):
        if "tok_s_gpu" in row:
            yield _named(row["model"] + ("-fp8" if row.get("fp8") else ""), row.get("world", gpus)), row["peer"], row["tok_s_gpu"]


def _named(model: str, gpus: int) -> str:
    return f"{model}, {gpus} GPU{'s' * (gpus > 1)}" if gpus else f"{model}, CPU"


def svg(works: Mapping[str, Mapping[str, float]], device: str) -> str:
    """Horizontal bars, in parts of our speed, each with its tokens a second."""
    names = [_OURS, *sorted({who for best in works.values() for who in best} - {_OURS})]
    longest = max(speed / best[_OURS] for best in works.values() for speed in best.values())
    room, y, parts = _WIDTH - _LEFT - _RIGHT, _TOP, []
    for work, best in works.items():
        parts.append(_text(_LEFT - 8, y + len(best) * _BAR / 2 + 4, work, "end"))
        for who in (name for name in names if name in best):
            wide, share = room * best[who] / best[_OURS] / longest, best[_OURS] / best[who]
            parts.append(f"<rect x='{_LEFT}' y='{y}' width='{wide:.1f}' height='{_BAR - 2}' fill='{_color(names, who)}'/>")
            beside = f"{best[who]:,.0f}" + ("" if who == _OURS else f" ({share:.2f}x)")
            parts.append(_text(_LEFT + wide + 6, y + _BAR - 5, beside, "start"))
            y += _BAR
        y += _GAP
    x = _LEFT
    for who in names:
        parts.append(f"<rect x='{x}' y='28' width='10' height='10' fill='{_color(names, who)}'/>")
        parts.append(_text(x + 14, 37, who, "start"))
        x += 40 + 7 * len(who)
    title = _text(_LEFT, 18, f"Training, tokens a second and GPU ({device}); in brackets how much faster mcore is", "start")
    # A ground of its own: pages are bright or dark.
    ground = f"<rect width='{_WIDTH}' height='{y}' fill='#ffffff'/>"
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_WIDTH} {y}' font-family='sans-serif' font-size='12' fill='#111827'>"
    return "\n".join([head, ground, title, *parts, "</svg>", ""])


def _color(names: Sequence[str], who: str) -> str:
    """Ours is no peer's."""
    number = names.index(who)
    return _COLORS[number and 1 + (number - 1) % (len(_COLORS) - 1)]


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}'>{html.escape(words)}</text>"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    files = [json.loads(path.read_text()) for path in arguments.results]
    works = bars(files)
    if not works:
        raise SystemExit("no work in these files has both sides")
    devices = sorted({file["machine"]["gpu"] for file in files if file["machine"]["gpu"]})
    arguments.output.write_text(svg(works, ", ".join(devices) or "CPU"))


if __name__ == "__main__":
    main()

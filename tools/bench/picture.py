# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The README's pictures: speed of training and of serving beside peers, drawn by matplotlib from result files.

python -m tools.bench.picture docs/benchmarks/train.json docs/benchmarks/dense_step.json \\
    --output docs/benchmarks/train.svg
python -m tools.bench.picture docs/benchmarks/serve_vllm_h200.json docs/benchmarks/serve_mixture_h200.json \\
    --output docs/benchmarks/serve.svg

Reads the results of ``tools.bench.train``, and of ``tools.bench.dense_step`` and ``tools.bench.serve`` with peers. Only runs of one call,
on as many GPUs and in the same layout, stand beside each other; each side of training at its fastest micro-batch, which the bar names. A
row with ``left_out``, a reason, is not drawn, nor one with ``cost``, which is ours beside ours.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_OURS = "mcore"
_LAYOUT = ("tp", "pp", "vpp", "cp", "ep", "dp")
_SERVED = "out_tok_s"
_TRAINED = ("tokens_per_s", "tokens_per_s_per_gpu", "tok_s_gpu")


@dataclass(frozen=True, kw_only=True)
class Bar:
    """The fastest run of one side."""

    tokens_per_s: float
    """Of one GPU."""
    micro_batch: int | None


Comparison = Mapping[str, Bar]


def comparisons(files: Sequence[Mapping[str, Any]]) -> dict[str, Comparison]:
    """Model, GPUs and layout -> side -> its bar; ours is always one of them.

    Raises:
        ValueError: two files measured the same work; their runs are of different calls.
    """
    works: dict[str, Comparison] = {}
    for file in files:
        best: dict[str, dict[str, Bar]] = {}
        for work, side, bar in _runs(file):
            bars = best.setdefault(work, {})
            if side not in bars or bar.tokens_per_s > bars[side].tokens_per_s:
                bars[side] = bar
        both = {work: bars for work, bars in best.items() if _OURS in bars and len(bars) > 1}
        if twice := sorted(works.keys() & both.keys()):
            raise ValueError(f"{twice[0]} was measured in two files, so in two calls; name one of them")
        works |= both
    return works


def _runs(file: Mapping[str, Any]) -> Iterator[tuple[str, str, Bar]]:
    gpus = file["machine"]["num_gpus"]
    for row in (*file["rows"], *file.get("peers", ())):
        if "left_out" in row or "cost" in row:
            continue
        speed = next((row[key] for key in (*_TRAINED, _SERVED) if key in row), None)
        if speed is None:
            continue
        fp8 = row.get("fp8") or any(flag.startswith("fp8=") and flag != "fp8=none" for flag in row.get("flags", ()))
        num_gpus = row.get("gpus", row.get("world", gpus))
        requests = f", {row['n']} x {row['isl']} / {row['osl']}" if _SERVED in row else ""
        work = _work(row["model"] + ("-fp8" if fp8 else "") + requests, num_gpus, row)
        bar = Bar(tokens_per_s=speed, micro_batch=row.get("micro_batch", row.get("mbs")))
        yield work, row.get("by") or row.get("peer") or _OURS, bar


def _work(model: str, gpus: int, row: Mapping[str, Any]) -> str:
    """Words for the work; degrees of 1 go without saying, and data parallelism takes the GPUs that the others leave."""
    degrees = {axis: row.get(axis, 1) for axis in _LAYOUT if axis != "dp"}
    model_parallel = degrees["tp"] * degrees["pp"] * degrees["cp"]
    degrees["dp"] = row.get("dp", max(gpus, 1) // model_parallel)
    layout = " ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1)
    place = f"{gpus} GPU{'s' * (gpus > 1)}" if gpus else "CPU"
    return ", ".join(filter(None, (model, place, layout)))


def colors(sides: Sequence[str]) -> dict[str, Any]:
    """One colour a side, ours always the first.

    Raises:
        ValueError: there are more sides than colours that can be told apart.
    """
    from matplotlib import colormaps

    palette = colormaps["tab10"].colors  # pyright: ignore[reportAttributeAccessIssue]
    names = [_OURS, *sorted(set(sides) - {_OURS})]
    if len(names) > len(palette):
        raise ValueError(f"sides={len(names)} must be at most {len(palette)}, one colour each; draw fewer files in one picture")
    return dict(zip(names, palette, strict=False))


def draw(works: Mapping[str, Comparison], title: str, output: Path) -> None:
    """Horizontal bars in parts of our speed, each with its tokens/s and its micro-batch."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = [(work, side, bar) for work, bars in works.items() for side, bar in sorted(bars.items(), key=lambda item: item[0] != _OURS)]
    palette = colors([side for _, side, _ in rows])
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "benchmarks", "font.size": 9}):
        figure = Figure(figsize=(8, 0.28 * len(rows) + 0.22 * len(works) + 1.1), layout="constrained", facecolor="white")
        axes = figure.add_subplot()
        places: dict[str, list[float]] = {}
        y = 0.0
        for work, side, bar in rows:
            y += 1.0 if work in places else 1.8
            places.setdefault(work, []).append(y)
            ours = works[work][_OURS].tokens_per_s
            axes.barh(y, bar.tokens_per_s / ours, height=0.9, color=palette[side])
            notes = [] if bar.micro_batch is None else [f"micro-batch {bar.micro_batch}"]
            notes += [] if side == _OURS else [f"mcore {ours / bar.tokens_per_s:.2f}x"]
            label = f"{bar.tokens_per_s:,.0f}" + (f" ({', '.join(notes)})" if notes else "")
            axes.text(bar.tokens_per_s / ours + 0.01, y, label, va="center")
        axes.set_yticks([sum(ys) / len(ys) for ys in places.values()], list(places))
        axes.invert_yaxis()
        axes.set_xlim(0, 1.6 * max(bar.tokens_per_s / works[work][_OURS].tokens_per_s for work, _, bar in rows))
        axes.set_xticks([])
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        handles = [Patch(color=color, label=side) for side, color in palette.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
        figure.suptitle(title, fontsize=10)
        figure.savefig(output, format="svg", metadata={"Date": None, "Creator": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    files = [json.loads(path.read_text()) for path in arguments.results]
    works = comparisons(files)
    if not works:
        raise SystemExit("no work in these files has both sides")
    devices = sorted({file["machine"]["gpu"] for file in files if file["machine"]["gpu"]})
    kinds = {_SERVED in row for file in files for row in file["rows"] if "error" not in row}
    if len(kinds) > 1:
        raise SystemExit("some of these files are of training, some of serving; draw a picture of each")
    what = "Serving, output tokens/s" if kinds == {True} else "Training, tokens/s/GPU"
    draw(works, f"{what} ({', '.join(devices) or 'CPU'}); each group is one call in one layout", arguments.output)


if __name__ == "__main__":
    main()

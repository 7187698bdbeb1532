# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Training beside its peers in one call: dense models on GPUs, the quickstart's model on a CPU.

python -m tools.bench.train --model moe_tiny gpt_tiny
python -m tools.bench.train --model dense-1b dense-8b-l8 dense-8b-l8-fp8 --gpus 1 --output docs/benchmarks/train.json \\
    --peer "FSDP2=python3 train_fsdp2.py --model {model} --mbs {micro_batch} --gbs {global_batch}"

Every choice of the sequences of a micro-batch (``--micro-batch``, or the model's own list) runs by us and by each peer in turn,
``--rounds`` times; the best of each counts, and the spread of its rounds is printed. A peer is a command that prints one JSON line with
"tok_s_gpu" (tokens/s/GPU) and "peak_gib"; with several GPUs, let it start its own ranks. Models that end in "-fp8" go to peers
whose name does so too, others to the others. Start-up is the time from the start of a process to the end of its first step: of the first
run, with no kernel compiled before, and of the last.

Without ``--model`` the recipe of the quickstart and its dense sibling train on the CPU in turn with transformers.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mcore_tools.launch import launch
from tools.bench._record import record
from tools.bench._small_step import SMALL, small_rows


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One line of the table."""

    model: str
    """Of ``tools.bench.dense_step``."""
    global_batch: int
    micro_batches: tuple[int, ...]
    flags: str = ""
    """Further words of a run there."""
    peer_fp8: bool = False


WORKS: Mapping[str, Workload] = MappingProxyType(
    {
        "tiny": Workload(model="tiny", global_batch=4, micro_batches=(2,)),
        "dense-1b": Workload(model="dense-1b", global_batch=16, micro_batches=(4, 8)),
        "dense-8b-l8": Workload(model="dense-8b-l8", global_batch=8, micro_batches=(2, 4, 8)),
        "dense-8b-l8-fp8": Workload(model="dense-8b-l8", global_batch=8, micro_batches=(4, 8), flags="fp8=tensorwise,head", peer_fp8=True),
        "dense-8b": Workload(model="dense-8b", global_batch=16, micro_batches=(2,)),
        "dense-8b-fp8": Workload(model="dense-8b", global_batch=16, micro_batches=(2,), flags="fp8=tensorwise,head", peer_fp8=True),
    }
)
"""By the name that ``--model`` takes; the global batch is that of all GPUs."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Somebody else's training step."""

    name: str
    command: str
    """With {model}, {micro_batch}, {global_batch} and {gpus} to be filled in."""

    @classmethod
    def parse(cls, text: str) -> "Peer":
        name, sign, command = text.partition("=")
        if not sign or not command:
            raise argparse.ArgumentTypeError(f"{text!r} must be NAME=COMMAND")
        return cls(name=name, command=command)

    def trains(self, work: Workload) -> bool:
        return self.name.endswith("fp8") == work.peer_fp8


def ours(work: Workload, gpus: int, micro_batch: int, caches: Path, timeout_s: float) -> dict[str, Any]:
    """One run in a process of its own."""
    layout = f"dp{gpus}," if gpus > 1 else ""
    run = f"{work.model}:{layout}mbs{micro_batch},gbs{work.global_batch}" + (f",{work.flags}" if work.flags else "")
    places = {"TRITON_CACHE_DIR": str(caches / "triton"), "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor")}
    begun = time.time()
    row = _last_line([sys.executable, "-m", "tools.bench.dense_step", "--runs", run], {**os.environ, **places}, timeout_s)
    if "error" in row:
        return row
    return {
        "tokens_per_s_per_gpu": row["tokens_per_s_per_gpu"],
        "peak_gib": max(row["peak_gib"]),
        "startup_s": row["first_step_at"] - begun,
    }


def theirs(peer: Peer, work: Workload, gpus: int, micro_batch: int, timeout_s: float) -> dict[str, Any]:
    """The same by a peer."""
    filled = peer.command.format(model=work.model, micro_batch=micro_batch, global_batch=work.global_batch, gpus=gpus)
    row = _last_line(shlex.split(filled), dict(os.environ), timeout_s)
    return row if "error" in row else {"tokens_per_s_per_gpu": row["tok_s_gpu"], "peak_gib": row["peak_gib"]}


def _last_line(command: list[str], environment: Mapping[str, str], timeout_s: float) -> dict[str, Any]:
    """The last line of JSON that a command prints, or {"error"}."""
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {timeout_s:g} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    try:
        return json.loads(lines[-1])
    except (IndexError, ValueError):
        return {"error": (done.stderr or done.stdout)[-400:]}


def dense_rows(name: str, arguments: argparse.Namespace, caches: Path) -> list[dict[str, Any]]:
    """Of one model: us first, then each peer, at the best micro-batch of each."""
    work, gpus = WORKS[name], arguments.gpus
    peers = [peer for peer in arguments.peer if peer.trains(work)]
    choices = arguments.micro_batch or work.micro_batches
    if bad := [size for size in choices if work.global_batch % (size * gpus)]:
        raise SystemExit(f"micro-batch {bad[0]} on {gpus} GPUs does not divide the {work.global_batch} sequences of a step of {name}")
    runs: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for _ in range(arguments.rounds):
        for micro_batch in choices:
            for peer in (None, *peers):
                limit = arguments.timeout_s
                row = ours(work, gpus, micro_batch, caches, limit) if peer is None else theirs(peer, work, gpus, micro_batch, limit)
                who = "mcore" if peer is None else peer.name
                runs.setdefault((who, micro_batch), []).append(row)
                print(json.dumps({"model": name, "by": who, "micro_batch": micro_batch, **row}), flush=True)
    return [_best(name, who, gpus, runs) for who in ("mcore", *(peer.name for peer in peers))]


def _best(name: str, who: str, gpus: int, runs: Mapping[tuple[str, int], list[dict[str, Any]]]) -> dict[str, Any]:
    """The micro-batch with the largest median."""
    speeds = {
        micro_batch: [row["tokens_per_s_per_gpu"] for row in rows if "error" not in row]
        for (worker, micro_batch), rows in runs.items()
        if worker == who
    }
    row: dict[str, Any] = {"model": name, "by": who, "gpus": gpus, "tried": dict(speeds)}
    usable = {size: rates for size, rates in speeds.items() if rates}
    if not usable:
        return {**row, "error": next(iter(runs[who, size][0].get("error") for size in speeds))}
    best = max(usable, key=lambda size: statistics.median(usable[size]))
    good = [run for run in runs[who, best] if "error" not in run]
    row |= {"micro_batch": best, "tokens_per_s": round(statistics.median(usable[best])), "spread": [min(usable[best]), max(usable[best])]}
    row["peak_gib"] = max(run["peak_gib"] for run in good)
    if who == "mcore":
        first = runs[who, next(iter(speeds))]
        # The first run of all compiles; those after find its kernels.
        row |= {"startup_cold_s": first[0].get("startup_s"), "startup_warm_s": good[-1]["startup_s"]}
    return row


def with_ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with "ratio": ours to the fastest peer of the same model."""
    out = []
    for row in rows:
        rivals = [
            other["tokens_per_s"] for other in rows if other["model"] == row["model"] and other["by"] != "mcore" and "error" not in other
        ]
        ratio = round(row["tokens_per_s"] / max(rivals), 3) if row["by"] == "mcore" and rivals and "error" not in row else None
        out.append({**row, "ratio": row.get("ratio", ratio)})
    return out


def show(rows: Sequence[dict[str, Any]]) -> None:
    """The table, on standard output."""
    columns = ("model", "gpus", "by", "micro_batch", "tokens_per_s", "peak_gib", "ratio", "startup_warm_s")
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    for line in (columns, *cells):
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=(*SMALL, *WORKS), default=list(SMALL))
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--micro-batch", type=int, nargs="+", help="sequences at once to try; default: the model's list")
    parser.add_argument("--peer", type=Peer.parse, action="append", default=[], metavar="NAME=COMMAND")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--timeout-s", type=float, default=150.0, help="of one run")
    parser.add_argument("--threads", type=int, default=2, help="of the small recipes on a CPU")
    parser.add_argument("--steps", type=int, default=5, help="of one turn of the small recipes")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as caches:
        for name in arguments.model:
            if name in SMALL:
                options = {"name": name, "rounds": arguments.rounds + 3, "steps": arguments.steps, "threads": arguments.threads}
                rows += launch(small_rows, 1, device="cpu", **options)[0]
            else:
                rows += dense_rows(name, arguments, Path(caches))
    rows = with_ratios(rows)
    show(rows)
    if arguments.output:
        record(arguments.output, {"work": "training steps on random tokens, beside peers", "rows": rows})


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""How long an asynchronous save holds training up, and what its writing costs the steps beside it.

python -m tools.bench.checkpoint_async --gibibytes 16 --folder /data --output docs/benchmarks/checkpoint_async.json

One process, on a GPU where there is one. `blocked` is the time until `save` returns: the first also gets the memory for the copy. A step
is a number of matmuls; `step_alone` and `step_beside` are its times without and with a save being written.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from mcore_ckpt import CheckpointManager
from tools.bench._record import record


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gibibytes", type=float, default=1.0, help="of the state")
    parser.add_argument("--tensors", type=int, default=64)
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--products", type=int, default=0, help="in a step; default: 200 on a GPU, 2 without")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to write to")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = max(1, round(options.gibibytes * 2**30 / options.tensors / 4))
    state = {f"w{i}": torch.rand(size, device=device) for i in range(options.tensors)}
    step = _stepper(device, options.products or (200 if device.type == "cuda" else 2))
    alone = [step() for _ in range(12)][2:]
    blocked, written, beside = [], [], []
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        manager = CheckpointManager(place, keep=1)
        for number in range(options.saves):
            _synchronize(device)
            start = time.perf_counter()
            request = manager.save(number, state, asynchronous=True)
            blocked.append(time.perf_counter() - start)
            assert request is not None
            while not request.done():
                beside.append(step())
            manager.wait()
            written.append(time.perf_counter() - start)
    results = {
        "gibibytes": round(size * 4 * options.tensors / 2**30, 3),
        "device": device.type,
        "blocked_first_s": round(blocked[0], 3),
        "blocked_later_s": round(max(blocked[1:], default=blocked[0]), 3),
        "committed_s": [round(seconds, 3) for seconds in written],
        "step_alone_s": round(statistics.median(alone), 5),
        "step_beside_s": round(statistics.median(beside), 5) if beside else None,
        "step_beside_over_alone": round(statistics.mean(beside) / statistics.mean(alone), 3) if beside else None,
    }
    for name, value in results.items():
        print(f"{name}: {value}")
    if options.output:
        record(options.output, results)
    return 0


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _stepper(device: torch.device, num_matmuls: int) -> Callable[[], float]:
    """A function that does one step and returns its seconds."""
    width = 4096 if device.type == "cuda" else 512
    matrix = torch.randn(width, width, device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32) / width**0.5
    out = torch.empty_like(matrix)

    def step() -> float:
        start = time.perf_counter()
        for _ in range(num_matmuls):
            torch.mm(matrix, matrix, out=out)
        _synchronize(device)
        return time.perf_counter() - start

    return step


if __name__ == "__main__":
    raise SystemExit(main())

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Bytes a second of saving and loading, beside plain writes and reads and torch.distributed.checkpoint, on one state in one run.

python -m tools.bench.checkpoint --ranks 8 --gibibytes 4 --folder /data --output docs/benchmarks/checkpoint.json

Each rank holds its rows of every tensor. `load` compares every SHA-256, `load_verified_first` before it fills anything; torch has none to
compare, and `load_unverified` does not either. `load_boxes` loads what was saved by rows in another layout, halves of the rows by columns:
each rank then reads from half of the files. `reshard` is the command of that name, one process that verifies, reads and writes.
`extra_mebibytes` is by how much the memory of a process grows meanwhile at most, pages of mapped files included, where the ranks grow most.
A plain write is what `dd conv=fsync` does: one file a rank, 16 MiB at a time, synced at the end.
Before each reading the files leave the page cache, so it comes from the disk, as after a restart; `sha256` is what all ranks hash together,
out of memory: no verified load is faster. The rounds of all ways take turns; the best of each counts.
"""

import argparse
import hashlib
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.multiprocessing.spawn import spawn

from mcore_ckpt import ShardedTensor, load, save
from mcore_ckpt.rewrite import Rewrite, rewrite
from tools.bench._record import record

_BLOCK = 16 * 2**20


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8, help="a power of two")
    parser.add_argument("--gibibytes", type=float, default=4.0, help="of all ranks together")
    parser.add_argument("--tensors", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        rows = max(1, round(options.gibibytes * 2**30 / (options.tensors * options.ranks * 4096 * 4)))
        config = {"ranks": options.ranks, "tensors": options.tensors, "rows": rows, "rounds": options.rounds, "place": place}
        spawn(_rank, args=(config,), nprocs=options.ranks)
        figures, grown = _figures(Path(place) / "seconds"), _figures(Path(place) / "grown")
        _forget(Path(place))
        before, start = _restart_peak(), time.perf_counter()
        rewrite(Path(place) / "ours", Path(place) / "again", Rewrite(num_parts=options.ranks))
        figures["reshard"], grown["reshard"] = time.perf_counter() - start, _memory("VmHWM") - before
    total = rows * options.ranks * 4096 * 4 * options.tensors
    rates = {name: round(total / seconds / 2**30, 3) for name, seconds in figures.items()}
    results = {
        "gibibytes": round(total / 2**30, 3),
        "ranks": options.ranks,
        "cores": os.cpu_count(),
        "tensors": options.tensors,
        "gibibytes_a_second": rates,
        "save_over_plain_write": round(rates["save"] / rates["plain_write"], 3),
        "save_over_torch": round(rates["save"] / rates["torch_save"], 3),
        "load_over_plain_read": round(rates["load"] / rates["plain_read"], 3),
        "load_over_torch": round(rates["load"] / rates["torch_load"], 3),
        "unverified_load_over_plain_read": round(rates["load_unverified"] / rates["plain_read"], 3),
        "unverified_load_over_torch": round(rates["load_unverified"] / rates["torch_load"], 3),
        "time_of_load_boxes_over_plain_read": round(rates["plain_read"] / rates["load_boxes"], 3),
        "mebibytes_of_largest_tensor": round(total / options.tensors / 2**20, 1),
        "extra_mebibytes": {name: round(num_bytes / 2**20, 1) for name, num_bytes in grown.items()},
    }
    for name, value in results.items():
        print(f"{name}: {value}")
    if options.output:
        record(options.output, results)
    return 0


def _figures(path: Path) -> dict[str, float]:
    """Numbers by name, as the first rank wrote them."""
    pairs = (line.split() for line in path.read_text().splitlines())
    return {name: float(number) for name, number in pairs}


def _rank(rank: int, config: dict[str, Any]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    place = Path(config["place"])
    dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=rank, world_size=config["ranks"])
    mesh = init_device_mesh("cpu", (config["ranks"],))
    generator = torch.Generator().manual_seed(rank)
    local = [torch.rand(config["rows"], 4096, generator=generator) for _ in range(config["tensors"])]
    state = {f"layers.{i}.weight": DTensor.from_local(tensor, mesh, [Shard(0)]) for i, tensor in enumerate(local)}
    blank = {name: DTensor.from_local(torch.empty_like(local[0]), mesh, [Shard(0)]) for name in state}
    boxes = _boxes(rank, config["ranks"], {name: value.to_local() for name, value in blank.items()})
    plain = place / f"plain-{rank}"
    trials: dict[str, Callable[[], Any]] = {
        "plain_write": lambda: _write(plain, local),
        "plain_read": lambda: _read(plain, list(blank.values())),
        "sha256": lambda: [hashlib.sha256(_bytes(tensor)) for tensor in local],
        "save": lambda: save(state, place / "ours"),
        "load": lambda: load(blank, place / "ours"),
        "load_boxes": lambda: load(boxes, place / "ours"),
        "load_boxes_unverified": lambda: load(boxes, place / "ours", verify=False),
        "load_verified_first": lambda: load(blank, place / "ours", verify="first"),
        "load_unverified": lambda: load(blank, place / "ours", verify=False),
        "save_torch_dist": lambda: save(state, place / "both", format="torch_dist"),
        "load_torch_dist": lambda: load(blank, place / "both"),
        "torch_save": lambda: state_dict_saver.save(dict(state), checkpoint_id=place / "theirs"),
        "torch_load": lambda: state_dict_loader.load(dict(blank), checkpoint_id=place / "theirs"),
    }
    best, grown = dict.fromkeys(trials, float("inf")), dict.fromkeys(trials, 0)
    # Of each rank the first tensor: what the boxes of it must come to.
    rows = [torch.rand(config["rows"], 4096, generator=torch.Generator().manual_seed(number)) for number in range(config["ranks"])]
    want = torch.cat(rows)[boxes["layers.0.weight"].box.slices()].clone()
    del rows
    for number in range(config["rounds"]):
        for name, trial in trials.items():
            if rank == 0 and ("load" in name or "read" in name):
                _forget(place)
            dist.barrier()
            before = _restart_peak()
            start = time.perf_counter()
            trial()
            dist.barrier()
            best[name] = min(best[name], time.perf_counter() - start)
            grown[name] = max(grown[name], _memory("VmHWM") - before)
            if "boxes" in name:
                assert torch.equal(boxes["layers.0.weight"].data, want)
        assert all(torch.equal(blank[name].to_local(), state[name].to_local()) for name in state)
        dist.barrier()
        if rank == 0:
            # The last one is resharded.
            for name in ("both", "theirs", "ours")[: 3 if number + 1 < config["rounds"] else 2]:
                shutil.rmtree(place / name)
        plain.unlink()
    most = torch.tensor(list(grown.values()))
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    if rank == 0:
        (place / "seconds").write_text("".join(f"{name} {seconds}\n" for name, seconds in best.items()))
        shown = [pair for pair in zip(grown, most.tolist(), strict=True) if "load" in pair[0]]
        (place / "grown").write_text("".join(f"{name} {number}\n" for name, number in shown))
    dist.barrier()
    dist.destroy_process_group()


def _boxes(rank: int, ranks: int, local: Mapping[str, torch.Tensor]) -> dict[str, ShardedTensor]:
    """The memory of rows of each tensor as another part of it, equally long: of half of the rows some columns."""
    halves = min(2, ranks)
    across = ranks // halves
    boxes = {}
    for name, tensor in local.items():
        rows = tensor.shape[0] * ranks
        shape = (rows // halves, tensor.shape[1] // across)
        offset = (rank // across * shape[0], rank % across * shape[1])
        boxes[name] = ShardedTensor(tensor.view(shape), (rows, tensor.shape[1]), offset)
    return boxes


def _restart_peak() -> int:
    """Bytes that this process holds; the peak is counted from here."""
    Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


def _memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


def _write(path: Path, tensors: Sequence[torch.Tensor]) -> None:
    with path.open("wb", buffering=0) as file:
        for tensor in tensors:
            view = _bytes(tensor)
            for begin in range(0, len(view), _BLOCK):
                file.write(view[begin : begin + _BLOCK])
        os.fsync(file.fileno())


def _forget(folder: Path) -> None:
    """Take the files out of the page cache; what is on the disk already can go."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.numpy().reshape(-1).view("uint8").data


def _read(path: Path, tensors: Sequence[DTensor]) -> None:
    with path.open("rb", buffering=0) as file:
        for tensor in tensors:
            file.readinto(_bytes(tensor.to_local()))


if __name__ == "__main__":
    raise SystemExit(main())

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Bytes a second of saving and loading, beside plain writes and reads and torch.distributed.checkpoint, on one state in one run.

python -m tools.bench.checkpoint --ranks 8 --gibibytes 4 --folder /data --output docs/benchmarks/checkpoint.json

Each rank holds its rows of every tensor. `load` compares every SHA-256, `load_verified_first` before it fills anything; torch has none to
compare, and `load_unverified` does not either. `load_boxes` loads what was saved by rows in another layout, halves of the rows by columns:
each rank then reads from half of the files. `reshard` is the command of that name, one process that verifies, reads and writes.
`extra_mebibytes` is by how much the memory of a process grows meanwhile at most, pages of mapped files included, where the ranks grow most.
A plain write is what `dd conv=fsync` does, a direct one what `dd oflag=direct` does: no digests, no copies, on as many files and threads a
rank as `save` has. Before each reading the files leave the page cache, so it comes from the disk, as after a restart; `cached_after` says
how much of them, torch's among them, was in memory all the same before which. `sha256` is what all ranks hash together, out of memory, on a
thread each. The rounds of all ways take turns; the best of each counts. With --limit-s no way is begun that would end later, going by the
times so far, and its figure is left out; the ways come in the order of what they are worth.
"""

import argparse
import hashlib
import mmap
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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
_DIRECT_BLOCK = 4 * 2**20
_PLACES = {"save": "ours", "save_torch_dist": "both", "torch_save": "theirs"}
_RATIOS = {
    "save_over_plain_write": ("save", "plain_write"),
    "save_over_direct_write": ("save", "direct_write"),
    "save_over_torch": ("save", "torch_save"),
    "load_over_plain_read": ("load", "plain_read"),
    "load_over_torch": ("load", "torch_load"),
    "unverified_load_over_plain_read": ("load_unverified", "plain_read"),
    "unverified_load_over_torch": ("load_unverified", "torch_load"),
    "time_of_load_boxes_over_plain_read": ("plain_read", "load_boxes"),
    "time_of_unverified_load_boxes_over_plain_read": ("plain_read", "load_boxes_unverified"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8, help="a power of two")
    parser.add_argument("--gibibytes", type=float, default=4.0, help="of all ranks together")
    parser.add_argument("--tensors", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="seconds of measuring, from the first write on")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        rows = max(1, round(options.gibibytes * 2**30 / (options.tensors * options.ranks * 4096 * 4)))
        config = {"ranks": options.ranks, "tensors": options.tensors, "rows": rows, "rounds": options.rounds, "place": place}
        spawn(_rank, args=({**config, "limit_s": options.limit_s},), nprocs=options.ranks)
        figures, grown = _figures(Path(place) / "seconds"), _figures(Path(place) / "grown")
        deadline, cached = figures.pop("deadline"), _figures(Path(place) / "cached")
        # One process: by experience it takes as long as four loads of eight.
        if (Path(place) / "ours").exists() and time.monotonic() + 4 * figures.get("load", float("inf")) < deadline:
            _forget(Path(place))
            before, start = _restart_peak(), time.perf_counter()
            rewrite(Path(place) / "ours", Path(place) / "again", Rewrite(num_parts=options.ranks))
            figures["reshard"], grown["reshard"] = time.perf_counter() - start, _grown(before)
    total = rows * options.ranks * 4096 * 4 * options.tensors
    rates = {name: round(total / seconds / 2**30, 3) for name, seconds in figures.items()}
    results = {
        "gibibytes": round(total / 2**30, 3),
        "ranks": options.ranks,
        "cores": os.cpu_count(),
        "tensors": options.tensors,
        "gibibytes_a_second": rates,
        "cached_after": {name: round(share, 3) for name, share in cached.items() if share},
        **{name: round(rates[one] / rates[other], 3) for name, (one, other) in _RATIOS.items() if {one, other} <= rates.keys()},
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
    # Touched, so that no reading has to wait for its memory.
    blank = {name: DTensor.from_local(torch.full_like(local[0], -1.0), mesh, [Shard(0)]) for name in state}
    mine = [value.to_local() for value in blank.values()]
    boxes = _boxes(rank, config["ranks"], dict(zip(blank, mine, strict=True)))
    num_files = max(1, min(8, len(os.sched_getaffinity(0)) // config["ranks"]))
    plain, direct = ([place / f"{kind}-{rank}-{number}" for number in range(num_files)] for kind in ("plain", "direct"))
    trials: dict[str, Callable[[], Any]] = {
        "plain_write": lambda: _each(_write, plain, local),
        "direct_write": lambda: _each(_write_direct, direct, local),
        "save": lambda: save(state, place / "ours"),
        "torch_save": lambda: state_dict_saver.save(dict(state), checkpoint_id=place / "theirs"),
        "plain_read": lambda: _each(_read, plain, mine),
        "load": lambda: load(blank, place / "ours"),
        "torch_load": lambda: state_dict_loader.load(dict(blank), checkpoint_id=place / "theirs"),
        "load_boxes": lambda: load(boxes, place / "ours"),
        "load_boxes_unverified": lambda: load(boxes, place / "ours", verify=False),
        "load_unverified": lambda: load(blank, place / "ours", verify=False),
        "sha256": lambda: [hashlib.sha256(_bytes(tensor)) for tensor in local],
        "load_verified_first": lambda: load(blank, place / "ours", verify="first"),
        "save_torch_dist": lambda: save(state, place / "both", format="torch_dist"),
        "load_torch_dist": lambda: load(blank, place / "both"),
    }
    if not _direct_works(place):
        del trials["direct_write"]
    best: dict[str, float] = {}
    grown: dict[str, int] = {}
    cached: dict[str, float] = {}
    # Of each rank the first tensor: what the boxes of it must come to.
    rows = [torch.rand(config["rows"], 4096, generator=torch.Generator().manual_seed(number)) for number in range(config["ranks"])]
    want = torch.cat(rows)[boxes["layers.0.weight"].box.slices()].clone()
    del rows
    dist.barrier()
    # One clock for all processes of a machine.
    deadline = time.monotonic() + config["limit_s"]
    for name, trial in [pair for _ in range(config["rounds"]) for pair in trials.items()]:
        # The first rank decides for all.
        late = torch.tensor([time.monotonic() + best.get(name, max(best.values(), default=0.0)) > deadline])
        dist.broadcast(late, 0)
        if late:
            break
        reads = "load" in name or "read" in name
        if rank == 0:
            if name in _PLACES:
                shutil.rmtree(place / _PLACES[name], ignore_errors=True)
            if reads:
                cached[name] = max(cached.get(name, 0.0), _forget(place))
        if reads:
            mine[0].fill_(-1.0)
        dist.barrier()
        before = _restart_peak()
        start = time.perf_counter()
        trial()
        dist.barrier()
        best[name] = min(best.get(name, float("inf")), time.perf_counter() - start)
        grown[name] = max(grown.get(name, 0), _grown(before))
        if name == "direct_write":
            for path in direct:
                path.unlink()
        if "boxes" in name:
            assert torch.equal(boxes["layers.0.weight"].data, want)
        elif reads:
            assert torch.equal(mine[0], local[0])
    most = torch.tensor(list(grown.values()))
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    if rank == 0:
        (place / "seconds").write_text("".join(f"{name} {seconds}\n" for name, seconds in {**best, "deadline": deadline}.items()))
        (place / "cached").write_text("".join(f"{name} {share}\n" for name, share in cached.items()))
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
    """Bytes that this process holds; the peak is counted from here, where the system can."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return 2**62
    return _memory("VmRSS")


def _grown(before: int) -> int:
    return max(0, _memory("VmHWM") - before)


def _memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), 0)


def _each(work: Callable[[Path, Sequence[torch.Tensor]], None], paths: Sequence[Path], tensors: Sequence[torch.Tensor]) -> None:
    """Do ``work`` for each file with its share of the tensors, all at a time."""
    if len(paths) == 1:
        work(paths[0], tensors)
        return
    with ThreadPoolExecutor(len(paths)) as pool:
        list(pool.map(work, paths, [tensors[number :: len(paths)] for number in range(len(paths))]))


def _write(path: Path, tensors: Sequence[torch.Tensor]) -> None:
    path.unlink(missing_ok=True)
    with path.open("wb", buffering=0) as file:
        for tensor in tensors:
            view = _bytes(tensor)
            for begin in range(0, len(view), _BLOCK):
                file.write(view[begin : begin + _BLOCK])
        os.fsync(file.fileno())


def _write_direct(path: Path, tensors: Sequence[torch.Tensor]) -> None:
    """One aligned block again and again, until as many bytes are written as the tensors have."""
    path.unlink(missing_ok=True)
    block = mmap.mmap(-1, _DIRECT_BLOCK)
    block[:] = bytes(_bytes(tensors[0])[:_DIRECT_BLOCK].tobytes().ljust(_DIRECT_BLOCK))
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
    try:
        for _ in range(-(-sum(tensor.nbytes for tensor in tensors) // _DIRECT_BLOCK)):
            os.write(handle, block)
        os.fsync(handle)
    finally:
        os.close(handle)


def _direct_works(place: Path) -> bool:
    path = place / f"probe-{os.getpid()}"
    try:
        _write_direct(path, [torch.zeros(_DIRECT_BLOCK // 4)])
    except OSError:
        return False
    finally:
        path.unlink(missing_ok=True)
    return True


def _forget(folder: Path) -> float:
    """Take the files out of the page cache; what is on the disk already can go. Returns what share of samples of them is still there."""
    cached_samples = []
    # Short files, such as the one by which the ranks meet, do not count.
    for path in (path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 2**20):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            for begin in range(0, os.fstat(file.fileno()).st_size, 64 * 2**20):
                cached_samples.append(_is_cached(file.fileno(), begin))
    return sum(cached_samples) / len(cached_samples) if cached_samples else 0.0


def _is_cached(handle: int, begin: int) -> bool:
    """Whether a byte can be had without waiting for the disk; true where the system does not tell."""
    try:
        return os.preadv(handle, [bytearray(1)], begin, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False
    except OSError:
        return True


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.numpy().reshape(-1).view("uint8").data


def _read(path: Path, tensors: Sequence[torch.Tensor]) -> None:
    with path.open("rb", buffering=0) as file:
        for tensor in tensors:
            view = _bytes(tensor)
            while view:
                length = file.readinto(view)
                assert length
                view = view[length:]


if __name__ == "__main__":
    raise SystemExit(main())

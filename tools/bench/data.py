# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Seconds until a dataset is ready, and samples a second, on one core each.

python -m tools.bench.data --output docs/benchmarks/data.json

`build` opens a corpus and makes the three indices of one epoch in memory, `start` opens it with cached ones; nothing reads tokens for that,
so they are a hole in a file. Samples are then read at random numbers from a second corpus, which lies in the page cache.
"""

import argparse
import dataclasses
import struct
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mcore_parallel.data import GPTDataset, GPTDatasetConfig, IndexedDataset, IndexedDatasetBuilder, Split
from tools.bench._record import record


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=10_000_000)
    parser.add_argument("--start-documents", type=int, default=100_000_000, help="of a further corpus, whose cached start is measured")
    parser.add_argument("--mean-length", type=int, default=500, help="tokens of a document")
    parser.add_argument("--sequence-length", type=int, default=4096)
    parser.add_argument("--access-tokens", type=int, default=100_000_000, help="of the corpus that samples are read from")
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        results = {
            "documents": options.documents,
            "mean_length": options.mean_length,
            "sequence_length": options.sequence_length,
            **_indices(Path(place) / "many", options.documents, options),
            "start_documents": options.start_documents,
            **_indices(Path(place) / "more", options.start_documents, options, only_start=True),
            **_access(Path(place) / "read", options),
        }
    for name, value in results.items():
        print(f"{name}: {value}")
    if options.output:
        record(options.output, results)
    return 0


def _lengths(count: int, mean: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.random.default_rng(0).integers(1, 2 * mean, count)


def _indices(prefix: Path, count: int, options: argparse.Namespace, *, only_start: bool = False) -> dict[str, Any]:
    _write_corpus(prefix, _lengths(count, options.mean_length))
    documents = np.arange(count, dtype=np.int32)
    memory = GPTDatasetConfig(random_seed=1, sequence_length=options.sequence_length)
    cached = dataclasses.replace(memory, path_to_cache=str(prefix.parent / "cache"))

    def make(config: GPTDatasetConfig) -> GPTDataset:
        return GPTDataset(IndexedDataset(prefix), None, documents, None, Split.train, config)

    build = {} if only_start else {"build": _best(lambda: make(memory), options.rounds)}
    make(cached)
    start = _best(lambda: make(cached), options.rounds)
    return {**build, "start_of_more" if only_start else "start": start}


def _write_corpus(prefix: Path, lengths: np.ndarray[Any, np.dtype[np.int64]]) -> None:
    """An .idx of one-byte tokens beside a .bin that is a hole of the right size."""
    ends = np.cumsum(lengths)
    with open(f"{prefix}.idx", "wb") as file:
        file.write(struct.pack("<9sQBQQ", b"MMIDIDX", 1, 1, lengths.size, lengths.size + 1))
        file.write(lengths.astype("<i4").tobytes())
        file.write((ends - lengths).astype("<i8").tobytes())
        file.write(np.arange(lengths.size + 1, dtype="<i8").tobytes())
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(int(ends[-1]))


def _access(prefix: Path, options: argparse.Namespace) -> dict[str, Any]:
    lengths = _lengths(max(1, options.access_tokens // options.mean_length), options.mean_length)
    with IndexedDatasetBuilder(f"{prefix}.bin", dtype="u2") as builder:
        builder.add_documents(np.random.default_rng(1).integers(0, 50_000, int(lengths.sum()), dtype=np.uint16), lengths)
        builder.finalize()
    config = GPTDatasetConfig(random_seed=1, sequence_length=options.sequence_length)
    documents = np.arange(lengths.size, dtype=np.int32)
    dataset = GPTDataset(IndexedDataset(prefix), None, documents, None, Split.train, config)
    numbers = np.random.default_rng(2).integers(0, len(dataset), options.samples).tolist()

    def read() -> None:
        for number in numbers:
            dataset[number]

    best = _best(read, options.rounds)
    pieces = float(np.diff(dataset.sample_index[:, 0].astype(np.int64)).mean()) + 1
    rates = {f"samples_a_second_{kind.removesuffix('_s')}": round(len(numbers) / seconds) for kind, seconds in best.items()}
    return {**rates, "documents_of_a_sample": round(pieces, 2)}


def _best(run: Callable[[], Any], rounds: int) -> dict[str, float]:
    """Least seconds on the clock and of the processor; they differ where other work shares the machine."""
    clock, processor = [], []
    for _ in range(rounds):
        begun, used = time.perf_counter(), time.process_time()
        run()
        clock.append(time.perf_counter() - begun)
        processor.append(time.process_time() - used)
    return {"clock_s": round(min(clock), 4), "processor_s": round(min(processor), 4)}


if __name__ == "__main__":
    raise SystemExit(main())

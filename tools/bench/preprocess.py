# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Documents a second of mcore-preprocess, beside the batch encoding of the tokenizer that it uses.

python -m tools.bench.preprocess --output docs/benchmarks/preprocess.json

Documents are passages of the text of Python's standard library, about as long as `--characters` on average, one a line of JSON;
the tokenizer is a byte-level BPE learnt from a part of them. `encode` is the library's own batch encoding of the same texts in
memory, 1000 a call, on all cores; it neither reads nor writes. `preprocess` goes from the file to the finished corpus, once with
the tokenizer's threads and once with `--workers` processes, whose start it includes. Rounds alternate, the best of each counts.
"""

import argparse
import itertools
import json
import os
import random
import resource
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mcore_parallel.data import preprocess, train_bpe
from tools.bench._record import record


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=200_000)
    parser.add_argument("--characters", type=int, default=600, help="of a document, on average")
    parser.add_argument("--vocab-size", type=int, default=32_000)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        results = _measure(Path(place), options)
    for name, value in results.items():
        print(f"{name}: {value}")
    if options.output:
        record(options.output, results)
    return 0


def _measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    import tokenizers

    texts = list(itertools.islice(_documents(options.characters), options.documents))
    source = folder / "documents.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    train_bpe(texts[:20_000], options.vocab_size, folder / "tokenizer")
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))

    def encode() -> None:
        for start in range(0, len(texts), 1000):
            library.encode_batch_fast(texts[start : start + 1000], add_special_tokens=False)

    def write(workers: int) -> Callable[[], Any]:
        return lambda: preprocess([source], folder / "corpus", str(folder / "tokenizer"), append_eod=True, workers=workers)

    runs: dict[str, Callable[[], Any]] = {"encode": encode, "preprocess": write(1)}
    if options.workers > 1:
        runs["preprocess_workers"] = write(options.workers)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(options.rounds):
        for name, run in runs.items():
            taken[name].append(_seconds(run))
    cores = os.cpu_count() or 1
    results: dict[str, Any] = {
        "documents": len(texts),
        "mean_characters": round(sum(map(len, texts)) / len(texts), 1),
        "cores": cores,
        "workers": options.workers,
    }
    for name, times in taken.items():
        clock, processor = (min(column) for column in zip(*times, strict=True))
        results[name] = {
            "clock_s": round(clock, 3),
            "processor_s": round(processor, 3),
            "documents_a_second": round(len(texts) / clock),
            "documents_a_second_of_16_cores_by_processor_time": round(16 * len(texts) / processor),
        }
    for kind in ("clock_s", "processor_s"):
        best = min(results[name][kind] for name in runs if name != "encode")
        results[f"times_encode_{kind.removesuffix('_s')}"] = round(best / results["encode"][kind], 3)
    return results


def _documents(mean: int) -> Iterator[str]:
    """Stretches of the standard library's files, ever again from other places."""
    source = random.Random(0)
    files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    texts = [path.read_text(encoding="utf-8", errors="ignore") for path in files[:400]]
    texts = [text for text in texts if len(text) > 4 * mean]
    while True:
        text = source.choice(texts)
        length = max(20, int(source.expovariate(1 / mean)))
        start = source.randrange(len(text))
        yield text[start : start + length] or text[:length]


def _seconds(run: Callable[[], Any]) -> tuple[float, float]:
    """On the clock, and of the processor, ended children included."""
    begun, used = time.perf_counter(), _processor()
    run()
    return time.perf_counter() - begun, _processor() - used


def _processor() -> float:
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


if __name__ == "__main__":
    raise SystemExit(main())

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Seconds and memory of planning a save of many tensors over many ranks; no process group, no data.

python -m tests.campaigns.checkpoint_plan --tensors 100000 --output docs/benchmarks/checkpoint_plan.json

16 pipeline stages, 8 shards of each tensor, the rest data-parallel copies. `first_rank_s` is the processor time of all that the first rank
does: it reads the layouts, plans, and tells each rank its writes. `rank_mib` is the peak of what any other rank allocates for it,
`first_rank_mib` that of the first. The seconds are measured without, the memory with allocations traced.
"""

import argparse
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mcore_ckpt._core._save_plan import ShardRecord, decode_layouts, decode_share, encode_layout, encode_writes, plan_layouts
from mcore_ckpt.chunks import Box
from tools.bench._record import record

_STAGES, _SHARDS = 16, 8


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, nargs="+", default=[128, 1024], help="multiples of 128")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    rows = [_measure(options.tensors, ranks) for ranks in options.ranks]
    for row in rows:
        print(row)
    if options.output:
        record(options.output, {"tensors": options.tensors, "worlds": rows})
    return 0


def _measure(num_tensors: int, num_ranks: int) -> dict[str, Any]:
    copies = num_ranks // (_STAGES * _SHARDS)
    boxes = [Box((8 * shard, 0), (8, 16)) for shard in range(_SHARDS)]
    texts, owners, runs = [], [], [[] for _ in range(num_ranks)]
    held: list[ShardRecord] = []
    for stage in range(_STAGES):
        for shard in range(_SHARDS):
            names = (f"layers.{i}.weight" for i in range(stage, num_tensors, _STAGES))
            held = [ShardRecord(name, "BF16", (64, 16), boxes[shard], 0) for name in names]
            texts.append(encode_layout(held)[0])
            owners.append([(stage * copies + copy) * _SHARDS + shard for copy in range(copies)])
            for copy, rank in enumerate(owners[-1]):
                runs[rank] = [[copy, len(held)]]
    told: list[str] = []

    def first_rank() -> None:
        layouts = decode_layouts(texts, owners, runs)
        told[:] = list(encode_writes(layouts, plan_layouts(layouts, num_ranks)))

    def other_rank() -> None:
        # All that it keeps: what it holds, as text too, and its writes.
        encode_layout(held)
        decode_share(held, told[num_ranks - 1], None)

    start = time.process_time()
    first_rank()
    seconds = time.process_time() - start
    return {"ranks": num_ranks, "first_rank_s": round(seconds, 2), "first_rank_mib": _peak(first_rank), "rank_mib": _peak(other_rank)}


def _peak(work: Callable[[], None]) -> float:
    """MiB that ``work`` had allocated at most."""
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return round(peak / 2**20, 2)


if __name__ == "__main__":
    raise SystemExit(main())

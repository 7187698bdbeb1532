# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Memory, tasks and file descriptors of a process that serves a steady load for long."""

import asyncio
import gc
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["Sample", "growth", "soaked"]

_WARM_UP = 0.25
"""Share of the samples that caches, pools and the allocator get to fill."""
_MAX_SAMPLES_KEPT = 60


@dataclass(frozen=True)
class Sample:
    """What a process holds at a time."""

    at_s: float
    resident_kb: int
    python_blocks: int
    """Of Python's allocator."""
    tasks: int
    """Of asyncio, in all event loops, that began since the first sample."""
    threads: int
    file_descriptors: int

    @classmethod
    def take(cls, at_s: float) -> "Sample":
        """Of this process, after a collection: what it counts is reachable."""
        gc.collect()
        return cls(
            at_s=round(at_s, 1),
            resident_kb=int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024,
            python_blocks=sys.getallocatedblocks(),
            tasks=sum(type(item) is asyncio.Task for item in gc.get_objects()),
            threads=threading.active_count(),
            file_descriptors=len(os.listdir("/proc/self/fd")),
        )


def growth(samples: Sequence[Sample], num_requests: int) -> tuple[dict[str, float], list[str]]:
    """What the last quarter of the samples holds beyond the second, by medians, and what of it is a leak.

    Args:
        samples: in their order, four at least.
        num_requests: that were served during all of them.
    """
    quarter = int(len(samples) * _WARM_UP)
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]
    grown = {
        name: statistics.median(getattr(sample, name) for sample in late) - statistics.median(getattr(sample, name) for sample in early)
        for name in ("resident_kb", "python_blocks", "tasks", "threads", "file_descriptors")
    }
    # From one median to the other half of the time passes; an object kept of every tenth request is seen.
    limits = {"resident_kb": 8192, "python_blocks": max(2000, num_requests / 20), "tasks": 8, "threads": 2, "file_descriptors": 8}
    return grown, [f"{name} grew by {grown[name]:g}; at most {limit:g}" for name, limit in limits.items() if grown[name] > limit]


def _sampled(seconds: float, every_s: float) -> list[Sample]:
    """Samples of this process over a time, the first at its begin."""
    gc.collect()
    # What is there already need not be looked at again: a collection of everything would hold requests up.
    gc.freeze()
    begin, samples = time.monotonic(), [Sample.take(0.0)]
    while (passed := time.monotonic() - begin) < seconds:
        time.sleep(min(every_s, seconds - passed))
        samples.append(Sample.take(time.monotonic() - begin))
    return samples


def soaked(seconds: float, every_s: float, load: Callable[[Callable[[], Any]], tuple[dict[str, Any], Any]]) -> dict[str, Any]:
    """Samples under a load, and whether something grew.

    Args:
        seconds: how long.
        every_s: between two samples.
        load: runs a function beside steady requests, and returns their figures and what the function returned.
    """
    steady, samples = load(lambda: _sampled(seconds, every_s))
    grown, problems = growth(samples, steady["requests"])
    kept = samples[:: max(1, len(samples) // _MAX_SAMPLES_KEPT)]
    return {
        "minutes": round(samples[-1].at_s / 60, 1),
        "good": steady,
        "num_samples": len(samples),
        "grown_from_the_second_to_the_last_quarter": grown,
        "samples": [asdict(sample) for sample in kept],
        "problems": problems,
    }

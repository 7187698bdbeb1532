# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""How single operations are timed, and the copy rate that their floors are counted with."""

import statistics
import time
from collections.abc import Callable, Mapping

import torch

COPY_BYTES_PER_S = 4.3e12
"""Of an H200, measured as a device copy, reads and writes counted."""
_WARMUP = 3


def milliseconds(work: Callable[[], object], device: torch.device, repeats: int, *, calls: int = 1) -> list[float]:
    """Times of one call, each measured over ``calls`` in a row."""
    return in_turn({"": work}, device, repeats, calls=calls)[""]


def median_ms(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median time of one call."""
    return statistics.median(milliseconds(work, device, repeats))


def in_turn(works: Mapping[str, Callable[[], object]], device: torch.device, repeats: int, *, calls: int = 1) -> dict[str, list[float]]:
    """Times of one call of each work, each measured over ``calls`` in a row; the works take turns, so that a slow minute meets all.

    On a GPU a matmul ahead keeps the device busy until the calls are queued: what is measured is the device's time.
    """
    times: dict[str, list[float]] = {name: [] for name in works}
    ahead = torch.zeros(8192, 8192, dtype=torch.bfloat16, device=device) if device.type == "cuda" else None
    for work in works.values():
        for _ in range(_WARMUP):
            work()
    for _ in range(repeats):
        for name, work in works.items():
            times[name].append(_once(work, calls, ahead))
    return times


def communication(step: Callable[[], object], *names: str) -> dict[str, float]:
    """Of one more step on a GPU: milliseconds in which collectives ran, in which nothing else did, and in which nothing ran.

    Args:
        step: what is profiled.
        names: parts of the names of kernels that count as collectives, beside NCCL's.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]) as profiler:
        step()
        torch.cuda.synchronize()
    communicating, computing = [], []
    for event in profiler.events() or ():
        if event.device_type == torch.profiler.DeviceType.CUDA and not getattr(event, "is_user_annotation", False):
            span = (event.time_range.start, event.time_range.end)
            is_collective = "nccl" in event.name.lower() or any(name in event.name for name in names)
            (communicating if is_collective else computing).append(span)
    both = _covered(communicating + computing)
    computed = _covered(computing)
    end = max((stop for _, stop in communicating + computing), default=0.0)
    begin = min((start for start, _ in communicating + computing), default=0.0)
    spans = {"communication_ms": _covered(communicating), "exposed_ms": both - computed, "idle_ms": end - begin - both}
    return {name: value / 1e3 for name, value in spans.items()}


def _covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return total


def _once(work: Callable[[], object], calls: int, ahead: torch.Tensor | None) -> float:
    if ahead is None:
        start = time.perf_counter()
        for _ in range(calls):
            work()
        return (time.perf_counter() - start) * 1e3 / calls
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(6):
        ahead @ ahead
    begin.record()
    for _ in range(calls):
        work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / calls

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Which cores the parts of the serving campaign run on."""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["FEWEST", "Cores", "assigned", "physical_core"]

FEWEST = 8
"""Cores from which on each part has its own."""


@dataclass(frozen=True, kw_only=True)
class Cores:
    """Numbers of cores; all parts have all of them where they are few."""

    server: list[int]
    """Of servers and their engines."""
    good: list[int]
    """Of clients whose requests are timed."""
    others: list[int]
    """Of all other clients."""


def physical_core(core: int) -> int:
    """The first of the hardware threads that share a core; the core itself where the kernel does not say."""
    try:
        text = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text()
    except OSError:
        return core
    return int(text.replace("-", ",").split(",")[0])


def assigned(cores: Iterable[int], shared: Mapping[int, int]) -> Cores:
    """Half of the cores for servers, a quarter each for good clients and for the others; hardware threads of a core stay together.

    Args:
        cores: that this process may use.
        shared: of each, what names its physical core.
    """
    ordered = sorted(cores, key=lambda core: (shared[core], core))
    if len(ordered) < FEWEST:
        return Cores(server=ordered, good=ordered, others=ordered)
    quarters = [ordered[len(ordered) * part // 4 : len(ordered) * (part + 1) // 4] for part in range(4)]
    # A core that lies across a boundary goes to the first part.
    for first, second in itertools.pairwise(quarters):
        while second and shared[second[0]] == shared[first[-1]]:
            first.append(second.pop(0))
    return Cores(server=quarters[0] + quarters[1], good=quarters[2], others=quarters[3])

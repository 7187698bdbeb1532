# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A few numbers of every rank, waited for no longer than a bound."""

import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from mcore_parallel import Group

# UNTIL torch 2.12: before, it had another name, which now warns.
_gather_into = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def gather_numbers(numbers: Sequence[int], group: Group, *, device: torch.device, timeout_s: float, purpose: str) -> list[list[int]]:
    """The numbers of each rank, in rank order; the host waits.

    Raises:
        TimeoutError: names purpose, ranks and bound, when a rank does not come in time.
    """
    if group.size == 1:
        return [list(numbers)]
    mine = torch.tensor(list(numbers), device=device)
    everyone = mine.new_empty(group.size * len(mine))
    start = time.monotonic()
    try:
        work = _gather_into(everyone, mine, group=group.pg, async_op=True)
        if work is not None:
            work.wait(timedelta(seconds=timeout_s))
    except RuntimeError as error:
        if time.monotonic() - start < timeout_s:
            raise
        peers = [rank for place, rank in enumerate(group.ranks) if place != group.rank]
        raise TimeoutError(
            f"rank {group.ranks[group.rank]} waited {timeout_s:g} s for ranks {peers} in {purpose}; one of them failed or is far behind "
            "(moe_flex_timeout_s is the bound)"
        ) from error
    return everyone.view(group.size, -1).tolist()

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Ranks that wait for each other with a limit of their own, before a collective that has only that of its group."""

import time

from mcore_parallel import Group
from mcore_rl._placement import RankTimeoutError

_PREFIX = "mcore_rl rendezvous"
_FIRST_POLL_S, _LONGEST_POLL_S = 1e-3, 0.05


def rendezvous(group: Group, timeout_s: float, purpose: str) -> None:
    """Wait until all ranks of a group are here; over its store, so that nothing is queued on a device meanwhile.

    Args:
        group: all of its ranks call this.
        timeout_s: limit of waiting for the others.
        purpose: what they come for, in the error.

    Raises:
        RankTimeoutError: ranks did not come; names them.
    """
    if group.size == 1:
        return
    assert group.pg is not None
    store = group.pg.get_group_store()
    # Nobody comes a second time before all came once, so that the sum over all ranks says who waits no longer.
    turn = store.add(f"{_PREFIX}/{group.rank}", 1)
    store.add(f"{_PREFIX}/sum", 1)
    end, poll_s = time.monotonic() + timeout_s, _FIRST_POLL_S
    while store.add(f"{_PREFIX}/sum", 0) < turn * group.size:
        if time.monotonic() > end:
            late = [rank for place, rank in enumerate(group.ranks) if store.add(f"{_PREFIX}/{place}", 0) < turn]
            names = " and ".join(f"rank {rank}" for rank in late)
            raise RankTimeoutError(f"{names} did not come within timeout_s={timeout_s:g} ({purpose}); look at the log of that rank")
        time.sleep(poll_s)
        poll_s = min(2 * poll_s, _LONGEST_POLL_S)

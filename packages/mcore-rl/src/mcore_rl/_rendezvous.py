# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Ranks that wait for each other with a limit of their own, before a collective that has only that of its group."""

import time

from mcore_parallel import Group
from mcore_rl._ended import absence, announce, ended
from mcore_rl._placement import RankTimeoutError
from mcore_rl._stability import experimental_api

_PREFIX = "mcore_rl rendezvous"
_FIRST_POLL_S, _LONGEST_POLL_S = 1e-3, 0.05
_LOOK_S = 1.0
"""Between two looks whether those who are missing live."""


@experimental_api
def rendezvous(group: Group, timeout_s: float, purpose: str) -> None:
    """Wait until all ranks of a group are here; over its store, so that nothing is queued on a device meanwhile.

    Args:
        group: all of its ranks call this.
        timeout_s: limit of waiting for the others.
        purpose: what they come for, in the error.

    Raises:
        RankTimeoutError: ranks did not come, or died, which those of this machine are told for within seconds; names them.
    """
    if group.size == 1:
        return
    assert group.pg is not None
    store = group.pg.get_group_store()
    # Nobody comes a second time before all came once, so that the sum over all ranks says who waits no longer.
    turn = store.add(f"{_PREFIX}/{group.rank}", 1)
    if turn == 1:
        announce(group)
    store.add(f"{_PREFIX}/sum", 1)
    begin, poll_s = time.monotonic(), _FIRST_POLL_S
    look = begin + _LOOK_S
    while store.add(f"{_PREFIX}/sum", 0) < turn * group.size:
        now = time.monotonic()
        is_over = now > begin + timeout_s
        if is_over or now > look:
            look = now + _LOOK_S
            # Until the limit only ranks of this machine are asked for: all of a large group, every second, are too many for the store.
            places = range(group.size) if is_over else ended(group, range(group.size))
            late = [place for place in places if store.add(f"{_PREFIX}/{place}", 0) < turn]
            if late:
                raise RankTimeoutError(absence(group, late, "did not come", purpose, waited_s=now - begin, timeout_s=timeout_s))
            if is_over:
                return
        time.sleep(poll_s)
        poll_s = min(2 * poll_s, _LONGEST_POLL_S)

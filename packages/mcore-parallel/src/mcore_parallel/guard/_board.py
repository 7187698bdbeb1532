# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What the ranks of a watched run tell each other through the store."""

import json
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store

from mcore_parallel.guard._report import RankStatus


class Board:
    """Heartbeats, statuses and the verdict of one run; every call is short and none waits for another rank.

    Args:
        store: reached by all ranks; a connection of its own is opened, because another thread may be waiting on this one.
        rank: of this process.
        world_size: number of ranks.
        timeout_s: limit of one request.
    """

    def __init__(self, store: Store, rank: int, world_size: int, timeout_s: float) -> None:
        connection: Any = store
        self._store = PrefixStore("mcore/watchdog", connection.clone())
        self._store.set_timeout(timedelta(seconds=timeout_s))
        self.rank, self.world_size = rank, world_size

    def beat(self, count: int, end: str = "") -> None:
        """Sign of life; ``end`` says how this rank left the watched block."""
        self._store.set(f"beat/{self.rank}", json.dumps([count, end]))

    def beats(self, ranks: Iterable[int]) -> dict[int, tuple[int, str]]:
        """Rank -> count and end, for the ranks that have ever beaten."""
        ranks = list(ranks)
        keys = [f"beat/{rank}" for rank in ranks]
        if not self._store.check(keys):
            ranks = [rank for rank, key in zip(ranks, keys, strict=True) if self._store.check([key])]
        texts = self._store.multi_get([f"beat/{rank}" for rank in ranks]) if ranks else []
        return {rank: (count, end) for rank, (count, end) in zip(ranks, map(json.loads, texts), strict=True)}

    def alarmed(self, incident: int) -> bool:
        return self._store.check([f"{incident}/alarm"])

    def tell(self, incident: int, status: RankStatus) -> None:
        """Give this rank's status and call for those of the others."""
        self._store.set(f"{incident}/status/{self.rank}", json.dumps(status.to_json()))
        self._store.set(f"{incident}/alarm", "1")

    def claim(self, duty: str) -> bool:
        """True for the first rank that asks."""
        return self._store.add(f"claim/{duty}", 1) == 1

    def status(self, incident: int, rank: int) -> RankStatus | None:
        key = f"{incident}/status/{rank}"
        return RankStatus.from_json(json.loads(self._store.get(key))) if self._store.check([key]) else None

    def decide(self, incident: int, report: str) -> None:
        """Close an incident for all ranks: with the report that ends the run, or with an empty one when it gets on again."""
        self._store.set(f"{incident}/verdict", json.dumps(report))

    def verdict(self, incident: int) -> str | None:
        key = f"{incident}/verdict"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

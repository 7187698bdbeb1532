# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What the ranks of a watched run tell each other through the store."""

import json

from mcore_parallel.guard._report import RankStatus
from mcore_parallel.guard._timed_store import TimedStore


class StatusStore:
    """Alarms, statuses and verdicts of one run; no call waits for another rank.

    Args:
        store: of the run.
        rank: of this process.
        world_size: number of ranks.
    """

    def __init__(self, store: TimedStore, rank: int, world_size: int) -> None:
        self._store, self.rank, self.world_size = store, rank, world_size

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

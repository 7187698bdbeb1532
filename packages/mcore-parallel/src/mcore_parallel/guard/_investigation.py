# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The asking around when a rank is stuck: who answers, who has died, who is only slow."""

import time

from mcore_parallel.guard._liveness import FINISHED, Liveness
from mcore_parallel.guard._report import RankStatus, compose
from mcore_parallel.guard._status_store import StatusStore


class StallInvestigation:
    """Gathers one incident on one rank: ``look`` again and again until it returns the report.

    Args:
        board: where the statuses come.
        liveness: who lives.
        incident: number.
        dead_after_s: living ranks have twice this time to answer.
        limit_s: after this time without progress a rank is stuck even if others are at work.
    """

    def __init__(self, status_store: StatusStore, liveness: Liveness, incident: int, *, dead_after_s: float, limit_s: float) -> None:
        self._status_store, self._liveness, self._incident, self._limit_s = status_store, liveness, incident, limit_s
        self._statuses: dict[int, RankStatus] = {}
        # Living ranks that never answer must not hold it up.
        self._deadline = time.monotonic() + 2 * dead_after_s

    def look(self) -> str | None:
        """The report once every rank has answered, ended or died, empty when the run is only slow; None before."""
        silent = [rank for rank in range(self._status_store.world_size) if rank not in self._statuses]
        answers = {rank: self._status_store.status(self._incident, rank) for rank in silent}
        self._statuses |= {rank: status for rank, status in answers.items() if status is not None}
        silent = [rank for rank in silent if rank not in self._statuses]
        gone = self._liveness.gone(silent) if silent else {}
        if len(gone) < len(silent) and time.monotonic() < self._deadline:
            return None
        answered = len(gone) == len(silent) and all(what == f"has {FINISHED}" for what in gone.values())
        statuses = self._statuses.values()
        if answered and any(status.at_work for status in statuses) and all(status.idle_s < self._limit_s for status in statuses):
            return ""
        return compose(statuses, gone, self._status_store.world_size)

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The asking around when a rank is stuck: who answers, who has died."""

import time
from collections.abc import Iterable

from mcore_parallel.guard._board import Board
from mcore_parallel.guard._report import RankStatus, compose

FINISHED = "finished"


class Pulse:
    """Tells the living from the dead by heartbeats that change.

    Clocks of other machines are not compared: a heartbeat is old once it has been the same here for ``dead_after_s``.
    """

    def __init__(self, board: Board, dead_after_s: float) -> None:
        self._board, self._dead_after_s = board, dead_after_s
        self._seen: dict[int, tuple[int, float]] = {}

    def gone(self, ranks: Iterable[int]) -> dict[int, str]:
        """Rank -> what became of it, for those that ended or are dead; call it again and again."""
        ranks, now = list(ranks), time.monotonic()
        beats = self._board.beats(ranks)
        gone = {}
        for rank in ranks:
            count, end = beats.get(rank, (-1, ""))
            if end:
                gone[rank] = f"has {end}"
                continue
            if rank not in self._seen or self._seen[rank][0] != count:
                self._seen[rank] = count, now
            elif now - self._seen[rank][1] > self._dead_after_s:
                gone[rank] = f"dead, no sign of life for {self._dead_after_s:g} s" if count >= 0 else "never started its watchdog"
        return gone


class Inquiry:
    """Gathers one incident on one rank: ``look`` again and again until it returns the report."""

    def __init__(self, board: Board, incident: int, dead_after_s: float) -> None:
        self._board, self._incident = board, incident
        self._pulse = Pulse(board, dead_after_s)
        self._statuses: dict[int, RankStatus] = {}
        # Living ranks that never answer must not hold it up.
        self._deadline = time.monotonic() + 2 * dead_after_s

    def look(self) -> str | None:
        """The report once every rank has answered, ended or died; None before."""
        silent = [rank for rank in range(self._board.world_size) if rank not in self._statuses]
        answers = {rank: self._board.status(self._incident, rank) for rank in silent}
        self._statuses |= {rank: status for rank, status in answers.items() if status is not None}
        silent = [rank for rank in silent if rank not in self._statuses]
        gone = self._pulse.gone(silent) if silent else {}
        if len(gone) < len(silent) and time.monotonic() < self._deadline:
            return None
        return compose(self._statuses.values(), gone, self._board.world_size)

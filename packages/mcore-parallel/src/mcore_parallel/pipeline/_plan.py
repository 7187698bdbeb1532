# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The transfers between the actions of the stages."""

import functools
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from mcore_parallel.pipeline._clock import Costs, Table, Transfer, clock, count_chunks, transfers_from
from mcore_parallel.pipeline._schedule import Schedule, parts


@dataclass(frozen=True)
class Exchange:
    """Transfers of one batch, in the order in which a stage posts them."""

    sends: tuple[Transfer, ...] = ()
    receives: tuple[Transfer, ...] = ()


def exchanges(tables: Sequence[Table]) -> list[list[Exchange]]:
    """For each stage the exchange before each of its entries and one after the last; empty ones included.

    What an entry gives leaves right after it. The receiver posts the receive in the first exchange that is still open at that time, by
    the clock of ``simulate``: no later than the entry that needs it, often earlier, so that a stage that runs ahead need
    not wait with its send. Two stages list what they send each other in one order.

    Such a plan cannot deadlock even when every transfer waits for its other end. A stage that waits in an exchange open
    until time s waits for one that stands in an exchange open until some time before s: the sender has not yet produced by s, or
    the receiver was due at an exchange that is the first to be open at a time before s. So no stages wait in a circle.

    Transfers between two chunks of one stage are left out: nothing travels.

    Raises:
        ValueError: an impossible table.
        DeadlockError: an input never comes.

    Example:
        >>> first, last = exchanges([[Action("F", 0), Action("B", 0)], [Action("F", 0), Action("B", 0)]])
        >>> [[str(transfer) for transfer in entry.receives] for entry in first]
        [[], ['gradient 0'], []]
    """
    num_stages, num_chunks = len(tables), count_chunks(tables)
    spans = clock(tables, Costs())
    sends: list[list[list[Transfer]]] = [[[] for _ in range(len(table) + 1)] for table in tables]
    received: list[list[list[tuple[float, int, Transfer]]]] = [[[] for _ in range(len(table) + 1)] for table in tables]
    starts = [[span.start for span in row] for row in spans]
    for stage, table in enumerate(tables):
        for position, entry in enumerate(table):
            end = spans[stage][position].end
            for rank, transfer in enumerate(transfers_from(entry, stage, num_stages, num_chunks)):
                if transfer.receiver == stage:
                    continue
                sends[stage][position + 1].append(transfer)
                received[transfer.receiver][bisect_left(starts[transfer.receiver], end)].append((end, rank, transfer))
    return [
        [
            Exchange(tuple(out), tuple(transfer for _, _, transfer in sorted(incoming, key=lambda item: item[:2])))
            for out, incoming in zip(sends[stage], received[stage], strict=True)
        ]
        for stage in range(num_stages)
    ]


@dataclass(frozen=True)
class PipelinePlan:
    """What all stages do and transfer, ready to run.

    Example:
        >>> PipelinePlan.of([[Action("F", 0)], [Action("F", 0)]]).num_chunks
        1
    """

    tables: tuple[Table, ...]
    exchanges: tuple[tuple[Exchange, ...], ...]
    num_chunks: int

    def slots(self, stage: int) -> dict[tuple[int, int], int]:
        """(chunk, micro-batch) -> the lowest number that no other forward has whose backward the stage has still to finish.

        Example:
            >>> actions = [Action(kind, number) for number in range(2) for kind in "FB"]
            >>> PipelinePlan.of([actions]).slots(0)
            {(0, 0): 0, (0, 1): 0}
        """
        slot_of: dict[tuple[int, int], int] = {}
        live: dict[tuple[int, int], int] = {}
        for entry in self.tables[stage]:
            # The parts of a pair run beside each other, so the forward's comes first.
            for action in sorted(parts(entry), key=lambda action: action.kind != "F"):
                key = (action.chunk, action.microbatch)
                if action.kind == "F":
                    slot_of[key] = live[key] = min(set(range(len(live) + 1)) - set(live.values()))
                elif action.kind in "BW":
                    del live[key]
        return slot_of

    @classmethod
    def of(cls, tables: Sequence[Table]) -> "PipelinePlan":
        """Plan one table a stage.

        Raises:
            ValueError: an impossible table.
            DeadlockError: an input never comes.
        """
        return cls(tuple(map(tuple, tables)), tuple(map(tuple, exchanges(tables))), count_chunks(tables))


@functools.lru_cache(maxsize=16)
def plan_pipeline(schedule: Schedule, num_stages: int, num_microbatches: int) -> PipelinePlan:
    """The plan of a schedule; kept, since every step of a run asks for the same.

    Raises:
        ValueError: what the schedule refuses.
        DeadlockError: the tables of the schedule do not fit together.

    Example:
        >>> len(plan_pipeline(one_f_one_b, num_stages=2, num_microbatches=4).tables)
        2
    """
    return PipelinePlan.of([schedule(num_stages, stage, num_microbatches) for stage in range(num_stages)])

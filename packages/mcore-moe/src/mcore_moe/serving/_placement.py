# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Where experts and their redundant copies lie: pure functions of the experts' loads."""

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mcore_moe._stability import experimental_api

# G ranks of the expert-parallel group, S slots of each of them, E experts.

LEAST_GAIN = 0.05
"""Of the busiest rank's load: for less no expert is moved."""


@experimental_api
@dataclass(frozen=True)
class ExpertPlacement:
    """The expert in each slot of each rank; every expert is in at least one of them.

    Tokens of an expert are shared evenly by its copies.

    Args:
        experts_GS: expert numbers from 0, equally many on each rank.

    Example:
        >>> ExpertPlacement(((0, 1), (2, 0))).imbalance([8, 1, 3])  # ranks of 5 and 7 tokens
        1.1666666666666667

    Raises:
        ValueError: ranks with different numbers of slots, or experts that are in none.
    """

    experts_GS: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if len({len(row) for row in self.experts_GS}) != 1:
            raise ValueError(f"experts_GS has rows of {[len(row) for row in self.experts_GS]} slots; give each rank equally many")
        held = {expert for row in self.experts_GS for expert in row}
        if held != set(range(len(held))):
            raise ValueError(f"experts_GS holds experts {sorted(held)}; every number from 0 must be in a slot")

    @classmethod
    def home(cls, num_experts: int, num_ranks: int, num_redundant_experts: int = 0) -> "ExpertPlacement":
        """Experts in order over the ranks, as parameters hold them; further slots repeat experts of their own rank, which changes no load.

        Raises:
            ValueError: the ranks do not divide the experts or the redundant ones, or would have more slots than there are experts.
        """
        if num_experts % num_ranks or num_redundant_experts % num_ranks:
            raise ValueError(
                f"ep={num_ranks} must divide num_moe_experts={num_experts} and num_redundant_experts={num_redundant_experts}; choose a "
                "multiple of it"
            )
        most = num_experts * (num_ranks - 1)
        if num_redundant_experts > most:
            raise ValueError(
                f"num_redundant_experts={num_redundant_experts} leaves slots for two copies of an expert on each of ep={num_ranks} ranks; "
                f"at most {most} copies of num_moe_experts={num_experts} lie on ranks of their own"
            )
        own, more = num_experts // num_ranks, num_redundant_experts // num_ranks
        slots = [*range(own), *(slot % own for slot in range(more))]
        return cls(tuple(tuple(rank * own + slot for slot in slots) for rank in range(num_ranks)))

    @property
    def num_experts(self) -> int:
        """E."""
        return 1 + max(map(max, self.experts_GS))

    def slots(self) -> list[list[int]]:
        """Of each expert the slots that hold it, numbered over the ranks in order."""
        slots: list[list[int]] = [[] for _ in range(self.num_experts)]
        for number, expert in enumerate(expert for row in self.experts_GS for expert in row):
            slots[expert].append(number)
        return slots

    def rank_loads(self, loads_E: Sequence[float]) -> list[float]:
        """Load of each rank, where the experts have these."""
        copies = Counter(expert for row in self.experts_GS for expert in row)
        return [sum(loads_E[expert] / copies[expert] for expert in row) for row in self.experts_GS]

    def imbalance(self, loads_E: Sequence[float]) -> float:
        """The busiest rank's load over the mean of all; 1 where there is none."""
        total = sum(loads_E)
        return max(self.rank_loads(loads_E)) * len(self.experts_GS) / total if total else 1.0


@experimental_api
def place_experts(loads_E: Sequence[float], before: ExpertPlacement) -> ExpertPlacement:
    """A placement with as many ranks and slots that lets no rank have much more to do than another; the same for the same arguments.

    Copies go one by one to the expert whose copies have most to do each. Then the slots, the heaviest first, go to the rank that has least
    to do, and pairs of the busiest and the idlest rank are exchanged as long as that helps. What stays on a rank keeps its slot.

    Args:
        loads_E: tokens of each expert.
        before: where they lie. It is returned where the busiest rank would have less than 5 % less to do.

    Returns:
        One whose busiest rank has no more to do than that of ``before``.
    """
    num_ranks, num_slots = len(before.experts_GS), len(before.experts_GS[0])
    copies_E = _copies(loads_E, num_ranks, num_slots)
    rows = _packed(loads_E, copies_E, num_ranks, num_slots)
    _exchange_pairs(rows, [load / copies for load, copies in zip(loads_E, copies_E, strict=True)])
    after = ExpertPlacement(_with_fewest_moves(rows, before))
    if after.imbalance(loads_E) > (1 - LEAST_GAIN) * before.imbalance(loads_E):
        return before
    return after


@experimental_api
def plan_moves(before_GS: Sequence[Sequence[int]], after: ExpertPlacement) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """(rank, slot) whence and whither, for every slot that is to hold another expert; all sources are read before a target is written.

    A rank copies from itself where it can; else the copies of an expert are read in turn.

    Args:
        before_GS: the expert in each slot of each rank that holds one, further slots left out.
        after: where they are to lie.

    Example:
        >>> plan_moves([[0, 1], [2, 3]], ExpertPlacement(((0, 1, 2), (2, 3, 2))))
        [((1, 0), (0, 2)), ((1, 0), (1, 2))]
    """
    holders: dict[int, list[tuple[int, int]]] = {}
    for rank, row in enumerate(before_GS):
        for slot, expert in enumerate(row):
            holders.setdefault(expert, []).append((rank, slot))
    moves = []
    for rank, row in enumerate(after.experts_GS):
        known = before_GS[rank]
        for slot, expert in enumerate(row):
            if slot < len(known) and known[slot] == expert:
                continue
            here = [place for place in holders[expert] if place[0] == rank]
            moves.append((here[0] if here else holders[expert][rank % len(holders[expert])], (rank, slot)))
    return moves


def _copies(loads_E: Sequence[float], num_ranks: int, num_slots: int) -> list[int]:
    """Copies of each expert, at most one a rank."""
    copies_E = [1] * len(loads_E)
    heap = [(-load, 1, expert) for expert, load in enumerate(loads_E)] if num_ranks > 1 else []
    heapq.heapify(heap)
    for _ in range(num_ranks * num_slots - len(loads_E)):
        _, copies, expert = heapq.heappop(heap)
        copies_E[expert] = copies + 1
        if copies + 1 < num_ranks:
            heapq.heappush(heap, (-loads_E[expert] / (copies + 1), copies + 1, expert))
    return copies_E


def _packed(loads_E: Sequence[float], copies_E: Sequence[int], num_ranks: int, num_slots: int) -> list[list[int]]:
    """Experts of each rank."""
    weights = [(-loads_E[expert] / copies, expert) for expert, copies in enumerate(copies_E)]
    rows: list[list[int]] = [[] for _ in range(num_ranks)]
    heap = [(0.0, rank) for rank in range(num_ranks)]
    for weight, expert in sorted(weights):
        for _ in range(copies_E[expert]):
            passed = []
            # Two copies on a rank do the work of one: only where no other has room.
            while heap and expert in rows[heap[0][1]]:
                passed.append(heapq.heappop(heap))
            load, rank = heapq.heappop(heap) if heap else passed.pop(0)
            rows[rank].append(expert)
            if len(rows[rank]) < num_slots:
                passed.append((load - weight, rank))
            for entry in passed:
                heapq.heappush(heap, entry)
    return rows


def _exchange_pairs(rows: list[list[int]], weights_E: Sequence[float]) -> None:
    """Exchange an expert of the busiest rank for one of the idlest, in place, as long as the busier of the two has less to do then."""
    loads = [sum(weights_E[expert] for expert in row) for row in rows]
    for _ in range(2 * len(rows)):
        most, least = (pick(range(len(rows)), key=loads.__getitem__) for pick in (max, min))
        gap = loads[most] - loads[least]
        exchanges = [
            (abs(gap - 2 * (weights_E[one] - weights_E[other])), i, j)
            for i, one in enumerate(rows[most])
            for j, other in enumerate(rows[least])
            if one not in rows[least] and other not in rows[most]
        ]
        left, i, j = min(exchanges, default=(gap, 0, 0))
        # Rounding is no gain.
        if left >= gap * (1 - 1e-9):
            return
        rows[most][i], rows[least][j] = rows[least][j], rows[most][i]
        for rank in (most, least):
            loads[rank] = sum(weights_E[expert] for expert in rows[rank])


def _with_fewest_moves(rows: list[list[int]], before: ExpertPlacement) -> tuple[tuple[int, ...], ...]:
    """The rows, each on the rank and in the slots that hold most of it."""
    counts = [Counter(row) for row in before.experts_GS]
    overlaps = sorted(
        (-(Counter(row) & held).total(), number, rank) for number, row in enumerate(rows) for rank, held in enumerate(counts)
    )  # fmt: skip
    row_of_rank: dict[int, int] = {}
    for _, number, rank in overlaps:
        if rank not in row_of_rank and number not in row_of_rank.values():
            row_of_rank[rank] = number
    return tuple(_in_slots(rows[row_of_rank[rank]], held) for rank, held in enumerate(before.experts_GS))


def _in_slots(row: list[int], held: Sequence[int]) -> tuple[int, ...]:
    """A row in the order of the slots that hold its experts already."""
    left = Counter(row)
    stays = []
    for expert in held:
        stays.append(left[expert] > 0)
        left[expert] -= stays[-1]
    rest = iter(sorted((+left).elements()))
    return tuple(expert if stay else next(rest) for expert, stay in zip(held, stays, strict=True))

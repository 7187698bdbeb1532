# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Which sequences share a bin, and which bins a rank: planned from lengths alone, alike on every rank."""

import bisect
import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from mcore_rl._fields import check_integers
from mcore_rl._stability import experimental_api

_ALGORITHMS = ("first_fit_decreasing", "best_fit_decreasing", "next_fit")


@experimental_api
@dataclass(frozen=True, kw_only=True)
class PackingConfig:
    """Bins of a fixed size, each a micro-batch of one row.

    Raises:
        ValueError: a field out of its range.

    Example:
        >>> PackingConfig(bin_size=8).bins([5, 3, 4, 4, 2])
        [[0, 1], [2, 3], [4]]
    """

    bin_size: int
    """Places of a bin; a trajectory needs one less than it has tokens."""
    max_sequences_per_bin: int = 50
    """Trajectories in one bin at most."""
    algorithm: str = "first_fit_decreasing"
    """first_fit_decreasing and best_fit_decreasing begin with the longest; next_fit, as Megatron-LM, never looks back at a bin."""
    alignment: int = 1
    """The length of each sequence is rounded up to a multiple of it: 2 cp over cp context-parallel ranks."""
    share_prompts: bool = False
    """Answers in one bin to the same prompt lie behind it, and it is computed once for all of them. Log-probabilities, losses and gradients
    are those of prompts that are computed with each answer; the balance of a mixture's experts counts their tokens once. A bin should have
    room for a prompt with all its answers: a group that needs more is divided among several. Not with context parallelism, linear mixers,
    heads that predict further tokens, or attention cores that follow no ``Step.prefixes``."""
    device_bounds: bool = False
    """Bounds of the sequences lie on the device, always of ``max_sequences_per_bin`` and what is left of a bin: layers run from one CUDA
    graph for all bins (``mcore_parallel.graphs``). Not with ``share_prompts``, context parallelism, linear mixers, heads that predict
    further tokens, or attention cores that read bounds on the host."""

    def __post_init__(self) -> None:
        check_integers(self, 1, "bin_size", "max_sequences_per_bin", "alignment")
        if self.bin_size % self.alignment:
            raise ValueError(f"bin_size={self.bin_size} must be a multiple of alignment={self.alignment}")
        if self.share_prompts and self.alignment > 1:
            raise ValueError(
                f"share_prompts=True and alignment={self.alignment} exclude one another: a shared prompt is not split over cp ranks; set "
                "alignment=1, or share_prompts=False"
            )
        if self.device_bounds and (self.share_prompts or self.alignment > 1):
            raise ValueError(
                f"device_bounds=True needs whole sequences on one rank, found share_prompts={self.share_prompts} and alignment="
                f"{self.alignment}; set False and 1, or device_bounds=False"
            )
        if self.algorithm not in _ALGORITHMS:
            raise ValueError(f"algorithm={self.algorithm!r} must be one of {', '.join(_ALGORITHMS)}")

    def room(self, length: int) -> int:
        """Places that a sequence takes."""
        return -(-length // self.alignment) * self.alignment

    def bins(self, lengths: Sequence[int], counts: Sequence[int] | None = None) -> list[list[int]]:
        """The numbers of the sequences in each bin; every one is in exactly one.

        Args:
            lengths: places that the sequences need.
            counts: how many each counts as, at most ``max_sequences_per_bin``; None for one each.

        Raises:
            ValueError: a sequence that no bin can hold.
        """
        counts = [1] * len(lengths) if counts is None else counts
        rooms = [self.room(length) for length in lengths]
        for number, (room, length) in enumerate(zip(rooms, lengths, strict=True)):
            if room > self.bin_size:
                raise ValueError(f"sequence {number} needs {length} places, more than bin_size={self.bin_size}; raise bin_size")
        order = sorted(range(len(rooms)), key=lambda number: (-rooms[number], number))
        if self.algorithm == "next_fit":
            return self._next_fit(rooms, counts, order)
        open_bins = _FirstFit(len(rooms), self.bin_size) if self.algorithm == "first_fit_decreasing" else _BestFit(self.bin_size)
        bins: list[list[int]] = []
        taken: list[int] = []
        for number in order:
            passed: list[tuple[int, int]] = []
            chosen, free = open_bins.take(rooms[number])
            while chosen < len(bins) and taken[chosen] + counts[number] > self.max_sequences_per_bin:
                # Room, but for fewer sequences: closed until another one has the place.
                passed.append((chosen, free + rooms[number]))
                open_bins.give(chosen, -1)
                chosen, free = open_bins.take(rooms[number])
            if chosen == len(bins):
                bins.append([])
                taken.append(0)
            bins[chosen].append(number)
            taken[chosen] += counts[number]
            open_bins.give(chosen, -1 if taken[chosen] == self.max_sequences_per_bin else free)
            for other, room in passed:
                open_bins.give(other, room)
        return bins

    def _next_fit(self, rooms: Sequence[int], counts: Sequence[int], order: Sequence[int]) -> list[list[int]]:
        bins: list[list[int]] = []
        free = taken = 0
        for number in order:
            if not bins or rooms[number] > free or taken + counts[number] > self.max_sequences_per_bin:
                bins.append([])
                free, taken = self.bin_size, 0
            bins[-1].append(number)
            free -= rooms[number]
            taken += counts[number]
        return bins


@experimental_api
def balance(costs: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Items for each rank, equally many up to one, with sums that are nearly equal: the largest differencing method (Karmarkar, Karp 1982).

    Args:
        costs: of the items; for attention the sum of the squared lengths in a bin.
        num_ranks: how many share them.

    Returns:
        The items of each rank, ascending; ranks may have none.

    Example:
        >>> balance([8, 7, 6, 5], 2)
        [[0, 3], [1, 2]]
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks={num_ranks} must be at least 1")
    order = sorted(range(len(costs)), key=lambda item: (-costs[item], item))
    # A partition is a set for each rank, the largest sum first; two merge the largest set of one with the smallest of the other.
    partitions: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for begin in range(0, len(order), num_ranks):
        sets = [(costs[item], [item]) for item in order[begin : begin + num_ranks]]
        sets += [(0.0, []) for _ in range(num_ranks - len(sets))]
        partitions.append((sets[-1][0] - sets[0][0], begin, sets))
    heapq.heapify(partitions)
    while len(partitions) > 1:
        _, number, first = heapq.heappop(partitions)
        _, _, second = heapq.heappop(partitions)
        merged = [(a + b, one + other) for (a, one), (b, other) in zip(first, reversed(second), strict=True)]
        merged.sort(key=lambda part: (-part[0], part[1]))
        heapq.heappush(partitions, (merged[-1][0] - merged[0][0], number, merged))
    return [sorted(items) for _, items in partitions[0][2]] if partitions else [[] for _ in range(num_ranks)]


class _FirstFit:
    """The lowest bin with room, from a tree of the most room below each node."""

    def __init__(self, num_bins: int, bin_size: int) -> None:
        self._leaves = 1 << max(0, num_bins - 1).bit_length()
        self._tree = [bin_size] * (2 * self._leaves)

    def take(self, room: int) -> tuple[int, int]:
        """The bin, and what stays free in it."""
        node = 1
        while node < self._leaves:
            node = 2 * node if self._tree[2 * node] >= room else 2 * node + 1
        return node - self._leaves, self._tree[node] - room

    def give(self, number: int, free: int) -> None:
        """Free places from now on; -1 closes the bin."""
        node = number + self._leaves
        self._tree[node] = free
        while node > 1:
            node //= 2
            self._tree[node] = max(self._tree[2 * node], self._tree[2 * node + 1])


class _BestFit:
    """The bin with the least room that is enough, of equal ones the lowest."""

    def __init__(self, bin_size: int) -> None:
        self._bin_size, self._num_bins = bin_size, 0
        self._open: list[tuple[int, int]] = []

    def take(self, room: int) -> tuple[int, int]:
        """The bin, and what stays free in it."""
        at = bisect.bisect_left(self._open, (room, -1))
        if at == len(self._open):
            self._num_bins += 1
            return self._num_bins - 1, self._bin_size - room
        free, number = self._open.pop(at)
        return number, free - room

    def give(self, number: int, free: int) -> None:
        """As of ``_FirstFit``."""
        if free >= 0:
            bisect.insort(self._open, (free, number))

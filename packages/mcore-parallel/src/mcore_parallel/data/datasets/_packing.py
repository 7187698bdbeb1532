# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Which documents of different lengths share a sample of fixed length."""

import bisect
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def pack_best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Groups of numbers into ``lengths`` whose lengths sum to ``capacity`` at most: best fit, longest first (Johnson, 1973).

    At most 11/9 of the fewest groups possible, and one. Lengths must lie in [1, capacity]; equal ones keep their order.

    Example:
        >>> pack_best_fit([3, 5, 2, 4], 7)
        [[1, 2], [3, 0]]
    """
    groups: list[list[int]] = []
    with_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # those that some group has, rising
    for number in np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable").tolist():
        length = lengths[number]
        at = bisect.bisect_left(rooms, length)
        if at == len(rooms):
            group, room = len(groups), capacity
            groups.append([])
        else:
            room = rooms[at]
            group = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[at]
        groups[group].append(number)
        if left := room - length:
            if left not in with_room:
                with_room[left] = []
                bisect.insort(rooms, left)
            with_room[left].append(group)
    return groups


def build_packs(
    lengths: NDArray[np.integer], num_samples: int | None, capacity: int, seed: int
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Documents in reading order and where the samples begin among them, for as many epochs as it takes.

    Each epoch packs anew: which of equal lengths meet, and the order of samples, come from one legacy generator of numpy.

    Args:
        lengths: [N] tokens that each document takes, in [1, capacity].
        num_samples: least samples; None is one epoch.
        capacity: tokens of a sample.
        seed: of the orders.

    Returns:
        (document numbers [N * epochs], bounds [samples + 1]).
    """
    generator = np.random.RandomState(seed)
    order: list[int] = []
    bounds = [0]
    while len(bounds) == 1 or (num_samples is not None and len(bounds) <= num_samples):
        documents = generator.permutation(lengths.size)
        groups = pack_best_fit(lengths[documents].tolist(), capacity)
        for group in generator.permutation(len(groups)).tolist():
            order += documents[groups[group]].tolist()
            bounds.append(len(order))
    return np.array(order, dtype=np.int32), np.array(bounds, dtype=np.int64)

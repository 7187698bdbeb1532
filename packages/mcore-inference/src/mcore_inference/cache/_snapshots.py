# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Which snapshot holds the recurrent states behind which cache block: bookkeeping on the host, no device and no tensor."""

from collections import OrderedDict

from mcore_inference._stability import experimental_api


@experimental_api
class StateSnapshots:
    """Copies of the states behind known blocks, from which other requests go on.

    Nobody holds one: a request copies it. It goes with its block, or when all are taken and another is wanted, the one least recently used
    first.

    Args:
        num_snapshots: that there is memory for; 0 for none.

    Example:
        >>> snapshots = StateSnapshots(1)
        >>> snapshots.take(7), 7 in snapshots
        (0, True)
        >>> snapshots.take(9), 7 in snapshots, snapshots.num_evicted
        (0, False, 1)
    """

    def __init__(self, num_snapshots: int) -> None:
        self.total_count = num_snapshots
        self.num_evicted = 0
        """Snapshots that gave way to others."""
        self.clear()

    def __contains__(self, block: object) -> bool:
        return block in self._places

    def __len__(self) -> int:
        return len(self._places)

    def take(self, block: int) -> int | None:
        """A place for the states behind a known block, which counts as used now; None where they are kept already, or there is no place."""
        if block in self._places:
            self._places.move_to_end(block)
            return None
        if not self.total_count:
            return None
        if not self._free:
            _, place = self._places.popitem(last=False)
            self.num_evicted += 1
            self._free.append(place)
        self._places[block] = place = self._free.pop()
        return place

    def use(self, block: int) -> int:
        """The place of the states behind a block, which counts as used now."""
        self._places.move_to_end(block)
        return self._places[block]

    def drop(self, block: int) -> None:
        """Forget the states behind a block that is known no more; nothing happens where none are kept."""
        place = self._places.pop(block, None)
        if place is not None:
            self._free.append(place)

    def clear(self) -> None:
        """Forget all of them."""
        self._places: OrderedDict[int, int] = OrderedDict()
        """By block, the least recently used first."""
        self._free = list(range(self.total_count - 1, -1, -1))

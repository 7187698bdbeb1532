# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Where ranks are in a stream of numbers that they share, when some of them took more than others."""

from collections.abc import Sequence
from dataclasses import dataclass

from mcore_rl._stability import experimental_api


@experimental_api
@dataclass(frozen=True, kw_only=True)
class StreamPosition:
    """What is taken of a stream: ``left``, then all numbers from ``first`` on. Rank r of n has its places r, r + n, r + 2n, ...

    Ranks take as many as they need: one whose groups had equal rewards took more than the others. A run that goes on with as many ranks
    gives each the numbers that it would have had.

    Example:
        >>> position = StreamPosition(num_taken=(3, 1))  # of 0, 2, 4, ... and of 1, 3, 5, ...
        >>> position.shared_by(1)
        StreamPosition(first=5, left=(3,), num_taken=(0,))
    """

    first: int = 0
    left: tuple[int, ...] = ()
    """Numbers below ``first`` that nobody took, which go before it."""
    num_taken: tuple[int, ...] = (0,)
    """How many each of the ranks has taken."""

    @classmethod
    def of(cls, first: int = 0, left: Sequence[int] = (), num_taken: Sequence[int] = (0,)) -> "StreamPosition":
        """Of values that were read from JSON."""
        return cls(first=int(first), left=tuple(left), num_taken=tuple(num_taken))

    def number(self, place: int) -> int:
        """The number at a place of the stream."""
        return self.left[place] if place < len(self.left) else self.first + place - len(self.left)

    def shared_by(self, num_ranks: int) -> "StreamPosition":
        """The same for so many ranks: of as many, itself; of others, a stream of what nobody has taken, each number once."""
        before = len(self.num_taken)
        if before == num_ranks:
            return self
        # Behind the last place that is taken.
        end = max((rank + 1 + (count - 1) * before for rank, count in enumerate(self.num_taken) if count), default=0)
        places = range(min(self.num_taken) * before, max(end, len(self.left)))
        left = tuple(self.number(place) for place in places if place // before >= self.num_taken[place % before])
        return StreamPosition(first=self.first + max(0, end - len(self.left)), left=left, num_taken=(0,) * num_ranks)

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Which rank sends which rollouts to which: planned from headers alone, alike on every rank."""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_rl._packing._header import RolloutHeader
from mcore_rl._types import TokenRollout


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """Rollouts on their way from the ranks that drew them to those that train on them.

    A rank receives what its replica trains on, without what it drew itself, and a few examples; ranks that only serve receive those alone.
    """

    headers: Sequence[RolloutHeader]
    """Of all rollouts."""
    sources: Sequence[int]
    """Rank that drew each; ascending."""
    wanted: Sequence[frozenset[int]]
    """Numbers of the rollouts that each rank trains on."""
    examples: Sequence[int] = ()
    """Numbers of the rollouts that every rank gets, without their routing."""

    def size(self, source: int, target: int) -> int:
        """Bytes from one rank to another."""
        return sum(self.headers[number].num_bytes(routed=routed) for number, routed in self._parcel(source, target))

    def parcels(self, rank: int, rollouts: Mapping[int, TokenRollout]) -> list[Tensor]:
        """uint8, what ``rank`` sends to each rank, of the rollouts that it drew."""
        made: dict[tuple[tuple[int, bool], ...], Tensor] = {}
        parcels = []
        for target in range(len(self.wanted)):
            # Ranks of one replica get the same.
            key = tuple(self._parcel(rank, target))
            if key not in made:
                data = b"".join(self.headers[number].encode(rollouts[number], routed=routed) for number, routed in key)
                made[key] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
            parcels.append(made[key])
        return parcels

    def received(self, rank: int, parcels: Sequence[Tensor], rollouts: Mapping[int, TokenRollout]) -> dict[int, TokenRollout]:
        """By their numbers, the rollouts that ``rank`` wants and the examples, which may lack their routing.

        Args:
            rank: this one.
            parcels: uint8, what each rank sent.
            rollouts: those that this rank drew.
        """
        known = {number: rollouts[number] for number in sorted(self.wanted[rank].union(self.examples)) if self.sources[number] == rank}
        for source, parcel in enumerate(parcels):
            if source == rank:
                continue
            rest = memoryview(parcel.numpy().tobytes())
            for number, routed in self._parcel(source, rank):
                size = self.headers[number].num_bytes(routed=routed)
                known[number] = self.headers[number].rollout(rest[:size], routed=routed)
                rest = rest[size:]
        return known

    def _parcel(self, source: int, target: int) -> list[tuple[int, bool]]:
        """Numbers of the rollouts from one rank to another, and whether their routing goes along."""
        if source == target:
            return []
        wanted, drawn = self.wanted[target], range(bisect_left(self.sources, source), bisect_right(self.sources, source))
        return [(number, number in wanted) for number in drawn if number in wanted or number in self.examples]

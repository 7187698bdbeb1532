# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Which answers lie in a bin behind one prompt, and where: planned from headers alone, alike on every rank."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mcore_rl._packing._header import RolloutHeader
from mcore_rl._packing._packing import PackingConfig
from mcore_rl._packing._trajectories import Place


@dataclass(frozen=True)
class PackUnit:
    """What goes into one bin together: a trajectory, or a prompt once with answers to it.

    The last token of a shared prompt stands at the head of each answer, so that each has a row of its own that predicts its first token.
    """

    members: tuple[int, ...]
    """Numbers of the rollouts."""
    lengths: tuple[int, ...]
    """Places of each, without those they share."""
    num_shared: int = 0
    """Places of the prompt, its last token left out; 0 for a trajectory alone."""

    @property
    def length(self) -> int:
        """Places of all."""
        return self.num_shared + sum(self.lengths)

    @property
    def cost(self) -> int:
        """Of attention, as the squared length of a trajectory alone."""
        shared = self.num_shared
        return shared**2 + sum((shared + length) ** 2 - shared**2 for length in self.lengths)


def pack_units(headers: Sequence[RolloutHeader], packing: PackingConfig) -> list[PackUnit]:
    """All rollouts, each in one unit.

    Answers share a prompt where their tokens up to the first one that the policy wrote are equal. A group that no bin holds is divided
    among several.

    Args:
        headers: of rollouts, none of which is longer than a bin.
        packing: sizes, and whether prompts are shared.
    """
    lengths = [max(0, header.num_tokens - 1) for header in headers]
    if not packing.share_prompts:
        return [PackUnit((number,), (length,)) for number, length in enumerate(lengths)]
    groups: dict[str | int, list[int]] = {}
    for number, header in enumerate(headers):
        groups.setdefault(header.prompt or number, []).append(number)
    units: list[PackUnit] = []
    for key, members in groups.items():
        shared = headers[members[0]].num_prompt - 1 if isinstance(key, str) else 0
        own = [lengths[number] - shared for number in members]
        parts = [list(range(len(members)))]
        if shared + sum(own) > packing.bin_size or len(members) > packing.max_sequences_per_bin:
            parts = dataclasses.replace(packing, bin_size=packing.bin_size - shared).bins(own)
        for part in parts:
            if len(part) == 1:
                units.append(PackUnit((members[part[0]],), (lengths[members[part[0]]],)))
            else:
                units.append(PackUnit(tuple(members[i] for i in part), tuple(own[i] for i in part), shared))
    return units


@dataclass
class BinLayout:
    """The sequences of one bin, behind one another."""

    bin_size: int
    bounds: list[int] = field(default_factory=lambda: [0])
    prefixes: list[int] = field(default_factory=list)

    def add(self, unit: PackUnit, packing: PackingConfig, number: int) -> list[Place]:
        """The places of a unit's members, in the bin of this number."""
        prefix, start = -1, self.bounds[-1]
        if unit.num_shared:
            prefix = len(self.prefixes)
            self._append(unit.num_shared)
        places = []
        for length in unit.lengths:
            places.append(Place(number, self.bounds[-1], length, packing.room(length), start, unit.num_shared))
            self._append(packing.room(length), prefix)
        return places

    def finish(self) -> tuple[Tensor, Tensor | None]:
        """``Batch.cu_seqlens``, with what is left of the bin as a sequence of its own, and ``Batch.prefixes``."""
        self._append(self.bin_size - self.bounds[-1])
        shared = any(prefix >= 0 for prefix in self.prefixes)
        return torch.tensor(self.bounds, dtype=torch.int32), torch.tensor(self.prefixes, dtype=torch.int32) if shared else None

    def _append(self, length: int, prefix: int = -1) -> None:
        if length:
            self.bounds.append(self.bounds[-1] + length)
            self.prefixes.append(prefix)

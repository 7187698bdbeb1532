# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Trajectories packed into bins without padding between them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mcore_rl._packing import PackingConfig, balance
from mcore_rl._stability import experimental_api
from mcore_rl._trajectories import BatchStyle, Place, TrajectoryBatches, write_batches
from mcore_rl._types import TokenRollout


@experimental_api
@dataclass(frozen=True, kw_only=True)
class PackingContext(TrajectoryBatches):
    """This data rank's bins: micro-batches [1, bin_size] whose sequences ``cu_seqlens`` keep apart.

    Every rank plans the same from the lengths of all rollouts. All ranks have equally many bins, some may be empty; the squared lengths
    of their sequences are balanced. A sequence takes one place less than it has tokens, rounded up to the alignment; what is left of a
    bin is a sequence of its own that counts nothing.

    Example:
        >>> context = PackingContext.pack(rollouts, PackingConfig(bin_size=4096))
        >>> batches = context.with_advantages(advantages).batches
    """

    bins: tuple[tuple[int, ...], ...]
    """Numbers of the rollouts in each bin of this rank."""
    rollouts: tuple[int, ...]
    """Numbers of this rank's rollouts among all, in the order of ``places``."""
    efficiency: float
    """Places that labels fill, of those of all ranks' bins that are not empty."""

    @classmethod
    def pack(
        cls,
        rollouts: Sequence[TokenRollout],
        packing: PackingConfig,
        style: BatchStyle | None = None,
        *,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> "PackingContext":
        """The bins of data rank ``rank`` of ``num_ranks``.

        Args:
            rollouts: those of all ranks.
            packing: sizes and algorithm.
            style: as of ``rollout_batches``.
            rank: of this process among the data ranks.
            num_ranks: how many there are.

        Raises:
            ValueError: a trajectory that is longer than a bin; names its problem.
        """
        lengths = [max(0, len(rollout.trajectory) - 1) for rollout in rollouts]
        for rollout, length in zip(rollouts, lengths, strict=True):
            if packing.room(length) > packing.bin_size:
                raise ValueError(
                    f"trajectory of {rollout.problem_id} has {length + 1} tokens, bin_size={packing.bin_size} admits "
                    f"{packing.bin_size + 1}; raise bin_size"
                )
        bins = packing.bins(lengths)
        shares = balance([sum(lengths[number] ** 2 for number in members) for members in bins], num_ranks)
        own = [bins[number] for number in shares[rank]]
        # Every rank takes part in every collective.
        own += [[] for _ in range(max(1, *map(len, shares)) - len(own))]
        places, cu_seqlens = [], []
        for number, members in enumerate(own):
            bounds = [0]
            for member in members:
                places.append(Place(number, bounds[-1], lengths[member], packing.room(lengths[member])))
                bounds.append(bounds[-1] + places[-1].room)
            if bounds[-1] < packing.bin_size:
                bounds.append(packing.bin_size)
            cu_seqlens.append(torch.tensor([bound for i, bound in enumerate(bounds) if i == 0 or bound > bounds[i - 1]], dtype=torch.int32))
        numbers = [member for members in own for member in members]
        own_rollouts, shape = [rollouts[number] for number in numbers], (len(own), 1, packing.bin_size)
        return cls(
            batches=write_batches(own_rollouts, places, shape, style or BatchStyle(), cu_seqlens),
            places=places,
            bins=tuple(map(tuple, own)),
            rollouts=tuple(numbers),
            efficiency=sum(lengths) / max(1, len(bins) * packing.bin_size),
        )

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Trajectories packed into bins without padding between them."""

from collections.abc import Sequence
from dataclasses import dataclass

from mcore_rl._packing import PackingConfig, balance
from mcore_rl._shared_prompts import BinLayout, pack_units
from mcore_rl._stability import experimental_api
from mcore_rl._trajectories import BatchStyle, TrajectoryBatches, write_batches
from mcore_rl._types import TokenRollout


@experimental_api
@dataclass(frozen=True, kw_only=True)
class PackingContext(TrajectoryBatches):
    """This data rank's bins: micro-batches [1, bin_size] whose sequences ``cu_seqlens`` keep apart.

    Every rank plans the same from the lengths of all rollouts. All ranks have equally many bins, some may be empty; the squared lengths
    of their sequences are balanced. A sequence takes one place less than it has tokens, rounded up to the alignment; what is left of a
    bin is a sequence of its own that counts nothing. A prompt that answers share (``PackingConfig.share_prompts``) is a sequence in front
    of theirs (``Batch.prefixes``), which begin with its last token.

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
        units = pack_units(rollouts, packing)
        bins = packing.bins([unit.length for unit in units], [len(unit.members) for unit in units])
        shares = balance([sum(units[number].cost for number in held) for held in bins], num_ranks)
        own = [[units[number] for number in bins[share]] for share in shares[rank]]
        # Every rank takes part in every collective.
        own += [[] for _ in range(max(1, *map(len, shares)) - len(own))]
        places, bounds = [], []
        for number, held in enumerate(own):
            layout = BinLayout(packing.bin_size)
            for unit in held:
                places += layout.add(unit, packing, number)
            bounds.append(layout.finish())
        members = [tuple(member for unit in held for member in unit.members) for held in own]
        numbers = [member for some in members for member in some]
        own_rollouts, shape = [rollouts[number] for number in numbers], (len(own), 1, packing.bin_size)
        return cls(
            batches=write_batches(own_rollouts, places, shape, style or BatchStyle(), bounds),
            places=places,
            bins=tuple(members),
            rollouts=tuple(numbers),
            efficiency=sum(unit.length for unit in units) / max(1, len(bins) * packing.bin_size),
        )

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Trajectories packed into bins without padding between them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from mcore_parallel.training import Batch
from mcore_rl._packing._header import RolloutHeader
from mcore_rl._packing._packing import PackingConfig, balance
from mcore_rl._packing._shared_prompts import BinLayout, PackUnit, pack_units
from mcore_rl._packing._trajectories import BatchStyle, TrajectoryBatches, write_batches
from mcore_rl._stability import experimental_api
from mcore_rl._types import TokenRollout


@dataclass(frozen=True, kw_only=True)
class BinPlan:
    """What lies in the bins of each data rank, planned from headers alone."""

    shares: list[list[list[PackUnit]]]
    """Units of each bin of each rank; all ranks have equally many bins, some may be empty."""
    efficiency: float
    """Places that labels fill, of those of all bins that are not empty."""

    def members(self, rank: int) -> list[int]:
        """Numbers of a rank's rollouts, in the order of their places."""
        return [member for held in self.shares[rank] for unit in held for member in unit.members]


def plan_bins(headers: Sequence[RolloutHeader], packing: PackingConfig, num_ranks: int) -> BinPlan:
    """The bins of ``num_ranks`` data ranks, with the squared lengths of their sequences balanced.

    Raises:
        ValueError: a trajectory that is longer than a bin; names its problem.
    """
    for header in headers:
        if packing.room(max(0, header.num_tokens - 1)) > packing.bin_size:
            raise ValueError(
                f"trajectory of {header.problem_id} has {header.num_tokens} tokens, bin_size={packing.bin_size} admits "
                f"{packing.bin_size + 1}; raise bin_size"
            )
    units = pack_units(headers, packing)
    bins = packing.bins([unit.length for unit in units], [len(unit.members) for unit in units])
    shares = balance([sum(units[number].cost for number in held) for held in bins], num_ranks)
    # Every rank takes part in every collective.
    num_bins = max(1, *map(len, shares))
    own: list[list[list[PackUnit]]] = [[[units[number] for number in bins[held]] for held in share] for share in shares]
    own = [[*share, *([] for _ in range(num_bins - len(share)))] for share in own]
    return BinPlan(shares=own, efficiency=sum(unit.length for unit in units) / max(1, len(bins) * packing.bin_size))


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
        >>> batches = context.with_advantages([advantages[number] for number in context.rollouts]).batches
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
        plan = plan_bins([RolloutHeader.of(rollout) for rollout in rollouts], packing, num_ranks)
        return write_bins(plan, dict(enumerate(rollouts)), packing, style or BatchStyle(), rank)


def write_bins(plan: BinPlan, rollouts: Mapping[int, TokenRollout], packing: PackingConfig, style: BatchStyle, rank: int) -> PackingContext:
    """The bins of data rank ``rank``, whose rollouts are those numbers of the plan."""
    own, places, bounds = plan.shares[rank], [], []
    for number, held in enumerate(own):
        layout = BinLayout(packing.bin_size)
        for unit in held:
            places += layout.add(unit, packing, number)
        bounds.append(layout.finish())
    numbers, shape = plan.members(rank), (len(own), 1, packing.bin_size)
    batches = write_batches([rollouts[number] for number in numbers], places, shape, style, bounds)
    if packing.device_bounds:
        batches = [_of_one_kind(batch.with_device_bounds(packing.max_sequences_per_bin + 1)) for batch in batches]
    return PackingContext(
        batches=batches,
        places=places,
        bins=tuple(tuple(member for unit in held for member in unit.members) for held in own),
        rollouts=tuple(numbers),
        efficiency=plan.efficiency,
    )


def _of_one_kind(batch: Batch) -> Batch:
    """With padding marked where there is none, too: full bins would need graphs of their own."""
    return batch if batch.valid is not None else replace(batch, valid=torch.ones_like(batch.tokens, dtype=torch.bool))

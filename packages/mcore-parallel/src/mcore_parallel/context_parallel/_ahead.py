# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What lies further on in a sequence, wherever its tokens are held."""

import functools

import torch
from torch import Tensor

from mcore_parallel.comm import all_gather
from mcore_parallel.context_parallel._zigzag import zigzag_indices
from mcore_parallel.groups import Group


def tokens_ahead(values: Tensor, lengths: tuple[int, ...], group: Group, *, by: int) -> Tensor:
    """For each token of this rank the value ``by`` tokens later in its sequence; 0 where the sequence has ended.

    Args:
        values: [T] of this rank's tokens (``zigzag_indices``), without a gradient; small things such as ids and weights, because all
            ranks' are gathered.
        lengths: of the whole sequences, over all ranks.
        group: the context-parallel ranks.
        by: how many tokens, at least 0.

    Returns:
        [T].

    Raises:
        SequenceSplitError: as of ``zigzag_indices``.

    Example:
        >>> tokens_ahead(torch.tensor([1, 2, 3, 4, 5]), (3, 2), Group.single(), by=1)
        tensor([2, 3, 0, 5, 0])
    """
    source = _sources(lengths, group.size, group.rank, by).to(values.device, non_blocking=True)
    whole = all_gather(values, group)
    # One value more, which those behind the ends read.
    return torch.cat((whole, whole.new_zeros(1)))[source]


@functools.lru_cache(maxsize=256)
def _sources(lengths: tuple[int, ...], size: int, rank: int, by: int) -> Tensor:
    """[T] of ``rank``: where the value lies among those of all ranks behind one another; behind them all for none."""
    held = [zigzag_indices(lengths, size, other) for other in range(size)]
    place = torch.empty(sum(lengths) + 1, dtype=torch.int64)
    place[torch.cat(held)] = torch.arange(sum(lengths))
    place[-1] = sum(lengths)
    ends = torch.tensor(lengths).cumsum(0)
    wanted = held[rank] + by
    end = ends[torch.searchsorted(ends, held[rank], right=True)]
    return place[torch.where(wanted < end, wanted, sum(lengths))]

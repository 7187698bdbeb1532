# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Tokens that all tensor-parallel ranks hold: each rank takes the picks of its own experts, and nothing is exchanged."""

import torch
from torch import Tensor

from mcore_moe._routing import Routing
from mcore_moe._stability import experimental_api
from mcore_moe.dispatch._local import LocalPicks, sort_picks, sum_rows
from mcore_parallel import ProcessGroups

# T tokens, K experts a token, P = T * K picks, N experts of this rank, D model.


@experimental_api
class ReplicatedTokenDispatcher:
    """Selects this rank's picks of tokens that are equal on all tp ranks; the sum of ``combine`` over tp is the result.

    Where several tp ranks hold the same experts, they share the tokens out.

    Args:
        num_experts: E, split evenly and in order over ep.
        groups: the layout.

    Raises:
        ValueError: ep does not divide E, or the experts are spread beyond the tp ranks.
    """

    def __init__(self, num_experts: int, groups: ProcessGroups) -> None:
        if num_experts % groups.ep.size:
            raise ValueError(f"ep={groups.ep.size} must divide num_moe_experts={num_experts}; lower ep")
        if not set(groups.tp_ep.ranks) <= set(groups.tp.ranks):
            raise ValueError(
                f"ep={groups.ep.size} and etp={groups.expt_tp.size} spread the experts beyond the tp={groups.tp.size} ranks that hold the "
                "same tokens; set sequence_parallel=True, or lower ep or etp"
            )
        self.num_experts = num_experts
        self.num_local_experts = num_experts // groups.ep.size
        self.first_expert = groups.ep.rank * self.num_local_experts
        copies = [rank for rank in groups.expt_dp.ranks if rank in groups.tp.ranks]
        self.num_copies, self.copy = len(copies), copies.index(groups.world.ranks[groups.world.rank])

    def dispatch(self, x_TD: Tensor, routing: Routing) -> LocalPicks:
        """This rank's rows; differentiable in ``x_TD``."""
        topk, N = routing.experts_TK.shape[1], self.num_local_experts
        local_P = routing.destinations(self.num_experts).flatten() - self.first_expert
        mine_P = (local_P >= 0) & (local_P < N)
        if self.num_copies > 1:
            mine_P &= torch.arange(len(local_P), device=x_TD.device) // topk % self.num_copies == self.copy
        return sort_picks(x_TD, routing, torch.where(mine_P, local_P, N).view_as(routing.experts_TK), N)

    def combine(self, rows_RD: Tensor, picks: LocalPicks, routing: Routing) -> Tensor:
        """This rank's part of the sums, [T, D]; the order of each sum is fixed."""
        return sum_rows(rows_RD, picks)

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Exchange of tokens by all-gather over the ranks that hold a set of experts, and of the sums by reduce-scatter."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_moe._routing import Routing
from mcore_moe._stability import experimental_api
from mcore_moe.dispatch._equal import check_equal
from mcore_moe.dispatch._local import LocalPicks, sort_picks, sum_rows
from mcore_parallel import Group, ProcessGroups
from mcore_parallel.comm import all_gather, gather_from_sequence_parallel_region, reduce_scatter_to_sequence_parallel_region

# T tokens of this rank, A tokens of all ranks, K experts a token, N experts of this rank, D model.


@experimental_api
@dataclass(frozen=True)
class GatheredPicks:
    """Rows for this rank's experts, of the tokens of all ranks."""

    picks: LocalPicks
    sizes: Sequence[int] | None
    """Tokens of each rank; None when they are equally many."""

    @property
    def rows_RD(self) -> Tensor:
        """[R, D] in expert order."""
        return self.picks.rows_RD

    @property
    def ends_N(self) -> Tensor:
        """int32, rows of each of the N experts and of all before it."""
        return self.picks.ends_N

    @property
    def weights_R(self) -> Tensor:
        """Of the rows' results."""
        return self.picks.weights_R


@experimental_api
class MoEAllGatherTokenDispatcher:
    """Gathers the tokens of all ranks that hold a set of experts; each computes the picks of its own experts, and the sums are scattered.

    Every rank receives every token, so it moves more than an all-to-all unless a token's experts lie on nearly all ranks. Where several
    ranks hold slices of one expert (expert tensor parallelism), their partial results are added in the same sum.

    Args:
        num_experts: E, split evenly and in order over ep.
        groups: the layout; tokens are gathered over ``tp_ep``.
        equal_lengths: the ranks hold equally many tokens in every exchange. Nobody compares them, and the host never waits for the device.

    Raises:
        ValueError: ep does not divide E.
    """

    def __init__(self, num_experts: int, groups: ProcessGroups, *, equal_lengths: bool = False) -> None:
        if num_experts % groups.ep.size:
            raise ValueError(f"ep={groups.ep.size} must divide num_moe_experts={num_experts}; lower ep")
        self.num_experts = num_experts
        self.num_local_experts = num_experts // groups.ep.size
        self.first_expert = groups.ep.rank * self.num_local_experts
        self.group = groups.tp_ep
        self._equal_lengths = self._sizes_agree = equal_lengths

    def dispatch(self, x_TD: Tensor, routing: Routing) -> GatheredPicks:
        """The rows of this rank's experts; differentiable in ``x_TD`` and the weights.

        Ranks may hold different numbers of tokens, which the host reads, unless ``equal_lengths`` says that they do not. With padding to
        capacity they must hold equally many, and nothing waits for the device but the first call, which compares them.

        Raises:
            ValueError: at the first call, ranks with different numbers of tokens and padding to capacity.
        """
        sizes, capacity = None, None
        if routing.capacity is None and not self._equal_lengths:
            lengths = all_gather(torch.tensor([len(x_TD)], device=x_TD.device), self.group).tolist()
            sizes = lengths if len(set(lengths)) > 1 else None
        elif routing.capacity is not None:
            if not self._sizes_agree:
                check_equal("tokens", len(x_TD), self.group, x_TD.device)
                self._sizes_agree = True
            capacity = routing.capacity * self.group.size
        parts = x_TD, routing.probs_TK, routing.destinations(self.num_experts)
        if self._equal_lengths and not torch.is_grad_enabled():
            x_AD, probs_AK, experts_AK = _gather_together(parts, self.group)
        else:
            x_AD, probs_AK, experts_AK = (
                gather_from_sequence_parallel_region(part, self.group, output_split_sizes=sizes) for part in parts
            )
        N = self.num_local_experts
        local_AK = experts_AK - self.first_expert
        local_AK = torch.where((local_AK >= 0) & (local_AK < N), local_AK, N)
        return GatheredPicks(sort_picks(x_AD, Routing(experts_AK, probs_AK), local_AK, N, capacity), sizes)

    def combine(self, rows_RD: Tensor, gathered: GatheredPicks, routing: Routing) -> Tensor:
        """The sums of this rank's tokens, [T, D]; ranks are added up in the dtype of the weights if that is wider."""
        sums_AD = sum_rows(rows_RD, gathered.picks)
        wide = torch.promote_types(sums_AD.dtype, routing.probs_TK.dtype)
        return reduce_scatter_to_sequence_parallel_region(sums_AD.to(wide), self.group, gathered.sizes).to(sums_AD.dtype)


def _gather_together(parts: Sequence[Tensor], group: Group) -> list[Tensor]:
    """Tensors [T, .] of all ranks, in one collective: of few tokens each takes as long as all of them."""
    bytes_of = [part.contiguous().view(torch.uint8) for part in parts]
    gathered = all_gather(torch.cat(bytes_of, dim=1), group).split([part.shape[1] for part in bytes_of], dim=1)
    return [piece.contiguous().view(part.dtype) for piece, part in zip(gathered, parts, strict=True)]

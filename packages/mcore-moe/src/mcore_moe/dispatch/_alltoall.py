# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Exchange of tokens by all-to-all over the expert-parallel group."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_moe._routing import Routing
from mcore_parallel import Group
from mcore_parallel.comm import all_to_all, all_to_all_autograd

# T tokens of this rank, K experts a token, P = T * K picks, R rows received, N experts of this rank, G ranks of the group.


@dataclass(frozen=True)
class Dispatched:
    """Rows for this rank's experts, in expert order, with what is needed to send the results back."""

    rows_RD: Tensor
    tokens_per_expert: list[int]
    """Rows of each of the N experts held here."""
    order_P: Tensor
    """Picks in the order in which they were sent."""
    arrival_R: Tensor
    """Rows in expert order -> position of arrival."""
    sent: list[int]
    """Rows sent to each rank."""
    received: list[int]


class MoEAlltoAllTokenDispatcher:
    """Sends each (token, expert) pick to the rank that holds the expert.

    Args:
        num_experts: E, split evenly and in order over ``group``.
        group: expert-parallel ranks.

    Raises:
        ValueError: the group size does not divide E.
    """

    def __init__(self, num_experts: int, group: Group) -> None:
        if num_experts % group.size:
            raise ValueError(f"ep={group.size} must divide num_moe_experts={num_experts}; lower ep")
        self.num_experts = num_experts
        self.num_local_experts = num_experts // group.size
        self.group = group

    def dispatch(self, x_TD: Tensor, routing: Routing) -> Dispatched:
        """Deliver every pick; differentiable in ``x_TD``."""
        picks_P = routing.experts_TK.flatten()
        order_P = picks_P.argsort(stable=True)
        send_GN = torch.bincount(picks_P, minlength=self.num_experts).view(self.group.size, self.num_local_experts)
        if self.group.size == 1:
            receive_GN = send_GN
        else:
            blocks = [self.num_local_experts] * self.group.size
            receive_GN = all_to_all(send_GN.flatten(), blocks, blocks, self.group).view_as(send_GN)
        # One transfer to the host: the exchange needs its sizes there.
        counts = torch.stack((send_GN, receive_GN)).tolist()
        sent = [sum(row) for row in counts[0]]
        received = [sum(row) for row in counts[1]]
        rows_RD = all_to_all_autograd(x_TD[order_P // routing.experts_TK.shape[1]], received, sent, self.group)
        # Rows arrive by (source, expert); group them by expert.
        expert_R = torch.arange(self.num_local_experts, device=x_TD.device).repeat(self.group.size)
        expert_R = expert_R.repeat_interleave(receive_GN.flatten(), output_size=sum(received))
        arrival_R = expert_R.argsort(stable=True)
        per_expert = [sum(row[expert] for row in counts[1]) for expert in range(self.num_local_experts)]
        return Dispatched(rows_RD[arrival_R], per_expert, order_P, arrival_R, sent, received)

    def combine(self, rows_RD: Tensor, dispatched: Dispatched, routing: Routing) -> Tensor:
        """Return the experts' rows to their tokens and sum them by weight -> [T, D]; the sum's order is fixed."""
        arrived_RD = torch.empty_like(rows_RD).index_copy(0, dispatched.arrival_R, rows_RD)
        back_PD = all_to_all_autograd(arrived_RD, dispatched.sent, dispatched.received, self.group)
        picks_PD = torch.empty_like(back_PD).index_copy(0, dispatched.order_P, back_PD)
        picks_TKD = picks_PD.unflatten(0, routing.experts_TK.shape)
        return (picks_TKD * routing.probs_TK.to(picks_TKD.dtype).unsqueeze(-1)).sum(1)

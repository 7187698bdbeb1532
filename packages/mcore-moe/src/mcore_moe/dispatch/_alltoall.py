# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Exchange of tokens by all-to-all over the expert-parallel group, and over the ranks that share an expert."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mcore_moe import _fp8_payload
from mcore_moe._routing import Routing
from mcore_moe._stability import experimental_api
from mcore_moe.dispatch._equal import check_equal
from mcore_moe.dispatch._local import LocalPicks, sort_picks, sum_places
from mcore_parallel import Group
from mcore_parallel.comm import RowsUnderWay, all_gather, all_to_all, all_to_all_autograd

# T tokens of this rank, K experts a token, P picks that go to an expert, Q rows received from the expert-parallel group, R rows for this
# rank's experts, N experts of this rank, G ranks of the expert-parallel group, H ranks that share an expert. R = Q when H = 1.


@experimental_api
@dataclass(frozen=True)
class Dispatched:
    """Rows for this rank's experts, in expert order, with what is needed to send the results back."""

    rows_RD: Tensor
    ends_N: Tensor
    """int32, rows of each of the N experts held here and of all before it."""
    weights_R: Tensor
    """Of the rows' results."""
    places_TK: Tensor
    """int32 row of each pick among those that were sent; -1 where it goes to no expert."""
    padded: bool
    """Whether rows of zeros were sent that fill experts up."""
    arrival_R: Tensor
    """Rows in expert order -> position of arrival."""
    place_R: Tensor
    """Position of arrival -> row in expert order."""
    sent: list[int]
    """Rows sent to each rank."""
    received: list[int]
    """Rows received from each rank."""
    shared: list[int]
    """Rows that each of the H ranks received; all of them compute all of these."""


@experimental_api
class MoEAlltoAllTokenDispatcher:
    """Sends each (token, expert) pick to the rank that holds the expert, and its weight with it, which acts in the expert.

    Where several ranks hold slices of one expert (expert tensor parallelism), each of them gets the rows of all, and the
    partial results are added up on the way back, in the order of the ranks.

    Args:
        num_experts: E, split evenly and in order over ``group``.
        group: expert-parallel ranks.
        expert_tp: ranks that share each expert; None for one rank an expert.
        pause: called between start and end of every exchange of rows, forwards and backwards, for other work to run meanwhile
            (``mcore_parallel.pipeline.Overlap.pause``).
        fp8: tokens travel in e4m3, with a scale for each block of 128 and their weights in the same message; results and gradients do not.

    Raises:
        ValueError: the group size does not divide E.
    """

    def __init__(
        self,
        num_experts: int,
        group: Group,
        expert_tp: Group | None = None,
        *,
        pause: Callable[[], None] | None = None,
        fp8: bool = False,
    ) -> None:
        if num_experts % group.size:
            raise ValueError(f"ep={group.size} must divide num_moe_experts={num_experts}; lower ep")
        self.num_experts = num_experts
        self.num_local_experts = num_experts // group.size
        self.group = group
        self.expert_tp = expert_tp or Group.single()
        self.pause, self.fp8 = pause, fp8
        self._sizes_agree = False

    def dispatch(self, x_TD: Tensor, routing: Routing, meanwhile: Callable[[], None] | None = None) -> Dispatched:
        """Deliver every pick; differentiable in ``x_TD`` and the weights. ``meanwhile`` is called once, while the rows travel, in place
        of ``pause``.

        With padding to capacity all sizes are known: no counts are exchanged, nothing waits for the device, and every rank must hold the
        same number of tokens. The first call compares them.

        Raises:
            ValueError: at the first call, ranks with different capacities.
        """
        picks = sort_picks(x_TD, routing, routing.destinations(self.num_experts), self.num_experts)
        if routing.capacity is not None:
            return self._dispatch_filled(picks, routing.capacity, meanwhile)
        counts_E = picks.ends_N.diff(prepend=picks.ends_N.new_zeros(1)).long()
        send_GN = counts_E.view(self.group.size, self.num_local_experts)
        if self.group.size == 1:
            receive_GN = send_GN
        else:
            blocks = [self.num_local_experts] * self.group.size
            receive_GN = all_to_all(send_GN.flatten(), blocks, blocks, self.group).view_as(send_GN)
        receive_HGN = all_gather(receive_GN.unsqueeze(0), self.expert_tp)
        # One transfer to the host: the exchange needs its sizes there.
        sent_GN, *received_HGN = torch.cat((send_GN.unsqueeze(0), receive_HGN)).tolist()
        sent = [sum(row) for row in sent_GN]
        received = [sum(row) for row in received_HGN[self.expert_tp.rank]]
        shared = [sum(map(sum, rank)) for rank in received_HGN]
        # Rows arrive by (rank that shares, source, expert); group them by expert.
        expert_R = torch.arange(self.num_local_experts, device=x_TD.device).repeat(self.expert_tp.size * self.group.size)
        expert_R = expert_R.repeat_interleave(receive_HGN.flatten(), output_size=sum(shared))
        arrival_R = expert_R.argsort(stable=True)
        ends_N = receive_HGN.sum((0, 1)).cumsum(0).to(torch.int32)
        # Picks of padding, and those that an expert has no room for, come last and stay here.
        picks = _first(picks, sum(sent))
        rows_RD, weights_R = self._exchange(picks, sent, received, shared, meanwhile)
        return _in_expert_order(rows_RD, weights_R, arrival_R, ends_N, picks, (sent, received, shared))

    def combine(self, rows_RD: Tensor, dispatched: Dispatched, routing: Routing) -> Tensor:
        """Return the experts' rows to their tokens and sum them -> [T, D]; the sum's order is fixed."""
        arrived_RD = _Permuted.apply(rows_RD, dispatched.place_R, dispatched.arrival_R)
        arrived_QD = _reduce_scatter_rows(arrived_RD, dispatched.shared, self.expert_tp)
        back_PD = all_to_all_autograd(arrived_QD, dispatched.sent, dispatched.received, self.group, self.pause)
        return sum_places(back_PD, dispatched.places_TK, dispatched.padded)

    def _exchange(
        self, picks: LocalPicks, sent: list[int], received: list[int], shared: list[int], meanwhile: Callable[[], None] | None
    ) -> tuple[Tensor, Tensor]:
        """Rows for this rank's experts and their weights, in the order of arrival."""
        if self.fp8:
            if meanwhile is not None:
                raise ValueError("fp8=True sends rows in one step, and meanwhile runs between two; leave one out")
            rows_QD, weights_Q = _fp8_payload.send(picks.rows_RD, picks.weights_R, received, sent, self.group, self.pause)
            copies, own = [_copies(part, self.expert_tp) for part in (rows_QD, weights_Q)], [len(rows_QD)] * self.expert_tp.size
            return _fp8_payload.send(copies[0], copies[1], shared, own, self.expert_tp, None)
        weights_Q = all_to_all_autograd(picks.weights_R, received, sent, self.group)
        rows_QD = self._send(picks.rows_RD, received, sent, meanwhile)
        return _gather_rows(rows_QD, shared, self.expert_tp), _gather_rows(weights_Q, shared, self.expert_tp)

    def _send(self, rows_PD: Tensor, received: list[int], sent: list[int], meanwhile: Callable[[], None] | None) -> Tensor:
        if meanwhile is None:
            return all_to_all_autograd(rows_PD, received, sent, self.group, self.pause)
        rows = RowsUnderWay(rows_PD, received, sent, self.group)
        meanwhile()
        return rows.finish()

    def _dispatch_filled(self, picks: LocalPicks, capacity: int, meanwhile: Callable[[], None] | None) -> Dispatched:
        """``capacity`` rows from this rank to every expert."""
        device = picks.rows_RD.device
        if not self._sizes_agree:
            for group in (self.group, self.expert_tp):
                check_equal("capacity", capacity, group, device)
            self._sizes_agree = True
        N, sources = self.num_local_experts, self.expert_tp.size * self.group.size
        sizes = [N * capacity] * self.group.size
        shared = [sum(sizes)] * self.expert_tp.size
        rows_RD, weights_R = self._exchange(picks, sizes, sizes, shared, meanwhile)
        arrival_R = torch.arange(len(rows_RD), device=device).view(sources, N, capacity).transpose(0, 1).flatten()
        ends_N = torch.arange(1, N + 1, dtype=torch.int32, device=device) * (sources * capacity)
        return _in_expert_order(rows_RD, weights_R, arrival_R, ends_N, picks, (sizes, sizes, shared))


class _Permuted(torch.autograd.Function):
    """x[order], whose gradient is a gather as well: no row is taken twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_R)
        return x.index_select(0, order_R)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (inverse_R,) = ctx.saved_tensors
        return grads[0].index_select(0, inverse_R), None, None


def _in_expert_order(
    rows_RD: Tensor, weights_R: Tensor, arrival_R: Tensor, ends_N: Tensor, picks: LocalPicks, sizes: tuple[list[int], list[int], list[int]]
) -> Dispatched:
    """Rows and weights as they arrived, for the experts; ``sizes`` are those sent, received and shared."""
    place_R = torch.empty_like(arrival_R).scatter_(0, arrival_R, torch.arange(len(arrival_R), device=arrival_R.device))
    rows_RD, weights_R = (_Permuted.apply(arrived, arrival_R, place_R) for arrived in (rows_RD, weights_R))
    return Dispatched(rows_RD, ends_N, weights_R, picks.places_TK, picks.padded, arrival_R, place_R, *sizes)


def _first(picks: LocalPicks, num_rows: int) -> LocalPicks:
    """The rows that go to an expert."""
    if num_rows == len(picks.rows_RD):
        return picks
    return dataclasses.replace(picks, rows_RD=picks.rows_RD[:num_rows], weights_R=picks.weights_R[:num_rows])


def _gather_rows(rows_QD: Tensor, sizes: list[int], group: Group) -> Tensor:
    """All ranks' rows, ``sizes`` of each, in rank order; the gradient is summed over the ranks and cut.

    An all-to-all moves what an all-gather would, and takes a different number of rows from each rank without padding.
    """
    return all_to_all_autograd(_copies(rows_QD, group), sizes, [len(rows_QD)] * group.size, group) if group.size > 1 else rows_QD


def _copies(rows_QD: Tensor, group: Group) -> Tensor:
    """One for each rank, behind each other."""
    return rows_QD.expand(group.size, *rows_QD.shape).flatten(0, 1)


def _reduce_scatter_rows(rows_RD: Tensor, sizes: list[int], group: Group) -> Tensor:
    """This rank's rows, summed over the ranks in their order; the inverse of ``_gather_rows``."""
    if group.size == 1:
        return rows_RD
    mine = sizes[group.rank]
    return all_to_all_autograd(rows_RD, [mine] * group.size, sizes, group).unflatten(0, (group.size, mine)).sum(0)

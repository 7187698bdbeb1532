# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The slots of one layer's experts: which copy a token goes to, and weights that move between ranks."""

import dataclasses
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from mcore_moe._routing import Routing
from mcore_moe._stability import experimental_api
from mcore_moe.serving._placement import ExpertPlacement, place_experts, plan_moves
from mcore_parallel import Group
from mcore_parallel.comm import all_to_all

# T tokens, K experts a token, E experts, C copies of an expert at most, S slots of this rank, G ranks of the expert-parallel group.

_BUCKET_BYTES = 256 * 2**20
"""That a rank sends, or receives, at a time."""


@experimental_api
class ExpertSlots:
    """Where the experts of a layer lie, for engines whose ranks share them (``MoELayer.add_redundant_experts``).

    Slots are numbered over the ranks in order, so that dispatchers send to them as to experts. Token t of a rank goes to copy
    ``(t + turn) % copies`` of each of its experts. Tables and loads keep their addresses, so that graphs stay valid when experts move.

    Weights are at home until they are first settled, and after every load of new ones: the parameters, which are the first slots, hold
    the rank's experts in order, and what lies in other slots is not to be used.

    Args:
        weights: each [S, ...], of the experts in the slots of this rank.
        home: where parameters hold the experts.
        group: expert-parallel ranks.
        turn: of the ranks that hold the same tokens, the same; of others another, so that their first tokens do not meet.
    """

    def __init__(self, weights: Sequence[Tensor], home: ExpertPlacement, group: Group, turn: int) -> None:
        self.placement = home
        self.is_settled = False
        """Whether experts lie where ``placement`` says."""
        self._weights, self._group, self._turn = weights, group, turn
        self._num_home = home.num_experts // group.size
        device, num_experts, num_slots = weights[0].device, home.num_experts, len(weights[0]) * group.size
        self.num_slots = num_slots
        """Of all ranks."""
        self.loads = torch.zeros(num_experts, dtype=torch.int64, device=device)
        """[E], tokens of this rank that went to each expert since it was last zeroed."""
        self._copies_E = torch.ones(num_experts, dtype=torch.int64, device=device)
        self._slots_EC = torch.zeros((num_experts, num_slots - num_experts + 1), dtype=torch.int64, device=device)
        self._write_tables()

    def assign(self, routing: Routing) -> Routing:
        """The same choice by slots in place of experts, counted; nothing waits for the device."""
        experts_TK = routing.experts_TK
        self.loads.add_(routing.counts(len(self.loads)))
        turns_T1 = torch.arange(len(experts_TK), device=experts_TK.device).unsqueeze(-1) + self._turn
        return dataclasses.replace(routing, experts_TK=self._slots_EC[experts_TK, turns_T1 % self._copies_E[experts_TK]])

    def weights_changed(self) -> None:
        """The parameters hold new weights: experts are at home."""
        self.is_settled = False

    def settle(self) -> None:
        """Bring experts from home to their slots; every rank of the group calls it at the same point, between two steps."""
        if not self.is_settled:
            rows = [row[: self._num_home] for row in ExpertPlacement.home(len(self.loads), self._group.size).experts_GS]
            self._move(rows)
            self.is_settled = True

    def rebalance(self, loads: Sequence[int]) -> tuple[float, float, int]:
        """Place experts by their loads, and move their weights; as ``settle``.

        Args:
            loads: [E], of all ranks, and the same on each.

        Returns:
            The busiest rank's load over the mean before and after, by these loads, and slots of all ranks that got another expert.
        """
        self.settle()
        before = self.placement
        self.placement = place_experts(loads, before)
        # Before the weights: a move that breaks leaves tables and placement alike, and the next new weights go there.
        self._write_tables()
        num_moved = self._move(before.experts_GS)
        return before.imbalance(loads), self.placement.imbalance(loads), num_moved

    def _write_tables(self) -> None:
        slots = self.placement.slots()
        width = self._slots_EC.shape[1]
        self._slots_EC.copy_(torch.tensor([[*row, *[row[0]] * (width - len(row))] for row in slots]))
        self._copies_E.copy_(torch.tensor([len(row) for row in slots]))

    @torch.no_grad()
    def _move(self, before_GS: Sequence[Sequence[int]]) -> int:
        """Bring experts from where they lie to where ``placement`` says; how many slots that fills.

        A part of every weight moves at a time, of all experts: sources are read before any of them is overwritten.
        """
        moves = plan_moves(before_GS, self.placement)
        if not moves:
            return 0
        ranks, rank = range(self._group.size), self._group.rank
        sent, received = (
            [[ends for ends in moves if (ends[end][0], ends[1 - end][0]) == (rank, other)] for other in ranks] for end in (0, 1)
        )
        sent_P = self._places(source for part in sent for (_, source), _ in part)
        received_Q = self._places(target for part in received for _, (_, target) in part)
        sizes = [len(part) for part in received], [len(part) for part in sent]
        # The same on every rank, so that all exchange as often.
        most = max(sum(ends[end][0] == other for ends in moves) for end in (0, 1) for other in ranks)
        for weight in self._weights:
            words_SB = _words(weight)
            for part_SB in words_SB.split(max(1, _BUCKET_BYTES // (most * words_SB.itemsize)), dim=1):
                part_SB.index_copy_(0, received_Q, all_to_all(part_SB.index_select(0, sent_P), *sizes, self._group))
        return len(moves)

    def _places(self, slots: Iterable[int]) -> Tensor:
        return torch.tensor(list(slots), dtype=torch.int64, device=self.loads.device)


def _words(weight: Tensor) -> Tensor:
    """[S, B], the bytes of each expert by eight, or one by one: fp8 has no copies of its own on every device."""
    bytes_SB = weight.detach().view(len(weight), -1).view(torch.uint8)
    return bytes_SB if bytes_SB.shape[1] % 8 else bytes_SB.view(torch.int64)

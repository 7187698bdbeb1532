# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Exchange of tokens by who sends each token once to every rank that holds one of its experts: a library, or kernels of this package."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from mcore_moe._routing import Routing
from mcore_moe._stability import experimental_api
from mcore_moe.dispatch._local import LocalPicks
from mcore_parallel import ProcessGroups

# T tokens, K experts a token, R rows for this rank's experts, N experts of this rank, H ranks that share an expert, D model.


@experimental_api
@dataclass(frozen=True)
class FlexPicks:
    """Rows for this rank's experts, in expert order, with what the backend needs to send the results back."""

    rows_RD: Tensor
    ends_N: Tensor
    """int32, rows of each of the N experts and of all before it."""
    weights_R: Tensor
    """Of the rows' results."""
    handle: Any
    """The layout of the exchange, as the backend made it."""
    num_tokens: int
    """T."""
    received: LocalPicks | None = None
    """How the rows are made of the tokens that came; None where the backend does that."""


class TokenExchange(Protocol):
    """Sends tokens to the ranks of ``group`` and adds up what comes back; each backend conforms to it.

    Each rank of the group holds N experts, numbered over the ranks in order.
    """

    def dispatch(self, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> FlexPicks:
        """Differentiable in tokens and weights. ``experts_TK`` int64 numbers experts over the ranks; -1 is no expert."""
        ...

    def combine(self, rows_RD: Tensor, picks: FlexPicks) -> Tensor:
        """[T, D], the sums of each token's rows, which are weighted already."""
        ...


@experimental_api
class MoEFlexTokenDispatcher:
    """Leaves the exchange to a backend (``moe_flex_dispatcher_backend``): the libraries DeepEP and HybridEP, or `SymmetricExchange`.

    Weights travel with the tokens and act in the experts. Where several ranks hold slices of one expert (expert tensor parallelism),
    each of them gets the token, and the sum adds up their parts.

    Args:
        num_experts: E, split evenly and in order over ep.
        groups: the layout; tokens travel over ``tp_ep``.
        exchange: one over that group, with E / ep experts a rank; layers may share it.

    Raises:
        ValueError: ep does not divide E.
    """

    def __init__(self, num_experts: int, groups: ProcessGroups, exchange: TokenExchange) -> None:
        if num_experts % groups.ep.size:
            raise ValueError(f"ep={groups.ep.size} must divide num_moe_experts={num_experts}; lower ep")
        self.num_experts = num_experts
        self.num_local_experts = num_experts // groups.ep.size
        self.exchange = exchange
        self._steps = _steps(groups)
        self._num_sharing = groups.expt_tp.size

    def dispatch(self, x_TD: Tensor, routing: Routing) -> FlexPicks:
        """The rows of this rank's experts; differentiable in ``x_TD`` and the weights. A pick is left out by the routing, never by its
        weight, so one that has underflowed to 0 still counts.

        Raises:
            TimeoutError: ranks that did not come to the exchange in time.
        """
        with torch.no_grad():
            experts_TK1, N = routing.destinations(self.num_experts).unsqueeze(-1), self.num_local_experts
            # Computed from numbers: a table would be copied to the device, which the host waits for.
            outer, inner = self._steps
            copies_H = torch.arange(self._num_sharing, device=x_TD.device) * inner
            places_TKH = experts_TK1.div(N, rounding_mode="floor") * outer + copies_H
            numbers_TKH = torch.where(experts_TK1 < self.num_experts, places_TKH * N + experts_TK1 % N, -1)
        weights_TKH = routing.probs_TK.unsqueeze(-1).expand_as(numbers_TKH)
        return self.exchange.dispatch(x_TD, numbers_TKH.flatten(1), weights_TKH.flatten(1))

    def combine(self, rows_RD: Tensor, picks: FlexPicks, routing: Routing) -> Tensor:
        """The sums of this rank's tokens, [T, D]."""
        return self.exchange.combine(rows_RD, picks)


def _steps(groups: ProcessGroups) -> tuple[int, int]:
    """How far apart in ``tp_ep`` neighbours of ep lie, and those that share an expert."""
    ep, etp = groups.ep.size, groups.expt_tp.size
    axes = list(groups.plan.expert_shape())
    steps = (etp, 1) if axes.index("tp") < axes.index("ep") else (1, ep)
    assert groups.ep.rank * steps[0] + groups.expt_tp.rank * steps[1] == groups.tp_ep.rank
    return steps

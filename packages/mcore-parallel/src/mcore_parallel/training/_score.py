# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Numbers of each token, from a forward pass alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mcore_parallel.comm import all_gather
from mcore_parallel.context_parallel import zigzag_indices
from mcore_parallel.groups import Group, ProcessGroups
from mcore_parallel.training._batch import Batch
from mcore_parallel.training._objective import LossReport
from mcore_parallel.training._step import forward_pass


@torch.no_grad()
def score(
    model: nn.Module | Sequence[nn.Module],
    batches: Sequence[Batch],
    function: Callable[[Any, Batch], Tensor],
    *,
    groups: ProcessGroups | None = None,
) -> list[Tensor]:
    """A number a token of every micro-batch, computed on the last stage without a gradient: log-probabilities, values, losses.

    The model is in evaluation mode meanwhile: no dropout, no jitter and no balance statistics of routers.

    Args:
        model: as in ``train_step``.
        batches: as in ``train_step``; whole ones, of which each cp rank computes its share.
        function: from the last stage's output and its micro-batch (this cp rank's share, T tokens) to a floating [T]. The tp ranks must
            get the same numbers.
        groups: the layout; None for ``model.groups``.

    Returns:
        [B, S] a micro-batch, float32 or wider; the same on all tp, cp and pp ranks of a replica, so that it may go into ``Batch.extras``.

    Raises:
        ValueError: no micro-batch, shares of context-parallel ranks, a result of another shape.

    Example:
        >>> old = score(model, batches, lambda output, batch: output.log_probs(batch.labels.flatten()))
    """
    return _scored(model, batches, function, groups, None)


@torch.no_grad()
def score_and_route(
    model: nn.Module | Sequence[nn.Module],
    batches: Sequence[Batch],
    function: Callable[[Any, Batch], Tensor],
    *,
    groups: ProcessGroups | None = None,
) -> tuple[list[Tensor], list[Tensor | None]]:
    """As ``score``, and where the routers of this pipeline stage sent each token.

    Args:
        model: as of ``score``.
        batches: as of ``score``.
        function: as of ``score``.
        groups: as of ``score``.

    Returns:
        What ``score`` gives; [B, S, L, K] int16 a micro-batch, whole on all tp and cp ranks, for ``routed_experts`` in ``Batch.extras``: L
        layers up to the last one of this stage that routes, -1 in those that do not, or are another stage's. None on a stage without any.

    Raises:
        ValueError: as of ``score``.
    """
    recorded = _Routing()
    values = _scored(model, batches, function, groups, recorded)
    owner: Any = model if isinstance(model, nn.Module) else model[0]
    layout: ProcessGroups = owner.groups if groups is None else groups
    return values, [recorded.whole(number, batch, layout) for number, batch in enumerate(batches)]


def _scored(
    model: nn.Module | Sequence[nn.Module],
    batches: Sequence[Batch],
    function: Callable[[Any, Batch], Tensor],
    groups: ProcessGroups | None,
    routing: "_Routing | None",
) -> list[Tensor]:
    if shares := [number for number, batch in enumerate(batches) if batch.context_size > 1]:
        raise ValueError(f"batches {shares} are shares of context-parallel ranks; pass whole ones, score() cuts them")
    kept = _Kept(function)
    stage = forward_pass(model, batches, kept, groups, None if routing is None else routing.record)
    layout, owner = stage.groups, stage.chunks[0]
    if layout.pp.is_last:
        # A schedule may finish the micro-batches in any order.
        parts = [kept.values[id(batch)] for batch in stage.batches]
    else:
        dtype = torch.promote_types(getattr(owner, "dtype", torch.float32), torch.float32)
        parts = [torch.empty(batch.tokens.shape, dtype=dtype, device=stage.device) for batch in stage.batches]
    if layout.pp.size > 1:
        flat = torch.cat([part.flatten() for part in parts])
        dist.broadcast(flat, group=layout.pp.pg, group_src=layout.pp.size - 1)
        parts = [values.view(part.shape) for part, values in zip(parts, flat.split([part.numel() for part in parts]), strict=True)]
    return [_whole(part, batch, layout.cp) for part, batch in zip(parts, batches, strict=True)]


@dataclass(frozen=True)
class _Kept:
    """An objective that keeps the numbers of each micro-batch and sums nothing."""

    function: Callable[[Any, Batch], Tensor]
    values: dict[int, Tensor] = field(default_factory=dict)

    def __call__(self, output: Any, batch: Batch) -> LossReport:
        value = self.function(output, batch).detach()
        if value.shape != (batch.tokens.numel(),) or not value.is_floating_point():
            raise ValueError(
                f"function returned {value.dtype} of shape {tuple(value.shape)}; return a floating number for each of "
                f"{batch.tokens.numel()} tokens"
            )
        value = value.to(torch.promote_types(value.dtype, torch.float32))
        self.values[id(batch)] = value.view(batch.tokens.shape)
        return LossReport(sum=value.new_zeros(()), count=batch.weight())


@dataclass(frozen=True)
class _Routing:
    """Where routers sent the tokens of each micro-batch, by layer."""

    experts: dict[int, dict[int, Tensor]] = field(default_factory=dict)

    def record(self, microbatch: int, layer: int, experts: Tensor, weights: Tensor) -> None:
        """Keep a router's choice, [T or T / tp, K]."""
        # NCCL sends no int16.
        self.experts.setdefault(microbatch, {})[layer] = experts.to(torch.int32)

    def whole(self, microbatch: int, batch: Batch, groups: ProcessGroups) -> Tensor | None:
        """[B, S, L, K] of a micro-batch; None where nothing was recorded."""
        if not (layers := self.experts.get(microbatch)):
            return None
        first = next(iter(layers.values()))
        local = first.new_full((len(first), max(layers) + 1, first.shape[1]), -1)
        for layer, experts in layers.items():
            local[:, layer] = experts
        share = all_gather(local, groups.tp) if groups.sequence_parallel else local
        return _whole(share.unflatten(0, (batch.tokens.shape[0], -1)), batch, groups.cp).to(torch.int16)


def _whole(part: Tensor, batch: Batch, cp: Group) -> Tensor:
    """[B, S, ...] from the shares [B, S / cp, ...] of the context-parallel ranks."""
    if cp.size == 1:
        return part
    index = torch.cat([zigzag_indices(batch.sequence_lengths(), cp.size, rank) for rank in range(cp.size)]).to(part.device)
    flat = all_gather(part.flatten(0, 1), cp)
    return torch.empty_like(flat).index_copy_(0, index, flat).unflatten(0, tuple(batch.tokens.shape))

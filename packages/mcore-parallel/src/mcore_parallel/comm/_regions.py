# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Collectives with autograd, named after the boundary of the parallel region they form.

The rule behind every backward: a tensor that is replicated over the group carries one gradient, the same on all
ranks; a tensor that differs between the ranks carries a gradient of its own on each.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mcore_parallel._stability import internal_api
from mcore_parallel.comm._collectives import (
    all_gather,
    all_gather_ragged,
    all_reduce,
    all_to_all,
    local_slice,
    reduce_scatter,
    reduce_scatter_ragged,
    shard_size,
)
from mcore_parallel.groups import Group


def copy_to_tensor_model_parallel_region(x: Tensor, group: Group) -> Tensor:
    """Identity; the gradient is summed over the group."""
    return x if group.size == 1 else _CopyToRegion.apply(x, group)


def reduce_from_tensor_model_parallel_region(x: Tensor, group: Group) -> Tensor:
    """Sum over the group; the gradient passes unchanged."""
    return x if group.size == 1 else _Reduce.apply(x, group)


def scatter_to_tensor_model_parallel_region(x: Tensor, group: Group) -> Tensor:
    """This rank's slice of the last dim; the gradient is gathered.

    Raises:
        ValueError: the group does not divide the last dim.
    """
    return scatter(x, group, -1)


def gather_from_tensor_model_parallel_region(x: Tensor, group: Group) -> Tensor:
    """All ranks' slices joined along the last dim; the gradient is this rank's slice."""
    return gather(x, group, -1, output_grad_differs=False)


def scatter_to_sequence_parallel_region(x: Tensor, group: Group) -> Tensor:
    """This rank's tokens (slice of dim 0); the gradient is gathered.

    Raises:
        ValueError: the group does not divide dim 0.
    """
    return scatter(x, group, 0)


def gather_from_sequence_parallel_region(
    x: Tensor, group: Group, tensor_parallel_output_grad: bool = True, output_split_sizes: Sequence[int] | None = None
) -> Tensor:
    """All tokens (joined along dim 0).

    Args:
        x: [T / size, ...], or [output_split_sizes[rank], ...].
        group: the tensor-parallel group.
        tensor_parallel_output_grad: True when what follows differs between the ranks, so that their gradients are
            partial and are reduce-scattered; False when all ranks go on with the same work: the gradient is sliced.
        output_split_sizes: tokens of each rank, when they differ.

    Raises:
        ValueError: ``output_split_sizes`` does not fit the group or ``x``.
    """
    if output_split_sizes is None or group.size == 1:
        return gather(x, group, 0, output_grad_differs=tensor_parallel_output_grad)
    return _GatherRagged.apply(x, group, tuple(output_split_sizes), tensor_parallel_output_grad)


def reduce_scatter_to_sequence_parallel_region(x: Tensor, group: Group, input_split_sizes: Sequence[int] | None = None) -> Tensor:
    """Sum over the group, this rank's tokens; the gradient is gathered along dim 0.

    Args:
        x: [T, ...].
        group: the tensor-parallel group.
        input_split_sizes: tokens each rank keeps, when they differ.

    Raises:
        ValueError: the group does not divide dim 0, or ``input_split_sizes`` does not fit the group or ``x``.
    """
    if group.size == 1:
        return x
    if input_split_sizes is None:
        return _ReduceScatter.apply(x, group, 0)
    return _ReduceScatterRagged.apply(x, group, tuple(input_split_sizes))


def all_gather_last_dim_from_tensor_parallel_region(x: Tensor, group: Group) -> Tensor:
    """All ranks' slices joined along the last dim, for work that differs between the ranks; the gradient is reduce-scattered."""
    return gather(x, group, -1, output_grad_differs=True)


def reduce_scatter_last_dim_to_tensor_parallel_region(x: Tensor, group: Group) -> Tensor:
    """Sum over the group, this rank's slice of the last dim; the gradient is gathered.

    Raises:
        ValueError: the group does not divide the last dim.
    """
    return x if group.size == 1 else _ReduceScatter.apply(x, group, -1)


def all_to_all_sp2hp(x: Tensor, group: Group) -> Tensor:
    """From a share of the tokens with all features to all tokens with a share of the features; the gradient travels back.

    Args:
        x: [T / size, ..., H].
        group: ranks that take part.

    Returns:
        [T, ..., H / size].

    Raises:
        ValueError: the group does not divide H.
    """
    shard_size(x, -1, group)
    return x if group.size == 1 else all_to_all_autograd(torch.cat(x.chunk(group.size, -1)), None, None, group)


def all_to_all_hp2sp(x: Tensor, group: Group) -> Tensor:
    """The inverse of ``all_to_all_sp2hp``: [T, ..., H / size] -> [T / size, ..., H].

    Raises:
        ValueError: the group does not divide T.
    """
    shard_size(x, 0, group)
    return x if group.size == 1 else torch.cat(all_to_all_autograd(x, None, None, group).chunk(group.size), -1)


def all_to_all_autograd(
    x: Tensor,
    out_splits: Sequence[int] | None,
    in_splits: Sequence[int] | None,
    group: Group,
    pause: Callable[[], None] | None = None,
) -> Tensor:
    """``all_to_all`` whose gradient travels the way back; both call ``pause``, if given, while the rows are on their way.

    Raises:
        ValueError: as ``all_to_all``.
    """
    if group.size == 1:
        return all_to_all(x, out_splits, in_splits, group)
    return _AllToAll.apply(x, out_splits, in_splits, group, pause)


def scatter(x: Tensor, group: Group, dim: int) -> Tensor:
    """This rank's slice of a replicated tensor; the gradient is gathered."""
    return x if group.size == 1 else _Scatter.apply(x, group, dim)


@internal_api
def gather(x: Tensor, group: Group, dim: int, *, output_grad_differs: bool) -> Tensor:
    """Slices joined along ``dim``; the gradient is summed over the ranks first if it differs between them."""
    return x if group.size == 1 else _Gather.apply(x, group, dim, output_grad_differs)


class _CopyToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return all_reduce(grads[0], ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return local_slice(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return all_gather(grads[0], ctx.group, ctx.dim), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int, output_grad_differs: bool) -> Tensor:
        ctx.group, ctx.dim, ctx.output_grad_differs = group, dim, output_grad_differs
        return all_gather(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        cut = reduce_scatter if ctx.output_grad_differs else local_slice
        return cut(grads[0], ctx.group, ctx.dim), None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return reduce_scatter(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return all_gather(grads[0], ctx.group, ctx.dim), None, None


class _GatherRagged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, sizes: tuple[int, ...], output_grad_differs: bool) -> Tensor:
        ctx.group, ctx.sizes, ctx.output_grad_differs = group, sizes, output_grad_differs
        return all_gather_ragged(x, sizes, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if ctx.output_grad_differs:
            return reduce_scatter_ragged(grads[0], ctx.sizes, ctx.group), None, None, None
        rank = ctx.group.rank
        return grads[0].narrow(0, sum(ctx.sizes[:rank]), ctx.sizes[rank]).contiguous(), None, None, None


class _ReduceScatterRagged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, sizes: tuple[int, ...]) -> Tensor:
        ctx.group, ctx.sizes = group, sizes
        return reduce_scatter_ragged(x, sizes, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return all_gather_ragged(grads[0], ctx.sizes, ctx.group), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        out_splits: Sequence[int] | None,
        in_splits: Sequence[int] | None,
        group: Group,
        pause: Callable[[], None] | None,
    ) -> Tensor:
        ctx.out_splits, ctx.in_splits, ctx.group, ctx.pause = out_splits, in_splits, group, pause
        return all_to_all(x, out_splits, in_splits, group, pause)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return all_to_all(grads[0], ctx.in_splits, ctx.out_splits, ctx.group, ctx.pause), None, None, None, None

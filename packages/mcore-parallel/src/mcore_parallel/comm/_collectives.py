# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Collectives that return a new tensor without gradient history and leave their input alone; identity for a group of one."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mcore_parallel._stability import internal_api
from mcore_parallel.groups import Group

_REDUCTIONS = ("sum", "avg", "max", "min", "product")


def all_reduce(x: Tensor, group: Group, op: str = "sum") -> Tensor:
    """Elementwise reduction over the group; every rank gets the result.

    Args:
        x: any shape; the same on every rank.
        group: ranks that take part.
        op: one of sum, avg, max, min, product.

    Returns:
        A tensor like ``x``, without gradient history; ``x`` itself for a group of one.

    Raises:
        ValueError: an unknown ``op``.
    """
    return wait(start_all_reduce(x, group, op), group)


def all_gather(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """Concatenate every rank's ``x`` along ``dim`` in group order.

    Args:
        x: the same shape on every rank.
        group: ranks that take part.
        dim: dim of the result that grows by ``group.size``.
    """
    return wait_gathered(start_all_gather(x, group), group, _positive(x, dim))


def reduce_scatter(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """Sum over the group and keep this rank's slice along ``dim``.

    Raises:
        ValueError: ``group.size`` does not divide ``x.shape[dim]``.
    """
    return wait(start_reduce_scatter(x, group, dim), group)


def all_to_all(
    x: Tensor,
    out_splits: Sequence[int] | None,
    in_splits: Sequence[int] | None,
    group: Group,
    pause: Callable[[], None] | None = None,
) -> Tensor:
    """Send row blocks of ``x`` to the ranks of the group and concatenate what they send here.

    Args:
        x: [sum(in_splits), ...].
        out_splits: rows that come from each rank; None for even splits.
        in_splits: rows that go to each rank; None for even splits.
        group: ranks that take part.
        pause: called while the rows are on their way (``mcore_parallel.pipeline.Overlap.pause``).

    Returns:
        [sum(out_splits), ...].

    Raises:
        ValueError: a list of the wrong length, splits that do not add up to the rows, one list without the other.
    """
    if (out_splits is None) != (in_splits is None):
        raise ValueError("out_splits and in_splits must both be given or both be None")
    if in_splits is None or out_splits is None:
        in_splits = out_splits = [shard_size(x, 0, group)] * group.size
    if len(in_splits) != group.size or len(out_splits) != group.size:
        raise ValueError(
            f"in_splits={list(in_splits)} and out_splits={list(out_splits)} must have one entry for each of {group.size} ranks"
        )
    if sum(in_splits) != x.shape[0]:
        raise ValueError(f"in_splits={list(in_splits)} add up to {sum(in_splits)}, but dim 0 of x has size {x.shape[0]}")
    if group.size == 1:
        return x
    pending = torch.ops._c10d_functional.all_to_all_single(x.detach().contiguous(), list(out_splits), list(in_splits), group.name)
    if pause is not None:
        pause()
    return wait(pending, group)


def all_gather_ragged(x: Tensor, sizes: Sequence[int], group: Group) -> Tensor:
    """Concatenate every rank's rows, of which each has its own number.

    Args:
        x: [sizes[rank], ...].
        sizes: rows of each rank, the same list on all ranks.
        group: ranks that take part.

    Raises:
        ValueError: ``sizes`` does not fit the group or ``x``.
    """
    _check_sizes(sizes, group)
    if sizes[group.rank] != x.shape[0]:
        raise ValueError(f"split sizes {list(sizes)} give rank {group.rank} of the group {sizes[group.rank]} rows, but x has {x.shape[0]}")
    return all_to_all(torch.cat([x] * group.size), sizes, [x.shape[0]] * group.size, group)


def reduce_scatter_ragged(x: Tensor, sizes: Sequence[int], group: Group) -> Tensor:
    """Sum over the group, in rank order, and keep this rank's rows.

    Args:
        x: [sum(sizes), ...].
        sizes: rows that each rank keeps, the same list on all ranks.
        group: ranks that take part.

    Raises:
        ValueError: ``sizes`` does not fit the group or ``x``.
    """
    _check_sizes(sizes, group)
    mine = sizes[group.rank]
    return all_to_all(x, [mine] * group.size, sizes, group).view(group.size, mine, *x.shape[1:]).sum(0)


def _check_sizes(sizes: Sequence[int], group: Group) -> None:
    if len(sizes) != group.size or min(sizes) < 0:
        raise ValueError(f"split sizes {list(sizes)} must be one number of rows for each of {group.size} ranks")


# The start_* functions return at once; the result must go through wait (wait_gathered) before it is read.


@internal_api
def start_all_reduce(x: Tensor, group: Group, op: str = "sum") -> Tensor:
    if op not in _REDUCTIONS:
        raise ValueError(f"op={op!r} must be one of {', '.join(_REDUCTIONS)}")
    if group.size == 1:
        return x
    return torch.ops._c10d_functional.all_reduce(x.detach().contiguous(), op, group.name)


@internal_api
def start_all_gather(x: Tensor, group: Group) -> Tensor:
    """Ranks' tensors below each other along dim 0."""
    if group.size == 1:
        return x
    x = x.detach().contiguous()
    if torch.compiler.is_compiling() and torch.__version__ < "2.13":
        # Older compilers take no operator that writes into an argument.
        return torch.ops._c10d_functional.all_gather_into_tensor(x, group.size, group.name)
    rows = x.new_empty((group.size * x.shape[0], *x.shape[1:]))
    # Only this form is safe on gloo: of the one that allocates, its threads store a long name without a lock and free memory twice.
    return torch.ops._c10d_functional.all_gather_into_tensor_out(x, group.size, group.name, out=rows)


@internal_api
def start_reduce_scatter(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    dim = _positive(x, dim)
    shard_size(x, dim, group)
    if group.size == 1:
        return x
    # The operator cuts dim 0, so the slices of another dim are stacked there first.
    x = x.detach()
    rows = x if dim == 0 else torch.cat(x.chunk(group.size, dim))
    return torch.ops._c10d_functional.reduce_scatter_tensor(rows.contiguous(), "sum", group.size, group.name)


@internal_api
def wait(pending: Tensor, group: Group) -> Tensor:
    """The finished result of a start_* function (the compute stream waits, not the host)."""
    return pending if group.size == 1 else torch.ops._c10d_functional.wait_tensor(pending)


def wait_gathered(pending: Tensor, group: Group, dim: int) -> Tensor:
    rows = wait(pending, group)
    return rows if dim == 0 or group.size == 1 else torch.cat(rows.chunk(group.size), dim)


@internal_api
def local_slice(x: Tensor, group: Group, dim: int) -> Tensor:
    """This rank's even slice of ``dim``, contiguous."""
    size = shard_size(x, dim, group)
    return x if group.size == 1 else x.narrow(dim, group.rank * size, size).contiguous()


def shard_size(x: Tensor, dim: int, group: Group) -> int:
    """Size of one even slice.

    Raises:
        ValueError: the group does not divide the dim.
    """
    dim = _positive(x, dim)
    if x.shape[dim] % group.size:
        raise ValueError(f"dim {dim} of size {x.shape[dim]} must be a multiple of the group size {group.size}; pad it or use fewer ranks")
    return x.shape[dim] // group.size


def _positive(x: Tensor, dim: int) -> int:
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim={dim} is not a dim of a tensor of shape {tuple(x.shape)}")
    return dim % x.dim()

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Sums of 16-bit tensors over ranks that add in float32 and round once.

A ring adds in the dtype it sends, so a 16-bit sum over W ranks rounds W - 1 times. Here every rank sends its slices as they
are (as many bytes as a ring sends), and each slice's owner adds them up in rank order.
"""

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_parallel._stability import internal_api
from mcore_parallel.comm._collectives import shard_size
from mcore_parallel.groups import Group

# UNTIL torch 2.12: before, these had other names, which now warn.
_gather_into = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter_into = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> object: ...


class _Nothing:
    def wait(self) -> None:
        """Already done."""


class _Summed:
    """Slices that travel; the sum happens in ``wait``."""

    def __init__(self, work: Pending, received: Tensor, out: Tensor) -> None:
        self._work, self._out = work, out
        self._received: Tensor | None = received

    def wait(self) -> None:
        if self._received is None:
            return
        self._work.wait()
        sum_rows(self._received, self._out)
        self._received = None  # the scratch is free again


class _Gathered:
    """A sum of slices whose results are gathered in ``wait``."""

    def __init__(self, slices: Pending, x: Tensor, mine: Tensor, group: Group) -> None:
        self._slices, self._x, self._mine, self._group = slices, x, mine, group

    def wait(self) -> None:
        self._slices.wait()
        start_gather_into(self._x, self._mine, self._group).wait()


@internal_api
def start_gather_into(out: Tensor, mine: Tensor, group: Group) -> Pending:
    """Fill ``out`` [W * n] with every rank's ``mine`` [n], which may be this rank's slice of ``out``."""
    if group.size == 1:
        if out.data_ptr() != mine.data_ptr():
            out.copy_(mine)
        return _Nothing()
    return _started(_gather_into(out, mine, group=group.pg, async_op=True))


def start_reduce_scatter_into(out: Tensor, x: Tensor, group: Group, *, fp32_accumulation: bool = False) -> Pending:
    """Sum ``x`` [W * n] over the group and put this rank's slice into ``out`` [n], which may be that slice of ``x``.

    Args:
        out: result, valid after ``wait`` of what is returned.
        x: the same size on every rank; its other slices are garbage afterwards.
        group: ranks that take part.
        fp32_accumulation: of 16-bit tensors, add in float32 in rank order and round once.

    Raises:
        ValueError: the group does not divide ``x``.
    """
    shard_size(x, 0, group)
    if group.size == 1:
        if out.data_ptr() != x.data_ptr():
            out.copy_(x)
        return _Nothing()
    if not fp32_accumulation or x.element_size() > 2:
        return _started(_reduce_scatter_into(out, x, group=group.pg, async_op=True))
    received = torch.empty_like(x)
    work = dist.all_to_all_single(received, x, group=group.pg, async_op=True)
    return _Summed(_started(work), received.view(group.size, -1), out)


@internal_api
def start_all_reduce_in_place(x: Tensor, group: Group, *, fp32_accumulation: bool = False) -> Pending:
    """Sum ``x`` [N] over the group in place; with ``fp32_accumulation`` 16-bit tensors add in float32 and round once."""
    if group.size == 1:
        return _Nothing()
    if not fp32_accumulation or x.element_size() > 2:
        return _started(dist.all_reduce(x, group=group.pg, async_op=True))
    rest = -len(x) % group.size
    padded = torch.nn.functional.pad(x, (0, rest)) if rest else x
    mine = padded.chunk(group.size)[group.rank]
    gathered = _Gathered(start_reduce_scatter_into(mine, padded, group, fp32_accumulation=True), padded, mine, group)
    return _Unpadded(gathered, padded, x) if rest else gathered


class _Unpadded:
    def __init__(self, pending: Pending, padded: Tensor, out: Tensor) -> None:
        self._pending, self._padded, self._out = pending, padded, out

    def wait(self) -> None:
        self._pending.wait()
        self._out.copy_(self._padded[: len(self._out)])


def _started(work: Any) -> Pending:
    assert work is not None, "an asynchronous collective of a member returns its handle"
    return work


def sum_rows(rows: Tensor, out: Tensor) -> None:
    """out [n] = sum of rows [W, n], added in float32 in order and rounded once."""
    if rows.is_cuda:
        from mcore_parallel.comm._sum_rows import sum_rows_kernel

        sum_rows_kernel(rows, out)
        return
    total = rows[0].float()
    for row in rows[1:]:
        total += row
    out.copy_(total)

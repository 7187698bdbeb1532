# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""An all-to-all with other work between its start and its end, in the forward and in the backward."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mcore_parallel._stability import experimental_api
from mcore_parallel.comm._collectives import wait
from mcore_parallel.groups import Group


@experimental_api
class RowsUnderWay:
    """Row blocks that travel between the ranks of a group, as of ``all_to_all``, while this rank does something else.

    What is computed between construction and ``finish`` runs while the rows travel. So does its backward, while the gradients travel:
    autograd runs it between those of the two ends, for it goes by the order of the forward.

    Args:
        x: [sum(in_splits), ...].
        out_splits: rows that come from each rank.
        in_splits: rows that go to each rank.
        group: ranks that take part.

    Example:
        >>> RowsUnderWay(torch.arange(3.0), [3], [3], Group.single()).finish()
        tensor([0., 1., 2.])
    """

    def __init__(self, x: Tensor, out_splits: Sequence[int], in_splits: Sequence[int], group: Group) -> None:
        self.out_splits, self.in_splits, self.group = list(out_splits), list(in_splits), group
        self.gradient: Tensor | None = None
        """That of ``x`` on its way."""
        self._rows = x if group.size == 1 else _Start.apply(x, self)

    def finish(self) -> Tensor:
        """[sum(out_splits), ...], once."""
        return self._rows if self.group.size == 1 else _Finish.apply(self._rows, self)


def _start(x: Tensor, out_splits: list[int], in_splits: list[int], group: Group) -> Tensor:
    return torch.ops._c10d_functional.all_to_all_single(x.detach().contiguous(), out_splits, in_splits, group.name)


class _Start(torch.autograd.Function):
    """Its gradient was sent by ``_Finish``; the one it is given, which has another shape, is none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: RowsUnderWay) -> Tensor:
        ctx.rows = rows
        return _start(x, rows.out_splits, rows.in_splits, rows.group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        rows: RowsUnderWay = ctx.rows
        assert rows.gradient is not None
        gradient, rows.gradient = wait(rows.gradient, rows.group), None
        return gradient, None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pending: Tensor, rows: RowsUnderWay) -> Tensor:
        ctx.rows = rows
        return wait(pending, rows.group).view_as(pending)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        rows: RowsUnderWay = ctx.rows
        rows.gradient = _start(grads[0], rows.in_splits, rows.out_splits, rows.group)
        return grads[0], None

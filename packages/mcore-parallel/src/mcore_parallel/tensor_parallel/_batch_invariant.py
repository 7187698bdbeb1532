# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Matmuls, row functions and losses whose bits for one token do not depend on the tokens beside it.

On a CPU every token is computed alone, by calls whose shapes know nothing of the others: libraries choose their way by shape and
alignment. On a GPU kernels sum in an order that the rows have no part in.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_parallel._stability import internal_api
from mcore_parallel.comm import all_gather
from mcore_parallel.groups import Group
from mcore_parallel.tensor_parallel._product import Route, column_product, row_product
from mcore_parallel.tensor_parallel._row_maths import RowMaths, lowest, maths_dtype
from mcore_parallel.tensor_parallel._rows import row_statistics, to_gradient_, use_triton
from mcore_parallel.tensor_parallel._vocab import check_ids

# T tokens, I input and O output features of this rank, V vocabulary, v columns of this rank

_ALIGNMENT = 64
"""Bytes; what torch's allocator of the CPU gives."""


@internal_api
class BatchInvariantMatmul:
    """x W^T of one weight, whose result for a row depends on that row only; the forward only."""

    def __init__(self) -> None:
        self._finished: Tensor | None = None

    def __call__(self, x: Tensor, weight_OI: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """[..., I] times the transposed weight: [..., O] in ``dtype``, which is that of x where it is None.

        Raises:
            RuntimeError: under compilation on a GPU, where what is fused rounds otherwise.
        """
        if not has_row_kernels(x):
            dtype = x.dtype if dtype is None else dtype
            return batch_invariant_linear(x.to(dtype), weight_OI.to(dtype))
        from mcore_parallel.tensor_parallel import _triton_invariant as kernels

        if self._finished is None or self._finished.device != x.device:
            # Kept: its address is part of recorded graphs, and every launch leaves it as it was.
            self._finished = torch.zeros(kernels.FEWEST_PROGRAMS, dtype=torch.int32, device=x.device)
        rows, weight = aligned_rows(x.detach().flatten(0, -2)), aligned_rows(weight_OI.detach())
        return kernels.linear(rows, weight, self._finished, dtype=dtype).view(*x.shape[:-1], weight_OI.shape[0])


class BatchInvariantProducts:
    """Products of one layer whose result for a token depends on that token only; conforms to ``LinearProducts``.

    The backward takes torch's GEMMs.
    """

    def __init__(self) -> None:
        self._linear = BatchInvariantMatmul()

    def column(self, x: Tensor, weight_OI: Tensor, route: Route) -> Tensor:
        return column_product(x, weight_OI, dataclasses.replace(route, pieces=1, linear=self._linear))

    def row(self, x_TI: Tensor, weight_OI: Tensor, route: Route) -> Tensor:
        return row_product(x_TI, weight_OI, dataclasses.replace(route, pieces=1, linear=self._linear))

    def weight_changed(self) -> None:
        """Nothing is kept."""


@internal_api
def has_row_kernels(x: Tensor) -> bool:
    """Whether kernels compute rows of this dtype and place, each as if it were alone; a CPU computes each alone.

    Raises:
        RuntimeError: a GPU without such kernels: float64, no Triton, or a graph under compilation.
    """
    if not x.is_cuda:
        return False
    if not use_triton(x):
        why = "under torch.compile" if torch.compiler.is_compiling() else f"for {x.dtype} without Triton or in 64 bits"
        raise RuntimeError(f"batch_invariant=True of the backend has no kernels on {x.device} {why}; compute in 16 or 32 bits, uncompiled")
    return True


@internal_api
def aligned_rows(x: Tensor) -> Tensor:
    """The same values with nothing between the rows and where vector instructions find them, with strides that follow from the shape.

    Kernels are compiled for that; what they are compiled for must not depend on where a view begins.
    """
    whole = x.contiguous()
    whole = whole if whole.data_ptr() % 16 == 0 else whole.clone(memory_format=torch.contiguous_format)
    # Of dims of one element even a contiguous tensor may have any stride.
    return whole.view(-1).view(x.shape) if 1 in x.shape else whole


@internal_api
def batch_invariant_linear(x: Tensor, weight_OI: Tensor) -> Tensor:
    """[..., I] times the transposed weight: [..., O]; the forward only."""
    x_TI = x.flatten(0, -2)
    weight_OI = _aligned(weight_OI.detach())
    y_TO = one_by_one(lambda row: F.linear(row, weight_OI), x_TI.detach())
    return y_TO.view(*x.shape[:-1], weight_OI.shape[0])


@internal_api
def batch_invariant_grouped_linear(rows_RI: Tensor, weight_NOI: Tensor, ends_N: Tensor) -> Tensor:
    """Rows [R, I] in expert order times the transposed weight of their expert: [R, O]; the forward only.

    On a GPU nothing waits for the device.

    Args:
        rows_RI: those behind the last expert belong to none; their results hold anything.
        weight_NOI: one matrix an expert.
        ends_N: int32 on the rows' device, the rows of this expert and of all before it.

    Raises:
        RuntimeError: as of ``BatchInvariantMatmul``.
    """
    if has_row_kernels(rows_RI):
        from mcore_parallel.tensor_parallel import _triton_invariant as kernels

        return kernels.grouped_linear(aligned_rows(rows_RI.detach()), aligned_rows(weight_NOI.detach()), ends_N.contiguous())
    y_RO, begin = rows_RI.new_zeros(len(rows_RI), weight_NOI.shape[1]), 0
    for end, weight_OI in zip(ends_N.tolist(), weight_NOI, strict=True):
        y_RO[begin:end] = batch_invariant_linear(rows_RI[begin:end], weight_OI)
        begin = end
    return y_RO


@internal_api
def each_row(function: Callable[..., Tensor], x: Tensor, *parameters: Tensor) -> Tensor:
    """``function(x, *parameters)`` of rows x [T, ...], each computed alone; with a backward.

    Args:
        function: of any number of rows, [T, ...] -> [T, ...]; it mixes none.
        x: the rows.
        parameters: the same for all rows.
    """
    return _EachRow.apply(function, x, *parameters)


@internal_api
def one_by_one(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The rows through ``function`` one after the other, each in memory of its own."""
    if not len(x):
        return function(x)
    return torch.cat([function(row.clone(memory_format=torch.contiguous_format)) for row in x.split(1)])


def _aligned(x: Tensor) -> Tensor:
    """The same values where vector instructions find them as they find those of any other tensor."""
    return x.contiguous() if x.data_ptr() % _ALIGNMENT == 0 else x.clone(memory_format=torch.contiguous_format)


class _EachRow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(x, *parameters)
        whole = [_aligned(parameter) for parameter in parameters]
        return one_by_one(lambda row: function(row, *whole), x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        inputs = [saved.detach().requires_grad_(needed) for saved, needed in zip(ctx.saved_tensors, ctx.needs_input_grad[1:], strict=True)]
        with torch.enable_grad():
            y = ctx.function(*inputs)
        wanted = [one for one in inputs if one.requires_grad]
        found = iter(torch.autograd.grad(y, wanted, grads[0]))
        return None, *(next(found) if one.requires_grad else None for one in inputs)


@internal_api
def batch_invariant_losses(
    logits_Tv: Tensor, target_T: Tensor, group: Group, vocab_size: int, *, temperature: float | Tensor = 1.0
) -> tuple[Tensor, Tensor]:
    """Cross entropy of the targets [T] and entropy [T] of each row of logits / temperature, both differentiable.

    Args:
        logits_Tv: [T, V / group size] of this rank.
        target_T: int64 global ids; a negative one has loss 0.
        group: ranks that share the vocabulary.
        vocab_size: columns that count.
        temperature: above 0; one for each row, [T] float64, on a GPU and without a backward.

    Returns:
        float32, or float64 for float64 logits.
    """
    check_ids(target_T, "target", vocab_size, lowest=None)
    if has_row_kernels(logits_Tv):
        return _KernelLosses.apply(logits_Tv, target_T, group, vocab_size, temperature)
    assert not isinstance(temperature, Tensor), "a CPU draws every row alone"
    wide_Tv = logits_Tv.to(maths_dtype(logits_Tv)) * (1.0 / temperature)
    return _Losses.apply(wide_Tv, target_T, group, vocab_size)


@internal_api
def batch_invariant_log_norms(logits_Tv: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row on a GPU the largest logit and the logarithm of the sum of exponentials beside it, [T] each."""
    ones_T = torch.ones(len(logits_Tv), dtype=torch.float32, device=logits_Tv.device)
    nowhere_T = torch.full((len(logits_Tv),), -1, dtype=torch.int64, device=logits_Tv.device)
    stats_KT = _row_statistics(logits_Tv, ones_T, nowhere_T, logits_Tv.shape[1])
    return stats_KT[0], stats_KT[1].log()


def _row_statistics(logits_Tv: Tensor, inverse_T: Tensor, column_T: Tensor, valid: int) -> Tensor:
    from mcore_parallel.tensor_parallel import _triton_invariant as kernels

    logits_Tv = logits_Tv if logits_Tv.stride(-1) == 1 else logits_Tv.contiguous()
    return kernels.row_statistics(logits_Tv, inverse_T, column_T.contiguous(), valid, lowest(torch.float32))


class _KernelLosses(torch.autograd.Function):
    """``_Losses`` by a kernel with a program a row; the logits stay in their dtype."""

    @staticmethod
    def forward(
        ctx: Any, logits_Tv: Tensor, target_T: Tensor, group: Group, vocab_size: int, temperature: float | Tensor
    ) -> tuple[Tensor, Tensor]:
        rows, width = logits_Tv.shape
        maths = RowMaths(vocab_size=vocab_size, entropy=True)
        valid, local_T = maths.columns(group.rank, width), target_T - group.rank * width
        column_T = torch.where((local_T >= 0) & (local_T < width), local_T, -1)
        if isinstance(temperature, Tensor):
            inverse_T = (1.0 / temperature).float()
        else:
            inverse_T = torch.full((rows,), 1.0 / temperature, dtype=torch.float32, device=logits_Tv.device)
        if valid:
            stats_KT = _row_statistics(logits_Tv, inverse_T, column_T, valid)
        else:
            # Nothing but padding of the vocabulary.
            stats_KT = row_statistics(logits_Tv, column_T, valid, maths)
        stats_TRK = all_gather(stats_KT.unsqueeze(0), group).permute(2, 0, 1)
        loss_T, log_norm_T, entropy_T = _row_results(stats_TRK).unbind(1)
        counted_T = (target_T >= 0) & (target_T < vocab_size)
        ctx.save_for_backward(logits_Tv, column_T, log_norm_T, entropy_T, counted_T)
        ctx.maths, ctx.valid, ctx.temperature = maths, valid, temperature
        return torch.where(counted_T, loss_T, 0.0), entropy_T.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        logits_Tv, column_T, log_norm_T, entropy_T, counted_T = ctx.saved_tensors
        maths = dataclasses.replace(ctx.maths, temperature=cast(float, ctx.temperature))
        grad_Tv = logits_Tv.clone(memory_format=torch.contiguous_format)
        loss_grad_T, log_norm_T, entropy_T = torch.where(counted_T, grads[0], 0.0), log_norm_T.contiguous(), entropy_T.contiguous()
        to_gradient_(grad_Tv, column_T, ctx.valid, maths, log_norm_T, loss_grad_T, entropy_T, grads[1])
        return grad_Tv, None, None, None, None


class _Losses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_Tv: Tensor, target_T: Tensor, group: Group, vocab_size: int) -> tuple[Tensor, Tensor]:
        width = logits_Tv.shape[1]
        maths = RowMaths(vocab_size=vocab_size, entropy=True)
        valid, local_T = maths.columns(group.rank, width), target_T - group.rank * width
        column_T = torch.where((local_T >= 0) & (local_T < width), local_T, -1)
        rows = zip(logits_Tv.split(1), column_T.split(1), strict=True)
        parts = [row_statistics(row.clone(memory_format=torch.contiguous_format), column, valid, maths) for row, column in rows]
        # Statistics of each token and rank.
        stats_TRK = all_gather(torch.cat(parts, dim=1).unsqueeze(0), group).permute(2, 0, 1)
        loss_T, log_norm_T, entropy_T = one_by_one(_row_results, stats_TRK).unbind(1)
        counted_T = (target_T >= 0) & (target_T < vocab_size)
        ctx.save_for_backward(logits_Tv, column_T, log_norm_T, entropy_T, counted_T)
        ctx.maths, ctx.valid = maths, valid
        return torch.where(counted_T, loss_T, 0.0), entropy_T.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        logits_Tv, column_T, log_norm_T, entropy_T, counted_T = ctx.saved_tensors
        grad_Tv = logits_Tv.clone()
        to_gradient_(grad_Tv, column_T, ctx.valid, ctx.maths, log_norm_T, torch.where(counted_T, grads[0], 0.0), entropy_T, grads[1])
        return grad_Tv, None, None, None


def _row_results(stats_TRK: Tensor) -> Tensor:
    """Loss, logarithm of the sum of exponentials and entropy [T, 3] of the statistics of R ranks, as ``combine``."""
    max_TR, exp_TR, picked_TR, below_TR = stats_TRK.unbind(2)
    max_T = max_TR.amax(1)
    lag_TR = max_TR - max_T[:, None]
    shrink_TR = lag_TR.exp()
    sum_T = (exp_TR * shrink_TR).sum(1)
    log_T = sum_T.log()
    entropy_T = log_T - (shrink_TR * (below_TR + exp_TR * lag_TR)).sum(1) / sum_T
    return torch.stack((log_T - (picked_TR.sum(1) - max_T), max_T + log_T, entropy_T), dim=1)

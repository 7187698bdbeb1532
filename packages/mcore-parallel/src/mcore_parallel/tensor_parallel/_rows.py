# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Softmax statistics of rows of logits whose columns are split over ranks, and the gradient of what is made of them."""

import functools
import importlib.util
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_parallel._stability import internal_api
from mcore_parallel.comm import all_gather
from mcore_parallel.groups import Group
from mcore_parallel.tensor_parallel._row_maths import RowMaths, lowest, maths_dtype

# T tokens (rows), v columns of this rank, K statistics a row


@dataclass(frozen=True)
class RowResult:
    """Of every row, the same on all ranks."""

    loss_T: Tensor
    log_norm_T: Tensor
    """log of the sum of exp(z)."""
    entropy_T: Tensor | None


@internal_api
def row_statistics(logits_Tv: Tensor, column_T: Tensor, valid: int, maths: RowMaths) -> Tensor:
    """[K, T] of this rank's columns: largest z, sum of exp(z - largest), z of the label (0 where the label is not here),
    then with smoothing the sum of z - largest, then for the entropy the sum of exp(z - largest) * (z - largest).

    Args:
        logits_Tv: any float dtype; float64 is computed in float64, all else in float32.
        column_T: int64 local column of the label, -1 where another rank holds it.
        valid: leading columns that count.
        maths: which statistics.
    """
    if use_triton(logits_Tv) and valid:
        from mcore_parallel.tensor_parallel import _triton_rows

        return _triton_rows.statistics(logits_Tv, column_T, valid, maths)
    dtype = maths_dtype(logits_Tv)
    if not valid:
        empty = logits_Tv.new_zeros((maths.num_statistics, logits_Tv.shape[0]), dtype=dtype)
        empty[0] = lowest(dtype)
        return empty
    z_Tv = _scaled(logits_Tv[:, :valid].to(dtype), maths)
    picked_T = z_Tv.gather(-1, column_T.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    max_T = z_Tv.amax(-1).clamp(min=lowest(dtype))
    below_Tv = z_Tv - max_T.unsqueeze(-1)
    exp_Tv = below_Tv.exp() if maths.smoothing or maths.entropy else below_Tv.exp_()
    rows = [max_T, exp_Tv.sum(-1), torch.where(column_T >= 0, picked_T, 0.0)]
    if maths.smoothing:
        rows.append(below_Tv.sum(-1))
    if maths.entropy:
        rows.append(torch.where(exp_Tv > 0, exp_Tv * below_Tv, 0.0).sum(-1))
    return torch.stack(rows)


@internal_api
def combine(stats_KT: Tensor, width: int, maths: RowMaths, group: Group) -> RowResult:
    """Put the ranks' statistics together with one all-gather; the order of addition is that of the ranks.

    Args:
        stats_KT: of ``row_statistics``.
        width: columns a rank holds, counted or not.
        maths: as there.
        group: ranks that share the columns.
    """
    stats_RKT = all_gather(stats_KT.unsqueeze(0), group)
    max_RT, exp_RT, picked_RT = stats_RKT[:, 0], stats_RKT[:, 1], stats_RKT[:, 2]
    max_T = max_RT.amax(0)
    lag_RT = max_RT - max_T
    shrink_RT = lag_RT.exp()
    sum_T = (exp_RT * shrink_RT).sum(0)
    log_T = sum_T.log()
    loss_T = log_T - (picked_RT.sum(0) - max_T)
    if maths.smoothing:
        # Numbers of the host go in as such: a tensor of them would be a transfer that the host waits for.
        below_T = stats_RKT[:, 3].sum(0)
        for rank in range(group.size):
            below_T = below_T + maths.columns(rank, width) * lag_RT[rank]
        loss_T = (1.0 - maths.smoothing) * loss_T - maths.smoothing * (below_T / maths.vocab_size - log_T)
    entropy_T = None
    if maths.entropy:
        weighted_RT = shrink_RT * (stats_RKT[:, -1] + exp_RT * lag_RT)
        entropy_T = log_T - weighted_RT.sum(0) / sum_T
    return RowResult(loss_T, max_T + log_T, entropy_T)


def to_gradient_(
    logits_Tv: Tensor,
    column_T: Tensor,
    valid: int,
    maths: RowMaths,
    log_norm_T: Tensor,
    grad_T: Tensor,
    entropy_T: Tensor | None = None,
    entropy_grad_T: Tensor | None = None,
) -> None:
    """Overwrite logits by the gradient of them.

    Args:
        logits_Tv: in; out d/dlogits of sum(grad_T * loss_T) + sum(entropy_grad_T * entropy_T), 0 in columns that do not count.
        column_T: as in ``row_statistics``.
        valid: as there.
        maths: as there.
        log_norm_T: of ``combine``.
        grad_T: of the loss.
        entropy_T: of ``combine``, with ``entropy_grad_T``.
        entropy_grad_T: of the entropy, or None.
    """
    if use_triton(logits_Tv) and valid:
        from mcore_parallel.tensor_parallel import _triton_rows

        _triton_rows.to_gradient_(logits_Tv, column_T, valid, maths, log_norm_T, grad_T, entropy_T, entropy_grad_T)
        return
    if valid < logits_Tv.shape[-1]:
        logits_Tv[:, valid:].zero_()
    if not valid:
        return
    # In place wherever the dtypes allow: on a CPU fresh memory costs more than the arithmetic.
    part_Tv = logits_Tv[:, :valid]
    result_Tv = part_Tv if part_Tv.dtype == log_norm_T.dtype else part_Tv.to(log_norm_T.dtype)
    if maths.temperature != 1.0:
        result_Tv.div_(maths.temperature)
    result_Tv.sub_(log_norm_T.unsqueeze(-1))
    if entropy_grad_T is not None and entropy_T is not None:
        log_p_Tv, result_Tv = result_Tv, result_Tv.exp()
        # dH/dz = -p (log p + H); p is 0 where log p is -inf.
        surprise_Tv = torch.where(result_Tv > 0, -log_p_Tv, 0.0) - entropy_T.unsqueeze(-1)
        result_Tv.mul_(grad_T.unsqueeze(-1) + entropy_grad_T.unsqueeze(-1) * surprise_Tv)
    else:
        result_Tv.exp_().mul_(grad_T.unsqueeze(-1))
    if maths.smoothing:
        result_Tv.sub_((grad_T * (maths.smoothing / maths.vocab_size)).unsqueeze(-1))
    at_label_T = torch.where(column_T >= 0, grad_T * (1.0 - maths.smoothing), 0.0)
    result_Tv.scatter_add_(-1, column_T.clamp(min=0).unsqueeze(-1), -at_label_T.unsqueeze(-1).to(result_Tv.dtype))
    if maths.temperature != 1.0:
        result_Tv.div_(maths.temperature)
    if result_Tv is not part_Tv:
        part_Tv.copy_(result_Tv)


@internal_api
def to_narrow_gradient(
    logits_Tv: Tensor,
    column_T: Tensor,
    valid: int,
    maths: RowMaths,
    log_norm_T: Tensor,
    grad_T: Tensor,
    inverse: Tensor,
    turned_vT: Tensor,
) -> Tensor:
    """The gradient of logits in fp8 with one scale, [T, v], and transposed.

    Args:
        logits_Tv: in; what they hold afterwards is not defined.
        column_T: as in ``to_gradient_``.
        valid: as there.
        maths: as there, without entropy.
        log_norm_T: as there.
        grad_T: as there.
        inverse: [], by which the fp8 values are to be multiplied; none may saturate.
        turned_vT: out, [v, T] with any stride of its rows; its dtype is that of the result.
    """
    if use_triton(logits_Tv) and valid:
        from mcore_parallel.tensor_parallel import _triton_rows

        return _triton_rows.to_narrow_gradient(logits_Tv, column_T, valid, maths, log_norm_T, grad_T, inverse, turned_vT)
    grad_Tv = logits_Tv.to(log_norm_T.dtype, copy=True)
    to_gradient_(grad_Tv, column_T, valid, maths, log_norm_T, grad_T)
    largest = torch.finfo(turned_vT.dtype).max
    narrow_Tv = (grad_Tv * inverse.reciprocal()).clamp(-largest, largest).to(turned_vT.dtype)
    turned_vT.copy_(narrow_Tv.t())
    return narrow_Tv


def _scaled(x: Tensor, maths: RowMaths) -> Tensor:
    return x if maths.temperature == 1.0 else x / maths.temperature


def use_triton(logits: Tensor) -> bool:
    """Whether kernels of this package work on the tensor."""
    return logits.is_cuda and logits.dtype != torch.float64 and not torch.compiler.is_compiling() and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None

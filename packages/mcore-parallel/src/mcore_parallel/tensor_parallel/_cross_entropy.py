# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Cross entropy and log-probabilities of logits whose vocabulary is split over a group."""

from typing import Any

import torch
from torch import Tensor

from mcore_parallel.comm import all_reduce
from mcore_parallel.groups import Group
from mcore_parallel.tensor_parallel._vocab import check_ids, owned_rows

# T tokens (any leading dims), V vocabulary, v = V / group size columns of this rank


def vocab_parallel_cross_entropy(
    logits: Tensor, target: Tensor, label_smoothing: float = 0.0, *, group: Group, vocab_size: int | None = None
) -> Tensor:
    """-log p[target] of every token, not reduced; the maths is float32, or float64 for float64 logits.

    With smoothing alpha the target keeps the probability 1 - alpha and the other V - 1 classes share alpha, V being
    the whole vocabulary: with a = alpha * V / (V - 1) the loss is (1 - a) * nll - a * mean over V of log p. All of it is
    computed from logit - log-sum-exp, so no probability underflows on the way.

    Only the logits and one number a token are kept for the backward.

    Args:
        logits: [..., V / group.size] of this rank, in any float dtype.
        target: [...] int64 global ids, the same on every rank. A negative target (for instance -100) has loss 0 and no gradient.
        label_smoothing: alpha in [0, 1).
        group: ranks that share the vocabulary.
        vocab_size: columns that take part; those after it are padding. None for all V.

    Returns:
        [...] float32 (float64 for float64 logits), the same on every rank.

    Raises:
        ValueError: alpha outside [0, 1), shapes that do not fit, a target of at least V (on CPU; elsewhere it counts as ignored).
    """
    if not 0.0 <= label_smoothing < 1.0:
        raise ValueError(f"label_smoothing={label_smoothing} must lie in [0, 1)")
    if logits.shape[:-1] != target.shape:
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} need a target of shape {tuple(logits.shape[:-1])}, found {tuple(target.shape)}"
        )
    padded = logits.shape[-1] * group.size
    vocab_size = padded if vocab_size is None else vocab_size
    if not 1 <= vocab_size <= padded:
        raise ValueError(f"vocab_size={vocab_size} must lie between 1 and the {padded} columns of the logits")
    if vocab_size < padded:
        columns = torch.arange(logits.shape[-1], device=logits.device) + group.rank * logits.shape[-1]
        logits = logits.masked_fill(columns >= vocab_size, float("-inf"))
    if label_smoothing and vocab_size < 2:
        raise ValueError(f"label_smoothing={label_smoothing} needs a vocabulary of at least 2, found {vocab_size}")
    check_ids(target, "target", vocab_size, lowest=None)
    smoothing = label_smoothing * vocab_size / (vocab_size - 1) if label_smoothing else 0.0
    return _CrossEntropy.apply(logits, target, smoothing, group, vocab_size)


def vocab_parallel_log_probs(logits: Tensor, target: Tensor, group: Group) -> Tensor:
    """log p[target] of every token, differentiable.

    Args:
        logits: [..., V / group.size] of this rank.
        target: [...] int64 global ids, the same on every rank; a negative one gives 0 and no gradient.
        group: ranks that share the vocabulary.

    Returns:
        [...] float32 (float64 for float64 logits).

    Raises:
        ValueError: as ``vocab_parallel_cross_entropy``.
    """
    return -vocab_parallel_cross_entropy(logits, target, group=group)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_Tv: Tensor, target_T: Tensor, smoothing: float, group: Group, vocab_size: int) -> Tensor:
        columns = logits_Tv.shape[-1]
        z_Tv = logits_Tv.to(_maths_dtype(logits_Tv))
        max_T = all_reduce(z_Tv.amax(-1), group, "max")
        z_Tv = z_Tv - max_T.unsqueeze(-1)
        column_T, owned_T = owned_rows(target_T, columns, group)
        picked_T = z_Tv.gather(-1, column_T.unsqueeze(-1)).squeeze(-1)
        sums = [torch.where(owned_T, picked_T, 0.0), z_Tv.exp().sum(-1)]
        if smoothing:
            # Of padding, -inf, the smoothing takes nothing.
            sums.append(z_Tv[..., : max(0, min(columns, vocab_size - group.rank * columns))].sum(-1))
        picked_T, exp_T, *rest = all_reduce(torch.stack(sums), group).unbind(0)
        log_exp_T = exp_T.log()
        loss_T = log_exp_T - picked_T
        if smoothing:
            loss_T = (1.0 - smoothing) * loss_T - smoothing * (rest[0] / vocab_size - log_exp_T)
        counted_T = (target_T >= 0) & (target_T < vocab_size)
        ctx.save_for_backward(logits_Tv, max_T + log_exp_T, column_T, owned_T, counted_T)
        ctx.smoothing, ctx.vocab_size = smoothing, vocab_size
        return torch.where(counted_T, loss_T, 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        logits_Tv, log_norm_T, column_T, owned_T, counted_T = ctx.saved_tensors
        grad_T = torch.where(counted_T, grads[0], 0.0).unsqueeze(-1)
        # softmax - (1 - a) * onehot - a / V
        grad_Tv = (logits_Tv.to(log_norm_T.dtype) - log_norm_T.unsqueeze(-1)).exp_()
        if ctx.smoothing:
            grad_Tv.sub_(ctx.smoothing / ctx.vocab_size)
        onehot_T = owned_T.to(grad_Tv.dtype) * (1.0 - ctx.smoothing)
        grad_Tv.scatter_add_(-1, column_T.unsqueeze(-1), -onehot_T.unsqueeze(-1))
        return grad_Tv.mul_(grad_T).to(logits_Tv.dtype), None, None, None, None


def _maths_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Divergence of two distributions whose vocabulary is split over a group."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mcore_parallel.comm import all_gather, all_reduce
from mcore_parallel.groups import Group

# T tokens (any leading dims), V vocabulary, v = V / group size columns of this rank, c those that are no padding, K top-k

_CHUNK = 1 << 24
"""Elements that are widened to float32 at a time; the logits of a micro-batch may be far more."""


def vocab_parallel_kl_divergence(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    group: Group,
    temperature: float = 1.0,
    reverse: bool = False,
    vocab_size: int | None = None,
) -> Tensor:
    """KL(teacher || student) of every token, or KL(student || teacher), not reduced; the maths is float32 (float64 for float64 logits).

    Both distributions are softmax(logits / temperature) (Hinton et al., 2015, arXiv:1503.02531). With p of the teacher and q of the student
    the gradient of the student's logits is (q - p) / temperature; in reverse, q (log q - log p - KL) / temperature. It is computed along
    with the value, so that of both logits nothing else is kept. The teacher gets no gradient.

    Args:
        student_logits: [..., V / group.size] of this rank, finite, in any float dtype.
        teacher_logits: of the same shape, finite.
        group: ranks that share the vocabulary.
        temperature: above 0.
        reverse: KL(student || teacher), which seeks one mode of the teacher instead of covering all.
        vocab_size: columns that take part; those after it are padding. None for all V.

    Returns:
        [...] float32 (float64 for float64 logits), the same on every rank, exactly 0 for equal logits.

    Raises:
        ValueError: shapes that differ, a temperature or a vocabulary out of range.
    """
    if student_logits.shape != teacher_logits.shape:
        raise ValueError(
            f"teacher_logits of shape {tuple(teacher_logits.shape)} must have the shape of student_logits, "
            f"{tuple(student_logits.shape)}; give both models one tokenizer and one padded vocab_size"
        )
    columns = _real_columns(student_logits, group, temperature, vocab_size)
    return _Divergence.apply(student_logits, teacher_logits.detach(), group, float(temperature), reverse, columns)


def vocab_parallel_sparse_kl_divergence(
    student_logits: Tensor,
    teacher_log_probs: Tensor,
    teacher_token_ids: Tensor,
    *,
    group: Group,
    temperature: float = 1.0,
    vocab_size: int | None = None,
) -> Tensor:
    """KL(teacher || student) of every token over K + 1 events: each of the K tokens the teacher finds likely, and "any other token".

    By the log-sum inequality it is at most the divergence of the whole distributions, and equal to it for K = V. The student's mass of the
    other tokens is summed, not subtracted from 1.

    Args:
        student_logits: [..., V / group.size] of this rank, finite, in any float dtype.
        teacher_log_probs: [..., K], log-probabilities at this temperature (``vocab_parallel_top_k``), the same on every rank.
        teacher_token_ids: [..., K] integers, the global ids they belong to, no id twice in a row.
        group: ranks that share the vocabulary.
        temperature: the student's logits are divided by it.
        vocab_size: columns that take part; those after it are padding. None for all V.

    Returns:
        [...] float32 (float64 for float64 logits), the same on every rank.

    Raises:
        ValueError: shapes that do not fit, a temperature or a vocabulary out of range.
    """
    if teacher_log_probs.shape != teacher_token_ids.shape or teacher_log_probs.shape[:-1] != student_logits.shape[:-1]:
        raise ValueError(
            f"teacher_log_probs of shape {tuple(teacher_log_probs.shape)} and teacher_token_ids of shape "
            f"{tuple(teacher_token_ids.shape)} must both be {tuple(student_logits.shape[:-1])} and K, as student_logits without its columns"
        )
    columns = _real_columns(student_logits, group, temperature, vocab_size)
    return _SparseDivergence.apply(student_logits, teacher_log_probs, teacher_token_ids, group, float(temperature), columns)


@torch.no_grad()
def vocab_parallel_top_k(
    logits: Tensor, k: int, *, group: Group, temperature: float = 1.0, vocab_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """The k likeliest tokens, likeliest first: log-probabilities [..., k] and global ids [..., k] int64, the same on every rank.

    Args:
        logits: [..., V / group.size] of this rank.
        k: how many.
        group: ranks that share the vocabulary.
        temperature: logits are divided by it.
        vocab_size: columns that take part; None for all V.

    Raises:
        ValueError: k outside 1 to the vocabulary, a temperature or a vocabulary out of range.
    """
    columns = _real_columns(logits, group, temperature, vocab_size)
    whole = logits.shape[-1] * group.size if vocab_size is None else vocab_size
    if not 1 <= k <= whole:
        raise ValueError(f"k={k} must lie between 1 and vocab_size={whole}")
    z_Tc = logits[..., :columns].to(_maths_dtype(logits)) / temperature
    held = min(k, columns)
    best, ids = z_Tc.topk(held) if held else (z_Tc, torch.zeros_like(z_Tc, dtype=torch.int64))
    missing = (0, min(k, logits.shape[-1]) - held)
    best = torch.nn.functional.pad(best, missing, value=float("-inf"))
    ids = torch.nn.functional.pad(ids + group.rank * logits.shape[-1], missing)
    best, ids = all_gather(best, group, -1), all_gather(ids, group, -1)
    best, place = best.topk(k)
    max_T = best[..., :1]
    norm = all_reduce((z_Tc - max_T).exp().sum(-1, keepdim=True), group).log() + max_T
    return best - norm, ids.gather(-1, place)


class _OfTokens(torch.autograd.Function):
    """A loss of each token, the first of six inputs being the logits, whose gradient the forward keeps."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = ctx.saved_tensors
        # Without a wide copy of either.
        return torch.mul(grad, grads[0].unsqueeze(-1), out=torch.empty_like(grad)), None, None, None, None, None


class _Divergence(_OfTokens):
    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, group: Group, temperature: float, reverse: bool, columns: int) -> Tensor:
        maths = torch.promote_types(_maths_dtype(student), _maths_dtype(teacher))
        s_Tc, t_Tc = (x.flatten(0, -2)[:, :columns] for x in (student, teacher))
        max_2T = all_reduce(torch.stack([_max(s_Tc, maths), _max(t_Tc, maths)]) / temperature, group, "max")

        def shifted(rows: slice) -> list[Tensor]:
            return [(x[rows].to(maths) / temperature).sub_(m[rows, None]) for x, m in zip((s_Tc, t_Tc), max_2T, strict=True)]

        sums_3T = max_2T.new_empty(3, len(s_Tc))
        for rows in _chunks(s_Tc):
            zs, zt = shifted(rows)
            ws, wt = zs.exp(), zt.exp()
            sums_3T[0, rows], sums_3T[1, rows] = ws.sum(-1), wt.sum(-1)
            sums_3T[2, rows] = (ws.mul_(zs.sub_(zt)) if reverse else wt.mul_(zt.sub_(zs))).sum(-1)
        norm_s, norm_t, cross = all_reduce(sums_3T, group).unbind(0)
        log_s, log_t = norm_s.log(), norm_t.log()
        loss_T = cross / norm_s + (log_t - log_s) if reverse else cross / norm_t - (log_t - log_s)
        if ctx.needs_input_grad[0]:
            grad = torch.zeros_like(student, memory_format=torch.contiguous_format)
            grad_Tc = grad.view(-1, grad.shape[-1])[:, :columns]
            for rows in _chunks(s_Tc):
                zs, zt = shifted(rows)
                zs.sub_(log_s[rows, None])
                zt.sub_(log_t[rows, None])
                if reverse:
                    terms = zs.exp().mul_(zs.sub_(zt).sub_(loss_T[rows, None]))
                else:
                    terms = zs.exp_().sub_(zt.exp_())
                grad_Tc[rows] = terms.div_(temperature).to(grad.dtype)
            ctx.save_for_backward(grad)
        return loss_T.view(student.shape[:-1])


class _SparseDivergence(_OfTokens):
    @staticmethod
    def forward(ctx: Any, student: Tensor, log_probs: Tensor, token_ids: Tensor, group: Group, temperature: float, columns: int) -> Tensor:
        maths = torch.promote_types(_maths_dtype(student), _maths_dtype(log_probs))
        s_Tc = student.flatten(0, -2)[:, :columns]
        log_p_TK, ids_TK = log_probs.flatten(0, -2).to(maths), token_ids.flatten(0, -2).long()
        local_TK = ids_TK - group.rank * student.shape[-1]
        owned_TK = (local_TK >= 0) & (local_TK < columns)
        # Tokens of other ranks go to a column behind the last one.
        local_TK = torch.where(owned_TK, local_TK, columns)
        max_T = all_reduce(_max(s_Tc, maths) / temperature, group, "max")

        def shifted(rows: slice) -> Tensor:
            z = max_T.new_empty(len(s_Tc[rows]), columns + 1)
            z[:, :columns] = (s_Tc[rows].to(maths) / temperature).sub_(max_T[rows, None])
            z[:, columns] = float("-inf")
            return z

        picked = max_T.new_empty(len(s_Tc), log_p_TK.shape[-1] + 1)
        for rows in _chunks(s_Tc):
            z = shifted(rows)
            picked[rows, 1:] = torch.where(owned_TK[rows], z.gather(-1, local_TK[rows]), 0.0)
            picked[rows, 0] = z.exp_().scatter_(-1, local_TK[rows], 0.0).sum(-1)
        picked = all_reduce(picked, group)
        rest_T, z_TK = picked[:, 0], picked[:, 1:]
        norm_T = rest_T + z_TK.exp().sum(-1)
        p_TK = log_p_TK.exp()
        # What is left over of the teacher; nothing if no token of the student is left over.
        left_T = torch.where(rest_T > 0, (1.0 - p_TK.sum(-1)).clamp(min=0.0), 0.0)
        log_q_TK = z_TK - norm_T.log()[:, None]
        others_T = left_T * (left_T.log() - rest_T.log() + norm_T.log())
        loss_T = torch.where(p_TK > 0, p_TK * (log_p_TK - log_q_TK), 0.0).sum(-1) + torch.where(left_T > 0, others_T, 0.0)
        if ctx.needs_input_grad[0]:
            mass_T = p_TK.sum(-1) + left_T
            top_TK = (log_q_TK.exp() * mass_T[:, None] - p_TK) / temperature
            other_T = (mass_T / norm_T - torch.where(left_T > 0, left_T / rest_T, 0.0)) / temperature
            grad = torch.zeros_like(student, memory_format=torch.contiguous_format)
            grad_Tc = grad.view(-1, grad.shape[-1])[:, :columns]
            for rows in _chunks(s_Tc):
                part = shifted(rows).exp_().mul_(other_T[rows, None]).scatter_(-1, local_TK[rows], top_TK[rows])
                grad_Tc[rows] = part[:, :columns].to(grad.dtype)
            ctx.save_for_backward(grad)
        return loss_T.view(student.shape[:-1])


def _chunks(x_Tc: Tensor) -> Iterator[slice]:
    rows = max(1, _CHUNK // max(1, x_Tc.shape[-1]))
    return (slice(first, first + rows) for first in range(0, len(x_Tc), rows))


def _max(x_Tc: Tensor, dtype: torch.dtype) -> Tensor:
    """Of each row; -inf where this rank holds padding only."""
    return x_Tc.amax(-1).to(dtype) if x_Tc.shape[-1] else torch.full((len(x_Tc),), float("-inf"), dtype=dtype, device=x_Tc.device)


def _real_columns(logits: Tensor, group: Group, temperature: float, vocab_size: int | None) -> int:
    """How many columns of this rank are no padding."""
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be above 0")
    width = logits.shape[-1]
    vocab_size = width * group.size if vocab_size is None else vocab_size
    if not 1 <= vocab_size <= width * group.size:
        raise ValueError(f"vocab_size={vocab_size} must lie between 1 and the {width * group.size} columns of the logits")
    return max(0, min(width, vocab_size - group.rank * width))


def _maths_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32

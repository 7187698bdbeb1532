# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Output projection and cross entropy in one, a few tokens at a time."""

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.nn import functional as F

from mcore_parallel._stability import internal_api
from mcore_parallel.comm import all_gather, start_all_reduce, start_reduce_scatter, wait
from mcore_parallel.groups import Group
from mcore_parallel.tensor_parallel._row_maths import RowMaths, maths_dtype
from mcore_parallel.tensor_parallel._rows import RowResult, combine, row_statistics, to_gradient_
from mcore_parallel.tensor_parallel._vocab import check_ids
from mcore_parallel.tensor_parallel._weight_gradient import MainGradient, WeightGradientQueue, add_product_, put_product_, wide_product

# T tokens, D model, V vocabulary, v = V / group size columns of this rank, C tokens of a chunk

_CHUNK_LOGITS = 1 << 28
"""Logits that exist at a time: half a gibibyte in bfloat16, or more where ``early_chunk`` says so."""


@overload
def fused_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    group: Group,
    *,
    chunk_tokens: int | None = None,
    label_smoothing: float = 0.0,
    with_entropy: Literal[False] = False,
    token_weights: Tensor | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    sequence_parallel: bool = False,
    main_grad: MainGradient | None = None,
    queue: WeightGradientQueue | None = None,
) -> Tensor: ...
@overload
def fused_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    group: Group,
    *,
    chunk_tokens: int | None = None,
    label_smoothing: float = 0.0,
    with_entropy: Literal[True],
    token_weights: Tensor | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    sequence_parallel: bool = False,
    main_grad: MainGradient | None = None,
    queue: WeightGradientQueue | None = None,
) -> tuple[Tensor, Tensor]: ...
def fused_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    group: Group,
    *,
    chunk_tokens: int | None = None,
    label_smoothing: float = 0.0,
    with_entropy: bool = False,
    token_weights: Tensor | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    sequence_parallel: bool = False,
    main_grad: MainGradient | None = None,
    queue: WeightGradientQueue | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``vocab_parallel_cross_entropy(hidden @ weight.T, target)`` that holds the logits of a part of the tokens at a time.

    Without ``token_weights`` the backward computes the logits of a chunk again (four GEMMs in all instead of three) and is
    right for any gradient that arrives. With them the forward computes the gradients too (three GEMMs), for the case
    that the backward only scales them: it must arrive as one number for all tokens, as that of ``losses.sum()``, which is seen from
    its strides; any other gradient takes the general way, unless there is a single chunk, and costs the extra GEMM.

    The weight gradient is accumulated over the chunks in float32 (or wider) and rounded once; of a single chunk it is one GEMM. Nothing
    is added atomically: equal inputs give equal bits.

    Args:
        hidden: [T, D], the same on all ranks; its gradient is summed over the group. With ``sequence_parallel`` this rank's [T / size, D].
        weight: [V / size, D], this rank's rows.
        target: [T] int64 global ids; a negative one has loss 0 and no gradient.
        group: ranks that share the vocabulary.
        chunk_tokens: tokens whose logits exist at a time; None for as many as give 2^28 logits, or with ``token_weights`` for as many as
            take the memory of the float32 sum of the weight gradient, or of all tokens if they take no more than that sum and a chunk.
        label_smoothing: as in ``vocab_parallel_cross_entropy``.
        with_entropy: return the entropy of every token's distribution too; differentiable unless ``token_weights`` are given.
        token_weights: [T] float; the losses are multiplied by them.
        temperature: logits are divided by it.
        vocab_size: columns that take part; those after it are padding. None for all V.
        sequence_parallel: ``hidden`` holds this rank's tokens.
        main_grad: add the weight gradient there instead of handing it to autograd.
        queue: put the GEMM of the weight gradient there instead of computing it in the backward; needs ``main_grad``.

    Returns:
        Losses [T] in float32 (float64 for float64 inputs), the same on every rank; with ``with_entropy`` also entropies [T].

    Raises:
        ValueError: shapes that do not fit, smoothing outside [0, 1), a target that is no id (on CPU), a queue without
            ``main_grad`` or with ``token_weights``.

    Example:
        >>> hidden, weight = torch.zeros(3, 4), torch.zeros(8, 4)
        >>> fused_linear_cross_entropy(hidden, weight, torch.tensor([1, 2, -1]), Group.single()).exp()
        tensor([8., 8., 1.])
    """
    tokens, padded = target.shape[0], weight.shape[0] * group.size
    vocab_size = padded if vocab_size is None else vocab_size
    share = group.size if sequence_parallel else 1
    if target.dim() != 1 or hidden.dim() != 2 or hidden.shape[0] * share != tokens or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden of shape {tuple(hidden.shape)} and weight of shape {tuple(weight.shape)} do not fit a target of shape "
            f"{tuple(target.shape)}; give [{tokens // share}, D], [V / {group.size}, D] and [T]"
        )
    if not 0.0 <= label_smoothing < 1.0:
        raise ValueError(f"label_smoothing={label_smoothing} must lie in [0, 1)")
    if not 1 <= vocab_size <= padded:
        raise ValueError(f"vocab_size={vocab_size} must lie between 1 and the {padded} rows of the weight")
    if label_smoothing and vocab_size < 2:
        raise ValueError(f"label_smoothing={label_smoothing} needs a vocabulary of at least 2, found {vocab_size}")
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens={chunk_tokens} must be at least 1, or None")
    if token_weights is not None and token_weights.shape != target.shape:
        raise ValueError(f"token_weights of shape {tuple(token_weights.shape)} must have the shape {tuple(target.shape)} of target")
    if queue is not None and (main_grad is None or token_weights is not None):
        raise ValueError(
            "queue needs main_grad and no token_weights: a deferred product has no autograd to return to, and is not computed early"
        )
    check_ids(target, "target", vocab_size, lowest=None)
    maths = RowMaths(
        vocab_size=vocab_size,
        smoothing=label_smoothing * vocab_size / (vocab_size - 1) if label_smoothing else 0.0,
        entropy=with_entropy,
        temperature=temperature,
    )
    width, depth = weight.shape
    early = token_weights is not None and torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    job = _FusedLinearJob(
        group=group,
        maths=maths,
        chunks=token_chunks(tokens, width, chunk_tokens, early_chunk(tokens, width, depth, weight.itemsize) if early else None),
        sequence_parallel=sequence_parallel,
        main_grad=main_grad,
        queue=queue,
    )
    if early:
        loss_T, entropy_T = _Precomputed.apply(hidden, weight, target, token_weights, job)
    else:
        loss_T, entropy_T = _Recomputed.apply(hidden, weight, target, job)
        loss_T = loss_T if token_weights is None else loss_T * token_weights
    return (loss_T, entropy_T) if with_entropy else loss_T


@dataclass(frozen=True, kw_only=True, eq=False)
class _FusedLinearJob:
    group: Group
    maths: RowMaths
    chunks: tuple[tuple[int, int], ...]
    """First token and the one after the last."""
    sequence_parallel: bool
    main_grad: MainGradient | None
    queue: WeightGradientQueue | None

    def whole(self, hidden: Tensor) -> Tensor:
        return all_gather(hidden, self.group) if self.sequence_parallel else hidden

    def valid(self, weight_vD: Tensor) -> int:
        return self.maths.columns(self.group.rank, weight_vD.shape[0])

    def start_sum(self, grad_TD: Tensor) -> Tensor:
        return (start_reduce_scatter if self.sequence_parallel else start_all_reduce)(grad_TD, self.group)


@internal_api
@dataclass(frozen=True)
class Labels:
    """Where the labels lie among this rank's columns."""

    column_T: Tensor
    counted_T: Tensor

    @classmethod
    def of(cls, target_T: Tensor, width: int, vocab_size: int, rank: int) -> "Labels":
        """Of ``width`` columns on each rank, the first ``vocab_size`` of all counting."""
        counted_T = (target_T >= 0) & (target_T < vocab_size)
        local_T = target_T - rank * width
        return cls(torch.where(counted_T & (local_T >= 0) & (local_T < width), local_T, -1), counted_T)


class _Gradients:
    """Gradients of hidden and weight, grown chunk by chunk."""

    def __init__(
        self,
        whole_TD: Tensor,
        weight_vD: Tensor,
        job: _FusedLinearJob,
        wants: tuple[bool, bool],
        total: Tensor | None = None,
        *,
        fresh: bool = False,
    ) -> None:
        self.whole_TD, self.weight_vD, self.job, self.wants = whole_TD, weight_vD, job, wants
        self.hidden = torch.empty_like(whole_TD) if wants[0] else None
        self.pending: Tensor | None = None
        self.weight, self.fresh = total, fresh
        # One chunk needs no wider sum: the GEMM itself adds up in at least float32.
        self.dtype = weight_vD.dtype if len(job.chunks) == 1 else torch.promote_types(weight_vD.dtype, torch.float32)

    def add(self, chunk: tuple[int, int], grad_Cv: Tensor) -> None:
        begin, end = chunk
        if self.hidden is not None:
            torch.mm(grad_Cv, self.weight_vD, out=self.hidden[begin:end])
            if end == self.whole_TD.shape[0]:
                # The sum over the group runs beside the last GEMM of the weight gradient.
                self.pending = self.job.start_sum(self.hidden)
        if self.wants[1]:
            x_CD = self.whole_TD[begin:end]
            dtype = self.dtype if self.weight is None else self.weight.dtype
            if not x_CD.is_cuda and dtype != x_CD.dtype:
                # No GEMM with a wider result here: widen what goes in, so that the chunks are not rounded one by one.
                grad_Cv, x_CD = grad_Cv.to(dtype), x_CD.to(dtype)
            if self.weight is None:
                self.weight = wide_product(grad_Cv, x_CD, self.dtype)
            else:
                (put_product_ if self.fresh else add_product_)(self.weight, grad_Cv, x_CD)
            self.fresh = False

    def hidden_sum(self) -> Tensor | None:
        """Complete gradient of the hidden states this rank holds."""
        return None if self.pending is None else wait(self.pending, self.job.group)


class _Recomputed(torch.autograd.Function):
    """Statistics in the forward, gradients from logits computed again in the backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight_vD: Tensor, target_T: Tensor, job: _FusedLinearJob) -> Any:
        labels = Labels.of(target_T, weight_vD.shape[0], job.maths.vocab_size, job.group.rank)
        whole_TD, valid = job.whole(hidden), job.valid(weight_vD)
        parts = [
            row_statistics(F.linear(whole_TD[begin:end], weight_vD), labels.column_T[begin:end], valid, job.maths)
            for begin, end in job.chunks
        ]
        result = combine(torch.cat(parts, 1), weight_vD.shape[0], job.maths, job.group)
        _save(ctx, hidden, weight_vD, labels, result, job)
        return torch.where(labels.counted_T, result.loss_T, 0.0), result.entropy_T

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (*_recompute_gradients(ctx, grads[0], grads[1]), None, None)


class _Precomputed(torch.autograd.Function):
    """Gradients in the forward; the backward scales them.

    Of a single chunk the gradient of the logits is kept and the weight's is one GEMM in the backward, which adds it where it belongs:
    over several chunks every one reads and writes a wide sum, and the backward once more.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight_vD: Tensor, target_T: Tensor, weights_T: Tensor, job: _FusedLinearJob) -> Any:
        labels = Labels.of(target_T, weight_vD.shape[0], job.maths.vocab_size, job.group.rank)
        whole_TD, valid = job.whole(hidden), job.valid(weight_vD)
        weights_T = torch.where(labels.counted_T, weights_T, 0.0).to(maths_dtype(hidden))
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        later = wants_weight and len(job.chunks) == 1
        gradients = _Gradients(whole_TD, weight_vD, job, (wants_hidden, wants_weight and not later))
        results: list[RowResult] = []
        factors: tuple[Tensor | None, Tensor | None] = None, None
        for begin, end in job.chunks:
            logits_Cv = F.linear(whole_TD[begin:end], weight_vD)
            column_C = labels.column_T[begin:end]
            part = combine(row_statistics(logits_Cv, column_C, valid, job.maths), weight_vD.shape[0], job.maths, job.group)
            results.append(part)
            to_gradient_(logits_Cv, column_C, valid, job.maths, part.log_norm_T, weights_T[begin:end])
            gradients.add((begin, end), logits_Cv)
            if later:
                factors = logits_Cv, whole_TD
            del logits_Cv  # before the next ones are made
        result = join_rows(results)
        loss_T = torch.where(labels.counted_T, result.loss_T, 0.0)
        made = (gradients.hidden_sum(), _in_dtype(gradients, job), *factors)
        _save(ctx, hidden, weight_vD, labels, result, job, loss_T, weights_T, *made)
        if result.entropy_T is not None:
            ctx.mark_non_differentiable(result.entropy_T)
        return loss_T * weights_T, result.entropy_T

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad_T: Tensor | None = grads[0]
        if grad_T is None:
            return None, None, None, None, None
        loss_T, weights_T, grad_hidden, grad_weight, grad_Tv, whole_TD = ctx.saved_tensors[6:]
        grad_weights = grad_T * loss_T if ctx.needs_input_grad[3] else None
        job: _FusedLinearJob = ctx.job
        alike = grad_T.numel() <= 1 or grad_T.stride() == (0,)
        if not alike and len(job.chunks) > 1:
            return (*_recompute_gradients(ctx, grad_T * weights_T, None), None, grad_weights, None)
        scale = (grad_T[:1] if alike else grad_T).unsqueeze(-1)
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        main_grad = job.main_grad
        if wants_weight and grad_Tv is not None:
            # The smaller factor is scaled, token by token if need be.
            x_TD = whole_TD * scale.to(whole_TD.dtype)
            grad_weight = grad_Tv.T @ x_TD if main_grad is None else main_grad.add_product(grad_Tv, x_TD)
            del x_TD
        elif wants_weight and main_grad is not None:
            grad_weight = main_grad.add_scaled(grad_weight, scale[0, 0])
        else:
            grad_weight = (grad_weight * scale.to(grad_weight.dtype)).to(ctx.saved_tensors[1].dtype) if wants_weight else None
        if not wants_hidden or grad_hidden is None:
            return None, grad_weight, None, grad_weights, None
        if job.sequence_parallel and not alike:
            scale = scale.chunk(job.group.size)[job.group.rank]
        return grad_hidden * scale.to(grad_hidden.dtype), grad_weight, None, grad_weights, None


def _save(
    ctx: Any, hidden: Tensor, weight_vD: Tensor, labels: Labels, result: RowResult, job: _FusedLinearJob, *more: Tensor | None
) -> None:
    ctx.save_for_backward(hidden, weight_vD, labels.column_T, labels.counted_T, result.log_norm_T, result.entropy_T, *more)
    ctx.job = job
    # A loss that nothing was made of arrives as None instead of zeros, and so does an entropy.
    ctx.set_materialize_grads(False)


def _recompute_gradients(ctx: Any, grad_T: Tensor | None, entropy_grad_T: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    hidden, weight_vD, column_T, counted_T, log_norm_T, entropy_T = ctx.saved_tensors[:6]
    job: _FusedLinearJob = ctx.job
    if grad_T is None and entropy_grad_T is None:
        return None, None
    grad_T = torch.zeros_like(log_norm_T) if grad_T is None else torch.where(counted_T, grad_T, 0.0).to(log_norm_T.dtype)
    arguments = (hidden, weight_vD, column_T, log_norm_T, grad_T, entropy_T, entropy_grad_T)
    wants_hidden, wants_weight = ctx.needs_input_grad[:2]
    if wants_weight and job.queue is not None:
        job.queue.put(functools.partial(_gradients, job, arguments, (False, True)))
        wants_weight = False
    return _gradients(job, arguments, (wants_hidden, wants_weight))


def _gradients(job: _FusedLinearJob, arguments: tuple[Any, ...], wants: tuple[bool, bool]) -> tuple[Tensor | None, Tensor | None]:
    hidden, weight_vD, column_T, log_norm_T, grad_T, entropy_T, entropy_grad_T = arguments
    if not any(wants):
        return None, None
    whole_TD, valid = job.whole(hidden), job.valid(weight_vD)
    main_grad = job.main_grad if wants[1] else None
    with contextlib.nullcontext((None, False)) if main_grad is None else main_grad.open_or_claim() as (total, fresh):
        gradients = _Gradients(whole_TD, weight_vD, job, wants, total, fresh=fresh)
        for begin, end in job.chunks:
            logits_Cv = F.linear(whole_TD[begin:end], weight_vD)
            part = [None if x is None else x[begin:end] for x in (log_norm_T, grad_T, entropy_T, entropy_grad_T)]
            assert part[0] is not None and part[1] is not None
            to_gradient_(logits_Cv, column_T[begin:end], valid, job.maths, part[0], part[1], part[2], part[3])
            gradients.add((begin, end), logits_Cv)
            del logits_Cv  # before the next ones are made
    own = None if main_grad is not None or gradients.weight is None else gradients.weight.to(weight_vD.dtype)
    return gradients.hidden_sum(), own


def _in_dtype(gradients: _Gradients, job: _FusedLinearJob) -> Tensor | None:
    """The weight gradient as it waits for the backward: rounded when autograd gets it, wide when a main gradient does."""
    if gradients.weight is None or job.main_grad is not None:
        return gradients.weight
    return gradients.weight.to(gradients.weight_vD.dtype)


@internal_api
def join_rows(results: list[RowResult]) -> RowResult:
    """Of chunks in order."""
    if len(results) == 1:
        return results[0]
    entropies = [result.entropy_T for result in results if result.entropy_T is not None]
    return RowResult(
        torch.cat([result.loss_T for result in results]),
        torch.cat([result.log_norm_T for result in results]),
        torch.cat(entropies) if entropies else None,
    )


@internal_api
def early_chunk(tokens: int, width: int, depth: int, itemsize: int) -> int:
    """Most tokens whose logits exist at a time where gradients are computed in the forward.

    A chunk more reads and writes the wide sum of the weight gradient, 4 v D bytes, once more, and the backward reads that and adds it; one
    chunk alone needs no such sum. So a chunk may take as much memory as the sum, and a single one as much as both.

    Args:
        tokens: T.
        width: v.
        depth: D.
        itemsize: bytes of a logit.
    """
    as_sum = depth * max(4, itemsize) // itemsize
    most = max(128, _CHUNK_LOGITS // width, as_sum)
    return max(1, tokens) if tokens <= most + as_sum else most


@internal_api
def token_chunks(tokens: int, width: int, chunk_tokens: int | None, most: int | None = None) -> tuple[tuple[int, int], ...]:
    """Even chunks, multiples of 128 where the size is ours to choose; at least one.

    Args:
        tokens: T.
        width: v.
        chunk_tokens: size of a chunk; None to choose one.
        most: largest size to choose; None for that of 2^28 logits.
    """
    most = max(128, _CHUNK_LOGITS // width) if most is None else most
    return tuple(_spans(tokens, chunk_tokens or _even(tokens, most))) or ((0, 0),)


def _even(tokens: int, most: int) -> int:
    count = max(1, -(-tokens // most))
    return -(-tokens // (128 * count)) * 128


def _spans(tokens: int, size: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, tokens, max(1, size)):
        yield begin, min(begin + size, tokens)

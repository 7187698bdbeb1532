# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Triton kernels of a router that learns: from logits to choice, weights and what losses need, and back; imported only when they run."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false, reportOperatorIssue=false

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# T tokens, E experts, K experts a token, C chunks of tokens.

MOST_EXPERTS = 1024
_TILE = 2048
"""Keys of a program."""
SCORES = {"softmax": 0, "sigmoid": 1, "sqrtsoftplus": 2}


@dataclass(frozen=True, kw_only=True)
class ChoiceSettings:
    """Fields as the arguments of ``choose_experts``."""

    topk: int
    score_function: str
    pre_softmax: bool
    scaling_factor: float | None

    @property
    def constants(self) -> dict[str, Any]:
        return {"TOPK": self.topk, "SCORE": SCORES[self.score_function], "PRE": self.pre_softmax}


def top(keys_TE: Tensor, topk: int) -> Tensor:
    """As ``_routing.top``, of float32 keys of at most ``MOST_EXPERTS`` experts, in one pass over them."""
    tokens, experts = keys_TE.shape
    top_TK = torch.empty((tokens, topk), dtype=torch.int64, device=keys_TE.device)
    if top_TK.numel():
        grid, sizes = _launch(tokens, experts)
        _top_kernel[grid](keys_TE.contiguous(), top_TK, tokens, experts, TOPK=topk, **sizes)
    return top_TK


class Choose(torch.autograd.Function):
    """Scores, choice and weights of ``choose_experts`` in one kernel, their gradients in another.

    Logits are float32 [T, E] of at most ``MOST_EXPERTS`` experts. Keys [T, E] choose in place of the scores, or the bias [E] is added to
    these; ``given_TK`` as ``experts_TK`` of ``choose_experts``. With ``sums``, of the valid tokens also [E] sums of the scores that losses
    are computed of, whose rows sum to 1, the sum of the squared log-sum-exp, and [E] int64 of how many chose each expert; else None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits_TE: Tensor,
        keys_TE: Tensor | None,
        bias_E: Tensor | None,
        given_TK: Tensor | None,
        valid_T: Tensor | None,
        settings: ChoiceSettings,
        sums: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
        logits_TE, (tokens, experts), device = logits_TE.contiguous(), logits_TE.shape, logits_TE.device
        chosen_TK = torch.empty((tokens, settings.topk), dtype=torch.int64, device=device)
        # A number that is no expert, or stands twice, weighs nothing: nobody looks at what is given.
        make = torch.empty if given_TK is None else torch.zeros
        probs_TK = make((tokens, settings.topk), dtype=torch.float32, device=device)
        grid, sizes = _launch(tokens, experts)
        # Scores, picks and squares of a chunk of tokens; whole numbers of picks are exact up to 2^24.
        parts_CW = torch.empty((*grid, 2 * experts + 1), dtype=torch.float32, device=device) if sums else None
        keys_TE = None if keys_TE is None else keys_TE.contiguous()
        given_TK = None if given_TK is None else given_TK.to(torch.int64).contiguous()
        if tokens:
            _choose_kernel[grid](
                logits_TE, keys_TE, bias_E, given_TK, _bytes(valid_T), chosen_TK, probs_TK, parts_CW,
                tokens, experts, settings.scaling_factor or 1.0, **settings.constants, **sizes,
            )  # fmt: skip
        ctx.save_for_backward(logits_TE, chosen_TK, valid_T)
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        if parts_CW is None:
            ctx.mark_non_differentiable(chosen_TK)
            return chosen_TK, probs_TK, None, None, None
        scores_E, picks_E, squares_1 = parts_CW.sum(0).split((experts, experts, 1))
        counts_E = picks_E.long()
        ctx.mark_non_differentiable(chosen_TK, counts_E)
        return chosen_TK, probs_TK, scores_E, squares_1.squeeze(0), counts_E

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        _, grad_probs_TK, grad_scores_E, grad_squares, _ = grads
        logits_TE, chosen_TK, valid_T = ctx.saved_tensors
        settings, (tokens, experts) = ctx.settings, logits_TE.shape
        grad_TE = torch.empty_like(logits_TE)
        grid, sizes = _launch(tokens, experts)
        if tokens:
            _choose_backward_kernel[grid](
                logits_TE, chosen_TK, _bytes(valid_T), _whole(grad_probs_TK), _whole(grad_scores_E), grad_squares, grad_TE,
                tokens, experts, settings.scaling_factor or 1.0, **settings.constants, **sizes,
            )  # fmt: skip
        return grad_TE, None, None, None, None, None, None


def _launch(tokens: int, experts: int) -> tuple[tuple[int], dict[str, int]]:
    width = triton.next_power_of_2(experts)
    chunk = max(1, _TILE // width)
    return (triton.cdiv(tokens, chunk),), {"WIDTH": width, "CHUNK": chunk, "num_warps": 4}


def _bytes(valid_T: Tensor | None) -> Tensor | None:
    return None if valid_T is None else valid_T.contiguous().view(torch.uint8)


def _whole(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else grad.float().contiguous()


@triton.constexpr_function
def unrolled(topk):
    """Picks that a loop over those of a token writes out: a compiler takes minutes for many, and few are faster so."""
    return topk if topk <= 16 else 1


@triton.jit
def _ranked(keys, inside, lane, WIDTH: tl.constexpr):
    """int64 in the order of the keys, of equal ones the lowest number highest; what is outside is below all."""
    # Integers in the order of the keys: both zeros are one, and what is no number comes first, as a sort has it.
    bits = tl.where(keys == 0.0, 0.0, keys).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    bits = tl.where(keys != keys, 0x7FFFFFFF, bits)
    return tl.where(inside, (bits.to(tl.int64) << 32) + (WIDTH - 1 - lane)[None, :], -0x8000000000000000)


@triton.jit
def _top_kernel(keys_ptr, top_ptr, tokens, experts, TOPK: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    lane = tl.arange(0, WIDTH)
    inside = (token < tokens)[:, None] & (lane < experts)[None, :]
    keys = tl.load(keys_ptr + token[:, None] * experts + lane[None, :], mask=inside, other=0.0)
    ranked = _ranked(keys, inside, lane, WIDTH)
    for block in range(0, TOPK, unrolled(TOPK)):
        for step in tl.static_range(unrolled(TOPK)):
            pick = block + step
            number = WIDTH - 1 - (tl.max(ranked, 1) & 0xFFFFFFFF)
            tl.store(top_ptr + token * TOPK + pick, number, mask=token < tokens)
            ranked = tl.where(number[:, None] == lane[None, :], -0x8000000000000000, ranked)


@triton.jit
def _softmax(logits, inside):
    """Softmax of the rows, and their log-sum-exp; lines without an element are not read by callers."""
    shifted = tl.where(inside, logits, -float("inf"))
    most = tl.max(shifted, 1)
    powers = tl.exp(shifted - most[:, None])
    total = tl.sum(powers, 1)
    return powers / total[:, None], most + tl.log(total)


@triton.jit
def own_scores(logits, inside, SCORE: tl.constexpr):
    """Of each expert by itself, 0 outside."""
    if SCORE == 1:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    elif SCORE == 2:
        # log(1 + e^x) without overflow, and precise for small e^x, too.
        power = tl.exp(-tl.abs(logits))
        u = 1.0 + power
        log = tl.where(u == 1.0, power, tl.log(u) * (power / tl.where(u == 1.0, 1.0, u - 1.0)))
        scores = tl.sqrt(tl.maximum(logits, 0.0) + log)
    else:
        scores = logits
    return tl.where(inside, scores, 0.0)


@triton.jit
def _weights(logits, scores, chosen, TOPK: tl.constexpr, SCORE: tl.constexpr, PRE: tl.constexpr):
    """Of the chosen experts before scaling, 0 of others, and what the scores were divided by."""
    divisor = tl.full((scores.shape[0],), 1.0, tl.float32)
    if SCORE == 0 and not PRE:
        weight, _ = _softmax(logits, chosen)
    else:
        weight = tl.where(chosen, scores, 0.0)
        if SCORE != 0 and TOPK > 1:
            divisor = tl.sum(weight, 1) + 1e-20
            weight = weight / divisor[:, None]
    return weight, divisor


@triton.jit
def _choose_kernel(
    logits_ptr, keys_ptr, bias_ptr, given_ptr, valid_ptr, chosen_ptr, probs_ptr, parts_ptr, tokens, experts, scaling,
    TOPK: tl.constexpr, SCORE: tl.constexpr, PRE: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0).to(tl.int64)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    lane = tl.arange(0, WIDTH)
    here = token < tokens
    inside = here[:, None] & (lane < experts)[None, :]
    at = token[:, None] * experts + lane[None, :]
    logits = tl.load(logits_ptr + at, mask=inside, other=0.0)
    if SCORE == 0 and PRE:
        scores, _ = _softmax(logits, inside)
    else:
        scores = own_scores(logits, inside, SCORE)
    if keys_ptr is not None:
        keys = tl.load(keys_ptr + at, mask=inside, other=0.0)
    elif bias_ptr is not None:
        keys = scores + tl.load(bias_ptr + lane, mask=lane < experts, other=0.0)[None, :]
    else:
        keys = scores
    ranked = _ranked(keys, inside, lane, WIDTH)
    fresh = here
    if given_ptr is not None:
        least = tl.full((CHUNK,), 0, tl.int64)
        for block in range(0, TOPK, unrolled(TOPK)):
            for step in tl.static_range(unrolled(TOPK)):
                pick = block + step
                least = tl.minimum(least, tl.load(given_ptr + token * TOPK + pick, mask=here, other=0))
        fresh = least < 0
    rank = tl.full((CHUNK, WIDTH), TOPK, tl.int32)
    for block in range(0, TOPK, unrolled(TOPK)):
        for step in tl.static_range(unrolled(TOPK)):
            pick = block + step
            number = WIDTH - 1 - (tl.max(ranked, 1) & 0xFFFFFFFF)
            if given_ptr is not None:
                number = tl.where(fresh, number, tl.load(given_ptr + token * TOPK + pick, mask=here, other=0))
            tl.store(chosen_ptr + token * TOPK + pick, number, mask=here)
            hit = number[:, None] == lane[None, :]
            rank = tl.where(hit, pick, rank)
            ranked = tl.where(hit, -0x8000000000000000, ranked)
    chosen = inside & (rank < TOPK)
    weight, _ = _weights(logits, scores, chosen, TOPK, SCORE, PRE)
    tl.store(probs_ptr + token[:, None] * TOPK + rank, weight * scaling, mask=chosen)
    if parts_ptr is not None:
        real = here
        if valid_ptr is not None:
            real = here & (tl.load(valid_ptr + token, mask=here, other=0) != 0)
        shares, log_sums = _softmax(logits, inside)
        if SCORE != 0:
            shares = scores / (tl.sum(scores, 1) + 1e-20)[:, None]
        parts = parts_ptr + chunk * (2 * experts + 1)
        tl.store(parts + lane, tl.sum(tl.where(real[:, None], shares, 0.0), 0), mask=lane < experts)
        picks = tl.sum((chosen & real[:, None]).to(tl.float32), 0)
        tl.store(parts + experts + lane, picks, mask=lane < experts)
        tl.store(parts + 2 * experts, tl.sum(tl.where(real, log_sums * log_sums, 0.0), 0))


@triton.jit
def _choose_backward_kernel(
    logits_ptr, chosen_ptr, valid_ptr, grad_probs_ptr, grad_shares_ptr, grad_squares_ptr, grad_ptr, tokens, experts, scaling,
    TOPK: tl.constexpr, SCORE: tl.constexpr, PRE: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    lane = tl.arange(0, WIDTH)
    here = token < tokens
    inside = here[:, None] & (lane < experts)[None, :]
    at = token[:, None] * experts + lane[None, :]
    logits = tl.load(logits_ptr + at, mask=inside, other=0.0)
    softmax, log_sums = _softmax(logits, inside)
    scores = own_scores(logits, inside, SCORE)
    # Of the scores of the experts by themselves (of softmax the logits), and of the logits.
    grad_scores = tl.zeros((CHUNK, WIDTH), tl.float32)
    grad = tl.zeros((CHUNK, WIDTH), tl.float32)
    if grad_probs_ptr is not None:
        grad_weight = tl.zeros((CHUNK, WIDTH), tl.float32)
        chosen = inside & (lane[None, :] < 0)
        for block in range(0, TOPK, unrolled(TOPK)):
            for step in tl.static_range(unrolled(TOPK)):
                pick = block + step
                number = tl.load(chosen_ptr + token * TOPK + pick, mask=here, other=-1)
                hit = number[:, None] == lane[None, :]
                each = tl.load(grad_probs_ptr + token * TOPK + pick, mask=here, other=0.0) * scaling
                grad_weight = tl.where(hit, each[:, None], grad_weight)
                chosen = chosen | (inside & hit)
        if SCORE == 0 and PRE:
            grad += softmax * (grad_weight - tl.sum(tl.where(inside, softmax * grad_weight, 0.0), 1)[:, None])
        else:
            weight, divisor = _weights(logits, scores, chosen, TOPK, SCORE, PRE)
            if SCORE != 0 and TOPK == 1:
                grad_scores += grad_weight
            else:
                inner = grad_weight - tl.sum(tl.where(chosen, weight * grad_weight, 0.0), 1)[:, None]
                if SCORE == 0:
                    grad += tl.where(chosen, weight * inner, 0.0)
                else:
                    grad_scores += tl.where(chosen, inner / divisor[:, None], 0.0)
    real = here
    if valid_ptr is not None:
        real = here & (tl.load(valid_ptr + token, mask=here, other=0) != 0)
    if grad_shares_ptr is not None:
        each = tl.load(grad_shares_ptr + lane, mask=lane < experts, other=0.0)[None, :]
        if SCORE == 0:
            inner = softmax * (each - tl.sum(tl.where(inside, softmax * each, 0.0), 1)[:, None])
            grad += tl.where(real[:, None], inner, 0.0)
        else:
            total = tl.sum(scores, 1) + 1e-20
            inner = (each - tl.sum(scores * each, 1)[:, None] / total[:, None]) / total[:, None]
            grad_scores += tl.where(real[:, None], inner, 0.0)
    if grad_squares_ptr is not None:
        grad += tl.where(real[:, None], 2.0 * tl.load(grad_squares_ptr) * log_sums[:, None] * softmax, 0.0)
    if SCORE == 1:
        grad += grad_scores * scores * (1.0 - scores)
    elif SCORE == 2:
        # It falls to 0 with the score, and is 0 where that underflows.
        slope = 1.0 / (2.0 * tl.where(scores == 0.0, 1.0, scores) * (1.0 + tl.exp(-logits)))
        grad += tl.where(scores == 0.0, 0.0, grad_scores * slope)
    tl.store(grad_ptr + at, grad, mask=inside)

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Softmax of attention scores: with a sink, and fused with scale and mask."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mcore_parallel._stability import experimental_api
from mcore_parallel.nn.attention._windows import get_sliding_window_causal_mask
from mcore_parallel.nn.kernels import has_kernel, softmax_kernels


class SoftmaxOne(nn.Module):
    """``exp(x_j) / (offset + sum_i exp(x_i))``: what is left to one is attention to nothing (Miller, 2023).

    The offset is a number, 1 by default, or the exponential of a logit for each head, as attention sinks learn it. A row of -inf
    gives zeros, with and without an offset.

    Args:
        denominator_offset: added to the denominator: a number, 0 or None for the usual softmax; or a tensor [A] of logits, one a
            head, whose exponentials are added. x is [..., A, sq, sk] then.
        dim: over which weights are normalised; the last one with a tensor.

    Raises:
        ValueError: a negative number; with a tensor, a ``dim`` other than the last one.

    Example:
        >>> SoftmaxOne()(torch.zeros(1, 3)).tolist()
        [[0.25, 0.25, 0.25]]
    """

    def __init__(self, denominator_offset: Tensor | float | None = 1.0, dim: int = -1) -> None:
        super().__init__()
        if isinstance(denominator_offset, Tensor):
            if dim != -1:
                raise ValueError(f"dim={dim} must be -1 when denominator_offset is a tensor with a logit a head")
        elif denominator_offset is not None and denominator_offset < 0:
            raise ValueError(f"denominator_offset={denominator_offset} must not be negative; give logits as a tensor")
        # A parameter belongs to the module that made it.
        self._offset = (denominator_offset,)
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        """Weights of the shape and dtype of ``x``, computed in float32 (float64 for float64)."""
        (offset,) = self._offset
        if isinstance(offset, Tensor):
            return softmax_with_sink(x, offset[:, None, None])
        if not offset:
            return softmax_with_sink(x, None, self.dim)
        return softmax_with_sink(x, x.new_full((), math.log(offset), dtype=_wide(x)), self.dim)


@experimental_api
def soft_cap(x: Tensor, cap: float) -> Tensor:
    """``cap * tanh(x / cap)``: near x where that is small, and never beyond the cap (Gemma 2, arXiv:2408.00118).

    Example:
        >>> soft_cap(torch.tensor([0.0, 1e9]), 30.0)
        tensor([ 0., 30.])
    """
    return torch.tanh(x / cap) * cap


def softmax_with_sink(x: Tensor, sink: Tensor | None, dim: int = -1) -> Tensor:
    """Softmax of ``x`` and one more logit, which broadcasts against it, without the weight of that one; a row of -inf gives zeros."""
    wide = x.to(_wide(x))
    highest = wide.detach().amax(dim, keepdim=True)
    if sink is not None:
        sink = sink.to(wide.dtype)
        highest = torch.maximum(highest, sink.detach())
    highest = highest.masked_fill(highest == float("-inf"), 0.0)
    weights = (wide - highest).exp()
    total = weights.sum(dim, keepdim=True)
    if sink is not None:
        total = total + (sink - highest).exp()
    return (weights / total.masked_fill(total == 0, 1.0)).to(x.dtype)


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


ATTN_MASK_TYPES = ("causal", "padding", "padding_causal", "no_mask")
_WIDEST_ROW = 16384
"""Keys that one program of the kernel holds."""


# B sequences, A heads, Q queries, K keys.
class FusedScaleMaskSoftmax(nn.Module):
    """``softmax(mask(scale * scores))`` over the keys, for attention that holds its scores.

    On a GPU one Triton kernel each way reads the scores once and makes causal mask and window itself; elsewhere, under compilation, with a
    ``mask_func`` or with offsets torch computes the same. A query that sees no key gets zeros. The last query stands at the last key.
    Attention without scores in memory is ``choose_attention``.

    Args:
        input_in_fp16: the weights are float16.
        input_in_bf16: the weights are bfloat16. With neither they have the dtype of the scores.
        attn_mask_type: "causal" or "padding_causal" hide later keys; "padding" and "no_mask" hide what the mask says only.
        scaled_masked_softmax_fusion: use the kernel where there is one.
        mask_func: (scores, mask) -> scores, in place of -inf where the mask is True.
        softmax_in_fp32: compute in float32; False computes in the dtype of the scores, and never in the kernel.
        scale: factor of the scores; None for 1.
        window_size: (left, right) keys that a query sees before and behind it, -1 for no limit; None for no window. Causal masks and given
            ones hide what they hide within the window, too.

    Raises:
        ValueError: both dtypes, an unknown mask type, a scale without float32, a window below -1.

    Example:
        >>> softmax = FusedScaleMaskSoftmax(window_size=(1, 0))
        >>> softmax(torch.zeros(1, 1, 3, 3))[0, 0].tolist()
        [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.0, 0.5, 0.5]]
    """

    def __init__(
        self,
        input_in_fp16: bool = False,
        input_in_bf16: bool = False,
        attn_mask_type: str = "causal",
        scaled_masked_softmax_fusion: bool = True,
        mask_func: Callable[[Tensor, Tensor], Tensor] | None = None,
        softmax_in_fp32: bool = True,
        scale: float | None = None,
        window_size: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        if input_in_fp16 and input_in_bf16:
            raise ValueError("input_in_fp16=True and input_in_bf16=True exclude one another; set one of them")
        if attn_mask_type not in ATTN_MASK_TYPES:
            raise ValueError(f"attn_mask_type={attn_mask_type!r} must be one of {', '.join(map(repr, ATTN_MASK_TYPES))}")
        if scale is not None and not softmax_in_fp32:
            raise ValueError(f"scale={scale} needs softmax_in_fp32=True, or the scaled scores would be rounded")
        if window_size is not None and (len(window_size) != 2 or min(window_size) < -1):
            raise ValueError(f"window_size={window_size} must be two numbers of tokens, or -1 for no limit")
        self.out_dtype = torch.float16 if input_in_fp16 else torch.bfloat16 if input_in_bf16 else None
        self.attn_mask_type, self.scaled_masked_softmax_fusion, self.mask_func = attn_mask_type, scaled_masked_softmax_fusion, mask_func
        self.softmax_in_fp32, self.scale, self.window_size = softmax_in_fp32, scale, window_size

    @property
    def bounds(self) -> tuple[int, int]:
        """(left, right) of what a query sees, the causal mask included; -1 for no limit."""
        left, right = (-1, -1) if self.window_size is None else self.window_size
        return left, 0 if "causal" in self.attn_mask_type else right

    def forward(self, input: Tensor, mask: Tensor | None = None, softmax_offset: Tensor | None = None) -> Tensor:
        """Scores [B, A, Q, K] -> weights of the same shape.

        Args:
            input: scores.
            mask: bool, broadcasts against the scores, True where a key is hidden; None for none.
            softmax_offset: [A] logit a head of a key without a value; None for none.

        Raises:
            ValueError: scores of other than four dims, a mask that is not bool.
        """
        if input.dim() != 4:
            raise ValueError(f"input has shape {tuple(input.shape)}; give scores [batch, heads, queries, keys]")
        if mask is not None and mask.dtype != torch.bool:
            raise ValueError(f"mask is {mask.dtype}; give bool, True where a key is hidden")
        out_dtype = input.dtype if self.out_dtype is None or not self.softmax_in_fp32 else self.out_dtype
        if self.has_kernel(input) and softmax_offset is None:
            scale = 1.0 if self.scale is None else self.scale
            return _ScaleMaskSoftmax.apply(input, mask, scale, self.bounds, out_dtype)
        return self._torch(input, mask, softmax_offset).to(out_dtype)

    def has_kernel(self, scores: Tensor) -> bool:
        """Whether the kernel computes these scores."""
        wanted = self.scaled_masked_softmax_fusion and self.softmax_in_fp32 and self.mask_func is None
        return wanted and has_kernel(scores) and 0 < scores.shape[-1] <= _WIDEST_ROW

    def _torch(self, scores: Tensor, mask: Tensor | None, softmax_offset: Tensor | None) -> Tensor:
        if self.softmax_in_fp32 and scores.dtype != torch.float64:
            scores = scores.float()
        if self.scale is not None:
            scores = scores * self.scale
        if self.bounds != (-1, -1):
            hidden = get_sliding_window_causal_mask(*scores.shape[-2:], self.bounds, scores.device)
            mask = hidden if mask is None else mask | hidden
        if mask is not None:
            scores = scores.masked_fill(mask, float("-inf")) if self.mask_func is None else self.mask_func(scores, mask)
        return softmax_with_sink(scores, None if softmax_offset is None else softmax_offset[:, None, None])


class _ScaleMaskSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, mask: Tensor | None, scale: float, bounds: tuple[int, int], out_dtype: torch.dtype) -> Tensor:
        weights = softmax_kernels().scale_mask_softmax(scores.contiguous(), mask, scale, bounds, out_dtype)
        ctx.save_for_backward(weights)
        ctx.scale, ctx.dtype = scale, scores.dtype
        return weights

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (weights,) = ctx.saved_tensors
        return softmax_kernels().scale_mask_softmax_backward(grads[0].contiguous(), weights, ctx.scale, ctx.dtype), None, None, None, None

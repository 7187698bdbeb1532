# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Activations of feed-forward layers; those ending in "glu" have a gate."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_parallel.nn.kernels import activation_kernels, has_kernel, unit_stride
from mcore_parallel.tensor_parallel import aligned_rows, each_row, has_row_kernels

# N rows, F width of the result, W width of the input: 2 F with a gate, gates first, else F.

_E4M3_LARGEST = 448.0


def swiglu(gate: Tensor, value: Tensor) -> Tensor:
    """``silu(gate) * value`` (Shazeer, 2020)."""
    return F.silu(gate) * value


def geglu(gate: Tensor, value: Tensor) -> Tensor:
    """``gelu(gate) * value`` with the exact gelu."""
    return F.gelu(gate) * value


def squared_relu(x: Tensor) -> Tensor:
    """``max(x, 0)^2`` (So et al., 2021)."""
    return F.relu(x).square()


def quick_gelu(x: Tensor) -> Tensor:
    """``x * sigmoid(1.702 x)``, the sigmoid approximation of gelu."""
    return x * torch.sigmoid(1.702 * x)


def quick_geglu(gate: Tensor, value: Tensor, *, offset: float = 0.0, clamp: float | None = None) -> Tensor:
    """``quick_gelu(gate) * (value + offset)``.

    Args:
        gate: any shape.
        value: same shape.
        offset: added to the value.
        clamp: when given, gate is cut to at most clamp and value to [-clamp, clamp] before; no gradient flows where it cuts.
    """
    if clamp is not None:
        gate = gate.clamp(max=clamp)
        value = value.clamp(min=-clamp, max=clamp)
    return quick_gelu(gate) * (value + offset)


def weighted_swiglu(gate: Tensor, value: Tensor, weights: Tensor, *, fp8_input_store: bool = False) -> Tensor:
    """``swiglu`` of [N, F] times a weight a row, [N] or [N, 1]; as ``Activation`` does it, for inputs that come as two tensors."""
    return Activation(name="swiglu", fp8_input_store=fp8_input_store)(torch.cat((gate, value), dim=-1), weights=weights)


def weighted_quick_geglu(
    gate: Tensor,
    value: Tensor,
    weights: Tensor,
    *,
    offset: float = 0.0,
    clamp: float | None = None,
    fp8_input_store: bool = False,
) -> Tensor:
    """``quick_geglu`` of [N, F] times a weight a row, [N] or [N, 1]; as ``Activation`` does it, for inputs that come as two tensors."""
    activation = Activation(name="quick_geglu", offset=offset, clamp=clamp, fp8_input_store=fp8_input_store)
    return activation(torch.cat((gate, value), dim=-1), weights=weights)


class _Curve(NamedTuple):
    """A function of one number."""

    value: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]
    """Gradient of the result and input -> gradient of the input."""


def _quick_gelu_backward(grad: Tensor, x: Tensor) -> Tensor:
    share = torch.sigmoid(1.702 * x)
    return grad * share * (1 + 1.702 * x * (1 - share))


_CURVES = {
    "silu": _Curve(F.silu, lambda grad, x: torch.ops.aten.silu_backward(grad, x)),
    "gelu": _Curve(F.gelu, lambda grad, x: torch.ops.aten.gelu_backward(grad, x)),
    "gelu_tanh": _Curve(lambda x: F.gelu(x, approximate="tanh"), lambda grad, x: torch.ops.aten.gelu_backward(grad, x, approximate="tanh")),
    "quick_gelu": _Curve(quick_gelu, _quick_gelu_backward),
    "relu": _Curve(F.relu, lambda grad, x: grad * (x > 0)),
    "squared_relu": _Curve(squared_relu, lambda grad, x: 2 * grad * F.relu(x)),
}
_GATED = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "quick_geglu": "quick_gelu"}

ACTIVATIONS = (*_GATED, *_CURVES)
"""Names that ``Activation`` knows."""


@dataclass(frozen=True, kw_only=True)
class Activation:
    """An activation by its name, with bias, weight and gradient in one kernel each way on a GPU; in torch code elsewhere.

    Computed in float32 or wider; the result has the dtype of the input. Only the input is kept for the backward.

    Raises:
        ValueError: an unknown name, or options of a gate without one.

    Example:
        >>> Activation(name="swiglu")(torch.zeros(3, 8)).shape
        torch.Size([3, 4])
    """

    name: str
    """"swiglu", "geglu", "geglu_tanh", "quick_geglu", or without a gate "gelu", "gelu_tanh", "quick_gelu", "relu", "silu",
    "squared_relu"."""
    offset: float = 0.0
    """Added to the value, beside the gate."""
    clamp: float | None = None
    """Gates are cut to at most clamp and values to [-clamp, clamp]; no gradient flows where it cuts."""
    fp8_input_store: bool = False
    """Keep the input for the backward as e4m3 with a float32 factor a row; under ``torch.compile`` the compiler chooses what to keep."""
    batch_invariant: bool = False
    """Compute every row as if it were alone, so that its bits do not depend on the others; rows without bias."""

    def __post_init__(self) -> None:
        if self.name not in ACTIVATIONS:
            raise ValueError(f"activation={self.name!r} must be one of {', '.join(ACTIVATIONS)}")
        if not self.gated and (self.offset or self.clamp is not None):
            raise ValueError(
                f"activation={self.name!r} has no gate, but glu_linear_offset={self.offset}, "
                f"activation_func_clamp_value={self.clamp}; leave them at 0.0 and None"
            )
        if self.clamp is not None and not self.clamp > 0.0:
            raise ValueError(f"activation_func_clamp_value={self.clamp} must be positive")

    @property
    def gated(self) -> bool:
        """Whether the input is twice as wide as the result, gates first."""
        return self.name in _GATED

    @property
    def curve(self) -> str:
        """Name of the function of the gate, or of the whole."""
        return _GATED.get(self.name, self.name)

    def __call__(self, x: Tensor, bias: Tensor | None = None, weights: Tensor | None = None, *, num_rows: Tensor | None = None) -> Tensor:
        """[..., W] -> [..., F].

        Args:
            x: gates and values behind one another, or without a gate just the input.
            bias: added to x before; [W], or any shape that broadcasts to x.
            weights: of the rows, [...] or [..., 1] in any float dtype; they multiply the result.
            num_rows: one int32 on the device: results and gradients of the rows from there on may hold anything, and kernels leave them
                out. None for all rows.

        Raises:
            ValueError: an odd width with a gate, or weights of another shape.
        """
        if self.gated and x.shape[-1] % 2:
            raise ValueError(f"{self.name} takes gates and values, so the last dim of x {tuple(x.shape)} must be even")
        if weights is not None and tuple(weights.shape) not in (tuple(x.shape[:-1]), (*x.shape[:-1], 1)):
            raise ValueError(f"weights {tuple(weights.shape)} must have one number a row of x {tuple(x.shape)}")
        if bias is not None and tuple(bias.shape) != (x.shape[-1],):
            x, bias = (x + bias).to(x.dtype), None
        rows = x.reshape(-1, x.shape[-1])
        rows = aligned_rows(rows) if self.batch_invariant else rows
        if self.batch_invariant and bias is None and not has_row_kernels(x):
            y = self._each_row(rows, weights)
            return y.view(*x.shape[:-1], y.shape[-1])
        # Triton knows e4m3 from Ada on.
        kernels = has_kernel(x) and not (self.fp8_input_store and torch.cuda.get_device_capability(x.device) < (8, 9))
        y = self.run(rows, bias, None if weights is None else weights.reshape(-1), kernels, num_rows)
        return y.view(*x.shape[:-1], y.shape[-1])

    def _each_row(self, x_NW: Tensor, weights: Tensor | None) -> Tensor:
        """``run`` of every row by itself, without kernels."""
        if weights is None:
            return each_row(lambda part: self.run(part, None, None, False), x_NW)
        # Rows and their weights beside one another, in a dtype that holds both.
        wide = torch.promote_types(torch.promote_types(x_NW.dtype, torch.float32), weights.dtype)
        whole = torch.cat((x_NW.to(wide), weights.reshape(-1, 1).to(wide)), dim=-1)
        return each_row(lambda part: self.run(part[:, :-1], None, part[:, -1], False), whole).to(x_NW.dtype)

    def run(self, x_NW: Tensor, bias_W: Tensor | None, weights_N: Tensor | None, kernels: bool, num_rows: Tensor | None = None) -> Tensor:
        """``__call__`` on rows, with the kernels or without."""
        cut = (self.curve, self.gated, self.offset, self.clamp)
        if torch.compiler.is_compiling():
            # A compiler fuses the formula and chooses itself what to keep.
            return _forward(_wide(x_NW, None, bias_W), weights_N, *cut).to(x_NW.dtype)
        return _Activate.apply(x_NW, bias_W, weights_N, *cut, self.fp8_input_store, kernels, num_rows)


@dataclass(frozen=True, kw_only=True)
class RecomputedActivation:
    """An activation whose backward recomputes its result beside the gradient, so that only its input is saved.

    Conforms to ``RecomputedInput``.
    """

    activation: Activation
    kernels: bool
    """Use them; they are there."""

    def forward(self, source: Tensor) -> Tensor:
        """[N, W] -> [N, F]."""
        return self.activation.run(source, None, None, self.kernels)

    def backward(self, grad_TI: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient [N, F] -> gradient [N, W], and the result in the memory of ``grad_TI``."""
        a = self.activation
        if self.kernels:
            options: dict[str, Any] = {"curve": a.curve, "gated": a.gated, "offset": a.offset, "clamp": a.clamp}
            grad_x_NW, _ = activation_kernels().activate_backward(grad_TI, unit_stride(source), None, None, None, again=True, **options)
            return grad_x_NW, grad_TI
        wide_NW = _wide(source, None, None)
        grad_x_NW, _ = _backward(_wide(grad_TI, None, None), wide_NW, None, a.curve, a.gated, a.offset, a.clamp)
        return grad_x_NW.to(grad_TI.dtype), self.forward(source)


class _Activate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_NW: Tensor,
        bias_W: Tensor | None,
        weights_N: Tensor | None,
        curve: str,
        gated: bool,
        offset: float,
        clamp: float | None,
        fp8_input_store: bool,
        kernels: bool,
        num_rows: Tensor | None,
    ) -> Tensor:
        ctx.options, ctx.kernels, ctx.num_rows = (curve, gated, offset, clamp), kernels, num_rows
        scale_N, stores = None, fp8_input_store and any(ctx.needs_input_grad)
        if kernels:
            x_NW, options = unit_stride(x_NW), {"curve": curve, "gated": gated, "offset": offset, "clamp": clamp}
            if stores:
                y_NF, x_NW, scale_N = activation_kernels().activate_and_store(x_NW, bias_W, weights_N, _E4M3_LARGEST, **options)
            else:
                y_NF = activation_kernels().activate(x_NW, bias_W, weights_N, num_rows=num_rows, **options)
        else:
            y_NF = _forward(_wide(x_NW, None, bias_W), weights_N, *ctx.options).to(x_NW.dtype)
            if stores:
                x_NW, scale_N = quantize_rows(x_NW)
        ctx.save_for_backward(x_NW, scale_N, bias_W, weights_N)
        return y_NF

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x_NW, scale_N, bias_W, weights_N = ctx.saved_tensors
        curve, gated, offset, clamp = ctx.options
        if ctx.kernels:
            options = {"curve": curve, "gated": gated, "offset": offset, "clamp": clamp, "num_rows": ctx.num_rows}
            grad_x_NW, grad_weights_N = activation_kernels().activate_backward(
                unit_stride(grads[0]), x_NW, scale_N, bias_W, weights_N, **options
            )
        else:
            grad_NF = grads[0] if grads[0].dtype == torch.float64 else grads[0].float()
            grad_x_NW, grad_weights_N = _backward(grad_NF, _wide(x_NW, scale_N, bias_W), weights_N, *ctx.options)
        grad_bias_W = None
        if bias_W is not None and ctx.needs_input_grad[1]:
            grad_bias_W = grad_x_NW.sum(0, dtype=torch.promote_types(grad_x_NW.dtype, torch.float32)).to(bias_W.dtype)
        if weights_N is not None and grad_weights_N is not None:
            grad_weights_N = grad_weights_N.to(weights_N.dtype)
        return grad_x_NW.to(grads[0].dtype), grad_bias_W, grad_weights_N, None, None, None, None, None, None, None


def quantize_rows(x_NW: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 [N, W] and the float32 factor a row [N] that its largest magnitude needs, so that none saturates."""
    scale_N = x_NW.abs().amax(-1).float() / _E4M3_LARGEST if x_NW.numel() else x_NW.new_ones(x_NW.shape[0], dtype=torch.float32)
    # A row of zeros, or of numbers too small for a factor.
    scale_N = torch.where(scale_N > 1e-30, scale_N, 1.0)
    return (x_NW / scale_N[:, None]).to(torch.float8_e4m3fn), scale_N


def _wide(x_NW: Tensor, scale_N: Tensor | None, bias_W: Tensor | None) -> Tensor:
    """The input in float32 or wider, as it was before it was narrowed, with the bias."""
    x_NW = x_NW if x_NW.dtype == torch.float64 else x_NW.float()
    if scale_N is not None:
        x_NW = x_NW * scale_N[:, None]
    return x_NW if bias_W is None else x_NW + bias_W


def _forward(x_NW: Tensor, weights_N: Tensor | None, curve: str, gated: bool, offset: float, clamp: float | None) -> Tensor:
    if not gated:
        y_NF = _CURVES[curve].value(x_NW)
    else:
        gate_NF, value_NF = _cut(x_NW, clamp)
        y_NF = _CURVES[curve].value(gate_NF) * (value_NF + offset if offset else value_NF)
    return y_NF if weights_N is None else y_NF * weights_N[:, None]


def _backward(
    grad_NF: Tensor, x_NW: Tensor, weights_N: Tensor | None, curve: str, gated: bool, offset: float, clamp: float | None
) -> tuple[Tensor, Tensor | None]:
    grad_weights_N = None
    if weights_N is not None:
        grad_weights_N = (grad_NF * _forward(x_NW, None, curve, gated, offset, clamp)).sum(-1)
        grad_NF = grad_NF * weights_N[:, None]
    if not gated:
        return _CURVES[curve].backward(grad_NF, x_NW), grad_weights_N
    gate_NF, value_NF = _cut(x_NW, clamp)
    grad_value_NF = grad_NF * _CURVES[curve].value(gate_NF)
    grad_gate_NF = _CURVES[curve].backward(grad_NF * (value_NF + offset if offset else value_NF), gate_NF)
    if clamp is not None:
        raw_gate_NF, raw_value_NF = x_NW.chunk(2, dim=-1)
        grad_gate_NF = grad_gate_NF.masked_fill(raw_gate_NF > clamp, 0.0)
        grad_value_NF = grad_value_NF.masked_fill(raw_value_NF.abs() > clamp, 0.0)
    return torch.cat((grad_gate_NF, grad_value_NF), dim=-1), grad_weights_N


def _cut(x_NW: Tensor, clamp: float | None) -> tuple[Tensor, Tensor]:
    """Gates and values."""
    gate_NF, value_NF = x_NW.chunk(2, dim=-1)
    return (gate_NF, value_NF) if clamp is None else (gate_NF.clamp(max=clamp), value_NF.clamp(min=-clamp, max=clamp))

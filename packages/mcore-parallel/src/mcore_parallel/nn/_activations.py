# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Activations of feed-forward layers; "glu" ones take gate and value as two tensors."""

import torch
import torch.nn.functional as F
from torch import Tensor


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


def weighted_quick_geglu(gate: Tensor, value: Tensor, weights: Tensor, *, offset: float = 0.0, clamp: float | None = None) -> Tensor:
    """``quick_geglu`` of [N, F] times a weight a row, [N, 1] or [N, F]; the result has the dtype of gate."""
    return (quick_geglu(gate, value, offset=offset, clamp=clamp) * weights).to(gate.dtype)

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What is asked of an attention core."""

from dataclasses import dataclass

import torch

SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """One layer's attention without its parameters, as ``choose_attention`` needs to know it.

    Raises:
        ValueError: heads that do not divide, a scale that is not positive, a window below -1 or one that sees ahead in causal attention, an
            unknown softmax type.

    Example:
        >>> AttentionSpec(num_heads=8, num_kv_heads=2, head_dim=64, window=(128, 0)).bounds
        (128, 0)
    """

    num_heads: int
    """Query heads of a tp rank."""
    num_kv_heads: int
    """Key-value heads of a tp rank."""
    head_dim: int
    """Width of queries and keys."""
    value_dim: int | None = None
    """Width of values; None for ``head_dim``."""
    causal: bool = True
    window: tuple[int, int] | None = None
    """(left, right) tokens that a query sees before and behind it, -1 for no limit."""
    softmax_type: str = "vanilla"
    """"vanilla", "off-by-one", or "learnable": the core takes ``sink=``, a logit a head."""
    softmax_scale: float | None = None
    """Factor of the scores, above 0; None for 1 / sqrt(head_dim)."""
    packed: bool = False
    """Whether steps with ``cu_seqlens`` will come."""
    training: bool = True
    """Whether there will be a backward."""
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"
    """Type of the device."""

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads={self.num_kv_heads} must divide num_heads={self.num_heads}")
        if self.softmax_scale is not None and not self.softmax_scale > 0:
            raise ValueError(f"softmax_scale={self.softmax_scale} must be above 0")
        if self.softmax_type not in SOFTMAX_TYPES:
            raise ValueError(f"softmax_type={self.softmax_type!r} must be one of {', '.join(map(repr, SOFTMAX_TYPES))}")
        if self.window is None:
            return
        left, right = self.window
        if min(left, right) < -1:
            raise ValueError(f"window_size={self.window} must be two numbers of tokens, or -1 for no limit")
        if self.causal and right > 0:
            raise ValueError(
                f"window_size={self.window} sees {right} tokens ahead, but attention is causal; give ({left}, 0), or causal=False"
            )

    @property
    def bounds(self) -> tuple[int, int]:
        """(left, right) of what a query sees, the causal mask included; -1 for no limit."""
        left, right = (-1, -1) if self.window is None else self.window
        return left, 0 if self.causal else right

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale

    @property
    def width(self) -> int:
        """Of values."""
        return self.head_dim if self.value_dim is None else self.value_dim

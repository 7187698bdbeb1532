# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Rotary position embedding: each pair of channels turns with the position."""

import torch
from torch import Tensor

# T tokens, A heads, d width of a head.


def rotary_frequencies(head_dim: int, base: float = 10_000.0, device: torch.device | str | None = None) -> Tensor:
    """Angle a position, [d / 2] float32: ``base^(-2 i / d)`` (Su et al., 2021).

    Raises:
        ValueError: an odd head_dim.
    """
    if head_dim % 2:
        raise ValueError(f"head_dim={head_dim} must be even for rotary embedding; set kv_channels")
    return base ** -(torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)


def rotary_tables(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of every token's angles.

    Channel i pairs with channel i + d / 2 (the layout of Llama weights as Hugging Face stores them), so the
    d / 2 angles are repeated once.

    Args:
        positions: [T] integers.
        frequencies: [d / 2].

    Returns:
        Two float32 tensors [T, d].
    """
    angles = positions.to(frequencies.dtype)[:, None] * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def apply_rotary(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the heads of ``x`` [T, A, d] by the tables of ``rotary_tables``; computed in float32 or wider, same dtype out."""
    cos, sin = (table[:, None] for table in tables)
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)

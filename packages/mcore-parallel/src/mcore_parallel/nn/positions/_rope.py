# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Rotary position embedding: each pair of channels turns with the position."""

import torch
from torch import Tensor

from mcore_parallel.nn.kernels import fused_rotary, fused_split_rotary, has_kernel

# T tokens, A heads, K of them with keys and values, d width of a head, D of its channels turn.


def rotary_frequencies(head_dim: int, base: float = 10_000.0, device: torch.device | str | None = None) -> Tensor:
    """Angle a position, [D / 2] float32: ``base^(-2 i / D)`` (Su et al., 2021) of ``head_dim`` = D channels.

    Raises:
        ValueError: an odd head_dim.
    """
    if head_dim % 2:
        raise ValueError(f"head_dim={head_dim} must be even for rotary embedding; set kv_channels")
    return base ** -(torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)


def rotary_angles(positions: Tensor, frequencies: Tensor, *, interleaved: bool = False) -> Tensor:
    """Angle of every channel, [T, D] float32.

    Channel i pairs with channel i + D / 2 (the layout of Llama weights as Hugging Face stores them), so the D / 2 angles are
    repeated once; interleaved, channel 2 i pairs with 2 i + 1.

    Args:
        positions: [T].
        frequencies: [D / 2].
        interleaved: neighbours are pairs.
    """
    return paired(positions.to(frequencies.dtype)[:, None] * frequencies, interleaved=interleaved)


def paired(angles: Tensor, *, interleaved: bool) -> Tensor:
    """[T, D / 2] angles of pairs -> [T, D] angles of channels."""
    return angles.repeat_interleave(2, dim=-1) if interleaved else torch.cat((angles, angles), dim=-1)


def rotary_tables(positions: Tensor, frequencies: Tensor, *, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """cos and sin of ``rotary_angles``: two float32 tensors [T, D]."""
    angles = rotary_angles(positions, frequencies, interleaved=interleaved)
    return angles.cos(), angles.sin()


def apply_rotary(x: Tensor, tables: tuple[Tensor, Tensor], *, interleaved: bool = False) -> Tensor:
    """Turn the first D channels of the heads of ``x`` [T, A, d] by tables [T, D]; the others pass through.

    Computed in float32 or wider, same dtype out. On a GPU it is one kernel each way.

    Args:
        x: queries or keys; any strides.
        tables: of ``rotary_tables``, made with the same ``interleaved``.
        interleaved: channel 2 i pairs with 2 i + 1 in place of i + D / 2.
    """
    if has_kernel(x):
        return fused_rotary(x, tables, interleaved=interleaved)
    cos, sin = (table[:, None] for table in tables)
    width = cos.shape[-1]
    if width < x.shape[-1]:
        turned = apply_rotary(x[..., :width], tables, interleaved=interleaved)
        return torch.cat((turned, x[..., width:]), dim=-1)
    if interleaved:
        crossed = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    else:
        first, second = x.chunk(2, dim=-1)
        crossed = torch.cat((-second, first), dim=-1)
    return (x * cos + crossed * sin).to(x.dtype)


def split_rotary(qkv: Tensor, tables: tuple[Tensor, Tensor], *, interleaved: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Packed projection [T, K, A / K + 2, d] -> queries [T, A, d] and keys [T, K, d], turned, and values [T, K, d].

    As ``apply_rotary`` does it; on a GPU it is one kernel each way.

    Args:
        qkv: by key-value head: its queries, its key, its value.
        tables: as of ``apply_rotary``.
        interleaved: as of ``apply_rotary``.
    """
    if has_kernel(qkv):
        return fused_split_rotary(qkv, tables, interleaved=interleaved)
    q, k, v = qkv[:, :, :-2].flatten(1, 2), qkv[:, :, -2], qkv[:, :, -1]
    return apply_rotary(q, tables, interleaved=interleaved), apply_rotary(k, tables, interleaved=interleaved), v

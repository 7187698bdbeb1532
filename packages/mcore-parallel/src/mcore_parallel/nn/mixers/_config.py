# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Sizes of the linear mixers."""

from dataclasses import dataclass
from typing import Any

from mcore_parallel._field_types import check_field_types


@dataclass(frozen=True, kw_only=True)
class MambaConfig:
    """Of a Mamba-2 mixer (Dao and Gu, 2024).

    Raises:
        ValueError: a size below 1, limits in the wrong order.
    """

    state_dim: int = 128
    head_dim: int = 64
    num_groups: int = 8
    num_heads: int | None = None
    """None for expand * hidden_size / head_dim."""
    expand: int = 2
    conv_kernel: int = 4
    chunk_size: int = 128
    use_conv_bias: bool = True
    dt_limits: tuple[float, float] = (0.0, float("inf"))
    """Step sizes are cut to this range after the softplus."""

    def __post_init__(self) -> None:
        _at_least_one(self, "state_dim", "head_dim", "num_groups", "expand", "conv_kernel", "chunk_size")
        if self.num_heads is not None and self.num_heads < 1:
            raise ValueError(f"num_heads={self.num_heads} must be at least 1; leave it out for expand * hidden_size / head_dim")
        if not 0.0 <= self.dt_limits[0] <= self.dt_limits[1]:
            raise ValueError(f"dt_limits={self.dt_limits} must rise from at least 0")

    def heads(self, hidden_size: int) -> int:
        """Number of heads for a model of that width.

        Raises:
            ValueError: ``head_dim`` does not divide the inner width, ``num_groups`` not the heads.
        """
        if self.num_heads is None and self.expand * hidden_size % self.head_dim:
            raise ValueError(
                f"head_dim={self.head_dim} must divide expand * hidden_size = {self.expand * hidden_size}; change it or set num_heads"
            )
        heads = self.num_heads or self.expand * hidden_size // self.head_dim
        if heads % self.num_groups:
            raise ValueError(f"num_groups={self.num_groups} must divide num_heads={heads}; lower num_groups")
        return heads


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNetConfig:
    """Of a gated delta net mixer (Yang et al., 2024).

    Raises:
        ValueError: a size below 1, key heads that do not divide the value heads.
    """

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int = 128
    value_head_dim: int = 128
    conv_kernel: int = 4
    chunk_size: int = 64

    def __post_init__(self) -> None:
        _at_least_one(self, "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel", "chunk_size")
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(f"num_key_heads={self.num_key_heads} must divide num_value_heads={self.num_value_heads}; lower num_key_heads")


def _at_least_one(config: Any, *names: str) -> None:
    check_field_types(config)
    for name in names:
        if getattr(config, name) < 1:
            raise ValueError(f"{name}={getattr(config, name)} must be at least 1")

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Where a token stands: rotary embeddings with their scalings, and learned positions."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mcore_parallel._stability import internal_api
from mcore_parallel.context_parallel import zigzag_indices
from mcore_parallel.groups import Group, ProcessGroups, ShardSpec
from mcore_parallel.nn.positions._rope import paired, rotary_angles, rotary_frequencies
from mcore_parallel.nn.positions._scaling import Llama3Scaling, YarnScaling


# T tokens, D channels of a head that turn, C components of a position.
@dataclass(frozen=True, kw_only=True)
class RotaryConfig:
    """How heads turn with the position; pure numbers, from which every step makes its tables.

    Raises:
        ValueError: a width that does not fit, or numbers out of range.

    Example:
        >>> cos, sin = RotaryConfig(width=4).tables(torch.arange(3))
        >>> cos.shape
        torch.Size([3, 4])
    """

    width: int
    """D; the other channels of a head pass through."""
    base: float = 10_000.0
    interleaved: bool = False
    """Channel 2 i pairs with 2 i + 1 in place of i + D / 2."""
    interpolation_factor: float | None = None
    """Positions are divided by it."""
    scaling: Llama3Scaling | YarnScaling | None = None
    sections: tuple[int, ...] | None = None
    """Frequencies that follow each of C components of a position; None for positions of one component."""

    def __post_init__(self) -> None:
        if self.width < 2 or self.width % 2:
            raise ValueError(f"rotary width={self.width} must be even and at least 2; set kv_channels or rotary_percent")
        if not self.base > 1.0:
            raise ValueError(f"rotary_base={self.base} must exceed 1")
        if self.interpolation_factor is not None and not self.interpolation_factor > 0.0:
            raise ValueError(f"seq_len_interpolation_factor={self.interpolation_factor} must be positive")
        if self.sections is not None and (min(self.sections, default=0) < 1 or sum(self.sections) != self.width // 2):
            raise ValueError(f"mrope_section={self.sections} must be positive and add up to half the rotary width, {self.width // 2}")

    @property
    def concentration(self) -> float:
        """Factor of cos and sin; 1 without YaRN."""
        return self.scaling.concentration if isinstance(self.scaling, YarnScaling) else 1.0

    def frequencies(self, device: torch.device | str | None = None) -> Tensor:
        """Angle a position of each pair of channels, [D / 2] float32."""
        frequencies = rotary_frequencies(self.width, self.base, device)
        if isinstance(self.scaling, YarnScaling):
            return self.scaling.scaled(frequencies, self.base)
        return frequencies if self.scaling is None else self.scaling.scaled(frequencies)

    def angles(self, positions: Tensor) -> Tensor:
        """Angle of every channel, [T, D] float32.

        Args:
            positions: [T], or [C, T] with ``sections``; [T] then stands for C equal components.

        Raises:
            ValueError: positions of another shape.
        """
        frequencies = self.frequencies(positions.device)
        if self.interpolation_factor is not None:
            positions = positions / self.interpolation_factor
        if positions.dim() == 1:
            return rotary_angles(positions, frequencies, interleaved=self.interleaved)
        if self.sections is None or positions.dim() != 2 or positions.shape[0] != len(self.sections):
            wanted = "[T]" if self.sections is None else f"[T] or [{len(self.sections)}, T]"
            raise ValueError(f"positions of shape {tuple(positions.shape)} must be {wanted} for mrope_section={self.sections}")
        parts = [row[:, None].expand(-1, count) for row, count in zip(positions.to(frequencies.dtype), self.sections, strict=True)]
        return paired(torch.cat(parts, dim=-1) * frequencies, interleaved=self.interleaved)

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of ``angles``, times the concentration; what ``Step.rotary`` holds."""
        angles = self.angles(positions)
        cos, sin = angles.cos(), angles.sin()
        factor = self.concentration
        return (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)


class RotaryEmbedding(nn.Module):
    """Angles of the positions of one sequence, without parameters or buffers.

    Args:
        kv_channels: width of a head.
        rotary_percent: share of it that turns.
        rotary_interleaved: channel 2 i pairs with 2 i + 1.
        seq_len_interpolation_factor: positions are divided by it.
        rotary_base: of the frequencies.
        rope_scaling: change the frequencies as Llama 3.1 does.
        rope_scaling_factor: of that change.
        use_cpu_initialization: make the angles on the CPU.
        cp_group: each rank gets the angles of its share of the tokens; None for all of them.
        device: of the angles; None for torch's default one.

    Raises:
        ValueError: numbers out of range.
    """

    def __init__(
        self,
        kv_channels: int,
        rotary_percent: float = 1.0,
        rotary_interleaved: bool = False,
        seq_len_interpolation_factor: float | None = None,
        rotary_base: float = 10_000.0,
        rope_scaling: bool = False,
        rope_scaling_factor: float = 8.0,
        use_cpu_initialization: bool = False,
        cp_group: Group | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.config = RotaryConfig(
            width=rotary_width(kv_channels, rotary_percent),
            base=rotary_base,
            interleaved=rotary_interleaved,
            interpolation_factor=seq_len_interpolation_factor,
            scaling=Llama3Scaling(factor=rope_scaling_factor) if rope_scaling else None,
        )
        self.cp_group, self.device = cp_group, "cpu" if use_cpu_initialization else device

    def forward(self, max_seq_len: int, offset: int = 0, packed_seq: bool = False) -> Tensor:
        """Angles [S, 1, 1, D] float32 of positions offset, offset + 1, ...; this context-parallel rank's share of them.

        Args:
            max_seq_len: S of the whole sequence.
            offset: of the first position.
            packed_seq: return all of them on every rank: packed sequences pick theirs by their own positions.
        """
        return _sequence_angles(self.config, max_seq_len, offset, None if packed_seq else self.cp_group, self.device)


class YarnRotaryEmbedding(nn.Module):
    """Angles of the positions of one sequence under YaRN, and the factor of their cos and sin; without parameters or buffers.

    Args:
        kv_channels: width of a head.
        rotary_percent: share of it that turns.
        rotary_interleaved: channel 2 i pairs with 2 i + 1.
        seq_len_interpolation_factor: positions are divided by it.
        rotary_base: of the frequencies.
        use_cpu_initialization: make the angles on the CPU.
        scaling_factor: as ``YarnScaling.factor``; this and the following are its fields.
        original_max_position_embeddings: see there.
        beta_fast: see there.
        beta_slow: see there.
        mscale: see there.
        mscale_all_dim: see there.
        correction_range_round_to_int: see there.
        cp_group: each rank gets the angles of its share of the tokens; None for all of them.
        device: of the angles; None for torch's default one.

    Raises:
        ValueError: numbers out of range.

    Example:
        >>> angles, factor = YarnRotaryEmbedding(64, scaling_factor=32.0)(16)
        >>> tuple(angles.shape), round(factor, 5)
        ((16, 1, 1, 64), 1.34657)
    """

    def __init__(
        self,
        kv_channels: int,
        rotary_percent: float = 1.0,
        rotary_interleaved: bool = False,
        seq_len_interpolation_factor: float | None = None,
        rotary_base: float = 10_000.0,
        use_cpu_initialization: bool = False,
        scaling_factor: float = 1.0,
        original_max_position_embeddings: int = 4096,
        beta_fast: float = 32.0,
        beta_slow: float = 1.0,
        mscale: float | None = 1.0,
        mscale_all_dim: float | None = 0.0,
        correction_range_round_to_int: bool = True,
        cp_group: Group | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        scaling = YarnScaling(
            factor=scaling_factor,
            original_max_position_embeddings=original_max_position_embeddings,
            beta_fast=beta_fast,
            beta_slow=beta_slow,
            mscale=mscale,
            mscale_all_dim=mscale_all_dim,
            correction_range_round_to_int=correction_range_round_to_int,
        )
        self.config = RotaryConfig(
            width=rotary_width(kv_channels, rotary_percent),
            base=rotary_base,
            interleaved=rotary_interleaved,
            interpolation_factor=seq_len_interpolation_factor,
            scaling=scaling,
        )
        self.cp_group, self.device = cp_group, "cpu" if use_cpu_initialization else device

    def forward(self, max_seq_len: int, offset: int = 0, packed_seq: bool = False) -> tuple[Tensor, float]:
        """As of ``RotaryEmbedding``, and the concentration, by which cos and sin are to be multiplied."""
        group = None if packed_seq else self.cp_group
        return _sequence_angles(self.config, max_seq_len, offset, group, self.device), self.config.concentration


class LearnedPositions(nn.Module):
    """A learned vector a position, added to the embeddings: ``weight`` [max_position_embeddings, D], whole on every rank.

    Args:
        max_positions: rows.
        hidden_size: D.
        groups: under sequence parallelism a rank adds the vectors of its tokens.
        partial: further axes, as in ``ShardSpec``.
        dtype: of the weight.
        device: of the weight.

    Raises:
        ValueError: less than one row.
    """

    def __init__(
        self,
        max_positions: int,
        hidden_size: int,
        groups: ProcessGroups,
        *,
        partial: tuple[str, ...] = (),
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if max_positions < 1:
            raise ValueError(f"max_position_embeddings={max_positions} must be at least 1")
        self.groups = groups
        self.partial = (*(("tp",) if groups.sequence_parallel else ()), *partial)
        self.weight = nn.Parameter(torch.empty(max_positions, hidden_size, dtype=dtype, device=device))

    def shard_specs(self) -> Mapping[str, ShardSpec]:
        return {"weight": ShardSpec(shape=tuple(self.weight.shape), partial=self.partial)}

    def forward(self, positions: Tensor) -> Tensor:
        """positions [T] -> [T or T / tp, D].

        Raises:
            ValueError: a position outside the table; found on the CPU only, where looking does not wait for a device.
        """
        if positions.device.type == "cpu" and not torch.compiler.is_compiling() and positions.numel():
            low, high = (int(bound) for bound in positions.aminmax())
            if low < 0 or high >= self.weight.shape[0]:
                raise ValueError(f"positions {low} to {high} must lie in [0, max_position_embeddings={self.weight.shape[0]})")
        if self.groups.sequence_parallel:
            tp = self.groups.tp
            share = positions.shape[0] // tp.size
            positions = positions[share * tp.rank : share * (tp.rank + 1)]
        return nn.functional.embedding(positions, self.weight)


@internal_api
def rotary_width(head_dim: int, percent: float) -> int:
    """Channels of a head that turn.

    Raises:
        ValueError: a share outside (0, 1].
    """
    if not 0.0 < percent <= 1.0:
        raise ValueError(f"rotary_percent={percent} must lie in (0, 1]")
    return round(head_dim * percent)


def _sequence_angles(config: RotaryConfig, length: int, offset: int, cp_group: Group | None, device: torch.device | str | None) -> Tensor:
    if cp_group is None or cp_group.size == 1:
        positions = torch.arange(length, device=device)
    else:
        positions = zigzag_indices(length, cp_group.size, cp_group.rank).to(device)
    return config.angles(positions + offset)[:, None, None]

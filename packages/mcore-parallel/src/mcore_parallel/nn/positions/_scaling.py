# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""How rotary frequencies are changed for contexts longer than the trained one."""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_parallel._field_types import check_field_types

# D width that turns, of which each of D / 2 frequencies takes two channels.


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Of Llama 3.1: long wavelengths are stretched by ``factor``, short ones kept, those between mixed.

    Raises:
        ValueError: numbers that are not positive, or bounds in the wrong order.
    """

    factor: float = 8.0
    """Long wavelengths are stretched by it."""
    low_freq_factor: float = 1.0
    """A wavelength is long when it fits into the original context less often than this."""
    high_freq_factor: float = 4.0
    """A wavelength is short when it fits into the original context more often than this."""
    original_max_position_embeddings: int = 8192
    """Context before it is stretched, in tokens."""

    def __post_init__(self) -> None:
        _check_positive(self, "factor", "low_freq_factor", "original_max_position_embeddings")
        if not self.high_freq_factor > self.low_freq_factor:
            raise ValueError(f"high_freq_factor={self.high_freq_factor} must exceed low_freq_factor={self.low_freq_factor}")

    def scaled(self, frequencies: Tensor) -> Tensor:
        """[D / 2] angles a position -> the same, stretched."""
        periods = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        unscaled = (periods - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return torch.lerp(frequencies / self.factor, frequencies, unscaled.clamp(0.0, 1.0))


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """Of YaRN (Peng et al., 2023): channels that turn seldom are stretched by ``factor``, those that turn often kept, in between a ramp.

    Raises:
        ValueError: numbers that are not positive, or bounds in the wrong order.

    Example:
        >>> round(YarnScaling(factor=32.0).concentration, 5)
        1.34657
    """

    factor: float = 1.0
    """The context grows by it."""
    original_max_position_embeddings: int = 4096
    """Context before it is stretched, in tokens."""
    beta_fast: float = 32.0
    """Turns in the original context from which on a channel is kept."""
    beta_slow: float = 1.0
    """Turns in the original context up to which a channel is stretched by the whole factor."""
    mscale: float | None = 1.0
    """Weight of the logarithm of ``factor`` in the scale of the rotary embedding."""
    mscale_all_dim: float | None = 0.0
    """The same in the divisor of that scale."""
    correction_range_round_to_int: bool = True
    """The ramp begins and ends at whole channels."""

    def __post_init__(self) -> None:
        _check_positive(self, "factor", "original_max_position_embeddings", "beta_slow")
        if not self.beta_fast >= self.beta_slow:
            raise ValueError(f"beta_fast={self.beta_fast} must be at least beta_slow={self.beta_slow}")

    @functools.cached_property
    def concentration(self) -> float:
        """Factor of cos and sin, which sharpens attention over the longer context."""
        if self.mscale is None or self.mscale_all_dim is None:
            return self._magnitude(1.0)
        return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)

    @property
    def softmax_factor(self) -> float:
        """Further factor of the scores in multi-head latent attention, whose queries and keys turn in part only."""
        return self._magnitude(self.mscale_all_dim or 0.0) ** 2

    def ramp(self, width: int, base: float) -> tuple[float, float]:
        """Numbers of the frequencies, in [0, D - 1], between which keeping turns into stretching."""
        low, high = (self._frequency_of(turns, width, base) for turns in (self.beta_fast, self.beta_slow))
        if self.correction_range_round_to_int:
            low, high = math.floor(low), math.ceil(high)
        low, high = (float(min(max(bound, 0), width - 1)) for bound in (low, high))
        return low, high + 0.001 if high == low else high

    def scaled(self, frequencies: Tensor, base: float) -> Tensor:
        """[D / 2] angles a position -> the same, stretched; ``base`` is the one that they were made with."""
        low, high = self.ramp(2 * frequencies.shape[0], base)
        numbers = torch.arange(frequencies.shape[0], device=frequencies.device, dtype=frequencies.dtype)
        stretched = ((numbers - low) / (high - low)).clamp(0.0, 1.0)
        return torch.lerp(frequencies, frequencies / self.factor, stretched)

    def _frequency_of(self, turns: float, width: int, base: float) -> float:
        """Number of the frequency that turns so often in the original context."""
        return width * math.log(self.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(base))

    def _magnitude(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1.0 else 0.1 * mscale * math.log(self.factor) + 1.0


def _check_positive(scaling: object, *names: str) -> None:
    check_field_types(scaling)
    for name in names:
        if not getattr(scaling, name) > 0:
            raise ValueError(f"{name}={getattr(scaling, name)} of {type(scaling).__name__} must be positive")

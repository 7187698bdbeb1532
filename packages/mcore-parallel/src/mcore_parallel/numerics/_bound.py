# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""How far the gradients of two correct runs may lie apart, and how far those of two runs do."""

import re
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How one tensor fares."""

    name: str
    layer: int
    """As ``expected_rel_bound`` counts."""
    rel: float
    """Relative difference."""
    bound: float
    hint: str = ""
    """What the mistake looks like, of one beyond its bound."""

    @property
    def ok(self) -> bool:
        """Within the bound; a difference that is not a number is not."""
        return self.rel <= self.bound


def precision(dtype: torch.dtype) -> float:
    """Machine epsilon of what a run computes in; recipes of 8 and 4 bits accumulate in wider numbers and count as bfloat16.

    Raises:
        ValueError: not a dtype of floating point.

    Example:
        >>> precision(torch.bfloat16), precision(torch.float8_e4m3fn)
        (0.0078125, 0.0078125)
    """
    if str(dtype).removeprefix("torch.").startswith(("float8", "float4")):
        dtype = torch.bfloat16
    if not dtype.is_floating_point:
        raise ValueError(f"dtype={dtype} must be a dtype of floating point")
    return torch.finfo(dtype).eps


def expected_rel_bound(
    layer: int, num_layers: int, *, dtype: torch.dtype = torch.bfloat16, growth: float = 1.03, factor: float = 4.0
) -> float:
    """factor * growth^(L + 1 - l) * eps: errors grow on the way back, so that the last layer has the tightest bound.

    The form is that of arXiv 2506.09280, theorem 5.3; growth and factor are to be tuned.

    Args:
        layer: l, from 1 to L for the layers, 0 for the embedding, L + 1 for what follows the layers.
        num_layers: L of the model.
        dtype: what the run computes in.
        growth: of the error from one layer to the one before it.
        factor: how many epsilons the last layer may differ by.

    Raises:
        ValueError: a layer that does not exist, or factors that are not positive.

    Example:
        >>> expected_rel_bound(33, 32), expected_rel_bound(33, 32, dtype=torch.float32) < 1e-6
        (0.03125, True)
    """
    if not 0 <= layer <= num_layers + 1:
        raise ValueError(f"layer={layer} must lie between 0 and num_layers + 1 = {num_layers + 1}")
    if not (growth > 0.0 and factor > 0.0):
        raise ValueError(f"growth={growth} and factor={factor} must be positive")
    return factor * growth ** (num_layers + 1 - layer) * precision(dtype)


def layer_of(name: str, num_layers: int) -> int:
    """The layer that a global parameter name (or the name of its optimizer state) stands for, as ``expected_rel_bound`` counts.

    Example:
        >>> [layer_of(name, 4) for name in ("embedding.weight", "layers.0.mlp.up.weight", "layers.3.ffn_norm.weight", "output.weight")]
        [0, 1, 4, 5]
    """
    if match := re.search(r"(?:^|\.)layers\.(\d+)\.", name):
        return int(match[1]) + 1
    return 0 if "embedding" in name.split(".") else num_layers + 1

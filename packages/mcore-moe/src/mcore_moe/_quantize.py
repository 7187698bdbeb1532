# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""How many rows an expert must have for products in few bits, and a routing that gives it so many."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from mcore_moe._stability import experimental_api
from mcore_parallel.backends import RECIPES, Fp8Config

# T tokens, E experts.

_FP4 = ("nvfp4",)


@experimental_api
def get_fp8_align_size(fp8_recipe: str) -> int:
    """Rows of an expert are a multiple of this: the weight gradient's GEMM multiplies along them.

    Args:
        fp8_recipe: name of the scaling recipe, as in ``Fp8Config.recipe``.

    Raises:
        ValueError: no fp8 recipe.

    Example:
        >>> get_fp8_align_size("delayed"), get_fp8_align_size("mxfp8")
        (16, 32)
    """
    return _align_size("fp8_recipe", fp8_recipe, [recipe for recipe in RECIPES if recipe not in _FP4])


@experimental_api
def get_fp4_align_size(fp4_recipe: str) -> int:
    """As `get_fp8_align_size`, for fp4. GEMMs need 32; grouped quantisation takes whole tiles of 128.

    Args:
        fp4_recipe: name of the scaling recipe.

    Raises:
        ValueError: no fp4 recipe.

    Example:
        >>> get_fp4_align_size("nvfp4")
        128
    """
    return _align_size("fp4_recipe", fp4_recipe, _FP4)


@experimental_api
def get_align_size_for_quantization(fp8: Fp8Config | None) -> int:
    """Rows of an expert are a multiple of this in a model's recipe; 0 for a model without one.

    Args:
        fp8: recipe of the model's backend.

    Example:
        >>> get_align_size_for_quantization(Fp8Config(recipe="mxfp8")), get_align_size_for_quantization(None)
        (32, 0)
    """
    return 0 if fp8 is None else fp8.row_multiple


@experimental_api
def pad_routing_map(routing_map: Tensor, pad_multiple: int) -> tuple[Tensor, Tensor]:
    """Route more tokens to each expert, its first unrouted ones, until their number is a multiple of ``pad_multiple``.

    Their weights stay 0, so they add nothing. Nothing waits for the device.

    Args:
        routing_map: [T, E] bool; it stays as it is.
        pad_multiple: of ``get_fp8_align_size`` or ``get_fp4_align_size``.

    Returns:
        The padded map [T, E] bool, and aligned [E] bool: False where T tokens are too few. That expert's column is as it was, and its
        rows are to be padded by zeros.

    Raises:
        ValueError: ``pad_multiple`` below 1.

    Example:
        >>> import torch
        >>> padded, aligned = pad_routing_map(torch.tensor([[True, False], [False, False], [True, True], [True, False]]), 2)
        >>> padded.sum(0).tolist(), aligned.tolist()
        ([4, 2], [True, True])
    """
    if pad_multiple < 1:
        raise ValueError(f"pad_multiple={pad_multiple} must be at least 1")
    free_TE = ~routing_map
    missing_E = -routing_map.sum(0) % pad_multiple
    aligned_E = missing_E <= free_TE.sum(0)
    return routing_map | (free_TE & (free_TE.cumsum(0) <= missing_E) & aligned_E), aligned_E


def _align_size(field: str, recipe: Any, known: Sequence[str]) -> int:
    if recipe not in known:
        raise ValueError(f"{field}={recipe!r} must be one of {', '.join(known)}")
    return Fp8Config(recipe=recipe).row_multiple

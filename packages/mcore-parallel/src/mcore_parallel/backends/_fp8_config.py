# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""How products in eight (or four) bits are scaled, and in which layers."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from mcore_parallel._field_types import check_field_types

Recipe = Literal["tensorwise", "rowwise", "delayed", "blockwise", "mxfp8", "nvfp4"]
RECIPES: tuple[Recipe, ...] = ("tensorwise", "rowwise", "delayed", "blockwise", "mxfp8", "nvfp4")
_ROW_MULTIPLES: Mapping[Recipe, int] = MappingProxyType({"mxfp8": 32, "nvfp4": 128})


@dataclass(frozen=True, kw_only=True)
class Fp8Config:
    """A recipe and where it holds. Embedding, norms and attention's core keep the dtype of the model in any case.

    Raises:
        ValueError: a value that does not exist, or choices that exclude one another.

    Example:
        >>> Fp8Config(recipe="rowwise", num_layers_at_start_in_bf16=1).covers(layer=0, num_layers=4)
        False
    """

    recipe: Recipe = "tensorwise"
    """"tensorwise": one scale a tensor, from its largest value now. "rowwise": one a token and one an output feature; weight gradients
    stay in the model's dtype. "delayed": one a tensor, from its largest values in past steps. "blockwise": one a tile of 128. "mxfp8":
    one, a power of two, each 32 values. "nvfp4": four bits, one each 16 values. The torch backend has the first two."""
    gradient_format: Literal["e5m2", "e4m3"] | None = None
    """Of output gradients; everything else is e4m3. None for the recipe's: e5m2 for "tensorwise" and "delayed", otherwise e4m3."""
    weight_gradients: bool = True
    """Compute weight gradients from fp8 operands, too ("rowwise" never does)."""
    reduce_amax: bool = False
    """With one scale a tensor: share it among the tp ranks that hold parts of one tensor, so that results do not depend on tp. Without,
    each rank scales its part; tokens that are gathered share their scale in any case."""
    num_layers_at_start_in_bf16: int = 0
    """First layers that keep the model's dtype."""
    num_layers_at_end_in_bf16: int = 0
    """Last layers that keep the model's dtype."""
    output_layer: bool = False
    """Compute the training loss from fp8 operands, too, with one scale a tensor, beside layers of "tensorwise" or "rowwise". Logits and
    log-probabilities keep the model's dtype. The last layer is the one whose errors no later layer sees, and the usual recipes leave it
    wide: compare loss curves before."""

    def __post_init__(self) -> None:
        if self.recipe not in RECIPES:
            raise ValueError(f"recipe={self.recipe!r} is unknown; choose one of {', '.join(RECIPES)}")
        if self.gradient_format not in (None, "e5m2", "e4m3"):
            raise ValueError(f'gradient_format={self.gradient_format!r} must be "e5m2", "e4m3" or None')
        check_field_types(self)
        for name in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        if self.reduce_amax and self.recipe not in ("tensorwise", "delayed"):
            raise ValueError(f'reduce_amax=True needs one scale a tensor, found recipe={self.recipe!r}; use "tensorwise" or leave it off')

        if self.output_layer and (self.recipe not in ("tensorwise", "rowwise") or not self.weight_gradients):
            raise ValueError(
                f'output_layer=True needs recipe="tensorwise" or "rowwise" and weight_gradients=True, found recipe={self.recipe!r} and '
                f"weight_gradients={self.weight_gradients}; leave it off"
            )

    @property
    def row_multiple(self) -> int:
        """Of which the rows of an expert are one: the GEMM of its weight gradient multiplies along them. In four bits grouped casts take
        whole tiles of 128."""
        return _ROW_MULTIPLES.get(self.recipe, 16)

    def covers(self, layer: int, num_layers: int) -> bool:
        """Whether layer ``layer`` of ``num_layers`` computes its products so."""
        return self.num_layers_at_start_in_bf16 <= layer < num_layers - self.num_layers_at_end_in_bf16

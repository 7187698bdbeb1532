# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""One adapter, as it is loaded."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from torch import Tensor, nn

from mcore_inference._fields import as_integer
from mcore_inference._stability import experimental_api

__all__ = ["LoraWeights"]

_SUFFIXES = (".lora.A", ".lora.B")


# I and O input and output features of the base layer (global), r rank
@experimental_api
@dataclass(frozen=True, kw_only=True, eq=False)
class LoraWeights:
    """An adapter of some linear layers: ``alpha / rank * B A x`` is added to what a layer computes of x.

    Names and shapes are those of ``mcore_parallel.tensor_parallel.add_lora``, whatever the layout of the engine.

    Raises:
        ValueError: a number out of its range, no matrices, or a pair of them that is none.

    Example:
        >>> import torch
        >>> pair = torch.ones(2, 8), torch.zeros(3, 4, 2)  # of a layer [8] -> [3, 4]
        >>> LoraWeights(rank=2, alpha=4.0, matrices={"layers.0.attention.qkv": pair}).scaling
        2.0
    """

    rank: int
    """r, of all layers."""
    alpha: float
    """The product of A and B counts alpha / rank times."""
    matrices: Mapping[str, tuple[Tensor, Tensor]]
    """Of each layer, by its name ("layers.0.attention.qkv"), A [r, I] and B [*O, r], where [*O, I] is the shape of the base weight: whole,
    in any floating-point dtype of 16 bits or more, on any device."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rank", as_integer("rank", self.rank, 1, 2**16))
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, Real) or not math.isfinite(self.alpha):
            raise ValueError(f"alpha={self.alpha!r} must be a finite number")
        object.__setattr__(self, "alpha", float(self.alpha))
        if not isinstance(self.matrices, Mapping) or not self.matrices:
            raise ValueError(f"matrices is {type(self.matrices).__name__} of no layer; give a mapping of names to pairs of A and B")
        for name, pair in self.matrices.items():
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise ValueError(f"matrices[{name!r}] is a {type(pair).__name__}; give the pair of A and B")
            for kind, matrix in zip("AB", pair, strict=True):
                _check_matrix(f"{kind} of {name}", matrix)
            A, B = pair
            if A.dim() != 2 or A.shape[0] != self.rank or B.dim() < 2 or B.shape[-1] != self.rank:
                raise ValueError(
                    f"{name} has A {list(A.shape)} and B {list(B.shape)}; for rank={self.rank} they are [{self.rank}, in] and "
                    f"[out, {self.rank}]"
                )
        object.__setattr__(self, "matrices", {name: tuple(pair) for name, pair in self.matrices.items()})

    @property
    def scaling(self) -> float:
        """alpha / rank."""
        return self.alpha / self.rank

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], *, rank: int, alpha: float) -> "LoraWeights":
        """An adapter of its tensors by name, ``layers.0.mlp.up.lora.A`` and ``.lora.B``, as checkpoints have them.

        Raises:
            ValueError: another name, or one half of a pair; as of the class.
        """
        halves: dict[str, dict[str, Tensor]] = {}
        pairs: Any = tensors.items() if isinstance(tensors, Mapping) else tensors
        for name, tensor in pairs:
            suffix = name[-len(_SUFFIXES[0]) :]
            if suffix not in _SUFFIXES:
                raise ValueError(f"{name} is no matrix of a linear layer's adapter, whose name ends in .lora.A or .lora.B")
            halves.setdefault(name.removesuffix(suffix), {})[suffix] = tensor
        for name, half in halves.items():
            if len(half) < 2:
                raise ValueError(f"{name} has {next(iter(half))} alone; give A and B")
        return cls(rank=rank, alpha=alpha, matrices={name: (half[".lora.A"], half[".lora.B"]) for name, half in halves.items()})

    def tensors(self) -> dict[str, Tensor]:
        """By name, as ``of`` takes them."""
        return {f"{name}{suffix}": part for name, pair in self.matrices.items() for suffix, part in zip(_SUFFIXES, pair, strict=True)}


def _check_matrix(name: str, matrix: object) -> None:
    if not isinstance(matrix, Tensor) or type(matrix) not in (Tensor, nn.Parameter) or matrix.is_meta:
        kind = "tensor without memory" if isinstance(matrix, Tensor) and matrix.is_meta else type(matrix).__name__
        raise ValueError(f"{name} is a {kind}; give a plain tensor")
    if not matrix.dtype.is_floating_point or matrix.dtype.itemsize < 2:
        raise ValueError(f"{name} has dtype {matrix.dtype}; give a floating-point one of 16 bits or more")

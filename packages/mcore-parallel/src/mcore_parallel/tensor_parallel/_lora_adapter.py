# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A product of two narrow matrices beside the frozen weight of a linear layer (LoRA)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mcore_parallel.groups import ProcessGroups, ShardSpec
from mcore_parallel.tensor_parallel._init import normal_shard_
from mcore_parallel.tensor_parallel._product import Route, column_product

# T tokens, I and O input and output features of the base layer (global), r rank


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Which linear layers get adapters, and of what size.

    Raises:
        ValueError: a number out of its range, or no pattern.

    Example:
        >>> LoraConfig(rank=8, alpha=16.0).scaling
        2.0
    """

    rank: int = 16
    """r: rows of A and columns of B."""
    alpha: float = 32.0
    """The product of A and B counts alpha / rank times."""
    dropout: float = 0.0
    """Share of the adapter's inputs that training leaves out; the base layer sees them all. The ranks of a tp group need one state of
    torch's CPU generator, as they have from ``torch.manual_seed`` with one seed."""
    targets: tuple[str, ...] = ("qkv", "out", "up", "down")
    """Patterns (``fnmatch``) of the names of linear layers, or of the ends of names: "qkv" is "*.qkv"."""
    base_dtype: Literal["fp8", "fp8_weight_only"] | None = None
    """Of the frozen weights beside the adapters, from ``mcore_parallel.backends.quantize_base`` on; None for the model's. "fp8": one byte a
    weight (e4m3, a scale an output feature), multiplied in fp8. "fp8_weight_only": one byte a weight, widened for each GEMM; for GPUs
    without units for fp8, and for stacked experts."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "targets", tuple(self.targets))
        if self.rank < 1:
            raise ValueError(f"rank={self.rank} must be at least 1")
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ValueError(f"alpha={self.alpha} must be above 0")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} must lie between 0 and 1, without 1")
        if not self.targets:
            raise ValueError('targets is empty; name linear layers, such as ["qkv"]')
        if self.base_dtype not in (None, "fp8", "fp8_weight_only"):
            raise ValueError(f'base_dtype={self.base_dtype!r} must be "fp8", "fp8_weight_only" or None')

    @property
    def scaling(self) -> float:
        """alpha / rank."""
        return self.alpha / self.rank


class LoraAdapter(nn.Module):
    """``alpha / rank * B A x`` of one layer: A [r, I] and B [*out, r], cut as the base weight [*out, I] is.

    Beside a column-parallel layer A is whole and B cut with the output: the r features of this rank's tokens are gathered, not the tokens.
    Beside a row-parallel one A is cut with the input and B whole: the result is a partial sum, which joins that of the base layer.

    Args:
        config: rank, scale and dropout.
        base: spec of the base weight.
        groups: of the base layer.
        seed: of A, which is drawn from N(0, 1 / (3 I)), the same global values in every layout; B is zero.
        dtype: of A and B.
        device: of A and B.
    """

    def __init__(
        self,
        config: LoraConfig,
        base: ShardSpec,
        groups: ProcessGroups,
        *,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.config, self.groups = config, groups
        self.in_features = base.shape[-1]
        dim = base.shards.get("tp")
        self.cuts_input, self.cuts_output = dim == len(base.shape) - 1, dim is not None and dim < len(base.shape) - 1
        # Under sequence parallelism A meets this rank's tokens; B does so where nothing is gathered before it.
        tokens = ("tp",) if groups.sequence_parallel else ()
        sums_of_B = () if self.cuts_output else ("tp",) if self.cuts_input else tokens
        self._specs = {
            "A": ShardSpec(
                shape=(config.rank, self.in_features),
                shards={"tp": 1} if self.cuts_input else {},
                partial=() if self.cuts_input else tokens,
            ),
            "B": ShardSpec(shape=(*base.shape[:-1], config.rank), shards=base.shards if self.cuts_output else {}, partial=sums_of_B),
        }
        self.A = nn.Parameter(torch.empty(self._specs["A"].local_shape(groups), dtype=dtype, device=device))
        self.B = nn.Parameter(torch.empty(self._specs["B"].local_shape(groups), dtype=dtype, device=device))
        self.reset_parameters(seed)

    def shard_specs(self) -> Mapping[str, ShardSpec]:
        return self._specs

    def reset_parameters(self, seed: int = 0) -> None:
        """A is drawn again; B is zero."""
        normal_shard_(self.A, self._specs["A"], self.groups, std=(3 * self.in_features) ** -0.5, seed=seed)
        if not self.B.is_meta:
            nn.init.zeros_(self.B)

    def initial_value(self, name: str, shape: tuple[int, ...], generator: torch.Generator, config: Any) -> Tensor:
        """Of ``init_parameters``; see its ``SelfInitialised``."""
        if name == "B":
            return torch.zeros(shape)
        return torch.empty(shape).normal_(0.0, (3 * self.in_features) ** -0.5, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        """[T or T / tp, I], of a row-parallel layer [T, I / tp] -> what is added to the layer's product before any sum over tp."""
        low_Tr = F.linear(self._dropped(x), self.A) * self.config.scaling
        B_Or = self.B.flatten(0, -2)
        if self.cuts_output and self.groups.tp.size > 1:
            return column_product(low_Tr, B_Or, Route(group=self.groups.tp, sequence_parallel=self.groups.sequence_parallel))
        return F.linear(low_Tr, B_Or)

    def delta(self) -> Tensor:
        """What the adapter adds to this rank's part of the base weight, in float32 or wider."""
        dtype = torch.promote_types(self.A.dtype, torch.float32)
        product = self.B.detach().flatten(0, -2).to(dtype) @ self.A.detach().to(dtype)
        return (product * self.config.scaling).unflatten(0, self.B.shape[:-1])

    def graph_obstacle(self) -> str | None:
        """As ``mcore_parallel.graphs.GraphChecked``."""
        share = self.config.dropout
        return f"dropout={share} of LoraConfig is drawn on the host, which no graph replays; set it to 0" if share else None

    def extra_repr(self) -> str:
        return f"rank={self.config.rank}, alpha={self.config.alpha:g}, dropout={self.config.dropout:g}"

    def _dropped(self, x: Tensor) -> Tensor:
        """Dropout of the whole input, of which this rank has its part, so that the layout changes nothing."""
        share = self.config.dropout
        if not share or not self.training:
            return x
        tp = self.groups.tp
        tokens, features = x.shape[:-1], x.shape[-1]
        own = [slice(None)] * x.dim()
        if self.cuts_input:
            features *= tp.size
            own[-1] = slice(tp.rank * x.shape[-1], (tp.rank + 1) * x.shape[-1])
        elif self.groups.sequence_parallel:
            tokens = (tp.size * x.shape[0], *tokens[1:])
            own[0] = slice(tp.rank * x.shape[0], (tp.rank + 1) * x.shape[0])
        # The seed comes from torch's own generator, which a recomputation sets back; replicas see other tokens.
        seed = int(torch.randint(2**48, ()).item()) + self.groups.dp_cp.rank
        generator = torch.Generator(device=x.device).manual_seed(seed)
        kept = torch.rand((*tokens, features), generator=generator, device=x.device)[tuple(own)] >= share
        return x * kept / (1 - share)

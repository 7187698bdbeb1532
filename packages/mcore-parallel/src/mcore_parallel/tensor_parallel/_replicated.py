# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A linear layer that every tensor-parallel rank holds whole."""

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mcore_parallel.groups import Group, ProcessGroups, ShardSpec
from mcore_parallel.tensor_parallel._init import normal_shard_
from mcore_parallel.tensor_parallel._lora_adapter import LoraAdapter
from mcore_parallel.tensor_parallel._product import LinearProducts, ProductLayer, column_product


class ReplicatedLinear(ProductLayer):
    """y = x W^T of the tokens that are here, with the whole weight on every rank.

    For outputs so narrow that a cut would cost more in communication than it saves. Under sequence parallelism a rank sees its share
    of the tokens, and the gradient of the weight is a partial sum over tp.

    Args:
        in_features: size of the last dim of the input.
        out_features: size of the last dim of the output.
        groups: the process groups; ``tp`` is used.
        dtype: of the weight.
        device: of the weight.
        init: draw the weight from N(0, 1 / in_features); False leaves the memory uninitialised.
        seed: of that draw.
        products: who computes the GEMM; None for torch in the dtype of the weight.

    Example:
        >>> ReplicatedLinear(4, 2, ProcessGroups.single())(torch.ones(3, 4)).shape
        torch.Size([3, 2])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        groups: ProcessGroups,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        init: bool = True,
        seed: int = 0,
        products: LinearProducts | None = None,
    ) -> None:
        super().__init__()
        self.groups, self.products = groups, products
        self.lora: LoraAdapter | None = None
        """Of ``add_lora``."""
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype, device=device))
        self.weight_spec = self.shard_specs()["weight"]
        if init:
            normal_shard_(self.weight, self.weight_spec, groups, std=in_features**-0.5, seed=seed)

    def shard_specs(self) -> Mapping[str, ShardSpec]:
        return {"weight": ShardSpec(shape=tuple(self.weight.shape), partial=("tp",) if self.groups.sequence_parallel else ())}

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        route = self.route(self.groups)
        if self.products is not None or route.main_grad is not None:
            product = column_product if self.products is None else self.products.column
            y = product(x, self.weight, dataclasses.replace(route, group=Group.single(), sequence_parallel=False))
        else:
            y = F.linear(x, self.weight)
        return y if self.lora is None else y + self.lora(x)

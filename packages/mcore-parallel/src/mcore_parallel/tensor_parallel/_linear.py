# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Linear layers whose weight is cut over the tensor-parallel group."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mcore_parallel.comm import gather, reduce_from_tensor_model_parallel_region, reduce_scatter_to_sequence_parallel_region
from mcore_parallel.groups import ProcessGroups, ShardSpec
from mcore_parallel.tensor_parallel._init import normal_shard_
from mcore_parallel.tensor_parallel._lora_adapter import LoraAdapter
from mcore_parallel.tensor_parallel._product import LinearProducts, ProductLayer, RecomputedInput, column_product, num_pieces, row_product

# T tokens, I input features of this rank, O output features of this rank


class ColumnParallelLinear(ProductLayer):
    """y = x W^T + b with the output features split over tp.

    Under sequence parallelism the input holds this rank's tokens: they are gathered before the GEMM, and their
    gradient is reduce-scattered. The gathered tokens are not kept for the backward but gathered again, while the
    gradient of the input is computed. Otherwise the input is replicated and its gradient is summed over tp.

    Args:
        in_features: size of the last dim of the input.
        out_features: global output features; a tuple gives the weight more than one leading dim, so that a
            structured output (gate and up, key-value groups) is cut along one of them.
        groups: the process groups; ``tp`` is used.
        shard_dim: index into ``out_features`` of the dim that is cut.
        gather_output: every rank returns all output features.
        bias: add a bias, split like the output.
        overlap: under sequence parallelism, gather the tokens in pieces, each beside the GEMM of the one before it. None for
            ``ParallelPlan.tp_comm_overlap``. The result differs by rounding at most.
        dtype: of the parameters.
        device: of the parameters.
        init: draw the weight from N(0, 1 / in_features), the same global values in every layout; False leaves the
            memory uninitialised for a caller that fills it.
        seed: of that draw.
        products: who computes the GEMMs of this layer, and of no other; None for torch in the dtype of the weight.

    Raises:
        ValueError: tp does not divide the dim that is cut, or ``shard_dim`` does not exist.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | tuple[int, ...],
        groups: ProcessGroups,
        *,
        shard_dim: int = 0,
        gather_output: bool = False,
        bias: bool = False,
        overlap: bool | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        init: bool = True,
        seed: int = 0,
        products: LinearProducts | None = None,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = (out_features,) if isinstance(out_features, int) else tuple(out_features)
        if not 0 <= shard_dim < len(self.out_features):
            raise ValueError(f"shard_dim={shard_dim} must index out_features={self.out_features}")
        self.groups, self.shard_dim, self.gather_output, self.overlap = groups, shard_dim, gather_output, overlap
        self.products = products
        self.lora: LoraAdapter | None = None
        """Of ``add_lora``."""
        specs = self._specs(bias)
        self.weight_spec = specs["weight"]
        self.weight = nn.Parameter(torch.empty(specs["weight"].local_shape(groups), dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(specs["bias"].local_shape(groups), dtype=dtype, device=device)) if bias else None
        if init:
            self.reset_parameters(seed)

    def shard_specs(self) -> Mapping[str, ShardSpec]:
        return self._specs(self.bias is not None)

    def reset_parameters(self, seed: int = 0, std: float | None = None) -> None:
        """Normal weight (std 1 / sqrt(in_features) by default) that is the same in every layout; bias zero."""
        normal_shard_(self.weight, self.shard_specs()["weight"], self.groups, std=std or self.in_features**-0.5, seed=seed)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [T or T/tp, in] -> [T, prod(out)/tp], or [T, prod(out)] with ``gather_output``."""
        weight_OI = self.weight.flatten(0, -2)
        bias_O = None if self.bias is None else self.bias.flatten()
        pieces = num_pieces(x, x.shape[0], self.groups, self.overlap) if self.groups.sequence_parallel else 1
        route = self.route(self.groups, pieces)
        if self.products is not None:
            y_TO = self.products.column(x, weight_OI, route)
        elif self.groups.tp.size == 1 and route.main_grad is None:
            y_TO = F.linear(x, weight_OI, bias_O)
            return y_TO if self.lora is None else y_TO + self.lora(x)
        else:
            y_TO = column_product(x, weight_OI, route)
        if bias_O is not None:
            y_TO = y_TO + bias_O
        if self.lora is not None:
            y_TO = y_TO + self.lora(x)
        if not self.gather_output:
            return y_TO
        y = y_TO.unflatten(-1, self.weight.shape[:-1])
        return gather(y, self.groups.tp, x.dim() - 1 + self.shard_dim, output_grad_differs=False).flatten(x.dim() - 1)

    def extra_repr(self) -> str:
        return f"in={self.in_features}, out={self.out_features}, cut=out[{self.shard_dim}] over tp={self.groups.tp.size}"

    def _specs(self, bias: bool) -> dict[str, ShardSpec]:
        cut = {"tp": self.shard_dim}
        specs = {"weight": ShardSpec(shape=(*self.out_features, self.in_features), shards=cut)}
        return specs | ({"bias": ShardSpec(shape=self.out_features, shards=cut)} if bias else {})


class RowParallelLinear(ProductLayer):
    """y = x W^T + b with the input features split over tp; the partial results are summed over tp.

    The result is replicated, or under sequence parallelism holds this rank's tokens.

    Args:
        in_features: global size of the last dim of the input, of which this rank gets its slice.
        out_features: output features.
        groups: the process groups; ``tp`` is used.
        bias: add a bias, whole on every rank, after the sum.
        overlap: sum (or reduce-scatter) the partial results in pieces, each beside the GEMM of the next one; under
            sequence parallelism the backward gathers so too. None for ``ParallelPlan.tp_comm_overlap``. The result
            differs by rounding at most.
        dtype: of the parameters.
        device: of the parameters.
        init: draw the weight from N(0, 1 / in_features), the same global values in every layout; False leaves the
            memory uninitialised for a caller that fills it.
        seed: of that draw.
        products: who computes the GEMMs of this layer, and of no other; None for torch in the dtype of the weight.

    Raises:
        ValueError: tp does not divide ``in_features``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        groups: ProcessGroups,
        *,
        bias: bool = False,
        overlap: bool | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        init: bool = True,
        seed: int = 0,
        products: LinearProducts | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.groups, self.overlap = in_features, out_features, groups, overlap
        self.products = products
        self.lora: LoraAdapter | None = None
        """Of ``add_lora``."""
        specs = self._specs(bias)
        self.weight_spec = specs["weight"]
        self.weight = nn.Parameter(torch.empty(specs["weight"].local_shape(groups), dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype, device=device)) if bias else None
        if init:
            self.reset_parameters(seed)

    def shard_specs(self) -> Mapping[str, ShardSpec]:
        return self._specs(self.bias is not None)

    def reset_parameters(self, seed: int = 0, std: float | None = None) -> None:
        """Normal weight (std 1 / sqrt(in_features) by default) that is the same in every layout; bias zero."""
        normal_shard_(self.weight, self.shard_specs()["weight"], self.groups, std=std or self.in_features**-0.5, seed=seed)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x_TI: Tensor, recomputed: RecomputedInput | None = None) -> Tensor:
        """x [T, in/tp] -> [T, out], or [T/tp, out] under sequence parallelism.

        Args:
            x_TI: the input.
            recomputed: computes the input from ``x_TI``, which is saved in its place; not with ``products`` or an adapter.
        """
        tp = self.groups.tp
        # What does not divide is not cut, and named by the collective.
        rank_tokens = x_TI.shape[0] if not self.groups.sequence_parallel else 0 if x_TI.shape[0] % tp.size else x_TI.shape[0] // tp.size
        route = self.route(self.groups, num_pieces(x_TI, rank_tokens, self.groups, self.overlap) if tp.size > 1 else 1)
        assert recomputed is None or (self.products is None and self.lora is None)
        addend_TO = None if self.lora is None else self.lora(x_TI)
        if self.products is not None:
            y = self.products.row(x_TI, self.weight, route)
            y = y if addend_TO is None else y + self._summed(addend_TO)
        elif tp.size == 1 and route.main_grad is None and recomputed is None:
            y = F.linear(x_TI, self.weight, self.bias)
            return y if addend_TO is None else y + addend_TO
        else:
            y = row_product(x_TI, self.weight, route, recomputed, addend_TO)
        return y if self.bias is None else y + self.bias

    def _summed(self, partial_TO: Tensor) -> Tensor:
        if self.groups.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(partial_TO, self.groups.tp)
        return reduce_from_tensor_model_parallel_region(partial_TO, self.groups.tp)

    def extra_repr(self) -> str:
        return f"in={self.in_features} over tp={self.groups.tp.size}, out={self.out_features}"

    def _specs(self, bias: bool) -> dict[str, ShardSpec]:
        specs = {"weight": ShardSpec(shape=(self.out_features, self.in_features), shards={"tp": 1})}
        # Under sequence parallelism the bias meets only this rank's tokens.
        partial = ("tp",) if self.groups.sequence_parallel else ()
        return specs | ({"bias": ShardSpec(shape=(self.out_features,), partial=partial)} if bias else {})

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Frozen weights beside adapters, kept in eight bits."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mcore_parallel.backends._factory import missing_units
from mcore_parallel.backends._fp8_config import Fp8Config
from mcore_parallel.backends._fp8_products import fits, gather_rows
from mcore_parallel.backends._quantize import MULTIPLE, Scaled, quantize_rows, scaled_product, turn
from mcore_parallel.comm import all_gather, all_reduce, reduce_scatter, start_all_reduce, start_reduce_scatter, wait
from mcore_parallel.groups import Group
from mcore_parallel.tensor_parallel import QuantizableLoraTarget, Route, adapted_layers

# T tokens (t of this rank), I input features of this rank, O output features of this rank

_E4M3 = torch.float8_e4m3fn


@torch.no_grad()
def quantize_base(model: nn.Module) -> list[str]:
    """Keep the weights of the layers whose adapters say so (``LoraConfig.base_dtype``) in eight bits, and give up the wide ones.

    A weight [O, I] becomes e4m3 values with a scale per output feature, and so does that of each stacked expert. Scales are powers of two:
    the rounded weights are exact in bfloat16, and those of tp ranks are the bits of one rank. The parameters keep their names and shapes,
    without their scales, so a checkpoint must hold the adapters alone (``is_adapter``). Call it when the base weights are loaded, on the
    device where they stay.

    Args:
        model: one stage, or the chunks of one, after ``add_lora``; changed in place.

    Returns:
        Names of the layers that are kept so, in the model's order, linear ones before stacked experts.

    Raises:
        ValueError: "fp8" on a GPU without units for one scale a row, or a layer whose products something else computes.

    Example:
        >>> from mcore_parallel import ProcessGroups
        >>> from mcore_parallel.tensor_parallel import ColumnParallelLinear, LoraConfig, add_lora
        >>> groups = ProcessGroups.single()
        >>> model = nn.ModuleDict({"up": ColumnParallelLinear(16, 32, groups)})
        >>> _ = add_lora(model, LoraConfig(rank=2, targets=("up",), base_dtype="fp8"), groups)
        >>> quantize_base(model), model["up"].weight.dtype
        (['up'], torch.float8_e4m3fn)
    """
    chosen = [
        (name, layer, layer.lora.config.base_dtype)
        for name, layer in adapted_layers(model)
        if layer.lora is not None and layer.lora.config.base_dtype is not None and layer.weight.dtype != _E4M3
    ]
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    for name, layer, base_dtype in chosen:
        if layer.products is not None:
            raise ValueError(
                f"base_dtype={base_dtype!r} computes the products of {name}, and so does {type(layer.products).__name__}; build the model "
                "without fp8, or leave base_dtype out"
            )
        if base_dtype == "fp8" and (reason := missing_units(Fp8Config(recipe="rowwise"), capability)):
            raise ValueError(f'base_dtype="fp8" has one scale a row: {reason.partition(";")[0]}; use base_dtype="fp8_weight_only"')
    for _, layer, base_dtype in chosen:
        spec = layer.weight_spec
        cuts_input = spec.shards.get("tp") == len(spec.shape) - 1
        shape = layer.weight.shape
        stored = quantize_rows(layer.weight.flatten(0, -2), _E4M3, group=layer.groups.tp if cuts_input else None, powers_of_two=True)
        layer.products = StoredProducts(stored.inverse, multiply=base_dtype == "fp8")
        # Whoever knows the parameter goes on knowing it.
        layer.weight.data = stored.data.view(shape)
    stacks = [name for name, module in model.named_modules() if isinstance(module, QuantizableLoraTarget) and module.quantize_base()]
    return [*(name for name, _, _ in chosen), *stacks]


class StoredProducts:
    """Products with a frozen weight in e4m3; conforms to ``LinearProducts``. The weight has no gradient.

    Args:
        inverse_O1: float32 [O, 1], what the stored values are multiplied by.
        multiply: multiply in fp8: inputs and output gradients are cast as they come, with a scale a token. A call whose tokens, or a layer
            whose features, do not come in multiples of 16, and all calls without it, widen the weight for the time of the GEMM.
    """

    def __init__(self, inverse_O1: Tensor, *, multiply: bool) -> None:
        self.inverse_O1, self.multiply = inverse_O1, multiply

    def column(self, x: Tensor, weight_OI: Tensor, route: Route) -> Tensor:
        narrow = self._narrow(x, weight_OI, route, sharded=route.sequence_parallel)
        y_TO = _Column.apply(x.flatten(0, -2), Scaled(weight_OI.detach(), self.inverse_O1), route, narrow)
        return y_TO.view(-1, *x.shape[1:-1], weight_OI.shape[0])

    def row(self, x_TI: Tensor, weight_OI: Tensor, route: Route) -> Tensor:
        narrow = self._narrow(x_TI, weight_OI, route, sharded=False)
        y_TO = _Row.apply(x_TI.flatten(0, -2), Scaled(weight_OI.detach(), self.inverse_O1), route, narrow)
        return y_TO.view(-1, *x_TI.shape[1:-1], weight_OI.shape[0])

    def weight_changed(self) -> None:
        """Frozen weights do not."""

    def widened(self, weight_OI: Tensor, dtype: torch.dtype) -> Tensor:
        """The rounded weight in ``dtype``; exact in bfloat16 and wider."""
        return Scaled(weight_OI.detach(), self.inverse_O1).value(dtype)

    def _narrow(self, x: Tensor, weight_OI: Tensor, route: Route, *, sharded: bool) -> bool:
        return self.multiply and not any(size % MULTIPLE for size in weight_OI.shape) and fits(x, route, sharded=sharded)


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_tI: Tensor, weight: Scaled, route: Route, narrow: bool) -> Tensor:
        ctx.weight, ctx.route, ctx.narrow = weight, route, narrow
        gathers = route.sequence_parallel and route.group.size > 1
        if narrow:
            rows = quantize_rows(x_tI, _E4M3)
            return scaled_product(gather_rows(rows, route.group) if gathers else rows, weight, x_tI.dtype, fast=True)
        return F.linear(all_gather(x_tI, route.group) if gathers else x_tI, weight.value(x_tI.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        route: Route = ctx.route
        grad_x = _input_gradient(grads[0], ctx.weight, ctx.narrow, shared=route.group)
        start = start_reduce_scatter if route.sequence_parallel else start_all_reduce
        return wait(start(grad_x, route.group), route.group), None, None, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight: Scaled, route: Route, narrow: bool) -> Tensor:
        ctx.weight, ctx.route, ctx.narrow = weight, route, narrow
        if narrow:
            rows = quantize_rows(x_TI, _E4M3, group=route.group)
            y_TO = scaled_product(rows, weight, x_TI.dtype, fast=True)
        else:
            y_TO = F.linear(x_TI, weight.value(x_TI.dtype))
        return reduce_scatter(y_TO, route.group) if route.sequence_parallel else all_reduce(y_TO, route.group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        route: Route = ctx.route
        gathers = route.sequence_parallel and route.group.size > 1
        grad_TO = all_gather(grads[0], route.group) if gathers else grads[0]
        return _input_gradient(grad_TO, ctx.weight, ctx.narrow, shared=None), None, None, None


def _input_gradient(grad_TO: Tensor, weight: Scaled, narrow: bool, *, shared: Group | None) -> Tensor:
    """``grad W`` [T, I]; ``shared`` are ranks that hold other features of the same tokens."""
    if not narrow:
        return grad_TO @ weight.value(grad_TO.dtype)
    # The weight's scales lie along the sum: they go with the gradient, exactly, for they are powers of two.
    scaled_TO = grad_TO * weight.inverse.t().to(grad_TO.dtype)
    back_IO = turn(weight).data
    one_I1 = torch.ones(back_IO.shape[0], 1, dtype=torch.float32, device=back_IO.device)
    return scaled_product(quantize_rows(scaled_TO, _E4M3, group=shared), Scaled(back_IO, one_I1), grad_TO.dtype)

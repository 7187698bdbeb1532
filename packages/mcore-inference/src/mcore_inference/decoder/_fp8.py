# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Weights of served linear layers and experts in fp8."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcore_inference._capability import StoredWeight, StoresExperts, check_feed_forward
from mcore_inference._kernels import has_kernels
from mcore_inference._stability import experimental_api
from mcore_parallel.backends import Scaled, quantize_rows, scaled_product
from mcore_parallel.comm import all_reduce
from mcore_parallel.models import GPTModel, TransformerLayer
from mcore_parallel.nn import LatentSelfAttention
from mcore_parallel.tensor_parallel import (
    BatchInvariantProducts,
    ColumnParallelLinear,
    LinearProducts,
    ReplicatedLinear,
    Route,
    RowParallelLinear,
)

# T tokens, I input features of this rank, O output features of this rank

Linear = ColumnParallelLinear | RowParallelLinear | ReplicatedLinear
WeightDtype = Literal["fp8", "fp8_weight_only"]
"""As ``InferenceConfig.weight_dtype``."""
FEW_ROWS = 32
"""Tokens up to which activations keep their dtype: such a GEMM is bound by reading its weight."""
_E4M3 = torch.float8_e4m3fn
_MULTIPLE = 16
"""Of which the features of an fp8 GEMM are multiples."""


@experimental_api
class Fp8Weight:
    """Products of one layer whose weight is stored in e4m3 with a float32 scale for each output feature; conforms to ``LinearProducts``.

    Scales are powers of two: the stored weight is exact in bfloat16. Each tensor-parallel rank has scales of its own, for its part of
    the weight and of the activations, so that nothing is exchanged but the sum. There is no backward.

    Args:
        layer: its weight is rounded, in place: the parameter keeps its name and shape, and is e4m3.
        multiply: with more than ``FEW_ROWS`` tokens, multiply in fp8: activations get a scale a token. Else, and where features are no
            multiples of 16, the weight is widened for the GEMM.

    Example:
        >>> from mcore_parallel import ProcessGroups
        >>> layer = ColumnParallelLinear(16, 32, ProcessGroups.single())
        >>> layer.products = Fp8Weight(layer, multiply=False)
        >>> layer(torch.ones(2, 16)).shape, layer.weight.dtype
        (torch.Size([2, 32]), torch.float8_e4m3fn)
    """

    def __init__(self, layer: ColumnParallelLinear | RowParallelLinear | ReplicatedLinear, *, multiply: bool) -> None:
        self.multiply = multiply
        self._around: LinearProducts | None = layer.products
        weight = layer.weight
        self.dtype = weight.dtype
        """Of the weight before."""
        scaled = quantize_rows(weight.detach().flatten(0, -2), _E4M3, powers_of_two=True)
        self.inverse_O1 = scaled.inverse
        self.multiplies = multiply and not any(size % _MULTIPLE for size in scaled.data.shape)
        """Whether more than ``FEW_ROWS`` tokens are multiplied in fp8."""
        # Whoever knows the parameter goes on knowing it.
        weight.requires_grad_(False).data = scaled.data.view(weight.shape)

    def column(self, x: Tensor, weight_OI: Tensor, route: Route) -> Tensor:
        if self._around is not None:
            return self._around.column(x, self.widened(weight_OI, x.dtype), route)
        return self.product(x.flatten(0, -2), weight_OI).view(*x.shape[:-1], weight_OI.shape[0])

    def row(self, x_TI: Tensor, weight_OI: Tensor, route: Route) -> Tensor:
        if self._around is not None:
            return self._around.row(x_TI, self.widened(weight_OI, x_TI.dtype), route)
        y = self.product(x_TI.flatten(0, -2), weight_OI).view(*x_TI.shape[:-1], weight_OI.shape[0])
        return all_reduce(y, route.group)

    def weight_changed(self) -> None:
        """Weights change through ``store`` only."""

    def store(self, weight: Tensor, wide: Tensor) -> None:
        """Round other values into the weight, in place: addresses stay.

        Args:
            weight: the layer's parameter.
            wide: of its shape.
        """
        scaled = quantize_rows(wide.flatten(0, -2), _E4M3, powers_of_two=True)
        # Bytes: fp8 has no such copy on every device.
        weight.detach().view(torch.uint8).copy_(scaled.data.view(torch.uint8).view(wide.shape))
        self.inverse_O1.copy_(scaled.inverse)

    def product(self, x_TI: Tensor, weight_OI: Tensor) -> Tensor:
        """This rank's ``x W^T`` [T, O] in the dtype of x."""
        if 0 < len(x_TI) <= FEW_ROWS and has_stream_kernel(x_TI.device, x_TI.dtype):
            from mcore_inference.decoder._linear import streamed_linear

            # Each row side by side, as the kernel reads it.
            return streamed_linear(x_TI if x_TI.stride(-1) == 1 else x_TI.contiguous(), self.scaled(weight_OI))
        if self.multiplies and len(x_TI) > FEW_ROWS:
            return self.narrow_product(quantize_rows(x_TI, _E4M3), weight_OI, x_TI.dtype)
        return F.linear(x_TI, self.widened(weight_OI, x_TI.dtype))

    def narrow_product(self, x: Scaled, weight_OI: Tensor, dtype: torch.dtype) -> Tensor:
        """The same of activations in e4m3 with a scale a token, summed in the unit's own accumulators: [T, O] in ``dtype``."""
        return scaled_product(x, self.scaled(weight_OI), dtype, fast=True)

    def scaled(self, weight_OI: Tensor) -> Scaled:
        """The weight as a matrix, with its scales."""
        return Scaled(weight_OI, self.inverse_O1)

    def widened(self, weight_OI: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight as a matrix in ``dtype``."""
        # The scales of small weights are outside of the range of float16.
        first = torch.float32 if dtype == torch.float16 else dtype
        return self.scaled(weight_OI).value(first).to(dtype)


def has_stream_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a kernel multiplies few rows, widening the weight as it reads it; e4m3 begins with compute capability 8.9."""
    if dtype not in (torch.bfloat16, torch.float16) or not has_kernels(device, dtype):
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


@experimental_api
def check_quantization(model: GPTModel, weight_dtype: WeightDtype | None) -> None:
    """Whether the weights of a model can be those of an engine with this ``weight_dtype``; nothing changes.

    Raises:
        ValueError: as of ``quantize_weights``; for None, they are rounded already.
    """
    multiply, layers, mixtures = weight_dtype == "fp8", quantizable_layers(model), _mixtures(model)
    if weight_dtype is None:
        held = {name: layer.products for name, layer in layers.items() if isinstance(layer.products, Fp8Weight)}
        held |= {name: stored for name, mixture in mixtures.items() for stored in mixture.fp8_weights().values()}
        for name, stored in held.items():
            form = "fp8" if stored.multiply else "fp8_weight_only"
            raise ValueError(f"weight_dtype=None and {name} is {form!r} of another engine; use that, or build another model")
        return
    other = "fp8_weight_only" if multiply else "fp8"
    another = f"is {other!r} of another engine; use that, or build another model"
    for name, mixture in mixtures.items():
        check_feed_forward(name, mixture, weight_dtype)
        if any(stored.multiply != multiply for stored in mixture.fp8_weights().values()):
            raise ValueError(f"weight_dtype={weight_dtype!r} and {name} {another}")
    for name, layer in layers.items():
        products = layer.products
        if products is not None and not isinstance(products, (Fp8Weight, BatchInvariantProducts)):
            raise ValueError(
                f"weight_dtype={weight_dtype!r} and {type(products).__name__} both multiply the weight of {name}; "
                "leave weight_dtype at None"
            )
        if layer.weight.grad is not None:
            raise ValueError(
                f"weight_dtype={weight_dtype!r} rounds {name}.weight, which is being trained: it has a gradient; serve a model of its own "
                "and load_weights"
            )
        if isinstance(products, Fp8Weight) and products.multiply != multiply:
            raise ValueError(f"weight_dtype={weight_dtype!r} and {name} {another}")


@experimental_api
def quantize_weights(model: GPTModel, weight_dtype: WeightDtype) -> None:
    """Round the weights of a model's linear layers and experts inside its blocks; those that are rounded so already stay.

    Raises:
        ValueError: they are rounded already, and multiplied the other way; something else multiplies them, or a trainer has them. None is
            rounded then.
    """
    check_quantization(model, weight_dtype)
    multiply, layers, mixtures = weight_dtype == "fp8", quantizable_layers(model), _mixtures(model)
    for layer in layers.values():
        if not isinstance(layer.products, Fp8Weight):
            layer.products = Fp8Weight(layer, multiply=multiply)
    for mixture in mixtures.values():
        mixture.store_in_fp8(multiply=multiply)


def _mixtures(model: GPTModel) -> dict[str, StoresExperts]:
    """Feed-forwards of the blocks with experts, by name."""
    layers = {number: layer for number, layer in model.layers.items() if isinstance(layer, TransformerLayer)}
    return {f"layers.{number}.mlp": layer.mlp for number, layer in layers.items() if isinstance(layer.mlp, StoresExperts)}


def quantizable_layers(model: GPTModel) -> dict[str, Linear]:
    """Linear layers of the blocks by name; embedding and output layer are none of them.

    Of those that every tensor-parallel rank holds whole, the down projections of latent attention alone. Its ``kv_up`` keeps the model's
    dtype: queries and sums of latents are multiplied by it head by head.
    """
    layers: dict[str, Linear] = {}
    for number, block in model.layers.items():
        latent = [part for part in block.modules() if isinstance(part, LatentSelfAttention)]
        whole, absorbed = {down for part in latent for down in (part.q_down, part.kv_down)}, {part.kv_up for part in latent}
        for name, module in block.named_modules():
            cut = type(module) in (ColumnParallelLinear, RowParallelLinear) and module not in absorbed
            if isinstance(module, Linear) and (cut or module in whole):
                layers[f"layers.{number}.{name}"] = module
    return layers


@experimental_api
def fp8_parameters(model: nn.Module) -> dict[Tensor, StoredWeight]:
    """Parameters that are stored in fp8, with their scales."""
    layers = (module for module in model.modules() if isinstance(module, Linear))
    mixtures = (module for module in model.modules() if isinstance(module, StoresExperts))
    stored: dict[Tensor, StoredWeight] = {layer.weight: layer.products for layer in layers if isinstance(layer.products, Fp8Weight)}
    return stored | {weight: stack for mixture in mixtures for weight, stack in mixture.fp8_weights().items()}

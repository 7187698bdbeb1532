# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Parameters that a library holds as scaled bytes, with tensors that keep to the protocol of Transformer Engine's."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp import MegatronFSDP, fully_shard
from megatron_fsdp._layout import plan_atomic, plan_layout


class Quantizer:
    """One scale a tensor, from its largest magnitude (current scaling), or from ``scale`` (delayed), which notes that magnitude."""

    internal = False

    def __init__(self, scale: torch.Tensor | None = None, amax: torch.Tensor | None = None) -> None:
        self.scale, self.amax = scale, amax
        self.usage = {"rowwise": True, "columnwise": True}

    def copy(self) -> "Quantizer":
        return Quantizer(self.scale, self.amax)

    def set_usage(self, **usage: bool) -> None:
        self.usage.update(usage)

    def __call__(self, values: torch.Tensor) -> "Float8Tensor":
        most = values.abs().amax().float()
        scale = 448.0 / most if self.scale is None else self.scale
        if self.amax is not None:
            self.amax.copy_(most)
        data = (values.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        return Float8Tensor(
            shape=values.shape, dtype=values.dtype, data=data, fp8_scale_inv=(1 / scale).view(1), fp8_dtype="e4m3", quantizer=self
        )


class Float8Tensor(torch.Tensor):
    def __new__(cls, *, shape, dtype, data, fp8_scale_inv, fp8_dtype, quantizer, device="cpu"):
        tensor = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        tensor._data, tensor._scale_inv, tensor._fp8_dtype = data, fp8_scale_inv, fp8_dtype
        tensor._quantizer, tensor._transpose = quantizer.copy(), None
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl

    def _get_quantizer(self) -> Quantizer:
        return self._quantizer

    def dequantize(self, *, dtype: torch.dtype) -> torch.Tensor:
        return (self._data.view(torch.float8_e4m3fn).float() * self._scale_inv).to(dtype)

    def remove_caches(self) -> None:
        self._transpose = None

    def transpose_data(self) -> torch.Tensor:
        """[in, out]; fields until the caches are removed."""
        if self._transpose is None:
            self._transpose = self._data.t().contiguous()
        return self._transpose

    def detach(self) -> "Float8Tensor":
        return type(self)(
            shape=self._data.shape,
            dtype=self.dtype,
            data=self._data,
            fp8_scale_inv=self._scale_inv,
            fp8_dtype=self._fp8_dtype,
            quantizer=self._quantizer,
        )

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        if func is torch.ops.aten.detach.default:
            return args[0].detach()
        raise AssertionError(f"{func} computes with the bytes of a quantised parameter")


# By which a tensor of the library is known.
Float8Tensor.__module__ = "transformer_engine.pytorch.tensor.float8_tensor"


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.dequantize(dtype=x.dtype).t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        transposed = weight.transpose_data().view(torch.float8_e4m3fn).float() * weight._scale_inv
        return gradient @ transposed.t().to(gradient.dtype), gradient.t() @ x


class QuantizedLinear(nn.Module):
    """Computes with the bytes of its weight, without casting; ``delayed`` scales by what its weight was before."""

    def __init__(self, num_inputs: int, num_outputs: int, *, delayed: bool) -> None:
        super().__init__()
        quantizer = Quantizer(torch.tensor(100.0), torch.zeros(())) if delayed else Quantizer()
        value = torch.randn(num_outputs, num_inputs, dtype=torch.float64) / num_inputs**0.5
        self.weight: Any = nn.Parameter(quantizer(value))
        self.weight.get_high_precision_init_val = lambda: value
        self.bias = nn.Parameter(torch.zeros(num_outputs, dtype=torch.float64))
        self.delayed, self.quantizer = delayed, quantizer
        self.seen: list[tuple[torch.Tensor, float]] = []
        """Bytes and scales of each forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append((self.weight._data.clone(), self.weight._scale_inv.item()))
        if self.delayed:
            self.quantizer.scale.fill_(200.0 / self.quantizer.amax)
        return Product.apply(x, self.weight) + self.bias


def build(*, delayed: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(QuantizedLinear(16, 48, delayed=delayed), nn.Tanh()),
        nn.Sequential(QuantizedLinear(48, 16, delayed=delayed), nn.Tanh()),
        nn.Linear(16, 1, dtype=torch.float64),
    )


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def layers(net: nn.Module) -> list[QuantizedLinear]:
    return [module for module in net.modules() if isinstance(module, QuantizedLinear)]


def serial(steps: int, *, delayed: bool) -> tuple[dict[str, torch.Tensor], list[list[tuple[torch.Tensor, float]]]]:
    """Main parameters after training, and what each layer saw; the weights are quantised whole."""
    net = build(delayed=delayed)
    quantized = {name: parameter for name, parameter in net.named_parameters() if isinstance(parameter, Float8Tensor)}
    main = {name: value.get_high_precision_init_val() if name in quantized else value for name, value in net.named_parameters()}
    optimizer = torch.optim.SGD(main.values(), lr=0.1, momentum=0.9)
    for step in range(steps):
        net.zero_grad()
        net(batch(step)).square().mean().backward()
        for name, weight in quantized.items():
            main[name].grad = weight.grad
        optimizer.step()
        for name, weight in quantized.items():
            made = weight._quantizer(main[name])
            weight._data, weight._scale_inv = made._data, made._scale_inv
            weight.remove_caches()
    return main, [layer.seen for layer in layers(net)]


def train(steps: int, *, delayed: bool = False, num_parts: int = 1, **options: Any) -> tuple[MegatronFSDP, nn.Sequential]:
    net = build(delayed=delayed)
    model, optimizer = fully_shard(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), **options)
    assert optimizer is not None
    for step in range(steps):
        rows = batch(step).chunk(dist.get_world_size())[dist.get_rank()]
        for part in rows.chunk(num_parts):
            (model(part).square().mean() / num_parts).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, net


def check_training() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_outer", "dp_shard"))
    two_levels = {"device_mesh": mesh, "dp_shard_dim": "dp_shard", "dp_outer_dim": "dp_outer", "outer_dp_sharding_strategy": "optim"}
    units = {"fsdp_unit_modules": nn.Sequential}
    for delayed in (False, True):
        expected, seen = serial(3, delayed=delayed)
        whole = ({"zero_dp_strategy": "no_shard"}, {**units, "zero_dp_strategy": "optim_grads"})
        for options in (units, {**units, **two_levels}, *whole) if not delayed else (units, two_levels):
            model, net = train(3, delayed=delayed, **options)
            for name, value in model.full_state_dict():
                torch.testing.assert_close(value, expected[name].detach(), rtol=1e-10, atol=1e-12)
            for layer, before in zip(layers(net), seen, strict=True):
                assert len(layer.seen) == 3
                for (data, scale), (other, other_scale) in zip(layer.seen, before, strict=True):
                    assert torch.equal(data, other) and scale == other_scale
    # Two micro-batches see the bytes of one step; at its end neither bytes nor transposes are held.
    for options in (units, {**units, "fsdp_double_buffer": True, "maxpool_double_buffer": True}):
        model, net = train(3, num_parts=2, **options)
        for layer in layers(net):
            assert all(torch.equal(first, second) for (first, _), (second, _) in zip(layer.seen[::2], layer.seen[1::2], strict=True))
        fulls: list[Any] = [item.full for item in model.runtime.parameters if isinstance(item.full, Float8Tensor)]
        assert len(fulls) == 2 and all(full._transpose is None for full in fulls)
        if "fsdp_double_buffer" not in options:
            assert all(full._data.untyped_storage().nbytes() == 0 for full in fulls)
        for name, value in model.full_state_dict():
            assert value.dtype == torch.float64 and value.shape == expected[name].shape


@pytest.mark.journey
@pytest.mark.world(4)
def test_shards_have_the_bytes_and_scales_of_whole_tensors(world):
    world(check_training)


class MXFP8Tensor(Float8Tensor):
    __module__ = Float8Tensor.__module__


def test_what_cannot_be_cut_is_named():
    with pytest.raises(ValueError, match="which is quantised by its module"):
        train(0, eight_bit_parameters="0.0.weight")
    net = build()
    other = layers(net)[0].weight
    fields = {"fp8_scale_inv": other._scale_inv, "fp8_dtype": "e4m3", "quantizer": other._quantizer}
    layers(net)[0].weight = nn.Parameter(MXFP8Tensor(shape=other.shape, dtype=other.dtype, data=other._data, **fields))
    with pytest.raises(ValueError, match=r"'0.0.weight' is a MXFP8Tensor.*Float8CurrentScaling"):
        fully_shard(net)


def test_frozen_bytes_stay():
    net = build()
    for layer in layers(net):
        layer.weight.requires_grad_(False)
    model, optimizer = fully_shard(net, torch.optim.SGD(net.parameters(), lr=0.1), fsdp_unit_modules=nn.Sequential)
    assert optimizer is not None
    for step in range(2):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for layer in layers(net):
        assert torch.equal(layer.seen[0][0], layer.seen[1][0]) and layer.seen[0][1] == layer.seen[1][1]
        assert layer.bias.detach().count_nonzero()


def test_bytes_of_matrices_begin_where_products_want_them():
    shapes = [(48, 16), (16, 48), (33, 16), (64, 32)]
    for num_shards in range(1, 6):
        for layout in (plan_layout(shapes, num_shards, alignment=16), plan_atomic(shapes, num_shards, [0] * num_shards, alignment=16)):
            assert all(segment.offset % 16 == 0 for segment in layout.segments)

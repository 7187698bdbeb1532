# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Layers that write their weight gradients into the memory of a reduction train like those that leave it to autograd."""

import contextlib
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import MixedPrecisionPolicy, fully_shard

STEPS, MICROBATCHES = 3, 2


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, layer: "Linear") -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad,), (x, weight) = grads, ctx.saved_tensors
        gradient = grad.T @ x
        if ctx.layer.loan is None:
            return grad @ weight, gradient, None
        with ctx.layer.loan() as (total, fresh):
            ctx.layer.saw.append(fresh)
            assert total.shape == weight.shape
            (total.copy_ if fresh else total.add_)(gradient)
        return grad @ weight, None, None


class Linear(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs))
        self.loan: Any = None
        self.saw: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Product.apply(x, self.weight, self)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), Linear(6, 7), Linear(7, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Sequential):
    """The second block runs twice; the head is tied to nothing and belongs to the root."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.blocks, self.head = nn.Linear(3, 6), nn.ModuleList(Block() for _ in range(2)), Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for index in (0, 1, 1):
            x = self.blocks[index](x)
        return self.head(x)


def train(options: dict[str, Any], dtype: torch.dtype, *, sync: bool, lend: bool) -> tuple[dict[str, torch.Tensor], list[bool], int]:
    net = Net().to(dtype)
    model, optimizer = fully_shard(net, torch.optim.AdamW(net.parameters(), lr=0.02), fsdp_unit_modules=Block, **options)
    assert optimizer is not None
    loans = model.gradient_loans() if lend else {}
    layers = [(name, module) for name, module in net.named_modules() if isinstance(module, Linear)]
    for name, module in layers:
        module.loan = loans.get(f"{name}.weight")
    for step in range(STEPS):
        for microbatch in range(MICROBATCHES):
            generator = torch.Generator().manual_seed(100 * step + 10 * microbatch + dist.get_rank())
            with contextlib.nullcontext() if sync or microbatch == MICROBATCHES - 1 else model.no_sync():
                model(torch.randn(4, 3, generator=generator, dtype=dtype)).double().square().mean().backward()
        assert all(module.weight.grad is not None for _, module in layers), "autograd gave none, and the reduction did"
        optimizer.step()
        optimizer.zero_grad()
    held = sum(group.gradients.reduced is not None for group in model.runtime.groups)
    return dict(model.full_state_dict()), [fresh for _, module in layers for fresh in module.saw], held


def check_loans() -> None:
    for strategy, sync in itertools.product(range(4), (True, False)):
        # Each strategy in both precisions, each precision with and without sums between micro-batches.
        narrow = (strategy + sync) % 2 == 0
        dtype = torch.float32 if narrow else torch.float64
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if narrow else None)
        options = {"zero_dp_strategy": strategy, "mixed_precision": policy}
        expected, _, _ = train(options, dtype, sync=sync, lend=False)
        actual, saw, held = train(options, dtype, sync=sync, lend=True)
        # In bfloat16 two uses of a weight are rounded once more by autograd.
        bound = {"rtol": 0.05, "atol": 0.02} if narrow else {"rtol": 0, "atol": 1e-12}
        for name, value in actual.items():
            torch.testing.assert_close(value, expected[name], **bound, msg=f"{name} with {options}, sync={sync}")
        assert any(saw) and not all(saw), "a weight that is used twice is written once and then added to"
        assert held == 0, "gradients have memory between zero_grad and the next backward"


@pytest.mark.journey
@pytest.mark.world(2)
def test_gradients_written_into_lent_memory_equal_those_of_autograd(world):
    world(check_loans)


def test_tied_and_frozen_parameters_have_no_loan():
    net = Net()
    net.blocks[1].up.weight = net.blocks[0].up.weight
    net.head.weight.requires_grad_(False)
    model, _ = fully_shard(net, None, fsdp_unit_modules=Block)
    assert sorted(name for name in model.gradient_loans() if name.endswith(("up.weight", "down.weight", "head.weight"))) == [
        "blocks.0.down.weight",
        "blocks.1.down.weight",
    ]


def test_a_gradient_that_comes_after_its_reduction_is_named():
    net = Net()
    model, _ = fully_shard(net, None, fsdp_unit_modules=Block)
    x = torch.ones(4, 3)
    model(x).sum().backward()
    loan = model.gradient_loans()["blocks.0.up.weight"]

    class Late(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            with loan() as (total, fresh):
                assert fresh
                total.zero_()
            return grads[0]

    stem = net.stem
    stem.register_forward_hook(lambda _, __, output: Late.apply(output))
    with pytest.raises(RuntimeError, match=r"'blocks.0.up.weight' came after unit 'blocks.0' was reduced"):
        model(x).sum().backward()

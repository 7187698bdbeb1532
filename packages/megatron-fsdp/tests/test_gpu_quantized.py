# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Layers of Transformer Engine whose weights are its 8-bit tensors, sharded and whole."""

import importlib.util
from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp import fully_shard
from tests.support.world import run

needs_te = pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="needs transformer_engine")
pytestmark = pytest.mark.gpu
STEPS = 5

Seen = list[tuple[torch.Tensor, torch.Tensor]]
"""Bytes and inverse scale of a weight in each forward."""


def build(recipe: Any) -> tuple[nn.Sequential, list[Seen]]:
    import transformer_engine.pytorch as te

    torch.manual_seed(0)
    with te.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        widths = ((128, 272), (272, 144), (144, 128))
        net = nn.Sequential(*(te.Linear(*width, bias=False, params_dtype=torch.bfloat16, device="cuda") for width in widths))
    seen: list[Seen] = [[] for _ in net]
    for layer, mine in zip(net, seen, strict=True):
        layer.register_forward_pre_hook(
            lambda layer, _, mine=mine: mine.append((layer.weight._data.clone(), layer.weight._scale_inv.clone()))
        )
    return net, seen


def backward(module: nn.Module, recipe: Any, step: int) -> None:
    """Every rank has the same samples, so that the mean over ranks is each one's gradient, to the last bit."""
    import transformer_engine.pytorch as te

    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(step)).to("cuda", torch.bfloat16)
    with te.autocast(enabled=True, recipe=recipe):
        y = module(x)
    (y.float() - x.float()).square().mean().backward()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0, foreach=False)


def whole(recipe: Any) -> list[Seen]:
    """Training of this rank alone: the library quantises whole main parameters."""
    net, seen = build(recipe)
    main = [nn.Parameter(layer.weight.get_high_precision_init_val().to("cuda", torch.float32)) for layer in net]
    optimizer = sgd(main)
    for step in range(STEPS):
        backward(net, recipe, step)
        for layer, parameter in zip(net, main, strict=True):
            parameter.grad, layer.weight.grad = layer.weight.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for layer, parameter in zip(net, main, strict=True):
                layer.weight.quantize_(parameter.to(torch.bfloat16))
    return seen


def sharded(recipe: Any, **options: Any) -> list[Seen]:
    net, seen = build(recipe)
    model, optimizer = fully_shard(net, sgd(net.parameters()), fsdp_unit_modules=type(net[0]), **options)
    assert optimizer is not None
    for step in range(STEPS):
        backward(model, recipe, step)
        optimizer.step()
        optimizer.zero_grad()
    for item in model.runtime.parameters:
        assert item.full._transpose is None or options
    return seen


def check_bytes(*, delayed: bool) -> None:
    from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    recipe = DelayedScaling(amax_history_len=4) if delayed else Float8CurrentScaling()
    expected = whole(recipe)
    assert not torch.equal(expected[0][0][0], expected[0][-1][0]), "five steps change bytes"
    double = {"fsdp_double_buffer": True, "maxpool_double_buffer": True}
    for options in ({}, double, {"zero_dp_strategy": "optim_grads"}):
        FP8GlobalStateManager.reset()
        actual = sharded(recipe, **options)
        for layer, (mine, others) in enumerate(zip(actual, expected, strict=True)):
            for step, ((data, scale), (other, other_scale)) in enumerate(zip(mine, others, strict=True)):
                assert torch.equal(data, other) and torch.equal(scale, other_scale), (options, layer, step)


@needs_te
@pytest.mark.parametrize("delayed", [False, True])
def test_shards_have_the_bytes_that_the_library_gives_whole_weights(delayed):
    run(check_bytes, min(2, torch.cuda.device_count()), backend="nccl", timeout_s=110.0, delayed=delayed)

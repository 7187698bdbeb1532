# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Offloaded activations come back with the same bits; on the CPU the copies are real, only the place is not another."""

import gc
import weakref

import pytest
import torch
from torch import Tensor

from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.nn import ActivationOffloader, OffloadConfig, RecomputeConfig, Step

CONFIG = TransformerConfig(num_layers=4, hidden_size=8, num_attention_heads=2, vocab_size=16, ffn_hidden_size=24)
SMALL = {"min_offloaded_tensor_size": 1, "on_cpu": True}
CHOICES = [
    {"modules": ("layer",)},
    {"modules": ("layer",), "fraction": 0.5, "keep_last_layers": 0},
    {"modules": ("norm", "mlp", "attention"), "prefetch": 2},
    {"modules": ("core_attention", "mlp"), "prefetch": 0},
]


def train(groups: ProcessGroups, offload: OffloadConfig | None, recompute: RecomputeConfig | None = None) -> list[Tensor]:
    model = GPTModel(CONFIG, groups, dtype=torch.float64, seed=1, offload=offload, recompute=recompute)
    offloader = model.memory.offloader
    results, allocations = [], []
    for step in range(4):
        # Two micro-batches in flight, as in a pipeline: both forwards, then both backwards.
        losses = []
        for microbatch in range(2):
            tokens = torch.randint(0, 16, (24,), generator=torch.Generator().manual_seed(2 * step + microbatch))
            losses.append(model(tokens, Step.causal(4, 6))[0].token_losses(tokens).sum())
        if offloader is not None:
            assert offloader.bytes_out > 0
        for loss in losses:
            loss.backward()
            results.append(loss.detach())
        results += [parameter.grad.clone() for parameter in model.parameters()]
        del loss
        losses.clear()
        if offloader is not None:
            assert offloader.bytes_out == 0
            allocations.append(offloader.num_allocations)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.01 * parameter.grad)
                parameter.grad = None
    assert len(set(allocations[1:])) <= 1, "host memory is used again"
    return results


def compare(groups: ProcessGroups) -> None:
    plain = train(groups, None)
    for choice in CHOICES:
        for ours, expected in zip(train(groups, OffloadConfig(**SMALL, **choice)), plain, strict=True):
            assert torch.equal(ours, expected), choice


def test_every_choice_has_the_bits_of_a_plain_run() -> None:
    compare(ProcessGroups.single())


def check_ranks(tp: int) -> None:
    compare(ProcessGroups.build(ParallelPlan(tp=tp, sequence_parallel=True)))


@pytest.mark.world(2)
def test_every_choice_works_on_two_ranks(world) -> None:
    world(check_ranks, tp=2)


@pytest.mark.parametrize(
    ("offload", "recompute"),
    [
        (("layer",), RecomputeConfig(granularity="full")),
        (("layer",), RecomputeConfig(granularity="full", method="block", num_layers=1)),
        (("mlp",), RecomputeConfig(modules=("norm", "core_attention"))),
        (("attention",), RecomputeConfig(modules=("mlp",))),
        (("layer",), RecomputeConfig(modules=("norm", "mlp"))),
    ],
)
def test_offloading_goes_with_recomputation_of_other_parts(offload, recompute) -> None:
    plain = train(ProcessGroups.single(), None)
    for ours, expected in zip(train(ProcessGroups.single(), OffloadConfig(**SMALL, modules=offload), recompute), plain, strict=True):
        assert torch.equal(ours, expected)


def test_views_of_one_storage_are_one_copy_and_small_views_go_alone() -> None:
    offloader = ActivationOffloader(OffloadConfig(**SMALL))
    x = torch.randn(8, 8, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad((x.exp().T * x.exp()).sum(), x)
    with offloader.group():
        y = x.exp()
        product = y.T * y
    assert offloader.bytes_out == 64 * 8
    del y
    assert torch.equal(torch.autograd.grad(product.sum(), x)[0], expected[0])
    del product
    with offloader.group():
        wide = x * 1.0
        part = wide[2:4, ::2] * wide[1:3, 1::2]
    assert offloader.bytes_out == 2 * 8 * 8
    part.sum().backward()
    assert x.grad[2, 0] == x[1, 1]


def test_device_memory_is_free_between_forward_and_backward() -> None:
    offloader = ActivationOffloader(OffloadConfig(**SMALL))
    x = torch.ones(16, requires_grad=True)
    with offloader.group():
        y = x.exp()
        alive = weakref.ref(y.untyped_storage())
        z = (y * y).sum()
    del y
    gc.collect()
    assert alive() is None or offloader.bytes_out == 64
    for _ in range(2):
        (grad,) = torch.autograd.grad(z, x, retain_graph=True)
        torch.testing.assert_close(grad, 2 * x.exp().square())
    assert offloader.bytes_out == 64
    del z
    assert offloader.bytes_out == 0


def test_weights_small_tensors_and_quiet_runs_stay() -> None:
    offloader = ActivationOffloader(OffloadConfig(min_offloaded_tensor_size=10, on_cpu=True))
    layer = torch.nn.Linear(8, 8)
    x = torch.ones(1, 8, requires_grad=True)
    with offloader.group(layer.parameters()):
        y = layer(x)
    assert offloader.bytes_out == 0 and y.requires_grad
    with offloader.group():
        y = layer(x)
    assert offloader.bytes_out == 8 * 8 * 4
    del y
    with torch.no_grad(), offloader.group():
        layer(x)
    assert offloader.bytes_out == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modules": ()}, "modules is empty"),
        ({"modules": ("expert",)}, r"modules holds \['expert'\]"),
        ({"modules": ("layer", "mlp")}, "'layer' alone covers"),
        ({"fraction": 1.5}, "fraction=1.5"),
        ({"prefetch": -1}, "prefetch=-1"),
    ],
)
def test_bad_choices_are_named(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        OffloadConfig(**options)


def test_choices_that_exclude_one_another_are_named() -> None:
    def build(offload: tuple[str, ...], **options) -> None:
        GPTModel(CONFIG, ProcessGroups.single(), offload=OffloadConfig(modules=offload), seed=None, **options)

    with pytest.raises(ValueError, match=r"\['mlp'\] is recomputed and offloaded"):
        build(("mlp",), recompute=RecomputeConfig(modules=("mlp",)))
    with pytest.raises(ValueError, match=r"\['core_attention'\] is recomputed and offloaded"):
        build(("core_attention",), recompute=RecomputeConfig(modules=("attention",)))
    with pytest.raises(ValueError, match="offload 'layer'"):
        build(("mlp",), recompute=RecomputeConfig(granularity="full"))
    with pytest.raises(ValueError, match="wrap its core in ManagedCore"):
        build(("core_attention",), mixer=lambda site: torch.nn.Identity())

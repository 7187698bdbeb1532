# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Offloaded activations come back with the same bits; on the CPU the copies are real, only the place is not another."""

import contextlib
import functools
import gc
import weakref

import pytest
import torch
from torch import Tensor

from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.nn import ActivationOffloader, OffloadConfig, RecomputeConfig, Step
from mcore_parallel.pipeline import ModelChunks, PipelineLayout
from mcore_parallel.training import Batch, CrossEntropyObjective, train_step

CONFIG = TransformerConfig(num_layers=4, hidden_size=8, num_attention_heads=2, vocab_size=16, ffn_hidden_size=24)
SMALL = {"min_offloaded_tensor_size": 1, "on_cpu": True}
CHOICES = [
    {"modules": ("layer",)},
    {"modules": ("layer",), "fraction": 0.5, "keep_last_layers": 0},
    {"modules": ("norm", "mlp", "attention"), "prefetch": 2},
    {"modules": ("core_attention", "mlp"), "prefetch": 0},
    {"modules": ("norm", "mlp"), "keep_bytes": 20_000},
    {"modules": ("norm", "mlp"), "max_inflight": 1},
    {"modules": ("layer",), "max_inflight": 0},
]


def train(groups: ProcessGroups, offload: OffloadConfig | None, recompute: RecomputeConfig | None = None) -> list[Tensor]:
    model = GPTModel(CONFIG, groups, dtype=torch.float64, seed=1, offload=offload, recompute=recompute)
    offloader = model.memory.offloader
    results, allocations = [], []
    for step in range(3):
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


@pytest.mark.journey
@pytest.mark.world(2)
def test_every_choice_works_on_two_ranks(world) -> None:
    world(check_ranks, tp=2)


class Still:
    """A gradient sync and an optimizer that leave the gradients where they are."""

    loss_scale = None

    def __init__(self, chunks: ModelChunks) -> None:
        self.chunks = chunks

    def zero_grad_buffer(self) -> None:
        self.chunks.zero_grad()

    def no_sync(self):
        return contextlib.nullcontext()

    def finish_grad_sync(self) -> None: ...

    def step(self, *, grad_scale: Tensor, lr: float):
        return type("Result", (), {"grad_norm": torch.zeros(()), "skipped": False})()


def check_pipeline() -> None:
    """Four steps over one and two chunks a stage, with and without recomputation of other parts."""
    groups = ProcessGroups.build(ParallelPlan(pp=2))
    for text in ("Ett|ttL", "Et|t|t|tL"):
        layout = PipelineLayout.parse(text, num_stages=2, num_layers=4)
        results, allocations = [], []
        for offload, recompute in (
            (None, None),
            (OffloadConfig(**SMALL, modules=("layer",), keep_last_layers=0), None),
            (OffloadConfig(**SMALL, modules=("mlp", "norm"), keep_last_layers=0), RecomputeConfig()),
        ):
            options = {"dtype": torch.float64, "seed": 1, "offload": offload, "recompute": recompute}
            chunks = ModelChunks([GPTModel(CONFIG, groups, layers=part, **options) for part in layout.of_rank(groups.pp.rank)])
            still, found = Still(chunks), []
            offloaders = [chunk.memory.offloader for chunk in chunks if chunk.memory.offloader is not None]
            for step in range(4):
                tokens = torch.randint(0, 16, (4, 2, 6), generator=torch.Generator().manual_seed(step))
                batches = [Batch(tokens=part, labels=part.roll(-1), loss_mask=torch.ones(2, 6)) for part in tokens]
                report = train_step(chunks, batches, CrossEntropyObjective(), still, still, lr=0.1, groups=groups)
                found += [torch.tensor(report.loss), *(p.grad.clone() for p in chunks.parameters())]
                assert not any(offloader.bytes_out for offloader in offloaders), "nothing stays on the host after a step"
                allocations.append(sum(offloader.num_allocations for offloader in offloaders))
            assert len(set(allocations[-3:])) == 1 and bool(allocations[-1]) == (offload is not None)
            results.append(found)
        for other in results[1:]:
            assert all(torch.equal(ours, expected) for ours, expected in zip(other, results[0], strict=True))


@pytest.mark.journey
@pytest.mark.world(2)
def test_offloading_works_in_a_pipeline_with_one_and_two_chunks(world) -> None:
    world(check_pipeline)


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


def test_the_first_modules_stay_as_far_as_their_bytes_are_allowed() -> None:
    for keep, kept, out in ((0, 0, 3 * 128), (127, 0, 3 * 128), (128, 128, 2 * 128), (300, 256, 128), (1000, 384, 0)):
        offloader = ActivationOffloader(OffloadConfig(**SMALL, keep_bytes=keep))
        x = torch.linspace(0, 1, 16, dtype=torch.float64, requires_grad=True)
        y = x
        for _ in range(3):
            with offloader.group():
                y = y.exp()
        z = y.sum()
        del y
        assert (offloader.bytes_kept, offloader.bytes_out) == (kept, out)
        expected = torch.autograd.grad(x.exp().exp().exp().sum(), x)[0]
        for retain in (True, False):
            assert torch.equal(torch.autograd.grad(z, x, retain_graph=retain)[0], expected)
        del z
        assert offloader.bytes_kept == offloader.bytes_out == 0


@pytest.mark.parametrize(("bound", "joins"), [(None, 0), (0, 8), (1, 6), (2, 4), (4, 0)])
def test_only_so_many_offloads_of_a_part_are_under_way(bound: int | None, joins: int) -> None:
    offloader = ActivationOffloader(OffloadConfig(**SMALL, max_inflight=bound))
    x = torch.linspace(0, 1, 16, dtype=torch.float64, requires_grad=True)
    y, storages = x, []
    for _ in range(4):
        for name in ("attention", "mlp"):
            with offloader.group(name=name):
                y = (y / 2).exp()
            storages.append(weakref.ref(y.untyped_storage()))
    z = y.sum()
    del y
    assert offloader.num_joins == joins
    assert offloader.bytes_out == 8 * 128
    (expected,) = torch.autograd.grad(functools.reduce(lambda y, _: (y / 2).exp(), range(8), x).sum(), x)
    for retain in (True, False):
        assert torch.equal(torch.autograd.grad(z, x, retain_graph=retain)[0], expected)
    del z
    assert offloader.num_joins == joins, "a backward makes nobody wait"
    assert offloader.bytes_out == 0
    gc.collect()
    assert all(storage() is None for storage in storages)


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
        ({"keep_bytes": -1}, "keep_bytes=-1"),
        ({"max_inflight": -1}, "max_inflight=-1"),
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


def test_rows_of_a_large_tensor_come_back_as_they_were() -> None:
    x = torch.arange(12.0).view(6, 2).requires_grad_()
    offloader = ActivationOffloader(OffloadConfig(min_offloaded_tensor_size=1, on_cpu=True))
    with offloader.group():
        # Contiguous, and less than half of its storage.
        y = (x * 1.0)[4:].square()
    assert offloader.bytes_out == 4 * 4
    y.sum().backward()
    assert torch.equal(x.grad[4:], 2 * x.detach()[4:])

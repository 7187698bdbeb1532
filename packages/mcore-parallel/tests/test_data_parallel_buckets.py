# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Buckets: how many there are, when each is summed, and what happens when a graph changes."""

import dataclasses
import math
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig, lay_out_slices
from mcore_parallel.data_parallel._buffer import Bucket


def test_random_layouts_cover_each_buffer_once() -> None:
    generator = torch.Generator().manual_seed(4)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    for _ in range(100):
        shapes = [tuple(draw(1, 20) for _ in range(draw(1, 4))) for _ in range(draw(1, 20))]
        num_slices, size, multiple = draw(1, 9), draw(1, 3000), (1, 4096)[draw(0, 2)]
        layout = lay_out_slices(shapes, size, num_slices, multiple)
        assert layout == lay_out_slices([tuple(shape) for shape in shapes], size, num_slices, multiple)
        covered = torch.zeros(layout.total, dtype=torch.int8)
        for shape, start in zip(shapes, layout.starts, strict=True):
            assert start % 64 == 0
            covered[start : start + math.prod(shape)] += 1
        assert (covered <= 1).all() and covered.sum() == sum(map(math.prod, shapes))
        owned = torch.zeros(layout.total, dtype=torch.int8)
        end = 0
        for bucket in layout.buckets:
            assert bucket.start == end and (bucket.end - bucket.start) % math.lcm(num_slices, multiple) == 0
            end = bucket.end
            for index in bucket.members:
                assert bucket.start <= layout.starts[index] and layout.starts[index] + math.prod(shapes[index]) <= bucket.end
            for index in range(num_slices):
                owned[slice(*layout.slice_of(bucket, index))] += 1
        assert (owned == 1).all()
        assert [index for bucket in layout.buckets for index in bucket.members] == list(range(len(shapes)))


class Stack(nn.Module):
    """Layers of which some may be left out; the first weight is also the last one."""

    def __init__(self, num_layers: int = 6) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(num_layers))
        self.last = nn.Linear(6, 6, bias=False)
        self.last.weight = self.layers[0].weight

    def forward(self, x: Tensor, skip: int = -1) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number != skip:
                x = layer(x).tanh() + x
        return self.last(x).sum()


def test_the_number_of_buckets_may_be_given() -> None:
    for wanted, found in ((1, 1), (2, 2), (3, 3), (6, 6), (100, 6)):
        for options in ({}, {"use_distributed_optimizer": True}):
            model = nn.ParameterList(nn.Parameter(torch.zeros(8, 64)) for _ in range(6))
            ddp = DistributedDataParallel(DistributedDataParallelConfig(num_buckets=wanted, **options), model, ProcessGroups.single())
            assert [len(buffer.buckets) for buffer in ddp.grad_buffers] == [found]
    padded = DistributedDataParallelConfig(use_distributed_optimizer=True, num_buckets=2, pad_buckets_for_high_nccl_busbw=True)
    (buffer,) = DistributedDataParallel(padded, model, ProcessGroups.single()).grad_buffers
    assert [bucket.data.numel() for bucket in buffer.buckets] == [65536, 65536]
    with pytest.raises(ValueError, match="num_buckets=2 must be at least 1 and come without bucket_size=5"):
        DistributedDataParallelConfig(num_buckets=2, bucket_size=5)
    with pytest.raises(ValueError, match="num_buckets=0"):
        DistributedDataParallelConfig(num_buckets=0)
    with pytest.raises(ValueError, match="pad_buckets_for_high_nccl_busbw=True needs use_distributed_optimizer=True"):
        DistributedDataParallelConfig(pad_buckets_for_high_nccl_busbw=True)


def test_one_config_serves_two_models_and_stays_as_it_is() -> None:
    config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    before = dataclasses.replace(config)
    for _ in range(2):
        (buffer,) = DistributedDataParallel(config, Stack(), ProcessGroups.single()).grad_buffers
        assert len(buffer.buckets) == 1 and config == before
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.bucket_size = 3  # type: ignore[misc]


def test_parameters_and_gradients_lie_in_the_buffers_with_their_values() -> None:
    model, plain = Stack(), Stack()
    ddp = DistributedDataParallel(DistributedDataParallelConfig(use_distributed_optimizer=True), model, ProcessGroups.single())
    (buffer,) = ddp.grad_buffers
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)
        for tensor, flat in ((p, buffer.params), (ddp.gradients()[name], buffer.data)):
            assert flat is not None
            offset = tensor.data_ptr() - flat.data_ptr()
            assert offset >= 0 and offset + 4 * tensor.numel() <= 4 * flat.numel()
    assert model.last.weight is model.layers[0].weight


def check_launches() -> None:
    launches: list[Tensor] = []
    launch = Bucket.launch

    def record(bucket: Bucket) -> None:
        launches.append(bucket.data)
        launch(bucket)

    Bucket.launch = record  # this process ends with the check
    groups = ProcessGroups.build(ParallelPlan(dp=2))
    for overlap in (True, False):
        ddp = DistributedDataParallel(DistributedDataParallelConfig(bucket_size=1, overlap_grad_reduce=overlap), Stack(), groups)
        for step in range(3):
            launches.clear()
            ddp.zero_grad_buffer()
            with ddp.no_sync():
                ddp(torch.ones(2, 6)).backward()
                assert not launches
            ddp(torch.ones(2, 6)).backward()
            early = len(launches)
            assert early == (6 if overlap and step else 0)
            ddp.start_grad_sync()
            ddp.finish_grad_sync()
            # Six matrices, one of them used twice: each is summed exactly once.
            assert len(launches) == 6 and set(Counter(data.data_ptr() for data in launches).values()) == {1}
        first = ddp.gradients()["layers.0.weight"]
        assert "last.weight" not in ddp.gradients() and first.any()


@pytest.mark.world(2)
def test_a_tied_weight_is_summed_once(world) -> None:
    world(check_launches)


def check_ways() -> None:
    """All-reduce, reduce-scatter and the one that adds in float32, in one bucket and in many, early and late, against one process."""
    world, rank = dist.get_world_size(), dist.get_rank()
    groups = ProcessGroups.build(ParallelPlan(dp=world))
    inputs = torch.randn(3, world, 4, 6, generator=torch.Generator().manual_seed(8))
    serial = Stack()
    for x in inputs.flatten(0, 1):
        serial(x).backward()
    expected = {name: p.grad for name, p in serial.named_parameters()}
    fp32 = {"reduce_scatter_with_fp32_accumulation": True}
    for dtype, tolerance, options in ((torch.float32, 1e-6, {}), (torch.bfloat16, 3e-2, {}), (torch.bfloat16, 3e-2, fp32)):
        for sliced in (False, True):
            for size in (1, None):
                found = []
                for overlap in (False, True):
                    ways = {"bucket_size": size, "overlap_grad_reduce": overlap, "use_distributed_optimizer": sliced, **options}
                    config = DistributedDataParallelConfig(grad_reduce_in_fp32=dtype == torch.float32, **ways)
                    ddp = DistributedDataParallel(config, Stack().to(dtype), groups)
                    for _ in range(2):
                        ddp.zero_grad_buffer()
                        for number in range(3):
                            with nullcontext() if number == 2 else ddp.no_sync():
                                ddp(inputs[number, rank].to(dtype)).backward()
                        ddp.finish_grad_sync()
                    pieces = ddp.pieces()
                    found.append([piece.gradient.clone() for piece in pieces])
                    for piece in pieces:
                        wanted = expected[piece.name]
                        assert wanted is not None
                        error = (piece.gradient.float() - wanted.flatten()[piece.start : piece.end]).abs().max()
                        assert error <= tolerance * wanted.abs().max(), (dtype, ways, piece.name)
                assert all(torch.equal(late, early) for late, early in zip(*found, strict=True)), (dtype, ways)


@pytest.mark.world(2)
def test_every_way_to_sum_equals_one_process_on_two_ranks(world) -> None:
    world(check_ways)


@pytest.mark.journey
@pytest.mark.world(4)
def test_every_way_to_sum_equals_one_process_on_four_ranks(world) -> None:
    world(check_ways)


def check_changing_graph() -> None:
    rank = dist.get_rank()
    groups = ProcessGroups.build(ParallelPlan(dp=2))
    ddp = DistributedDataParallel(DistributedDataParallelConfig(bucket_size=1), Stack(), groups)

    def step(skip: int) -> dict[str, Tensor]:
        ddp.zero_grad_buffer()
        ddp(torch.ones(2, 6), skip).backward()
        ddp.finish_grad_sync()
        return {name: grad.clone() for name, grad in ddp.gradients().items()}

    def serial(skips: tuple[int, int]) -> dict[str, Tensor]:
        model = Stack()
        for skip in skips:
            model(torch.ones(2, 6), skip).backward()
        return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}

    def equal(found: dict[str, Tensor], skips: tuple[int, int]) -> None:
        for name, grad in serial(skips).items():
            torch.testing.assert_close(found[name], grad, rtol=1e-6, atol=1e-7)

    # Learnt with all layers; then one rank, then both leave one out: its sum waits for the end, and nobody hangs.
    equal(step(-1), (-1, -1))
    equal(step(3 if rank == 0 else -1), (3, -1))
    equal(step(2), (2, 2))
    # Learnt without a layer on one rank.
    ddp.reset_overlap()
    equal(step(5 if rank == 0 else -1), (5, -1))
    equal(step(5 if rank == 0 else -1), (5, -1))
    ddp.reset_overlap()
    equal(step(-1), (-1, -1))


@pytest.mark.world(2)
def test_a_layer_that_one_batch_leaves_out_does_not_hang_its_sum(world) -> None:
    world(check_changing_graph)


def test_a_gradient_that_the_learnt_step_had_not_is_refused_by_name() -> None:
    ddp = DistributedDataParallel(DistributedDataParallelConfig(bucket_size=1), Stack(), ProcessGroups.single())
    ddp(torch.ones(2, 6), 3).backward()
    ddp.finish_grad_sync()
    ddp.zero_grad_buffer()
    # Buckets are launched in one order, and the one without expected gradients does not wait for this one.
    with pytest.raises(RuntimeError, match=r"a gradient of layers\.3\.weight came after its sum .* reset_overlap\(\)"):
        ddp(torch.ones(2, 6)).backward()


def test_frozen_parameters_have_no_place_in_a_buffer() -> None:
    model = Stack()
    model.layers[1].requires_grad_(False)
    ddp = DistributedDataParallel(DistributedDataParallelConfig(use_distributed_optimizer=True), model, ProcessGroups.single())
    ddp(torch.ones(2, 6)).backward()
    ddp.finish_grad_sync()
    assert "layers.1.weight" not in ddp.gradients() and model.layers[1].weight.grad is None
    assert all(shard.name != "layers.1.weight" for buffer in ddp.grad_buffers for shard in buffer.shards)


def test_registered_gradients_cannot_be_offloaded() -> None:
    ddp = DistributedDataParallel(DistributedDataParallelConfig(nccl_ub=True), Stack(), ProcessGroups.single())
    with pytest.raises(RuntimeError, match="nccl_ub=True keeps the gradients in registered memory"):
        ddp.offload_grad_buffers()
    plain = DistributedDataParallel(DistributedDataParallelConfig(), Stack(), ProcessGroups.single())
    plain(torch.ones(2, 6)).backward()
    plain.offload_grad_buffers()
    assert plain.grad_buffers[0].data.untyped_storage().nbytes() == 0
    plain.restore_grad_buffers()
    assert not any(grad.any() for grad in plain.gradients().values())
    plain(torch.ones(2, 6)).backward()
    assert all(grad.any() for grad in plain.gradients().values())


def test_a_closed_wrapper_leaves_the_model_to_autograd() -> None:
    model = Stack()
    options = {"use_distributed_optimizer": True, "overlap_param_gather": True}
    ddp = DistributedDataParallel(DistributedDataParallelConfig(**options), model, ProcessGroups.single())
    ddp.close()
    model(torch.ones(2, 6)).backward()
    assert all(p.grad is not None for p in model.parameters())
    assert not any(grad.any() for grad in ddp.gradients().values())

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Sums of 16-bit gradients that round once, and what data parallelism does with them."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mcore_parallel import Group, ParallelPlan, ProcessGroups
from mcore_parallel.comm._reduce_scatter import start_all_reduce_in_place, start_gather_into, start_reduce_scatter_into
from mcore_parallel.comm._registered import RegisteredMemory
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.data_parallel._buffer import Bucket


def part(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Heavy tails, so that the order and the width of a sum show."""
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(numel, generator=generator) * torch.randn(numel, generator=generator).mul(2).exp()).to(dtype)


def summed(num_ranks: int, numel: int, dtype: torch.dtype) -> Tensor:
    total = part(0, numel, dtype).float()
    for rank in range(1, num_ranks):
        total += part(rank, numel, dtype)
    return total


def check_rounded_once() -> float:
    group = Group.of(dist.group.WORLD)
    errors = []
    for dtype in (torch.bfloat16, torch.float16):
        for numel in (group.size * 1000, group.size):
            exact = summed(group.size, numel, dtype)
            x = part(group.rank, numel, dtype)
            out = torch.empty(numel // group.size, dtype=dtype)
            start_reduce_scatter_into(out, x, group, fp32_accumulation=True).wait()
            assert torch.equal(out, exact.to(dtype).chunk(group.size)[group.rank])
            # Into the slice of the input itself, and gathered from there.
            mine = x.chunk(group.size)[group.rank]
            start_reduce_scatter_into(mine, x, group, fp32_accumulation=True).wait()
            start_gather_into(x, mine, group).wait()
            assert torch.equal(x, exact.to(dtype))
        for numel in (1001, 1, group.size * 8):
            exact, y = summed(group.size, numel, dtype), part(group.rank, numel, dtype)
            start_all_reduce_in_place(y, group, fp32_accumulation=True).wait()
            assert torch.equal(y, exact.to(dtype))
        native, ours = part(group.rank, 20_000, dtype), part(group.rank, 20_000, dtype)
        start_all_reduce_in_place(native, group).wait()
        start_all_reduce_in_place(ours, group, fp32_accumulation=True).wait()
        exact = summed(group.size, 20_000, dtype)
        errors.append([(some.float() - exact).norm().item() for some in (native, ours)])
    assert all(ours <= native for native, ours in errors)
    wide = torch.full((group.size,), float(group.rank + 1))
    start_reduce_scatter_into(wide[group.rank : group.rank + 1], wide, group, fp32_accumulation=True).wait()
    assert wide[group.rank] == sum(range(1, group.size + 1))
    return errors[0][1] / errors[0][0]


@pytest.mark.world(2)
def test_two_ranks_round_once(world) -> None:
    world(check_rounded_once)


@pytest.mark.world(4)
def test_four_ranks_round_once_and_lose_less_than_a_ring(world) -> None:
    assert all(ratio < 0.9 for ratio in world(check_rounded_once))


@pytest.mark.world(8)
def test_eight_ranks_round_once_and_lose_less_than_a_ring(world) -> None:
    assert all(ratio < 0.9 for ratio in world(check_rounded_once))


def check_handles() -> None:
    """Sums under way at once, finished in any order and more than once, have the bits of sums waited for one by one."""
    group = Group.of(dist.group.WORLD)
    numel = group.size * 500
    inputs = [part(10 * number + group.rank, numel, torch.bfloat16) for number in range(3)]
    expected = []
    for x in inputs:
        out = torch.empty(500, dtype=torch.bfloat16)
        start_reduce_scatter_into(out, x.clone(), group, fp32_accumulation=True).wait()
        expected.append(out)
    found = [torch.full((500,), torch.nan, dtype=torch.bfloat16) for _ in inputs]
    kept = [x.clone() for x in inputs]
    works = [start_reduce_scatter_into(out, x, group, fp32_accumulation=True) for out, x in zip(found, kept, strict=True)]
    for index in (2, 0, 1, 0):
        works[index].wait()
        assert torch.equal(found[index], expected[index])
    assert all(torch.equal(x, y) for x, y in zip(inputs, kept, strict=True))
    with pytest.raises(ValueError, match=f"dim 0 of size {numel + 1} must be a multiple"):
        start_reduce_scatter_into(found[0], torch.ones(numel + 1, dtype=torch.bfloat16), group, fp32_accumulation=True)


@pytest.mark.world(2)
def test_a_handle_ends_like_a_wait_on_two_ranks(world) -> None:
    world(check_handles)


@pytest.mark.world(4)
def test_a_handle_ends_like_a_wait_on_four_ranks(world) -> None:
    world(check_handles)


def check_norms() -> tuple[float, float]:
    """Mean error of the norm of a sum, of a ring and of ours, over heavy-tailed gradients."""
    group = Group.of(dist.group.WORLD)
    native = ours = 0.0
    for draw in range(10):
        parts = [part(100 * draw + rank, 4096, torch.bfloat16) for rank in range(group.size)]
        exact = sum((x.double() for x in parts[1:]), parts[0].double()).norm()
        for fp32 in (False, True):
            x = parts[group.rank].clone()
            start_all_reduce_in_place(x, group, fp32_accumulation=fp32).wait()
            error = ((x.double().norm() - exact) / exact).abs().item()
            native, ours = (native, ours + error) if fp32 else (native + error, ours)
    return ours / 10, native / 10


@pytest.mark.world(8)
def test_the_gradient_norm_of_eight_ranks_is_nearer_than_a_ring_s(world) -> None:
    for ours, native in world(check_norms):
        assert 0 < ours < native


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(size, dtype=torch.bfloat16)) for size in (70, 33, 129))


def sync(config: DistributedDataParallelConfig, groups: ProcessGroups, steps: int = 2) -> dict[str, Tensor]:
    """The pieces' gradients after backwards of ``part``."""
    ddp = DistributedDataParallel(config, Weights(), groups)
    for _ in range(steps):
        ddp.zero_grad_buffer()
        values = part(groups.dp.rank, 232, torch.bfloat16).split([70, 33, 129])
        sum((p * v).sum() for p, v in zip(ddp.module.parts, values, strict=True)).backward()
        ddp.finish_grad_sync()
    return {piece.name: (piece.start, piece.gradient.clone() * piece.factor) for piece in ddp.pieces()}


def check_data_parallel() -> None:
    groups = ProcessGroups.build(ParallelPlan(dp=4))
    exact = dict(zip([f"parts.{i}" for i in range(3)], summed(4, 232, torch.bfloat16).bfloat16().split([70, 33, 129]), strict=True))
    fp32 = {"grad_reduce_in_fp32": False, "reduce_scatter_with_fp32_accumulation": True}
    for sliced in (True, False):
        for size in (50, 1000):
            for overlap in (True, False):
                config = {**fp32, "use_distributed_optimizer": sliced, "bucket_size": size, "overlap_grad_reduce": overlap}
                for name, (start, gradient) in sync(DistributedDataParallelConfig(**config), groups).items():
                    assert torch.equal(gradient, exact[name][start : start + len(gradient)])
    # A second instance in the same process that does not ask for it gets a ring's sum.
    plain = sync(DistributedDataParallelConfig(grad_reduce_in_fp32=False), groups)
    assert any(not torch.equal(gradient, exact[name]) for name, (_, gradient) in plain.items())
    averaged = sync(DistributedDataParallelConfig(**fp32, average_in_collective=True), groups)
    assert all(torch.equal(gradient, exact[name]) for name, (_, gradient) in averaged.items())  # a power of two: exact


@pytest.mark.world(4)
def test_data_parallel_sums_round_once_where_asked(world) -> None:
    world(check_data_parallel)


def check_instances() -> None:
    """With two optimizer instances a sum rounds once within each, and once between them."""
    groups = ProcessGroups.build(ParallelPlan(dp=4, optimizer_instances=2))
    halves = []
    for ranks in ((0, 1), (2, 3)):
        first, second = (part(rank, 232, torch.bfloat16) for rank in ranks)
        halves.append((first.float() + second).bfloat16())
    exact = dict(zip([f"parts.{i}" for i in range(3)], (halves[0].float() + halves[1]).bfloat16().split([70, 33, 129]), strict=True))
    fp32 = {"grad_reduce_in_fp32": False, "reduce_scatter_with_fp32_accumulation": True, "use_distributed_optimizer": True}
    for overlap in (True, False):
        config = DistributedDataParallelConfig(**fp32, num_distributed_optimizer_instances=2, bucket_size=50, overlap_grad_reduce=overlap)
        for name, (start, gradient) in sync(config, groups, steps=3).items():
            assert torch.equal(gradient, exact[name][start : start + len(gradient)])


@pytest.mark.world(4)
def test_two_instances_round_once_each_and_once_together(world) -> None:
    world(check_instances)


def check_scratch() -> None:
    groups = ProcessGroups.build(ParallelPlan(dp=2))
    fp32 = {"grad_reduce_in_fp32": False, "reduce_scatter_with_fp32_accumulation": True, "use_distributed_optimizer": True}
    ddp = DistributedDataParallel(DistributedDataParallelConfig(**fp32, bucket_size=20), Weights(), groups)
    under_way: list[int] = []
    launch = Bucket.launch

    def record(bucket: Bucket) -> None:
        launch(bucket)
        under_way.append(sum(other._work is not None for buffer in ddp.grad_buffers for other in buffer.buckets))

    Bucket.launch = record  # this process ends with the check
    for _ in range(3):
        ddp.zero_grad_buffer()
        sum(p.sum() for p in ddp.module.parts).backward()
        ddp.finish_grad_sync()
    assert under_way == [1] * 9


@pytest.mark.world(2)
def test_one_bucket_s_scratch_is_alive_at_a_time(world) -> None:
    world(check_scratch)


def test_patterns_accumulate_in_float32_until_the_sum() -> None:
    for patterns, expected in (((), 256.0), (("parts.0",), 258.0), (("all",), 258.0)):
        config = DistributedDataParallelConfig(grad_reduce_in_fp32=False, param_name_patterns_for_fp32_local_accumulation=patterns)
        ddp = DistributedDataParallel(config, Weights(), ProcessGroups.single())
        for _ in range(2):
            ddp.zero_grad_buffer()
            for value in (256.0, 0.5, 0.5, 0.5, 0.5):
                (ddp.module.parts[0] * value).sum().backward()
            ddp.finish_grad_sync()
            assert ddp.gradients()["parts.0"][0] == expected


def check_bad_gradients() -> None:
    groups = ProcessGroups.build(ParallelPlan(dp=2))
    for value, options, match in (
        (torch.nan, {"check_for_nan_in_grad": True}, r"the local gradient of parts\.1 holds a value that is not finite"),
        (torch.inf, {"check_for_nan_in_grad": True}, r"rank 0 on cpu: .* over the ranks \[0, 1\]"),
        (1e12, {"check_for_large_grads": True}, r"parts\.1 holds an element of magnitude 9999.*, large_grad_limit=10000000000\.0"),
    ):
        ddp = DistributedDataParallel(DistributedDataParallelConfig(**options), Weights(), groups)
        ddp.gradients()["parts.0"].fill_(1e6)
        if groups.dp.rank == 0:
            ddp.gradients()["parts.1"][3] = value
            with pytest.raises(ArithmeticError, match=match):
                ddp.finish_grad_sync()


@pytest.mark.world(2)
def test_a_bad_local_gradient_names_rank_group_and_parameter(world) -> None:
    world(check_bad_gradients)


def check_registered() -> None:
    group = Group.of(dist.group.WORLD)
    memory = RegisteredMemory(group, torch.device("cpu"))
    with memory.allocate():
        buffer = torch.ones(3)
    assert not memory.active
    start_all_reduce_in_place(buffer, group).wait()
    assert buffer.tolist() == [2.0] * 3
    memory.close()


@pytest.mark.world(2)
def test_registered_memory_is_plain_memory_where_there_is_no_nccl(world) -> None:
    world(check_registered)


class Backend:
    """What a NCCL backend is asked for registration; ``windows`` says whether it knows symmetric memory."""

    def __init__(self, windows: bool) -> None:
        self.windows = windows
        self.calls: list[str] = []

    def register_mem_pool(self, pool: object, symm: bool = False) -> None:
        if symm and not self.windows:
            raise RuntimeError("no windows here")
        self.calls.append("symmetric" if symm else "plain")

    def deregister_mem_pool(self, pool: object) -> None:
        self.calls.append("off")


def test_memory_is_registered_plainly_where_windows_are_refused_or_not_wanted() -> None:
    for wanted, windows, expected in ((True, (True, True), "symmetric"), (True, (False, False), "plain"), (False, (True, True), "plain")):
        memory = RegisteredMemory(Group.single(), torch.device("cpu"), symmetric=wanted)
        memory._backends, memory._pool = [Backend(known) for known in windows], object()
        backends = list(memory._backends)
        for _ in range(2):
            memory._deregister()
            memory._register()
        memory.close()
        memory.close()
        assert [backend.calls for backend in backends] == [[expected, "off", expected, "off"]] * 2
        assert not memory.active

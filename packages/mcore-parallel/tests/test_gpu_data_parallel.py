# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Data parallelism over NCCL: what overlaps or lies in registered memory has the bits of what does not."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mcore_parallel import CommunicatorOptions, ParallelPlan, ProcessGroups, comm
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.groups._communicator import made_by_members
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from tests.support.world import run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]

WIDTH, STEPS = 256, 50
FP32_SUM = {"grad_reduce_in_fp32": False, "reduce_scatter_with_fp32_accumulation": True}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.norm = nn.Parameter(torch.ones(WIDTH))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        with torch.no_grad():
            for layer in self.layers:
                layer.weight.copy_(torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5)
                layer.bias.zero_()
        self.to("cuda", torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.norm
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return x.float().square().sum()


def trained(groups: ProcessGroups, **options: object) -> tuple[Tensor, list[Tensor], DistributedDataParallel]:
    """Parameters and gradient norms of 50 steps of two micro-batches."""
    config = DistributedDataParallelConfig(bucket_size=100_000, **options)  # type: ignore[arg-type]
    ddp = DistributedDataParallel(config, Net(), groups)
    sliced = config.use_distributed_optimizer
    optimizer = MegatronOptimizer(OptimizerConfig(lr=1e-3, weight_decay=0.1, use_distributed_optimizer=sliced), ddp, groups)
    generator = torch.Generator().manual_seed(groups.dp.rank)
    norms = []
    for _ in range(STEPS):
        ddp.zero_grad_buffer()
        first, last = (torch.randn(32, WIDTH, generator=generator).to("cuda", torch.bfloat16) for _ in range(2))
        with ddp.no_sync():
            ddp(first).backward()
        ddp(last).backward()
        ddp.finish_grad_sync()
        norms.append(optimizer.step(grad_scale=1 / 128).grad_norm)
    ddp.finish_param_sync()
    return torch.cat([p.detach().flatten() for p in ddp.module.parameters()]), norms, ddp


def check_overlap() -> None:
    groups = ProcessGroups.build(ParallelPlan(dp=2))
    sliced = {"use_distributed_optimizer": True}
    gathers = {"overlap_param_gather": True}
    families = [
        ({}, [{}]),
        (sliced, [{}, gathers, {**gathers, "separate_all_gather_group": True}]),
        ({**sliced, "pad_buckets_for_high_nccl_busbw": True}, [gathers]),
        ({**sliced, "grad_reduce_in_fp32": False}, [{}, gathers]),
        ({**sliced, **FP32_SUM}, [{}, gathers]),
        (FP32_SUM, [{}]),
    ]
    for family, variants in families:
        expected, norms, _ = trained(groups, **family, overlap_grad_reduce=False)
        assert torch.stack(norms).isfinite().all() and norms[0] != norms[-1]
        for variant in variants:
            found, others, ddp = trained(groups, **family, **variant)
            assert all(torch.equal(a, b) for a, b in zip(norms, others, strict=True)), (family, variant)
            assert torch.equal(found, expected), (family, variant)
            ddp.close()


def test_overlap_changes_no_bit_in_fifty_steps() -> None:
    run(check_overlap, 2, backend="nccl", timeout_s=300.0)


def check_registered() -> None:
    groups = ProcessGroups.build(ParallelPlan(dp=2), separate_all_gather=True)
    for family in ({}, {"use_distributed_optimizer": True}, {"use_distributed_optimizer": True, **FP32_SUM}):
        expected, norms, _ = trained(groups, **family)
        for more in ({}, {"disable_symmetric_registration": True}, {"overlap_param_gather": True, "separate_all_gather_group": True}):
            if "overlap_param_gather" in more and not family:
                continue
            found, others, ddp = trained(groups, **family, nccl_ub=True, **more)
            assert ddp.registered and all(memory.active for memory in ddp.registered.values())
            (memory,) = ddp.registered.values()
            starts = [(segment["address"], segment["total_size"]) for segment in memory._pool.snapshot()]
            for buffer in ddp.grad_buffers:
                for flat in (buffer.data, *([] if buffer.params is None else [buffer.params])):
                    assert any(start <= flat.data_ptr() < start + size for start, size in starts)
            # A sum of two numbers has one order, so the algorithm that NCCL chooses cannot show.
            assert torch.equal(found, expected) and all(torch.equal(a, b) for a, b in zip(norms, others, strict=True)), (family, more)
            ddp.close()
            ddp.close()
            assert not any(memory.active for memory in ddp.registered.values())
            del ddp, buffer, flat
    groups.close()


def test_registered_memory_changes_no_bit_in_fifty_steps() -> None:
    run(check_registered, 2, backend="nccl", timeout_s=300.0)


def check_options() -> None:
    options = {
        "dp_cp": CommunicatorOptions(min_ctas=1, max_ctas=4, cga_cluster_size=2, is_high_priority_stream=True),
        "dp": CommunicatorOptions(max_ctas=2),
    }
    for _ in range(2):
        groups = ProcessGroups.build(ParallelPlan(dp=2), options=options, timeout_s=120.0)
        assert groups.dp.name != groups.dp_cp.name
        for group, wanted in ((groups.dp_cp, options["dp_cp"]), (groups.dp, options["dp"])):
            assert group.pg is not None
            made = group.pg._get_backend(torch.device("cuda")).options
            assert made.config.max_ctas == wanted.max_ctas and made.is_high_priority_stream == wanted.is_high_priority_stream
            assert made._timeout.total_seconds() == 120.0
            x = torch.full((1 << 16,), float(dist.get_rank() + 1), device="cuda")
            assert (comm.all_reduce(x, group) == 3.0).all()
        torch.cuda.synchronize()
        groups.close()


def test_communicators_take_their_options_and_close_for_another_life() -> None:
    run(check_options, 2, backend="nccl", timeout_s=180.0)


def check_regions() -> None:
    groups = ProcessGroups.build(ParallelPlan(tp=2))
    tp = groups.tp
    sizes = [3, 1]
    parts = [torch.randn(size, 8, generator=torch.Generator().manual_seed(size)).cuda() for size in sizes]
    x = parts[tp.rank].clone().requires_grad_()
    y = comm.gather_from_sequence_parallel_region(x, tp, output_split_sizes=sizes)
    assert torch.equal(y, torch.cat(parts))
    (y * (tp.rank + 1)).sum().backward()
    assert x.grad is not None and (x.grad == 3.0).all()
    z = torch.randn(4, 2, 8, generator=torch.Generator().manual_seed(tp.rank)).cuda()
    turned = comm.all_to_all_sp2hp(z, tp)
    assert turned.shape == (8, 2, 4) and torch.equal(comm.all_to_all_hp2sp(turned, tp), z)


def test_ragged_and_turned_regions_run_over_nccl() -> None:
    run(check_regions, 2, backend="nccl", timeout_s=180.0)


def check_members_alone() -> float:
    """The world is bound to its devices, and the second rank makes nothing."""
    x = torch.ones(1, device="cuda")
    if dist.get_rank() == 0:
        with made_by_members():
            pg = dist.new_group([0], use_local_synchronization=True)
        assert isinstance(pg, dist.ProcessGroup)
        dist.all_reduce(x, group=pg)
    dist.barrier()
    assert dist.group.WORLD is not None and dist.group.WORLD.bound_device_id is not None
    return x.item()


def test_members_make_a_group_without_the_others() -> None:
    assert run(check_members_alone, 2, backend="nccl", timeout_s=60.0) == [1.0, 1.0]

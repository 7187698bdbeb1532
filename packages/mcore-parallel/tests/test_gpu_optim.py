# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Optimizers and data parallelism on GPUs."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mcore_parallel import Group, ParallelPlan, ProcessGroups
from mcore_parallel.comm import NCCL_ALLOCATOR, RegisteredMemory
from mcore_parallel.comm._reduce_scatter import start_reduce_scatter_into, sum_rows
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig, ParamGroup, orthogonalise
from mcore_parallel.optim._offload import ParkedTensors
from tests.support.world import run

pytestmark = pytest.mark.gpu
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype, width: int = 96) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.norm = nn.Parameter(torch.ones(width, dtype=dtype))
        self.layers = nn.ModuleList(nn.Linear(width, width, dtype=dtype) for _ in range(3))
        self.cuda()

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.norm
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.float().square().sum()


def start(groups: ProcessGroups, dtype: torch.dtype, ddp_options: dict | None = None, **options: object):
    ddp = DistributedDataParallel(DistributedDataParallelConfig(bucket_size=10_000, **(ddp_options or {})), Net(dtype), groups)
    sliced = ddp.config.use_distributed_optimizer
    config = OptimizerConfig(**{"lr": 1e-3, "weight_decay": 0.1, "use_distributed_optimizer": sliced, **options})  # type: ignore[arg-type]
    return ddp, MegatronOptimizer(config, ddp, groups)


def advance(ddp: DistributedDataParallel, optimizer: MegatronOptimizer, steps: range, replica: int = 0) -> None:
    dtype = ddp.module.norm.dtype
    for step in steps:
        ddp.zero_grad_buffer()
        x = torch.randn(16, 96, generator=torch.Generator().manual_seed(100 * step + replica)).cuda().to(dtype)
        ddp(x).backward()
        ddp.finish_grad_sync()
        optimizer.step(grad_scale=1 / 16)


def weights(ddp: DistributedDataParallel) -> Tensor:
    ddp.finish_param_sync()
    return torch.cat([p.detach().float().flatten() for p in ddp.module.parameters()])


WIDE, HALF, EIGHT = torch.float32, torch.float16, torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("dtype", "options", "tolerance"),
    [
        (torch.float32, {}, 1e-5),
        (torch.float32, {"decoupled_weight_decay": False}, 1e-5),
        (torch.bfloat16, {}, 1e-5),
        (torch.bfloat16, {"store_param_remainders": False}, 1e-5),
        (torch.float16, {}, 1e-5),
        (torch.bfloat16, {"exp_avg_dtype": WIDE}, 1e-5),
        (torch.bfloat16, {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": HALF}, 2e-2),
        (torch.bfloat16, {"exp_avg_dtype": EIGHT, "exp_avg_sq_dtype": EIGHT}, 0.15),
    ],
)
def test_the_fused_kernel_agrees_with_the_operators(dtype: torch.dtype, options: dict, tolerance: float) -> None:
    groups = ProcessGroups.single()
    options = {**options, "use_precision_aware_optimizer": "exp_avg_dtype" in options}
    (one, plain), (two, fused) = start(groups, dtype, **options), start(groups, dtype, **options)
    assert fused._updates.fused is not None
    plain._updates = replace(plain._updates, fused=None, plain=list(plain._units))
    for step in range(6):
        for ddp, optimizer in ((one, plain), (two, fused)):
            for number, grad in enumerate(ddp.gradients().values()):
                grad.copy_(torch.randn(grad.shape, generator=torch.Generator().manual_seed(10 * step + number)) * 0.1)
            if step == 3:
                ddp.gradients()["norm"][0] = torch.nan
            assert optimizer.step().skipped == (step == 3)
    for name, shard in plain.state_shards().items():
        ours = fused.state_shards()[name].tensor
        assert (ours - shard.tensor).norm() <= tolerance * shard.tensor.norm(), name
    assert fused.step_count == 5


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature:UserWarning")
def test_a_step_does_not_wait_for_the_device() -> None:
    ddp, optimizer = start(ProcessGroups.single(), torch.bfloat16, {"use_distributed_optimizer": True})
    advance(ddp, optimizer, range(2))
    scale = torch.tensor(0.5, device="cuda")
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        result = optimizer.step(grad_scale=scale, lr=1e-3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not result.skipped


def test_a_step_can_be_captured() -> None:
    """Skip, clipping and corrections are decided by the replayed kernels."""
    (one, eager), (two, graphed) = (start(ProcessGroups.single(), torch.bfloat16) for _ in range(2))
    for ddp in (one, two):
        for grad in ddp.gradients().values():
            grad.fill_(0.01)
    lr = torch.tensor(1e-3, device="cuda", dtype=torch.float64)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        graphed.step(lr=lr)
    torch.cuda.current_stream().wait_stream(side)
    eager.step(lr=1e-3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graphed.step(lr=lr)
    for number, poison in enumerate((0.01, torch.inf, 0.02)):
        lr.fill_(1e-3 / (1 + number))
        for ddp in (one, two):
            ddp.gradients()["norm"].fill_(poison)
        graph.replay()
        eager.step(lr=1e-3 / (1 + number))
    assert torch.equal(weights(one), weights(two)) and eager.step_count == graphed.step_count == 3


def test_rows_are_added_in_order_and_rounded_once() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for n in (8, 5000, 1_000_001):
            rows = torch.randn(4, n, device="cuda").to(dtype)
            out = torch.empty(n, device="cuda", dtype=dtype)
            sum_rows(rows, out)
            total = rows[0].float()
            for row in rows[1:]:
                total += row
            assert torch.equal(out, total.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_host_updates_equal_device_updates(dtype: torch.dtype) -> None:
    groups = ProcessGroups.single()
    ddp, plain = start(groups, dtype)
    advance(ddp, plain, range(10))
    for fraction in (0.3, 1.0):
        found = []
        for overlap in (False, True):
            options = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": fraction, "overlap_cpu_optimizer_d2h_h2d": overlap}
            hosted, optimizer = start(groups, dtype, **options)
            advance(hosted, optimizer, range(10))
            found.append(weights(hosted))
            assert optimizer.state_bytes["device"] <= (1 - fraction) * plain.state_bytes["device"]
        assert torch.equal(found[0], found[1])
        assert (found[0] - weights(ddp)).norm() < 2e-3 * weights(ddp).norm()


def test_fused_updates_clip_groups_apart() -> None:
    groups = ProcessGroups.single()
    apart = (ParamGroup(patterns=("layers.0.*",), grad_norm_group="first"), ParamGroup(patterns=("norm",), grad_norm_group="norms"))
    found = []
    for options in ({}, {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}):
        # Adam forgets a constant factor, so the clipping must change from step to step to be seen.
        ddp, optimizer = start(groups, torch.float32, param_groups=apart, clip_grad=0.3, **options)
        advance(ddp, optimizer, range(10))
        found.append(weights(ddp))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)
    ddp, optimizer = start(groups, torch.float32, clip_grad=0.3)
    advance(ddp, optimizer, range(10))
    assert (found[0] - weights(ddp)).norm() > 10 * (found[0] - found[1]).norm()


def test_the_fused_step_runs_near_the_memory_s_speed() -> None:
    model = nn.ParameterList([nn.Parameter(torch.zeros(16384, 4096, dtype=torch.bfloat16, device="cuda")) for _ in range(2)])
    groups = ProcessGroups.single()
    ddp = DistributedDataParallel(DistributedDataParallelConfig(use_distributed_optimizer=True), model, groups)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=1e-3, use_distributed_optimizer=True, clip_grad=0.0), ddp, groups)
    numbers = torch.tensor([1.0, 1e-3, 0.1, 0.1, 0.0, 0.1], dtype=torch.float64, device="cuda")
    assert optimizer._updates.fused is not None
    for _ in range(3):
        optimizer._updates.fused.run(numbers, {})
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(10):
        optimizer._updates.fused.run(numbers, {})
    end.record()
    torch.cuda.synchronize()
    numel = 2 * 16384 * 4096
    rate = numel * 30 / (begin.elapsed_time(end) / 10 * 1e-3)  # gradient 4, master and moments 12 + 12, parameter 2
    print(f"fused adam: {rate / 1e12:.2f} TB/s")
    assert rate > 2e12


def test_newton_schulz_in_sixteen_bits_is_orthogonal_enough() -> None:
    spread = torch.linalg.svdvals(orthogonalise(torch.randn(512, 256, device="cuda")).double())
    assert spread.min() > 0.6 and spread.max() < 1.3


def check_slices() -> None:
    groups = ProcessGroups.build(ParallelPlan(dp=2))
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 5e-3)):
        ddp, optimizer = start(groups, dtype)
        advance(ddp, optimizer, range(10), groups.dp.rank)
        expected = weights(ddp)
        found = []
        sliced = {"use_distributed_optimizer": True}
        for more in (
            {},
            {"overlap_grad_reduce": False},
            {"overlap_param_gather": True, "separate_all_gather_group": True},
            {"nccl_ub": True},
        ):
            other, which = start(groups, dtype, {**sliced, **more})
            advance(other, which, range(10), groups.dp.rank)
            found.append(weights(other))
            assert (found[-1] - expected).norm() <= tolerance * expected.norm()
            assert all(memory.active for memory in other.registered.values()) and bool(other.registered) == ("nccl_ub" in more)
            for memory in other.registered.values():
                memory.close()
        # Registered memory may make NCCL choose another algorithm; everything else has the same bits.
        assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@two_gpus
def test_slices_train_like_replicas_over_nccl() -> None:
    run(check_slices, 2, backend="nccl", timeout_s=180.0)


def check_fp32_sums() -> None:
    group = Group.of(dist.group.WORLD)
    parts = [torch.randn(1 << 20, generator=torch.Generator().manual_seed(rank)).bfloat16().cuda() for rank in range(group.size)]
    total = parts[0].float()
    for part in parts[1:]:
        total += part
    x = parts[group.rank].clone()
    mine = x.chunk(group.size)[group.rank]
    start_reduce_scatter_into(mine, x, group, fp32_accumulation=True).wait()
    assert torch.equal(mine, total.bfloat16().chunk(group.size)[group.rank])
    for symmetric in (True, False):
        memory = RegisteredMemory(group, torch.device("cuda", group.rank), symmetric=symmetric)
        with memory.allocate():
            buffer = torch.full((1 << 20,), float(group.rank + 1), device="cuda")
        assert memory.active and memory.allocator == NCCL_ALLOCATOR == "TORCH"
        dist.all_reduce(buffer)
        assert (buffer == sum(range(1, group.size + 1))).all()
        memory.close()


@two_gpus
def test_sixteen_bit_sums_round_once_and_registered_memory_works_over_nccl() -> None:
    run(check_fp32_sums, 2, backend="nccl", timeout_s=180.0)


def check_sharp() -> None:
    torch.cuda.set_device(dist.get_rank())
    torch.zeros(1, device="cuda")
    groups = ProcessGroups.build(ParallelPlan(dp=2), use_sharp=True)
    total = torch.full((1 << 16,), float(dist.get_rank() + 1), device="cuda")
    dist.all_reduce(total, group=groups.dp_cp.pg)
    assert (total == 3).all()
    groups.close()


@two_gpus
def test_groups_that_ask_for_sharp_add_right_on_any_network() -> None:
    run(check_sharp, 2, backend="nccl", timeout_s=180.0)


def test_state_leaves_for_locked_memory() -> None:
    model = nn.Linear(256, 256, device="cuda", dtype=torch.bfloat16)
    sync = DistributedDataParallel(DistributedDataParallelConfig(), model, ProcessGroups.single())
    optimizer = MegatronOptimizer(OptimizerConfig(lr=1e-3), sync, ProcessGroups.single())
    optimizer.offload_to_cpu()
    assert optimizer._parked._hosts and all(host.is_pinned() for host in optimizer._parked._hosts)


def test_state_that_streams_through_a_step_keeps_its_bits() -> None:
    results = []
    for streams in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(512, 512, device="cuda", dtype=torch.bfloat16) for _ in range(8)))
        sync = DistributedDataParallel(DistributedDataParallelConfig(), model, ProcessGroups.single())
        optimizer = MegatronOptimizer(OptimizerConfig(lr=1e-3), sync, ProcessGroups.single())
        groups = [[holder.data for _, holder in unit.storages()] for unit in optimizer._resident]
        optimizer._parked = ParkedTensors(groups, window_bytes=1 << 21)
        for step in range(6):
            if streams and step % 3 == 0:
                optimizer.offload_to_cpu()
            sync.zero_grad_buffer()
            x = torch.randn(64, 512, device="cuda", generator=torch.Generator("cuda").manual_seed(step))
            sync(x.bfloat16()).float().sum().backward()
            sync.finish_grad_sync()
            optimizer.step()
            if streams and step % 3 == 1:
                assert not any(tensor.untyped_storage().nbytes() for group in groups for tensor in group)
                optimizer.restore_from_cpu()
        results.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))

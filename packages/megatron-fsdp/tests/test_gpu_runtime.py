# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Streams, compiled units and registered memory on GPUs."""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy, fully_shard
from megatron_fsdp._collectives import Ranks
from tests.support.world import run

needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
pytestmark = pytest.mark.gpu


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up = nn.RMSNorm(width), nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(512, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 512, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(*, width: int = 256, depth: int = 6, compiled: bool = False, **options: Any) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Net(width, depth).cuda()
    if compiled:
        for block in net.blocks:
            block.compile(fullgraph=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
    options = {"fsdp_unit_modules": [Block, "embedding", "head"], **options}
    model, sharded = fully_shard(net, optimizer, **options)
    assert sharded is not None
    return model, sharded


def train(model: MegatronFSDP, optimizer: torch.optim.Optimizer, steps: int, *, num_tokens: int = 256) -> list[float]:
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        tokens = torch.randint(512, (4, num_tokens), generator=generator).cuda()
        for index in range(2):
            logits = model(tokens[2 * index : 2 * index + 2])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[2 * index : 2 * index + 2].flatten())
            loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def check_strategies() -> None:
    expected = train(*build(zero_dp_strategy="no_shard"), 6)
    for strategy in ("optim", "optim_grads", "optim_grads_params"):
        for num_prefetch_units in (0, 1, 4):
            actual = train(*build(zero_dp_strategy=strategy, num_prefetch_units=num_prefetch_units), 6)
            torch.testing.assert_close(torch.tensor(actual), torch.tensor(expected), rtol=1e-5, atol=0)


@needs_two
def test_strategies_and_prefetch_train_alike_in_float32():
    run(check_strategies, 2, backend="nccl", timeout_s=110.0)


def check_compiled() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    eager = train(*build(mixed_precision=policy), 6)
    compiled = train(*build(mixed_precision=policy, compiled=True), 6)
    torch.testing.assert_close(torch.tensor(compiled), torch.tensor(eager), rtol=1e-2, atol=0)
    narrow = train(*build(mixed_precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16, grad_comm_dtype=torch.bfloat16)), 6)
    torch.testing.assert_close(torch.tensor(narrow), torch.tensor(eager), rtol=1e-2, atol=0)
    from torch._dynamo.utils import counters

    assert not counters["graph_break"] or all("hook" in reason or "disable" in reason for reason in counters["graph_break"])


@needs_two
def test_compiled_units_and_narrow_gradients_train_alike():
    run(check_compiled, 2, backend="nccl", timeout_s=110.0)


def check_registered() -> None:
    expected = train(*build(), 4)
    for plain in (True, False):
        model, optimizer = build(nccl_ub=True, disable_symmetric_registration=plain)
        actual = train(model, optimizer, 4)
        torch.testing.assert_close(torch.tensor(actual), torch.tensor(expected), rtol=1e-5, atol=0)
        model.close()
        torch.cuda.synchronize()


@needs_two
def test_registered_memory_does_not_change_the_result():
    run(check_registered, 2, backend="nccl", timeout_s=110.0)


def check_overlap() -> None:
    model, optimizer = build(width=4096, depth=6, mixed_precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    step = functools.partial(train, model, optimizer, 1, num_tokens=4096)
    step(), step()
    # Nothing of a step waits for the device but the reading of the loss.
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["num_alloc_retries"]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["num_alloc_retries"] == before
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in profiler.events() or ():
        if event.device_type == torch.profiler.DeviceType.CUDA:
            spans["nccl" in event.name.lower()].append((event.time_range.start, event.time_range.end))
    assert spans[True], "the profiler saw no collective"
    hidden = sum(any(start < begin + (end - begin) / 2 < stop for start, stop in spans[False]) for begin, end in spans[True])
    assert hidden >= len(spans[True]) / 2, f"{hidden} of {len(spans[True])} collectives ran beside computation"


@needs_two
def test_most_collectives_run_beside_the_computation():
    run(check_overlap, 2, backend="nccl", timeout_s=110.0)


class RoutedBlock(Block):
    """Half of the tokens go to the expert of the other rank and come back; then the dense part, whose gather takes longer than that."""

    def __init__(self, width: int, pg: dist.ProcessGroup) -> None:
        super().__init__(width)
        self.expert, self.pg = nn.Parameter(0.02 * torch.randn(width, width)), pg

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        routed = all_to_all_single_autograd(x.flatten(0, 1), None, None, self.pg) @ self.expert
        return super().forward(x + all_to_all_single_autograd(routed, None, None, self.pg).view_as(x))


def check_experts_overlap() -> None:
    dense = init_device_mesh("cuda", (2,), mesh_dim_names=("shard",))
    experts = init_device_mesh("cuda", (1, 2), mesh_dim_names=("shard", "ep"))
    torch.manual_seed(0)
    depth = 6
    net = nn.Sequential(*(RoutedBlock(4096, experts["ep"].get_group()) for _ in range(depth))).cuda()
    model, _ = fully_shard(
        net,
        fsdp_unit_modules=RoutedBlock,
        device_mesh=dense,
        dp_shard_dim="shard",
        expt_device_mesh=experts,
        expert_parameters="*.expert",
        mixed_precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    )

    def step() -> None:
        x = torch.ones(1, 4096, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        model(x).float().square().mean().backward()

    step(), step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    spans: dict[str, list[tuple[float, float]]] = {"AllGather": [], "SendRecv": []}
    for event in profiler.events() or ():
        for kind, actual in spans.items():
            if event.device_type == torch.profiler.DeviceType.CUDA and f"ncclDevKernel_{kind}" in event.name:
                actual.append((event.time_range.start, event.time_range.end))
    assert len(spans["SendRecv"]) == 4 * depth, {kind: len(actual) for kind, actual in spans.items()}
    beside = sum(any(start < end and begin < stop for start, stop in spans["AllGather"]) for begin, end in spans["SendRecv"])
    assert beside >= depth // 2, f"{beside} of {4 * depth} exchanges ran beside {len(spans['AllGather'])} gathers"


@needs_two
def test_exchanges_of_experts_run_beside_the_gathers_of_dense_parameters():
    run(check_experts_overlap, 2, backend="nccl", timeout_s=110.0)


def check_members_alone():
    """The world is bound to its devices, and the second rank makes nothing."""
    pg = dist.new_group([0])
    total = 1.0
    if dist.get_rank() == 0:
        assert isinstance(pg, dist.ProcessGroup)
        apart = Ranks.of(pg).apart(torch.device("cuda", 0))
        x = torch.ones(1, device="cuda")
        dist.all_reduce(x, group=apart.pg)
        total = x.item()
    dist.barrier()
    return total


@needs_two
def test_ranks_get_a_communicator_of_their_own_without_the_others():
    assert run(check_members_alone, 2, backend="nccl", timeout_s=60.0) == [1.0, 1.0]


def test_one_gpu_without_a_process_group_trains():
    torch.manual_seed(0)
    net = Net(64, 2).cuda()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model, optimizer = fully_shard(net, torch.optim.AdamW(net.parameters(), lr=1e-2), fsdp_unit_modules=Block, mixed_precision=policy)
    assert optimizer is not None
    tokens = torch.arange(64, device="cuda").view(2, 32)
    losses = []
    for _ in range(30):
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]

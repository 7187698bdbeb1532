# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Hidden states between grids through NCCL, over connections that were never used before."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mcore_parallel import Group, HyperCommGrid
from mcore_parallel.comm import BridgeBatch, BridgeCommunicator, BridgeEnd, TensorSpec
from mcore_parallel.pipeline import ChainLink, Schedule, one_f_one_b, plan_pipeline, run_schedule, zero_bubble
from tests.support.world import run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]

WIDTH, LENGTHS, MICROBATCHES = 64, (16, 32, 16), 5
ROWS = sum(LENGTHS)


def end(tp: int, dp: int, offset: int, sequence_parallel: bool = False) -> BridgeEnd:
    grid = HyperCommGrid((tp, dp), ("tp", "dp"), offset, world_size=offset + tp * dp)
    return BridgeEnd.of(grid, last=True, sequence_parallel=sequence_parallel)


def tensor(seed: int, rows: int = ROWS) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).cuda()


def check_chain(schedule: Schedule) -> None:
    """One stage on each GPU; the first transfers go one way, and the schedule starts on them at once."""
    rank = dist.get_rank()
    bridge = BridgeCommunicator(end(1, 1, 0), end(1, 1, 1))
    batch = BridgeBatch(sequence_lengths=LENGTHS, hidden_size=WIDTH, dtype=torch.float64, device="cuda")
    side = {"before": bridge} if rank else {"after": bridge}
    link = ChainLink(Group.single(rank), first_stage=rank, num_stages=2, batch=batch, **side)
    weights = [nn.Parameter(tensor(stage, WIDTH) / 8) for stage in range(2)]

    def forward(microbatch: int, hidden: Tensor | None) -> tuple[Tensor, Tensor | None]:
        hidden = torch.tanh((tensor(50 + microbatch) if hidden is None else hidden) @ weights[rank])
        return (hidden.square().sum() if rank else hidden), None

    spec = TensorSpec(shape=(ROWS, WIDTH), dtype=torch.float64, device="cuda")
    run_schedule(plan_pipeline(schedule, 2, MICROBATCHES), forward, link.stages, hidden=spec, communicator=link)
    ours = weights[rank].grad
    assert ours is not None
    weights[rank].grad = None
    for microbatch in range(MICROBATCHES):
        torch.tanh(torch.tanh(tensor(50 + microbatch) @ weights[0]) @ weights[1]).square().sum().backward()
    torch.testing.assert_close(ours, weights[rank].grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("schedule", [one_f_one_b, zero_bubble])
def test_a_pipeline_over_two_grids_equals_one_gpu(schedule: Schedule) -> None:
    run(check_chain, 2, backend="nccl", timeout_s=120.0, schedule=schedule)


def check_shared_ranks() -> None:
    """Both grids on the same two GPUs: two replicas on one side, tensor parallelism on the other."""
    rank = dist.get_rank()
    for sequence_parallel in (False, True):
        link = BridgeCommunicator(end(1, 2, 0), end(2, 1, 0, sequence_parallel))
        batch = BridgeBatch(sequence_lengths=LENGTHS, hidden_size=WIDTH, dtype=torch.float64, device="cuda", source_sequences=(2, 1))
        full = tensor(0)
        mine = full[:48] if rank == 0 else full[48:]
        there = full.chunk(2)[rank] if sequence_parallel else full
        for _ in range(2):
            link.send_forward(mine, batch)
            came = link.recv_forward(batch)
            assert torch.equal(came, there) and came.requires_grad
            link.send_backward(came.detach(), batch)
            assert torch.equal(link.recv_backward(batch), mine)
        link.finish()


def test_two_grids_on_the_same_gpus_exchange_rows() -> None:
    run(check_shared_ranks, 2, backend="nccl", timeout_s=120.0)


def check_grids() -> None:
    """Built from two grids: tensors of changing length, one micro-batch ahead, their shapes exchanged beside NCCL."""
    grids = [HyperCommGrid((1, 1), ("tp", "dp"), rank) for rank in range(2)]
    link = BridgeCommunicator(*grids, dim_mapping={"s": 0, "b": 1, "h": 2}, comm_dtype=torch.float64)
    full = [tensor(number, 2 * (8 + number)).view(8 + number, 2, WIDTH) for number in range(3)]
    if link.is_source:
        link.send_forward(full[0])
        assert torch.equal(link.send_forward_recv_backward(full[1]), -full[0])
        assert torch.equal(link.send_forward_recv_backward(full[2]), -full[1])
        assert torch.equal(link.recv_backward(), -full[2])
    else:
        came = link.recv_forward()
        for number in (1, 2):
            assert torch.equal(came, full[number - 1]) and came.requires_grad and came.is_cuda
            came = link.send_backward_recv_forward(-came.detach())
        assert torch.equal(came, full[2])
        link.send_backward(-came.detach())
    link.finish()


def test_a_bridge_of_two_grids_sends_tensors() -> None:
    run(check_grids, 2, backend="nccl", timeout_s=120.0)

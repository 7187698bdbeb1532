# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""An encoder on one grid and a model on another, against both on one rank."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mcore_parallel import Group, HyperCommGrid
from mcore_parallel.comm import BridgeBatch, BridgeCommunicator, BridgeEnd, TensorSpec
from mcore_parallel.pipeline import ChainLink, Schedule, one_f_one_b, plan_pipeline, run_schedule, zero_bubble

WIDTH, LENGTHS, MICROBATCHES = 3, (2, 4, 3), 5
ROWS = sum(LENGTHS)


def weight(stage: int) -> Tensor:
    return torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(stage), dtype=torch.float64)


def inputs(microbatch: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(50 + microbatch), dtype=torch.float64)


def serial() -> list[Tensor]:
    weights = [nn.Parameter(weight(stage)) for stage in range(3)]
    for microbatch in range(MICROBATCHES):
        hidden = inputs(microbatch)
        for parameter in weights:
            hidden = torch.tanh(hidden @ parameter)
        hidden.square().sum().backward()
    return [parameter.grad for parameter in weights if parameter.grad is not None]


def check_chain(schedule: Schedule) -> None:
    """Stages 0 and 1 on ranks 0 and 1; stage 2 on ranks 2 and 3, each with its own sequences."""
    encoder = HyperCommGrid((2,), ("pp",))
    model = HyperCommGrid((2,), ("dp",), 2)
    rank, pipeline = dist.get_rank(), encoder.create_pg("pp")
    bridge = BridgeCommunicator(BridgeEnd.of(encoder, last=True), BridgeEnd.of(model, last=False))
    batch = BridgeBatch(sequence_lengths=LENGTHS, hidden_size=WIDTH, dtype=torch.float64)
    if rank < 2:
        assert pipeline is not None
        group = Group.of(pipeline)
        if rank == 1:
            with pytest.raises(ValueError, match="stage 1 of 3 is an end of its grid, but after is None; give the bridge"):
                ChainLink(group, first_stage=0, num_stages=3, batch=batch)
        link = ChainLink(group, first_stage=0, num_stages=3, batch=batch, after=bridge if rank == 1 else None)
    else:
        link = ChainLink(Group.single(rank), first_stage=2, num_stages=3, batch=batch, before=bridge)
        with pytest.raises(ValueError, match="stage 2 has no link to stage 0 of another grid"):
            link.transfer([(torch.zeros(1), 0)], [])
    stage = link.stages.rank
    parameter = nn.Parameter(weight(stage))

    def forward(microbatch: int, hidden: Tensor | None) -> tuple[Tensor, Tensor | None]:
        hidden = torch.tanh((inputs(microbatch) if hidden is None else hidden) @ parameter)
        return (hidden.square().sum() if stage == 2 else hidden), None

    spec = TensorSpec(shape=(ROWS, WIDTH), dtype=torch.float64)
    run_schedule(plan_pipeline(schedule, 3, MICROBATCHES), forward, link.stages, hidden=spec, communicator=link)
    grad = parameter.grad
    assert grad is not None
    if stage == 2:
        # Replicas of the model saw different sequences.
        dist.all_reduce(grad, group=dist.new_group([2, 3], use_local_synchronization=True))
    torch.testing.assert_close(grad, serial()[stage], rtol=1e-12, atol=1e-14)


@pytest.mark.world(4)
@pytest.mark.parametrize("schedule", [one_f_one_b, zero_bubble])
def test_a_pipeline_over_two_grids_equals_serial(world, schedule: Schedule) -> None:
    world(check_chain, schedule=schedule)

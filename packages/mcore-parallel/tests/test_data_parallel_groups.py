# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Which communicators data parallelism uses: optimizer instances, parameter gathers, both ends of a pipeline."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mcore_parallel import Group, ParallelPlan, ProcessGroups, ShardSpec
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig


class Mixture(nn.Module):
    """A dense matrix and an expert that replicas of the expert view share."""

    def __init__(self, groups: ProcessGroups) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.spec = ShardSpec(shape=(2 * groups.ep.size, 3, 5), view="expert", shards={"ep": 0})
        self.dense = nn.Parameter(torch.randn(7, 5, generator=generator, dtype=torch.float64))
        whole = torch.randn(self.spec.shape, generator=generator, dtype=torch.float64)
        self.expert = nn.Parameter(whole[self.spec.slices(groups)].clone())

    def shard_specs(self) -> dict[str, ShardSpec]:
        return {"expert": self.spec}

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.dense.T).sin().sum() + torch.einsum("td,efd->", x.cos(), self.expert)


def trained(groups: ProcessGroups, **options: object) -> tuple[dict[str, Tensor], DistributedDataParallel]:
    config = DistributedDataParallelConfig(bucket_size=20, use_distributed_optimizer=True, **options)
    ddp = DistributedDataParallel(config, Mixture(groups), groups)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=1e-2, use_distributed_optimizer=True), ddp, groups)
    for step in range(4):
        ddp.zero_grad_buffer()
        x = torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()), dtype=torch.float64)
        ddp(x).backward()
        ddp.finish_grad_sync()
        optimizer.step(grad_scale=1 / 12)
    ddp.finish_param_sync()
    return {name: p.detach().clone() for name, p in ddp.module.named_parameters()}, ddp


def num_communicators() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def check_instances() -> None:
    expected, _ = trained(ProcessGroups.build(ParallelPlan(dp=4, ep=2)))
    two = {"num_distributed_optimizer_instances": 2, "separate_all_gather_group": True}
    # The plan knows of the instances: nothing is made beside its groups.
    groups = ProcessGroups.build(ParallelPlan(dp=4, ep=2, optimizer_instances=2), timeout_s=66.0, separate_all_gather=True)
    before = num_communicators()
    ready, ddp = trained(groups, **two)
    assert num_communicators() == before
    used = {buffer.shards[0].name: buffer.groups for buffer in ddp.grad_buffers}
    assert used["dense"].inner is groups.intra_dp_cp and used["dense"].outer is groups.inter_dp_cp
    assert used["dense"].gather is groups.dp_cp_ag
    assert used["expert"].inner is groups.intra_expt_dp and used["expert"].outer is groups.inter_expt_dp
    # Dense slices and expert slices are added up over different ranks.
    rank = dist.get_rank()
    assert used["dense"].outer.ranks == ((0, 2), (1, 3))[rank % 2] == used["expert"].outer.ranks
    assert used["dense"].inner.ranks == ((0, 1), (2, 3))[rank // 2] and used["expert"].inner.ranks == (rank,)
    # It does not: they are made, with the same time limit, and serve the next one too.
    plain = ProcessGroups.build(ParallelPlan(dp=4, ep=2), timeout_s=66.0)
    before = num_communicators()
    made, ddp = trained(plain, **two)
    assert num_communicators() > before
    for buffer in ddp.grad_buffers:
        for group in (buffer.groups.inner, buffer.groups.outer, buffer.groups.gather):
            if group.size > 1:
                assert group.pg is not None and group.pg._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=66)
    before = num_communicators()
    ddp.close()
    ddp.close()
    again, _ = trained(plain, **two)
    assert num_communicators() == before
    for name, value in expected.items():
        assert torch.equal(ready[name], made[name]) and torch.equal(made[name], again[name])
        torch.testing.assert_close(ready[name], value, rtol=1e-12, atol=1e-13)


@pytest.mark.world(4)
def test_two_instances_equal_one_with_the_plan_s_groups_or_their_own(world) -> None:
    world(check_instances)


def check_unlike_instances() -> None:
    """An order in which dense and expert instances hold different ranks, so that one inter group cannot serve both."""
    plan = ParallelPlan(tp=2, dp=2, etp=1, ep=2, order="ep-dp-tp-cp-pp", optimizer_instances=2)
    groups = ProcessGroups.build(plan)
    assert groups.intra_dist_opt is None and groups.inter_dp_cp.ranks != groups.inter_expt_dp.ranks
    _, ddp = trained(groups, num_distributed_optimizer_instances=2)
    for buffer in ddp.grad_buffers:
        name = buffer.shards[0].name
        data = groups.data("expert" if name == "expert" else "dense")
        assert set(buffer.groups.outer.ranks) <= set(data.ranks)
        total = torch.tensor(float(dist.get_rank() + 1))
        sums = total.clone()
        buffer.data.fill_(total)
        ddp.finish_grad_sync()
        dist.all_reduce(sums, group=data.pg)
        for piece in ddp.pieces():
            if piece.name == name:
                assert (piece.gradient == sums).all()


@pytest.mark.world(4)
def test_dense_and_expert_instances_may_hold_different_ranks(world) -> None:
    world(check_unlike_instances)


def check_gather_ranks() -> None:
    for order in ("tp-cp-ep-dp-pp", "dp-tp-cp-ep-pp", "cp-dp-tp-ep-pp"):
        groups = ProcessGroups.build(ParallelPlan(tp=2, dp=2, order=order))
        _, ddp = trained(groups, separate_all_gather_group=True)
        for buffer in ddp.grad_buffers:
            view = buffer.shards[0].spec.view
            assert buffer.groups.gather.ranks == buffer.groups.inner.ranks == groups.data(view).ranks
            assert buffer.groups.gather.name != buffer.groups.inner.name
        ddp.close()


@pytest.mark.world(4)
def test_gathers_run_among_the_same_ranks_in_any_order_of_axes(world) -> None:
    world(check_gather_ranks)


class End(nn.Module):
    """One stage of two, whose table is the other stage's too."""

    def __init__(self, groups: ProcessGroups) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.table = nn.Parameter(torch.randn(9, 6))
        self.mix = nn.Linear(6, 6)
        self.is_first = groups.pp.is_first

    def shard_specs(self) -> dict[str, ShardSpec]:
        return {"table": ShardSpec(shape=(9, 6), partial=("embd",))}

    def forward(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Each stage learns from its own use of the table; the sum of both gradients moves it."""
        hidden = self.mix(hidden + self.table[tokens] if self.is_first else hidden).tanh()
        return hidden.square().sum() if self.is_first else (hidden @ self.table.T).logsumexp(-1).sum()


def check_shared_embedding(num_replicas: int) -> None:
    groups = ProcessGroups.build(ParallelPlan(pp=2, dp=num_replicas))
    embd = groups.embd
    assert isinstance(embd, Group) and embd.size == 2
    for options in ({}, {"use_distributed_optimizer": True, "overlap_param_gather": True}):
        ddp = DistributedDataParallel(DistributedDataParallelConfig(bucket_size=30, **options), End(groups), groups)
        sliced = ddp.is_sliced
        optimizer = MegatronOptimizer(OptimizerConfig(lr=1e-2, weight_decay=0.1, use_distributed_optimizer=sliced), ddp, groups)
        start = ddp.module.table.detach().clone()
        for step in range(20):
            ddp.zero_grad_buffer()
            generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
            ddp(torch.randn(4, 6, generator=generator), torch.randint(0, 9, (4,), generator=generator)).backward()
            ddp.finish_grad_sync()
            optimizer.step(grad_scale=1 / 8)
        ddp.finish_param_sync()
        table = ddp.module.table.detach()
        both = [torch.empty_like(table) for _ in range(dist.get_world_size())]
        dist.all_gather(both, table.contiguous())
        assert all(torch.equal(one, both[0]) for one in both) and not torch.equal(table, start)


@pytest.mark.world(2)
def test_a_table_at_both_ends_of_a_pipeline_stays_one_table(world) -> None:
    world(check_shared_embedding, num_replicas=1)


@pytest.mark.world(4)
def test_a_table_at_both_ends_of_replicated_pipelines_stays_one_table(world) -> None:
    world(check_shared_embedding, num_replicas=2)


def check_evaluation() -> None:
    """Hooks off and on around an evaluation after every step; the losses keep their bits."""
    groups = ProcessGroups.build(ParallelPlan(dp=2))
    found = []
    for overlap, toggle in ((False, False), (True, False), (True, True)):
        config = DistributedDataParallelConfig(bucket_size=20, use_distributed_optimizer=True, overlap_param_gather=overlap)
        ddp = DistributedDataParallel(config, Mixture(groups), groups)
        optimizer = MegatronOptimizer(OptimizerConfig(lr=1e-2, use_distributed_optimizer=True), ddp, groups)
        x = torch.randn(3, 5, generator=torch.Generator().manual_seed(dist.get_rank()), dtype=torch.float64)
        losses = []
        for _ in range(4):
            ddp.zero_grad_buffer()
            ddp(x).backward()
            ddp.finish_grad_sync()
            optimizer.step(grad_scale=1 / 6)
            if toggle:
                ddp.disable_forward_pre_hook()
                ddp.disable_forward_pre_hook()
                assert not ddp.module._forward_pre_hooks
                with torch.no_grad():  # the module itself, as an evaluation or an export would use it
                    losses.append(ddp.module(x).item())
                ddp.enable_forward_pre_hook()
                ddp.enable_forward_pre_hook()
                assert len(ddp.module._forward_pre_hooks) == 1
            else:
                with torch.no_grad():
                    losses.append(ddp(x).item())
        found.append(losses)
        ddp.close()
    assert found[0] == found[1] == found[2]


@pytest.mark.world(2)
def test_an_evaluation_may_switch_the_hooks_off_and_on(world) -> None:
    world(check_evaluation)

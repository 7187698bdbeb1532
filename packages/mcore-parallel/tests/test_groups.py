# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The groups of a plan: closed form on large worlds, communicators on small ones."""

import itertools
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from mcore_parallel import HyperCommGrid, ParallelPlan, ProcessGroups, comm

DENSE = {axis: axis for axis in ("tp", "cp", "dp", "pp")}
DENSE |= {"dp_cp": "cp-dp", "tp_pp": "tp-pp", "tp_cp": "tp-cp", "tp_dp": "tp-dp", "tp_dp_cp": "tp-cp-dp"}
EXPERT = {"ep": "ep", "expt_tp": "tp", "expt_dp": "dp", "tp_ep": "tp-ep", "tp_ep_pp": "tp-ep-pp"}


def closed_form(shape: dict[str, int], axes: str, rank: int) -> list[int]:
    """The group of one rank over ``axes``: its other coordinates stay, the fastest axis varies fastest."""
    coordinates, rest = {}, rank
    for name, size in shape.items():
        rest, coordinates[name] = divmod(rest, size)
    varied = [name for name in reversed(shape) if name in axes.split("-")]
    ranks = []
    for values in itertools.product(*(range(shape[name]) for name in varied)):
        now = coordinates | dict(zip(varied, values, strict=True))
        number, stride = 0, 1
        for name, size in shape.items():
            number, stride = number + now[name] * stride, stride * size
        ranks.append(number)
    return ranks


def random_plans(number: int, largest: int) -> Iterator[ParallelPlan]:
    draw = random.Random(5)
    found = 0
    while found < number:
        degrees = {axis: draw.choice([1, 1, 2, 3, 4, 8]) for axis in ("tp", "cp", "dp", "pp", "ep", "etp")}
        axes = ["tp", "cp", "ep", "dp"]
        draw.shuffle(axes)
        order = "-".join([*axes, "pp"])
        try:
            plan = ParallelPlan(order=order, **degrees)
        except ValueError:
            continue
        if plan.world_size <= largest:
            found += 1
            yield plan


def test_enumerations_equal_the_closed_form_up_to_16384_ranks() -> None:
    draw = random.Random(6)
    big = [
        ParallelPlan(tp=8, cp=2, dp=64, pp=16, ep=64),
        ParallelPlan(tp=8, cp=2, dp=64, pp=16, ep=64, etp=2, order="tp-ep-dp-cp-pp"),
        ParallelPlan(tp=4, dp=4096, ep=8),
    ]
    for plan in [*random_plans(150, 4096), *big]:
        world = plan.world_size
        dense, expert = plan.dense_shape(), plan.expert_shape()
        grid = HyperCommGrid(list(dense.values()), list(dense), world_size=world)
        grid.register_view("expert", list(expert.values()), list(expert), shared_dims=["pp"])
        for shape, view, table in ((dense, "", DENSE), (expert, "expert", EXPERT)):
            for axes in table.values():
                groups = grid.get_rank_enum(axes, view)
                assert {len(group) for group in groups} == {math.prod(shape[axis] for axis in axes.split("-"))}
                # Every rank lies in exactly one group.
                assert sorted(itertools.chain.from_iterable(groups)) == list(range(world))
                by_rank = {rank: group for group in groups for rank in group}
                for rank in draw.sample(range(world), min(world, 5)):
                    assert by_rank[rank] == closed_form(shape, axes, rank), (plan, axes)


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_groups_of_large_worlds_are_built() -> None:
    plans = [
        ParallelPlan(tp=4, cp=2, dp=2, pp=4, ep=8),
        ParallelPlan(tp=2, dp=16, pp=2, ep=4, etp=2, order="dp-tp-cp-ep-pp"),
        ParallelPlan(tp=8, cp=2, dp=8, pp=8, ep=16),
    ]
    for plan in plans:
        size = plan.world_size
        for rank in (0, 1, size // 3, size - 1):
            with fake_world(rank, size):
                groups = ProcessGroups.build(plan)
            for table, shape in ((DENSE, plan.dense_shape()), (EXPERT, plan.expert_shape())):
                for name, axes in table.items():
                    group = getattr(groups, name)
                    assert list(group.ranks) == closed_form(shape, axes, rank)
                    assert group.ranks[group.rank] == rank
                    assert (group.pg is None) == (group.size == 1) and bool(group.name) == (group.size > 1)
            pipeline = groups.pp.ranks
            ends = (pipeline[0], pipeline[-1])
            assert (groups.embd is None) == (rank not in ends) and (groups.embd is None or groups.embd.ranks == ends)
            assert (groups.pos_embd is None) == (rank != pipeline[0])
            assert groups.world.size == size
            assert groups.axis("dense", "tp") is groups.tp and groups.axis("expert", "tp") is groups.expt_tp
            assert groups.axis("expert", "dp") is groups.data("expert") is groups.expt_dp
            assert groups.axis("expert", "ep") is groups.ep and groups.data("dense") is groups.dp_cp


def check_communicators() -> None:
    me = dist.get_rank()
    for degrees in ({"tp": 2, "dp": 2}, {"pp": 2, "cp": 2}, {"tp": 2, "pp": 2, "ep": 2}, {"dp": 4, "ep": 2}):
        groups = ProcessGroups.build(ParallelPlan(**degrees))
        for name in (*DENSE, *EXPERT, "world"):
            group = getattr(groups, name)
            gathered = comm.all_gather(torch.tensor([me]), group)
            assert tuple(gathered.tolist()) == group.ranks, name
        # The same ranks share one communicator.
        same = {}
        for name in (*DENSE, *EXPERT):
            group = getattr(groups, name)
            assert same.setdefault(group.ranks, group.name) == group.name
    assert ProcessGroups.build(ParallelPlan(tp=4)).sequence_parallel
    assert not ProcessGroups.build(ParallelPlan(tp=4, sequence_parallel=False)).sequence_parallel
    assert not ProcessGroups.build(ParallelPlan(dp=4)).sequence_parallel


@pytest.mark.world(4)
def test_communicators_connect_their_ranks(world) -> None:
    world(check_communicators)


def check_wrong_world() -> None:
    with pytest.raises(ValueError, match=r"tp=4 \* cp=1 \* dp=1 \* pp=2 = 8 ranks, but the world has 2 from rank 0"):
        ProcessGroups.build(ParallelPlan(tp=4, pp=2))
    with pytest.raises(ValueError, match=r"dp=1 \* pp=1 = 1 ranks leave part of world_size=2 idle"):
        ProcessGroups.build(ParallelPlan())
    alone = ProcessGroups.single()
    assert alone.tp.size == 1 and alone.world.ranks == (dist.get_rank(),) and not alone.sequence_parallel
    # A grid of its own on the second rank, beside one on the first; every rank of the world calls build for both.
    offset = ProcessGroups.build(ParallelPlan(), rank_offset=1)
    assert offset.tp is None if dist.get_rank() == 0 else offset.tp.ranks == (1,)


@pytest.mark.world(2)
def test_a_plan_for_another_world_is_named(world) -> None:
    world(check_wrong_world)


def test_one_rank_needs_no_process_group() -> None:
    assert not dist.is_initialized()
    for groups in (ProcessGroups.single(), ProcessGroups.build(ParallelPlan())):
        assert groups.tp.size == groups.world.size == 1 and groups.pp.is_first and groups.pp.is_last
    with pytest.raises(ValueError, match="but the world has 1"):
        ProcessGroups.build(ParallelPlan(tp=2))

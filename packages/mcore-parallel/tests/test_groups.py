# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The groups of a plan: closed form on large worlds, communicators on small ones."""

import itertools
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from mcore_parallel import CommunicatorOptions, HyperCommGrid, ParallelPlan, ProcessGroups, comm
from mcore_parallel.groups import connect
from mcore_parallel.groups._groups import enumerate_groups

DENSE = {axis: axis for axis in ("tp", "cp", "dp", "pp")}
DENSE |= {"dp_cp": "cp-dp", "tp_pp": "tp-pp", "tp_cp": "tp-cp", "tp_dp": "tp-dp", "tp_dp_cp": "tp-cp-dp"}
DATA = {
    "dp_cp": ("intra_dp_cp", "inter_dp_cp", "dp_cp_ag"),
    "expt_dp": ("intra_expt_dp", "inter_expt_dp", "expt_dp_ag"),
}
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


@pytest.mark.journey
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


def by_coordinates(shape: dict[str, int], axes: str) -> list[list[int]]:
    """Ranks that agree in all axes but these, in the order in which they are met; shares no code with the library."""
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(math.prod(shape.values())):
        rest, fixed = rank, []
        for name, size in shape.items():
            rest, index = divmod(rest, size)
            if name not in axes.split("-"):
                fixed.append(index)
        found.setdefault(tuple(fixed), []).append(rank)
    return list(found.values())


def test_200_random_plans_in_any_order_equal_the_grid_and_an_independent_enumeration() -> None:
    draw = random.Random(11)
    met, refused, late_pp = 0, 0, 0
    while met < 200:
        degrees = {axis: draw.choice([1, 1, 2, 3, 4]) for axis in ("tp", "cp", "dp", "pp", "ep", "etp")}
        axes = ["tp", "cp", "ep", "dp", "pp"]
        draw.shuffle(axes)
        axes = [axis for axis in axes if degrees[axis] > 1 or draw.random() < 0.7] or ["tp"]
        try:
            plan = ParallelPlan(order="-".join(axes), **degrees)
        except ValueError:
            continue
        if plan.world_size > 256:
            continue
        dense, expert = plan.dense_shape(), plan.expert_shape()
        assert list(dense)[: len(axes)] == list(expert)[: len(axes)] == axes
        if by_coordinates(dense, "pp") != by_coordinates(expert, "pp"):
            # The two views put pipelines on other ranks, which no choice of groups can serve.
            with pytest.raises(ValueError, match="view 'expert' hold other ranks"):
                enumerate_groups(plan)
            refused += 1
            continue
        met, late_pp = met + 1, late_pp + (plan.pp > 1 and axes[-1] != "pp")
        found = enumerate_groups(plan)
        grid = HyperCommGrid(list(dense.values()), list(dense), world_size=plan.world_size)
        grid.register_view("expert", list(expert.values()), list(expert), shared_dims=["pp"])
        for table, shape, view in ((DENSE, dense, ""), (EXPERT, expert, "expert")):
            for name, which in table.items():
                assert found[name] == by_coordinates(shape, which) == grid.get_rank_enum(which, view), (plan, name)
        for name, groups in found.items():
            ranks = sorted(itertools.chain.from_iterable(groups))
            everywhere = name not in ("embd", "pos_embd")
            assert ranks == (list(range(plan.world_size)) if everywhere else sorted(set(ranks))), name
    assert refused > 5 and late_pp > 5


def test_optimizer_instances_are_neighbours_in_dense_and_expert_replicas() -> None:
    draw = random.Random(12)
    met, unlike = 0, 0
    while met < 100:
        degrees = {axis: draw.choice([1, 2, 4]) for axis in ("tp", "cp", "dp", "pp", "ep", "etp")}
        axes = ["tp", "cp", "ep", "dp"]
        draw.shuffle(axes)
        try:
            plan = ParallelPlan(order="-".join([*axes, "pp"]), optimizer_instances=draw.choice([1, 2, 4]), **degrees)
        except ValueError:
            continue
        met += 1
        found = enumerate_groups(plan)
        sets = []
        for data, (inner, outer, gather) in DATA.items():
            assert found[gather] == found[inner]
            for ranks in found[data]:
                size = len(ranks) // plan.optimizer_instances
                assert all(ranks[start : start + size] in found[inner] for start in range(0, len(ranks), size))
                assert all(ranks[place::size] in found[outer] for place in range(size))
            for name in (inner, outer):
                assert sorted(itertools.chain.from_iterable(found[name])) == list(range(plan.world_size))
            # Ranks of one instance: those that share its number in their data group.
            number = {rank: ranks.index(rank) * plan.optimizer_instances // len(ranks) for ranks in found[data] for rank in ranks}
            sets.append([sorted(r for r in number if number[r] == i) for i in range(plan.optimizer_instances)])
        assert found.get("intra_dist_opt") == (sets[0] if sets[0] == sets[1] else None)
        unlike += sets[0] != sets[1]
        if plan.optimizer_instances == 1:
            assert found["intra_dist_opt"] == found["world"]
    assert unlike  # there, inter groups of one view would join the wrong ranks of the other


def test_levels_of_context_parallelism_nest() -> None:
    found = enumerate_groups(ParallelPlan(tp=2, cp=8, dp=2, hierarchical_cp=(2, 4)))
    assert found["cp"][1] == [1, 3, 5, 7, 9, 11, 13, 15]
    assert [1, 3] in found["hierarchical_cp.0"] and [13, 15] in found["hierarchical_cp.0"]
    assert [1, 5, 9, 13] in found["hierarchical_cp.1"] and [3, 7, 11, 15] in found["hierarchical_cp.1"]
    for sizes in ((8,), (2, 2, 2), (4, 2), (1, 8)):
        found = enumerate_groups(ParallelPlan(tp=2, cp=8, dp=2, hierarchical_cp=sizes, order="dp-cp-tp"))
        for level, size in enumerate(sizes):
            groups = found[f"hierarchical_cp.{level}"]
            assert {len(group) for group in groups} == {size}
            assert sorted(itertools.chain.from_iterable(groups)) == list(range(32))
            below = math.prod(sizes[:level])
            for whole in found["cp"]:
                inside = torch.tensor(whole).view(-1, size, below).transpose(1, 2).reshape(-1, size).tolist()
                assert all(group in groups for group in inside)


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.journey
def test_groups_of_large_worlds_are_built() -> None:
    plans = [
        ParallelPlan(tp=4, cp=2, dp=2, pp=4, ep=8),
        ParallelPlan(tp=2, dp=16, pp=2, ep=4, etp=2, order="dp-tp-cp-ep-pp"),
        ParallelPlan(tp=8, cp=2, dp=8, pp=8, ep=16, hierarchical_cp=(2, 1), optimizer_instances=2),
        ParallelPlan(tp=8, cp=4, dp=16, pp=8, ep=64, hierarchical_cp=(2, 2), optimizer_instances=2, order="cp-tp-ep-dp-pp"),
    ]
    for plan in plans:
        size = plan.world_size
        for rank in (0, 1, size // 3, size - 1):
            with fake_world(rank, size):
                groups = ProcessGroups.build(plan, separate_all_gather=True)
                groups.close()
                groups.close()
            for data, (inner, outer, gather) in DATA.items():
                whole, part = getattr(groups, data), getattr(groups, inner)
                assert part.size * plan.optimizer_instances == whole.size and getattr(groups, outer).size == plan.optimizer_instances
                # Gathers run among the same ranks, whatever the order, through a communicator of their own.
                own = getattr(groups, gather)
                assert own.ranks == part.ranks and (own.size == 1 or own.name != part.name)
            assert [group.size for group in groups.hierarchical_cp] == list(plan.hierarchical_cp)
            assert groups.intra_dist_opt is not None and rank in groups.intra_dist_opt.ranks
            assert groups.intra_dist_opt.size * plan.optimizer_instances == size
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
    for degrees in ({"tp": 2, "dp": 2}, {"pp": 2, "cp": 2}, {"tp": 2, "pp": 2, "ep": 2}, {"dp": 4, "ep": 2}, {"dp": 4, "ep": 4}, {"cp": 4}):
        groups = ProcessGroups.build(ParallelPlan(**degrees))
        for name in (*DENSE, *EXPERT, "world"):
            group = getattr(groups, name)
            gathered = comm.all_gather(torch.tensor([me]), group)
            assert tuple(gathered.tolist()) == group.ranks, name
        # The same ranks share one communicator, but layers share none with sums of gradients and gathers of parameters.
        same: dict[tuple[object, ...], str] = {}
        for name in (*DENSE, *EXPERT):
            group = getattr(groups, name)
            assert same.setdefault((group.ranks, name in (*DATA, "dp")), group.name) == group.name
        layers, data = ({group for (ranks, is_data), group in same.items() if is_data is kind and len(ranks) > 1} for kind in (False, True))
        assert not layers & data
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


def check_time_limit(folder: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for life in range(2):
        if life:  # a second world in the same processes
            dist.destroy_process_group()
            dist.init_process_group("gloo", init_method=f"file://{folder}/again", rank=rank, world_size=size)
        plans = [ParallelPlan(dp=4, ep=2, optimizer_instances=2), ParallelPlan(cp=4, hierarchical_cp=(2, 2)), ParallelPlan(tp=2, pp=2)]
        for plan in plans:
            groups = ProcessGroups.build(plan, timeout_s=77.0, separate_all_gather=True)
            named = {name: getattr(groups, name) for name in (*DENSE, *EXPERT, *DATA["dp_cp"], *DATA["expt_dp"], "intra_dist_opt", "world")}
            named |= {f"level{level}": group for level, group in enumerate(groups.hierarchical_cp)}
            for name, group in named.items():
                if group.size > 1:
                    assert group.pg._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=77), name
                assert tuple(comm.all_gather(torch.tensor([rank]), group).tolist()) == group.ranks, name
            groups.close()
            for group in named.values():
                if group.size > 1:
                    with pytest.raises((RuntimeError, ValueError)):
                        comm.all_reduce(torch.ones(1), group)


@pytest.mark.journey
@pytest.mark.world(4)
def test_every_group_has_the_time_limit_and_closes_for_another_life(world, tmp_path: Path) -> None:
    world(check_time_limit, folder=str(tmp_path))


def test_options_go_to_the_groups_they_name() -> None:
    narrow, fast = CommunicatorOptions(max_ctas=4), CommunicatorOptions(is_high_priority_stream=True)
    plan = ParallelPlan(tp=2, dp=2)
    with fake_world(0, 4):
        plain, again = ProcessGroups.build(plan), ProcessGroups.build(plan, options={"tp_dp": narrow})
        mixed = ProcessGroups.build(plan, options={"dp_cp": narrow, "expt_dp": fast, "dp": fast})
        for name, options in (("nowhere", narrow), ("plan", narrow)):
            with pytest.raises(ValueError, match=rf"options name unknown groups \['{name}'\]"):
                ProcessGroups.build(plan, options={name: options})
    assert plain.dp.name == plain.dp_cp.name
    # One set of ranks, one communicator of layers and one of data parallelism, as long as nobody asks for another choice.
    layers, data = ({getattr(again, name).name for name in names} for names in (("tp_dp", "tp_dp_cp"), ("expt_dp", "world")))
    assert len(layers) == len(data) == 1 and layers != data
    assert mixed.dp.name != mixed.dp_cp.name and mixed.dp.name != mixed.expt_dp.name
    assert mixed.intra_dp_cp.name in (mixed.dp.name, mixed.dp_cp.name)


def check_members_alone() -> list[float]:
    groups = ProcessGroups.build(ParallelPlan(pp=3))
    here = connect((0, 1, 2), dist.get_rank(), backend="gloo", timeout_s=10.0, local=True)
    sums = [comm.all_reduce(torch.ones(()), group).item() for group in (groups.pp, here)]
    groups.close()
    return sums


@pytest.mark.world(3)
def test_members_of_all_stages_make_a_group_alone(world) -> None:
    assert world(check_members_alone, timeout_s=30.0) == [[3.0, 3.0]] * 3

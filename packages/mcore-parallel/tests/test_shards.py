# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Placement tables of parameters."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from mcore_parallel import NamedShard, ParallelPlan, ProcessGroups, ShardSpec, named_shards

PLANS = [
    ParallelPlan(tp=2, cp=2, dp=2),
    ParallelPlan(tp=4, dp=2, ep=4),
    ParallelPlan(tp=2, dp=4, ep=2, etp=2),
    ParallelPlan(tp=2, dp=2, pp=2, ep=2),
]
SPECS = [
    ShardSpec(shape=(8, 6)),
    ShardSpec(shape=(8, 6), shards={"tp": 0}),
    ShardSpec(shape=(3, 8), shards={"tp": 1}),
    ShardSpec(shape=(8, 2, 8, 3), view="expert", shards={"ep": 0, "tp": 2}),
    ShardSpec(shape=(8, 5), view="expert", shards={"ep": 0}),
    ShardSpec(shape=(4,), view="expert"),
]


def test_first_copies_tile_the_global_tensor_once() -> None:
    for plan in PLANS:
        counts = [torch.zeros(spec.shape, dtype=torch.int64) for spec in SPECS]
        for rank in range(plan.world_size):
            dist.init_process_group("fake", rank=rank, world_size=plan.world_size, store=FakeStore())
            groups = ProcessGroups.build(plan)
            dist.destroy_process_group()
            for spec, count in zip(SPECS, counts, strict=True):
                local = spec.local_shape(groups)
                assert count[spec.slices(groups)].shape == local
                assert tuple(part.start for part in spec.slices(groups)) == spec.offset(groups)
                if spec.replica(groups) == 0:
                    count[spec.slices(groups)] += 1
        for spec, count in zip(SPECS, counts, strict=True):
            assert (count == plan.pp).all(), (plan, spec)


def test_copies_are_numbered_without_gaps() -> None:
    for plan in PLANS:
        for spec in SPECS:
            seen: Counter[tuple[int, tuple[int, ...], int]] = Counter()
            for rank in range(plan.world_size):
                dist.init_process_group("fake", rank=rank, world_size=plan.world_size, store=FakeStore())
                groups = ProcessGroups.build(plan)
                dist.destroy_process_group()
                seen[groups.pp.rank, spec.offset(groups), spec.replica(groups)] += 1
            assert set(seen.values()) == {1}
            copies = max(number for _, _, number in seen) + 1
            assert {number for _, _, number in seen} == set(range(copies))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.second = nn.Linear(2, 3, bias=False)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.ones(3))

    def shard_specs(self) -> dict[str, ShardSpec]:
        return {"scale": ShardSpec(shape=(3,), partial=("tp",))}


def test_every_distinct_parameter_appears_once_with_its_placement() -> None:
    model = Tied()
    shards = {shard.name: shard for shard in named_shards(model)}
    assert sorted(shards) == ["first.bias", "first.weight", "scale"]
    scale = shards["scale"]
    assert isinstance(scale, NamedShard) and scale.parameter is model.scale and scale.spec == ShardSpec(shape=(3,), partial=("tp",))
    assert shards["first.weight"].spec == ShardSpec(shape=(3, 2))


class Confused(nn.Module):
    def shard_specs(self) -> dict[str, ShardSpec]:
        return {"weight": ShardSpec(shape=(3,))}


def test_a_placement_without_its_parameter_is_named() -> None:
    with pytest.raises(ValueError, match=r"Confused at 'inner' declares placements of \['weight'\]"):
        list(named_shards(nn.ModuleDict({"inner": Confused()})))


def test_a_degree_that_does_not_divide_is_named() -> None:
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    groups = ProcessGroups.build(ParallelPlan(tp=4))
    dist.destroy_process_group()
    with pytest.raises(ValueError, match=r"tp=4 must divide dim 1 of shape \(8, 6\); lower tp"):
        ShardSpec(shape=(8, 6), shards={"tp": 1}).local_shape(groups)

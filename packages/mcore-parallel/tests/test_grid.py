# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The named grid of ranks."""

import itertools

import pytest
import torch.distributed as dist

from mcore_parallel import Group, HyperCommGrid, ParallelPlan, ProcessGroups


def check_groups() -> tuple[int, int]:
    groups = ProcessGroups.build(ParallelPlan(tp=2, ep=2, dp=2))
    return groups.tp.rank, groups.ep.rank


def test_first_axis_varies_fastest() -> None:
    grid = HyperCommGrid((2, 3, 4), ("tp", "dp", "pp"), world_size=24)
    assert grid.get_rank_enum("dp")[:2] == [[0, 2, 4], [1, 3, 5]]
    assert grid.get_rank_enum("dp")[-1] == [19, 21, 23]
    assert grid.get_rank_enum(["tp", "pp"])[0] == [0, 1, 6, 7, 12, 13, 18, 19]
    assert grid.get_rank_enum("pp-tp") == grid.get_rank_enum("tp-pp")


@pytest.mark.world(4)
def test_every_rank_finds_its_groups(world) -> None:
    assert world(check_groups) == [(0, 0), (1, 1), (0, 0), (1, 1)]


def test_enumerations_cover_the_ranks_once() -> None:
    for shape in itertools.product((1, 2, 3), repeat=3):
        grid = HyperCommGrid(shape, ("a", "b", "c"), rank_offset=5, world_size=100)
        for length in range(1, 4):
            for dims in itertools.combinations("abc", length):
                groups = grid.get_rank_enum(list(dims))
                assert sorted(rank for group in groups for rank in group) == list(range(5, 5 + grid.size))
                assert all(group == sorted(group) for group in groups)


def test_bad_grids_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ValueError, match="same length"):
        HyperCommGrid((2, 2), ("tp",), world_size=4)
    with pytest.raises(ValueError, match="at least 1"):
        HyperCommGrid((0,), ("tp",), world_size=4)
    with pytest.raises(ValueError, match="distinct and without '-'"):
        HyperCommGrid((2, 2), ("tp", "tp"), world_size=4)
    with pytest.raises(ValueError, match="rank_offset=-1"):
        HyperCommGrid((2,), ("tp",), -1, world_size=4)
    with pytest.raises(RuntimeError, match="= 4 ranks from rank 1 exceeds world_size=4"):
        HyperCommGrid((4,), ("tp",), 1, world_size=4)
    with pytest.raises(RuntimeError, match="world size is unknown"):
        HyperCommGrid((4,), ("tp",))
    grid = HyperCommGrid((2, 2), ("tp", "dp"), world_size=4)
    with pytest.raises(KeyError, match="unknown axes"):
        grid.get_rank_enum("pp")
    with pytest.raises(KeyError, match="call create_pg"):
        grid.get_pg("tp")
    with pytest.raises(KeyError, match="unknown view"):
        grid.get_rank_enum("tp", "expert")


def test_a_view_must_agree_on_its_shared_axes() -> None:
    grid = HyperCommGrid((2, 2, 2), ("tp", "dp", "pp"), world_size=8)
    grid.register_view("expert", (4, 2), ("ep", "pp"), ["pp"])
    assert grid.get_rank_enum("ep", "expert") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(KeyError, match="exists already"):
        grid.register_view("expert", (4, 2), ("ep", "pp"))
    with pytest.raises(ValueError, match="has 4 ranks, the grid has 8"):
        grid.register_view("small", (2, 2), ("ep", "pp"))
    with pytest.raises(ValueError, match=r"axes \['pp'\] of view 'other' hold other ranks"):
        grid.register_view("other", (2, 4), ("pp", "ep"), ["pp"])
    for shape, names in (((2, 4), ("ep", "ep")), ((-2, -4), ("ep", "pp")), ((8,), ("ep", "pp")), ((8,), ("e-p",))):
        with pytest.raises(ValueError, match=r"same length|at least 1|distinct"):
            grid.register_view("odd", shape, names)
    with pytest.raises(KeyError, match=r"unknown axes \['dp'\]"):
        grid.register_view("odd", (4, 2), ("ep", "pp"), ["dp"])


def test_axes_may_come_as_a_string_a_list_or_a_tuple() -> None:
    grid = HyperCommGrid((2, 3, 4), ("tp", "dp", "pp"), world_size=24)
    assert grid.get_rank_enum("tp-pp") == grid.get_rank_enum(["tp", "pp"]) == grid.get_rank_enum(("pp", "tp"))


def test_a_launcher_says_the_world_size_before_there_is_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert HyperCommGrid((2, 4), ("tp", "dp")).get_rank_enum("dp", view=None)[0] == [0, 2, 4, 6]
    with pytest.raises(RuntimeError, match="exceeds world_size=8"):
        HyperCommGrid((16,), ("dp",))
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(RuntimeError, match="world size is unknown"):
        HyperCommGrid((4,), ("tp",))


def check_description() -> tuple[str, str, bool]:
    grid = HyperCommGrid((1, 2), ("tp", "dp"))
    described, plain = grid.create_pg("dp", group_desc="WEIGHT_GRADIENTS"), grid.create_pg("tp")
    assert described is not None and plain is not None
    return described.group_desc, plain.group_desc, HyperCommGrid((1,), ("tp",), 1).is_current_rank_in_grid()


@pytest.mark.world(2)
def test_groups_are_described_and_a_rank_knows_its_grid(world) -> None:
    assert world(check_description) == [("WEIGHT_GRADIENTS", "tp", False), ("WEIGHT_GRADIENTS", "tp", True)]


def check_lifetime() -> None:
    grid = HyperCommGrid((2, 2), ("tp", "dp"))
    pg = grid.create_pg("tp")
    assert pg is not None and grid.get_pg(["tp"]) is pg
    assert Group.of(pg).ranks == ((0, 1) if dist.get_rank() < 2 else (2, 3))
    with pytest.raises(KeyError, match="exist already; call get_pg"):
        grid.create_pg("tp")
    grid.register_view("expert", (4,), ("ep",))
    assert dist.get_process_group_ranks(grid.create_pg("ep", "expert")) == [0, 1, 2, 3]
    # A rank that is through would else close connections that others are still making.
    dist.barrier()
    grid.destroy()
    with pytest.raises(KeyError):
        grid.get_pg("tp")
    assert grid.create_pg("tp") is not None
    # Two grids that share no rank.
    halves = [HyperCommGrid((2,), ("tp",), offset) for offset in (0, 2)]
    found = [half.create_pg("tp") for half in halves]
    assert [group is not None for group in found] == ([True, False] if dist.get_rank() < 2 else [False, True])


@pytest.mark.world(4)
def test_groups_are_created_once_and_destroyed_once(world) -> None:
    world(check_lifetime)

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Grids and plans."""

import pytest

from mcore_parallel import HyperCommGrid, ParallelPlan, ProcessGroups


def check_groups() -> tuple[int, int]:
    groups = ProcessGroups.build(ParallelPlan(tp=2, ep=2, dp=2))
    return groups.tp.rank, groups.ep.rank


def test_first_axis_varies_fastest() -> None:
    grid = HyperCommGrid((2, 3, 4), ("tp", "dp", "pp"), world_size=24)
    assert grid.get_rank_enum("dp")[:2] == [[0, 2, 4], [1, 3, 5]]
    assert grid.get_rank_enum("dp")[-1] == [19, 21, 23]


@pytest.mark.world(4)
def test_every_rank_finds_its_groups(world) -> None:
    assert world(check_groups) == [(0, 0), (1, 1), (0, 0), (1, 1)]


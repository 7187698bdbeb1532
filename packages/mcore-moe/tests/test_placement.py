# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Experts and their copies are placed by their loads: every expert somewhere, equally many on each rank, the busiest rank hardly busier."""

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_moe.serving import ExpertPlacement, place_experts, plan_moves
from mcore_moe.serving._placement import LEAST_GAIN


@st.composite
def cases(draw: st.DrawFn, most_ranks: int = 6, most_own: int = 5) -> tuple[list[int], ExpertPlacement]:
    """Loads, and some placement of these experts with some copies."""
    ranks, own = draw(st.integers(1, most_ranks)), draw(st.integers(1, most_own))
    more = draw(st.integers(0, min(2, own * (ranks - 1))))
    loads = draw(st.lists(st.integers(0, 1000), min_size=ranks * own, max_size=ranks * own))
    home = ExpertPlacement.home(ranks * own, ranks, ranks * more)
    return loads, place_experts(draw(st.permutations(loads)), home) if draw(st.booleans()) else home


@settings(max_examples=200, deadline=None)
@given(case=cases())
def test_each_expert_has_a_slot_and_no_rank_gets_more_to_do_than_the_busiest_had(case: tuple[list[int], ExpertPlacement]) -> None:
    loads, before = case
    after = place_experts(loads, before)
    # A placement with ranks of different sizes, or without an expert, is none.
    assert [len(row) for row in after.experts_GS] == [len(row) for row in before.experts_GS]
    assert after.num_experts == len(loads) == len(after.slots())
    assert sum(after.rank_loads(loads)) == pytest.approx(sum(loads))
    assert after is before or max(after.rank_loads(loads)) < max(before.rank_loads(loads))
    assert place_experts(loads, before) == after
    # Loads of another unit say the same.
    assert place_experts([3 * load for load in loads], before) == after


@settings(max_examples=200, deadline=None)
@given(case=cases(), data=st.data())
def test_moves_bring_every_expert_to_its_slots_and_leave_what_stays(case: tuple[list[int], ExpertPlacement], data: st.DataObject) -> None:
    loads, before = case
    after = place_experts(loads, before)
    known = before.experts_GS
    if data.draw(st.booleans()):
        # After new weights only the first slots are known.
        known = tuple(row[: len(loads) // len(known)] for row in ExpertPlacement.home(len(loads), len(known)).experts_GS)
    moves = plan_moves(known, after)
    held = [[*row, *[-1] * (len(new) - len(row))] for row, new in zip(known, after.experts_GS, strict=True)]
    filled = [list(row) for row in held]
    for (source, place), (target, slot) in moves:
        assert filled[target][slot] != held[source][place] >= 0
        filled[target][slot] = held[source][place]
    assert tuple(map(tuple, filled)) == after.experts_GS
    assert len({target for _, target in moves}) == len(moves)
    # Nothing travels to a rank that has it.
    assert all(source == target or held[source][place] not in held[target] for (source, place), (target, _) in moves)
    assert plan_moves(after.experts_GS, after) == []


def fewest(loads: Sequence[int], num_ranks: int, num_slots: int) -> float:
    """The load of the busiest rank in the best of all placements."""
    rows = itertools.combinations_with_replacement(range(len(loads)), num_slots)
    placements = (
        rows for rows in itertools.combinations_with_replacement(list(rows), num_ranks) if set(sum(rows, ())) == set(range(len(loads)))
    )
    return min(max(ExpertPlacement(rows).rank_loads(loads)) for rows in placements)


@pytest.mark.parametrize(("ranks", "own", "more"), [(2, 2, 0), (2, 2, 1), (2, 3, 0), (3, 1, 1), (3, 2, 0)])
def test_small_placements_are_near_the_best_of_all(ranks: int, own: int, more: int) -> None:
    draw = random.Random(ranks + own + more)
    for _ in range(12):
        loads = [draw.choice([0, 1, 5, 10, 40, 40, 100, draw.randrange(50)]) for _ in range(ranks * own)]
        after = place_experts(loads, ExpertPlacement.home(ranks * own, ranks, ranks * more))
        assert max(after.rank_loads(loads)) <= 4 / 3 * fewest(loads, ranks, own + more) + 1e-9, loads


def test_many_experts_with_few_busy_ones_are_even_with_copies_and_stay_where_they_are_then() -> None:
    loads = [int(1000 * random.Random(expert).paretovariate(1.2)) for expert in range(256)]
    home = ExpertPlacement.home(256, 8, 32)
    placed = place_experts(loads, home)
    assert home.imbalance(loads) > 1.3 and placed.imbalance(loads) < 1.01
    # Nothing moves for the little that other loads of the same kind would gain.
    drifted = [load + expert % 3 for expert, load in enumerate(loads)]
    assert place_experts(drifted, placed) is placed
    busy = max(range(256), key=loads.__getitem__)
    assert len(placed.slots()[busy]) > 1 and len(home.slots()[busy]) <= 2
    # What moves is what must: experts that find no reason to leave their rank stay in their slots.
    nudged = [load * (3 if expert == 17 else 1) for expert, load in enumerate(placed.rank_loads(loads) * 32)]
    assert len(plan_moves(placed.experts_GS, place_experts(nudged, placed))) < 288


def test_a_gain_below_the_least_moves_nothing() -> None:
    home = ExpertPlacement.home(4, 2)
    gain = int(100 * LEAST_GAIN)
    assert place_experts([100, gain - 1, 100 - gain, 0], home) is home
    assert place_experts([100, 2 * gain, 100 - 2 * gain, 0], home) != home


def test_without_loads_or_with_one_rank_nothing_moves() -> None:
    for home in (ExpertPlacement.home(6, 3, 3), ExpertPlacement.home(4, 1)):
        assert place_experts([0] * home.num_experts, home) is home
    single = ExpertPlacement.home(4, 1)
    assert place_experts([9, 1, 1, 1], single) is single and single.imbalance([9, 1, 1, 1]) == 1.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ExpertPlacement.home(6, 4), "ep=4 must divide num_moe_experts=6"),
        (lambda: ExpertPlacement.home(6, 2, 3), "and num_redundant_experts=3; choose a multiple"),
        (lambda: ExpertPlacement.home(4, 2, 6), "at most 4 copies of num_moe_experts=4"),
        (lambda: ExpertPlacement(((0, 1), (2,))), r"rows of \[2, 1\] slots"),
        (lambda: ExpertPlacement(((0, 1), (3, 0))), r"holds experts \[0, 1, 3\]; every number"),
    ],
)
def test_what_is_no_placement_is_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()

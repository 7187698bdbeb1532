# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Schedules as tables, their simulation, and the placement of layers."""

import itertools

import pytest

from mcore_parallel.pipeline import Action, DeadlockError, exchanges, forward_only, one_f_one_b, partition_layers, simulate


def text(actions: list[Action]) -> str:
    return " ".join(map(str, actions))


def test_small_schedules_are_the_known_tables() -> None:
    assert text(one_f_one_b(1, 0, 2)) == "F0 B0 F1 B1"
    assert text(one_f_one_b(4, 0, 5)) == "F0 F1 F2 F3 B0 F4 B1 B2 B3 B4"
    assert text(one_f_one_b(4, 2, 5)) == "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4"
    assert text(one_f_one_b(4, 3, 3)) == "F0 B0 F1 B1 F2 B2"
    assert text(one_f_one_b(4, 0, 2)) == "F0 F1 B0 B1"  # fewer micro-batches than stages
    assert text(forward_only(4, 1, 2)) == "F0 F1"


def test_every_schedule_finishes_with_the_bubble_of_theory() -> None:
    for stages, microbatches in itertools.product(range(1, 9), range(1, 17)):
        tables = [one_f_one_b(stages, stage, microbatches) for stage in range(stages)]
        result = simulate(tables)
        assert result.bubble_fraction == pytest.approx((stages - 1) / microbatches)
        assert result.peak_live == tuple(min(stages - stage, microbatches) for stage in range(stages))
        assert result.makespan == 3 * (stages - 1 + microbatches)
        simulate([forward_only(stages, stage, microbatches) for stage in range(stages)])


def test_stages_that_wait_for_each_other_are_named() -> None:
    # Stage 1 wants both activations before it gives the first gradient; stage 0 wants that gradient first.
    tables = [one_f_one_b(1, 0, 2), one_f_one_b(2, 0, 2)]
    assert [text(table) for table in tables] == ["F0 B0 F1 B1", "F0 F1 B0 B1"]
    expected = "stage 0 before B0 waits for gradient 0 of stage 1; stage 1 before F1 waits for activation 1 of stage 0"
    with pytest.raises(DeadlockError, match=expected):
        simulate(tables)
    # Micro-batches in another order on the two sides.
    tables = [[Action("F", 0), Action("F", 1)], [Action("F", 1), Action("F", 0)]]
    with pytest.raises(DeadlockError, match="stage 0 before F1 waits to send activation 0 to stage 1"):
        simulate(tables)


def test_a_broken_table_is_named() -> None:
    with pytest.raises(ValueError, match="stage 0 runs B0 before F0"):
        simulate([[Action("B", 0), Action("F", 0)]])
    with pytest.raises(ValueError, match="stage 0 runs micro-batch 0 twice"):
        simulate([[Action("F", 0), Action("F", 0)]])
    with pytest.raises(ValueError, match=r"stage 0 runs \[1\] in one direction only"):
        simulate([[Action("F", 0), Action("F", 1), Action("B", 0)]])
    with pytest.raises(ValueError, match=r"stage=2 must lie in \[0, num_stages=2\)"):
        one_f_one_b(2, 2, 1)
    with pytest.raises(ValueError, match="num_microbatches=0"):
        one_f_one_b(2, 0, 0)


def test_end_stages_exchange_with_one_neighbour_only() -> None:
    first = exchanges(one_f_one_b(3, 0, 4), 3, 0)
    last = exchanges(one_f_one_b(3, 2, 4), 3, 2)
    assert all(entry.recv_activation is None and entry.send_grad is None for entry in first)
    assert all(entry.send_activation is None and entry.recv_grad is None for entry in last)
    assert [entry.send_activation for entry in first if entry.send_activation is not None] == [0, 1, 2, 3]
    assert [entry.recv_activation for entry in last if entry.recv_activation is not None] == [0, 1, 2, 3]


def test_layers_are_placed_once_and_evenly() -> None:
    for stages in range(1, 9):
        for layers in range(stages, 40):
            parts = [partition_layers(layers, stages, stage) for stage in range(stages)]
            assert [number for part in parts for number in part] == list(range(layers))
            sizes = [len(part) for part in parts]
            assert max(sizes) - min(sizes) <= 1
            assert sizes[-1] == layers // stages
    assert [len(partition_layers(9, 4, stage)) for stage in range(4)] == [2, 3, 2, 2]
    with pytest.raises(ValueError, match="num_layers=3 must be at least the number of pipeline stages 4; lower pp"):
        partition_layers(3, 4, 0)
    with pytest.raises(ValueError, match="stage=4"):
        partition_layers(8, 4, 4)

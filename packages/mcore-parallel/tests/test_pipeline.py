# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Schedules as tables, their simulation, and the placement of layers."""

import functools

import pytest

from mcore_parallel.pipeline import (
    Action,
    Combined,
    DeadlockError,
    Schedule,
    Simulation,
    combined_one_f_one_b,
    exchanges,
    forward_only,
    interleaved_one_f_one_b,
    one_f_one_b,
    partition_layers,
    plan_pipeline,
    simulate,
    virtual_order,
    zero_bubble,
)


def text(actions) -> str:
    return " ".join(map(str, actions))


def run(schedule: Schedule, stages: int, microbatches: int, **times: float) -> Simulation:
    return simulate([schedule(stages, stage, microbatches) for stage in range(stages)], **times)


def sizes(stages: int, microbatches: int) -> list[int]:
    """Group sizes worth a try: the smallest, the next, the largest, each if it is allowed."""
    found = {stages, stages + 1, microbatches // 2, microbatches}
    return sorted(n for n in found if stages <= n <= microbatches and (microbatches % n == 0 or microbatches % n >= stages))


def test_small_schedules_are_the_known_tables() -> None:
    assert text(one_f_one_b(1, 0, 2)) == "F0 B0 F1 B1"
    assert text(one_f_one_b(4, 0, 5)) == "F0 F1 F2 F3 B0 F4 B1 B2 B3 B4"
    assert text(one_f_one_b(4, 2, 5)) == "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4"
    assert text(one_f_one_b(4, 3, 3)) == "F0 B0 F1 B1 F2 B2"
    assert text(one_f_one_b(4, 0, 2)) == "F0 F1 B0 B1"  # fewer micro-batches than stages
    assert text(forward_only(4, 1, 2)) == "F0 F1"
    assert text(zero_bubble(3, 2, 4)) == "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3"
    assert text(zero_bubble(3, 0, 4)) == "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3"
    assert text(combined_one_f_one_b(2, 0, 5)) == "F0 F1 F2 F3+B0 F4+B1 B2 B3 B4"
    assert text(combined_one_f_one_b(2, 1, 3, delay_weight_grad=True)) == "F0 F1+I0 W0 F2+I1 W1 I2 W2"
    assert text(combined_one_f_one_b(4, 0, 2)) == "F0 F1 B0 B1"


def test_chunks_take_turns_in_groups_of_micro_batches() -> None:
    order = virtual_order(num_microbatches=5, num_chunks=2, group_size=3)
    assert [microbatch for microbatch, _ in order] == [0, 1, 2, 0, 1, 2, 3, 4, 3, 4]
    assert [chunk for _, chunk in order] == [0, 0, 0, 1, 1, 1, 0, 0, 1, 1]
    first, last = (interleaved_one_f_one_b(2, stage, 5, num_chunks=2, group_size=3) for stage in range(2))
    assert text(first) == "F0 F1 F2 F0.1 F1.1 F2.1 B0.1 F3 B1.1 F4 B2.1 F3.1 B0 F4.1 B1 B2 B3.1 B4.1 B3 B4"
    assert text(last) == "F0 F1 F2 F0.1 B0.1 F1.1 B1.1 F2.1 B2.1 F3 B0 F4 B1 F3.1 B2 F4.1 B3.1 B4.1 B3 B4"
    assert interleaved_one_f_one_b(4, 1, 2, num_chunks=1) == one_f_one_b(4, 1, 2)
    assert text(forward_only(2, 0, 3, num_chunks=2)) == "F0 F1 F0.1 F1.1 F2 F2.1"


@pytest.mark.parametrize("stages", range(1, 9))
def test_every_schedule_finishes_with_the_bubble_of_theory(stages: int) -> None:
    for microbatches in range(1, 17):
        forward, backward, weight = 1.0, 2.0, 1.0
        # What 1F1B loses at both ends: a forward and a backward for every stage but one.
        idle = (stages - 1) * (forward + backward)
        result = run(one_f_one_b, stages, microbatches)
        assert result.makespan == 3 * microbatches + idle
        assert result.bubble_fraction == pytest.approx((stages - 1) / microbatches)
        assert result.peak_live == tuple(min(stages - stage, microbatches) for stage in range(stages))
        result = run(zero_bubble, stages, microbatches)
        assert result.peak_live == (min(stages, microbatches),) * stages
        if microbatches >= stages:
            assert result.makespan == 3 * microbatches + idle - 2 * weight * (stages - 1)
        for delay in (False, True):
            result = run(functools.partial(combined_one_f_one_b, delay_weight_grad=delay), stages, microbatches)
            assert result.peak_live == tuple(min(2 * (stages - stage), microbatches) for stage in range(stages))
            assert delay or result.makespan == 3 * microbatches + idle
        run(forward_only, stages, microbatches)


@pytest.mark.parametrize("stages", range(1, 9))
@pytest.mark.parametrize("chunks", [2, 3])
def test_chunks_divide_the_bubble(stages: int, chunks: int) -> None:
    for microbatches in range(stages, 17):
        for size in sizes(stages, microbatches):
            result = run(functools.partial(interleaved_one_f_one_b, num_chunks=chunks, group_size=size), stages, microbatches)
            assert result.bubble_fraction == pytest.approx((stages - 1) / (chunks * microbatches))
            # What runs ahead, and the one whose turn it is.
            ahead = [2 * (stages - stage - 1) + (chunks - 1) * size + 1 for stage in range(stages)]
            assert result.peak_live == tuple(min(number, chunks * microbatches) for number in ahead)
            assert result.peak_received[0] <= size - stages + 3
        run(functools.partial(combined_one_f_one_b, num_chunks=chunks, group_size=size), stages, microbatches)
        run(functools.partial(forward_only, num_chunks=chunks), stages, microbatches)


def test_a_pair_saves_what_it_hides() -> None:
    serial, hidden = (run(combined_one_f_one_b, 2, 8, hidden_time=time).makespan for time in (0.0, 0.5))
    pairs = [sum(isinstance(entry, Combined) for entry in combined_one_f_one_b(2, stage, 8)) for stage in range(2)]
    assert pairs == [5, 7]
    assert serial - hidden == 7 * 0.5  # the last stage has no idle time between its pairs
    with pytest.raises(ValueError, match=r"hidden=2.0 must be less than the time of a pair"):
        run(combined_one_f_one_b, 2, 8, hidden_time=2.0)
    with pytest.raises(ValueError, match="needs positive times and weight < backward"):
        run(zero_bubble, 2, 8, weight_time=2.0)


def test_a_group_size_that_does_not_fit_is_named() -> None:
    bind = functools.partial(interleaved_one_f_one_b, 4, 0, num_chunks=2)
    with pytest.raises(ValueError, match="group_size=4 must lie between num_stages=4 and num_microbatches=3; run at least 4 micro-batches"):
        bind(num_microbatches=3)
    with pytest.raises(ValueError, match="group_size=3 must lie between num_stages=4 and num_microbatches=8; set group_size to 4"):
        bind(num_microbatches=8, group_size=3)
    with pytest.raises(ValueError, match="leaves a last group of 2, fewer than num_stages=4; run 8 or 12 micro-batches"):
        bind(num_microbatches=10, group_size=4)
    assert bind(num_microbatches=10) == bind(num_microbatches=10, group_size=5)
    with pytest.raises(ValueError, match="leaves a last group of 3"):
        combined_one_f_one_b(4, 0, 8, num_chunks=2, group_size=5)
    with pytest.raises(ValueError, match="num_chunks=0 must be at least 1"):
        virtual_order(1, 0, 1)


def test_stages_that_wait_for_each_other_are_named() -> None:
    # Stage 1 wants both activations before it gives the first gradient; stage 0 wants that gradient first.
    tables = [one_f_one_b(1, 0, 2), one_f_one_b(2, 0, 2)]
    assert [text(table) for table in tables] == ["F0 B0 F1 B1", "F0 F1 B0 B1"]
    expected = "stage 0 before B0 waits for gradient 0 of stage 1; stage 1 before F1 waits for activation 1 of stage 0"
    with pytest.raises(DeadlockError, match=expected):
        simulate(tables)
    # A pair whose backward the stage before waits for, before it gives the pair's forward its input.
    f_1b_1, f_0b_0 = ([Action("F", number), Action("B", number)] for number in (1, 0))
    with pytest.raises(ValueError, match=r"stage 0 runs B0 before F0"):
        simulate([[Combined(Action("F", 0), Action("B", 0))]])
    with pytest.raises(DeadlockError, match=r"stage 1 before F0\+B1 waits for activation 0 of stage 0"):
        simulate([[*f_1b_1, *f_0b_0], [Action("F", 1), Combined(Action("F", 0), Action("B", 1)), Action("B", 0)]])


def test_stages_may_take_micro_batches_in_another_order() -> None:
    tables = [[Action("F", 0), Action("F", 1)], [Action("F", 1), Action("F", 0)]]
    assert simulate(tables).makespan == 4.0
    # The receives follow the sends, not the order of use.
    received = [[str(transfer) for transfer in exchange.receives] for exchange in exchanges(tables)[1]]
    assert received == [["activation 0", "activation 1"], [], []]


def test_two_stages_list_what_they_send_each_other_in_one_order() -> None:
    # With two stages activations and gradients of several chunks share each direction.
    plan = plan_pipeline(functools.partial(interleaved_one_f_one_b, num_chunks=3), 2, 6)
    for sender, receiver in ((0, 1), (1, 0)):
        sent = [transfer for exchange in plan.exchanges[sender] for transfer in exchange.sends]
        received = [transfer for exchange in plan.exchanges[receiver] for transfer in exchange.receives]
        assert sent == received and len({transfer.kind for transfer in sent}) == 2
    assert plan_pipeline(one_f_one_b, 2, 6) is plan_pipeline(one_f_one_b, 2, 6)


def test_a_picture_shows_every_action() -> None:
    assert str(run(functools.partial(interleaved_one_f_one_b, num_chunks=2), 2, 2)).splitlines() == [
        "stage 0 F0 F1 f0 f1 .  .  b0 b0 .  b1 b1 B0 B0 B1 B1",
        "stage 1 .  F0 F1 f0 b0 b0 f1 b1 b1 B0 B0 B1 B1 .  .",
        "bubble 25.0% of the work, peak live 4, 3",
    ]


def test_a_broken_table_is_named() -> None:
    with pytest.raises(ValueError, match="stage 0 runs B0 before F0"):
        simulate([[Action("B", 0), Action("F", 0)]])
    with pytest.raises(ValueError, match="stage 0 runs micro-batch 0 twice"):
        simulate([[Action("F", 0), Action("F", 0)]])
    with pytest.raises(ValueError, match=r"stage 0 runs \[1\] in one direction only"):
        simulate([[Action("F", 0), Action("F", 1), Action("B", 0)]])
    with pytest.raises(ValueError, match=r"stage 0 runs \[0.1\] without weight gradients"):
        simulate([[Action("F", 0, 1), Action("I", 0, 1)]])
    with pytest.raises(ValueError, match=r"stage 0 runs W0 before I0"):
        simulate([[Action("F", 0), Action("B", 0), Action("W", 0)]])
    with pytest.raises(ValueError, match=r"stage=2 must lie in \[0, num_stages=2\)"):
        one_f_one_b(2, 2, 1)
    with pytest.raises(ValueError, match="num_microbatches=0"):
        one_f_one_b(2, 0, 0)


def test_end_stages_exchange_with_one_neighbour_only() -> None:
    first, _, last = exchanges([one_f_one_b(3, stage, 4) for stage in range(3)])
    assert {transfer.kind for entry in first for transfer in entry.sends} == {"activation"}
    assert {transfer.kind for entry in last for transfer in entry.sends} == {"gradient"}
    assert [transfer.microbatch for entry in first for transfer in entry.sends] == [0, 1, 2, 3]
    assert [transfer.microbatch for entry in last for transfer in entry.receives] == [0, 1, 2, 3]


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

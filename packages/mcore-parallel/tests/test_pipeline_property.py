# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Schedules and layouts drawn at random, against rules that know nothing of how they are made."""

import re
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_parallel.pipeline import (
    Action,
    Combined,
    DeadlockError,
    Entry,
    PipelineLayout,
    Schedule,
    ScheduleError,
    combined_one_f_one_b,
    forward_only,
    interleaved_one_f_one_b,
    one_f_one_b,
    plan_pipeline,
    simulate,
    zero_bubble,
)

campaign = settings(max_examples=60, deadline=None, derandomize=True)


def actions(entry: Entry) -> list[Action]:
    return [entry.forward, entry.backward] if isinstance(entry, Combined) else [entry]


@st.composite
def schedules(draw: st.DrawFn) -> tuple[Schedule, int, int, int]:
    """A schedule with its p, V and m."""
    p, m = draw(st.integers(1, 10)), draw(st.integers(1, 40))
    name = draw(st.sampled_from(["1f1b", "zero_bubble", "interleaved", "combined", "forward"]))
    if name in ("1f1b", "zero_bubble"):
        return (one_f_one_b if name == "1f1b" else zero_bubble), p, 1, m
    v = draw(st.integers(1, 4))
    size = draw(st.none() | st.integers(1, m + 1))
    if name == "forward":
        return partial(forward_only, num_chunks=v, group_size=size), p, v, m
    if name == "interleaved":
        return partial(interleaved_one_f_one_b, num_chunks=v, group_size=size), p, v, m
    return partial(combined_one_f_one_b, num_chunks=v, group_size=size, delay_weight_grad=draw(st.booleans())), p, v, m


@pytest.mark.journey
@campaign
@given(schedules())
def test_what_is_not_refused_finishes_and_holds_no_more_than_it_may(drawn: tuple[Schedule, int, int, int]) -> None:
    schedule, p, v, m = drawn
    bound = getattr(schedule, "keywords", {})
    size = bound.get("group_size")
    try:
        tables = [schedule(p, stage, m) for stage in range(p)]
    except ScheduleError as refusal:
        # Only because of the groups: p <= N <= m, and no last group of fewer than p.
        assert v > 1 and schedule.func is not forward_only  # type: ignore[attr-defined]
        sizes = range(p, m + 1) if size is None else [size] if p <= size <= m else []
        assert not any(m % n == 0 or m % n >= p for n in sizes), refusal
        return
    result = simulate(tables)
    every = {(microbatch, chunk) for microbatch in range(m) for chunk in range(v)}
    for stage, table in enumerate(tables):
        done = [action for entry in table for action in actions(entry)]
        assert {(a.microbatch, a.chunk) for a in done if a.kind == "F"} == every
        assert len(done) == len(set(done))
        if schedule is one_f_one_b:
            assert result.peak_live[stage] <= p - stage
        if schedule is zero_bubble:
            assert result.peak_live[stage] <= p
    # What is sent arrives: every transfer has one sender and one receiver.
    plan = plan_pipeline(schedule, p, m)
    sent = sorted(transfer for row in plan.exchanges for exchange in row for transfer in exchange.sends)
    received = sorted(transfer for row in plan.exchanges for exchange in row for transfer in exchange.receives)
    assert sent == received and len(sent) == len(set(sent))


def stuck_stages(tables: list[list[Entry]], chunks: int) -> dict[int, Entry]:
    """Stages that cannot finish, with the entry they stand before; runs the tables on nothing but what each action needs."""
    p, done, at = len(tables), set[tuple[str, int, int]](), [0] * len(tables)
    moved = True
    while moved:
        moved = False
        for stage, table in enumerate(tables):
            if at[stage] == len(table):
                continue
            needs = []
            for action in actions(table[at[stage]]):
                place = action.chunk * p + stage
                if action.kind == "F" and place:
                    needs.append(("F", action.microbatch, place - 1))
                if action.kind == "B" and place < p * chunks - 1:
                    needs.append(("B", action.microbatch, place + 1))
            if done.issuperset(needs):
                done.update((action.kind, action.microbatch, action.chunk * p + stage) for action in actions(table[at[stage]]))
                at[stage] += 1
                moved = True
    return {stage: table[at[stage]] for stage, table in enumerate(tables) if at[stage] < len(table)}


@campaign
@given(st.integers(2, 4), st.integers(1, 2), st.integers(1, 3), st.randoms(use_true_random=False))
def test_a_table_that_waits_in_a_circle_is_refused_by_name(p: int, v: int, m: int, random) -> None:
    """Tables in any order that a stage by itself allows: about half of them fit together."""
    tables: list[list[Entry]] = []
    for _ in range(p):
        order = [Action("F", microbatch, chunk) for microbatch in range(m) for chunk in range(v)]
        random.shuffle(order)
        table: list[Entry] = list(order)
        for action in order:
            first = table.index(action)
            table.insert(random.randint(first + 1, len(table)), Action("B", action.microbatch, action.chunk))
        tables.append(table)
    stuck = stuck_stages(tables, v)
    if not stuck:
        assert simulate(tables).makespan > 0
        return
    with pytest.raises(DeadlockError) as refusal:
        simulate(tables)
    named = dict(re.findall(r"stage (\d+) before (\S+) waits for", str(refusal.value)))
    assert named == {str(stage): str(entry) for stage, entry in stuck.items()}


def test_the_rule_for_circles_knows_both_kinds_of_tables() -> None:
    good = [one_f_one_b(2, stage, 2) for stage in range(2)]
    assert stuck_stages(good, 1) == {}
    circle: list[list[Entry]] = [
        [Action("F", 0), Action("B", 0), Action("F", 1), Action("B", 1)],
        [Action("F", 1), Action("F", 0), Action("B", 0), Action("B", 1)],
    ]
    assert stuck_stages(circle, 1) == {0: Action("B", 0), 1: Action("F", 1)}
    with pytest.raises(DeadlockError, match="stage 0 before B0 waits for gradient 0 of stage 1; stage 1 before F1 waits for activation 1"):
        simulate(circle)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[str], int]:
    """Virtual stages as text, and the number of pipeline stages."""
    p, v = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    stages = ["t" * draw(st.integers(0, 4)) for _ in range(p * v)]
    further = draw(st.integers(0, 3))
    last = max((place for place, stage in enumerate(stages) if stage), default=0)
    where = draw(st.integers(last, p * v - 1))
    stages[where] += "m" * further
    stages[0] = "E" + stages[0]
    stages[-1] += "L"
    return stages, p


def shorten(stage: str, draw: st.DataObject) -> str:
    """The same stage with repeats written as such, and blanks."""
    return draw.draw(st.sampled_from(["", " ", ","])).join(
        match[0] if len(match[0]) == 1 or draw.draw(st.booleans()) else f"({match[0][0]})*{len(match[0])}" if draw.draw(st.booleans())
        else f"{match[0][0]}*{len(match[0])}" for match in re.finditer(r"(.)\1*", stage)
    )  # fmt: skip


@campaign
@given(layouts(), st.data())
def test_a_layout_places_every_layer_once(drawn: tuple[list[str], int], data: st.DataObject) -> None:
    stages, p = drawn
    layout = PipelineLayout.parse("|".join(shorten(stage, data) for stage in stages), num_stages=p)
    assert [number for stage in layout.stages for number in stage.layers] == list(range(layout.num_layers))
    further = [number for stage in layout.stages for number in stage.mtp_layers]
    assert further == list(range("".join(stages).count("m")))
    assert [stage.embedding for stage in layout.stages] == [place == 0 for place in range(len(stages))]
    assert [stage.loss for stage in layout.stages] == [place == len(stages) - 1 for place in range(len(stages))]
    for place, text in enumerate(stages):
        held = layout.stage(place % p, place // p)
        assert len(held.layers) == text.count("t") and len(held.mtp_layers) == text.count("m")
        assert held is layout.stages[place]
    # Anything else in E's and L's place is refused.
    wrong = data.draw(st.sampled_from([lambda s: s.replace("E", ""), lambda s: s.replace("L", ""), lambda s: s + "E", lambda s: "L" + s]))
    with pytest.raises(ValueError, match="must hold one E, first in its first stage, and one L, last in its last"):
        PipelineLayout.parse(wrong("|".join(stages)), num_stages=p)

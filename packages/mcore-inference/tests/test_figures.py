# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Figures of engines, one and several together."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("zmq")

from mcore_inference import EngineRunner
from mcore_inference._figures import FIGURES, counters, together
from mcore_inference.coordinator._past import PastCounters


def test_everything_that_an_engine_says_of_itself_is_a_figure(make_engine: Callable[..., Any]) -> None:
    with EngineRunner(make_engine()) as runner:
        stats = runner.stats()
    assert set(stats) <= set(FIGURES)
    # Of one engine nothing changes.
    assert together([stats]) == stats


def test_counters_and_sizes_are_summed_and_the_rest_has_its_own_rule() -> None:
    first = {"generated_tokens": 5, "finished_stop": 1, "used_blocks": 10, "total_blocks": 10, "utilization": 1.0, "weight_version": 3}
    second = {"generated_tokens": 7, "used_blocks": 0, "total_blocks": 30, "utilization": 0.0, "weight_version": 2}
    more = {"seconds_to_first_token": 4.0, "max_tokens": 64, "nobody_knows": 9}
    merged = together([{**first, **more}, {**second, "seconds_to_first_token": 9.0, "max_tokens": 32}, {"generated_tokens": 100}])
    assert merged == {
        "generated_tokens": 112,
        "finished_stop": 1,
        "used_blocks": 10,
        "total_blocks": 40,
        "utilization": 0.25,
        "weight_version": 2,
        "seconds_to_first_token": 9.0,
        "max_tokens": 64,
    }
    assert together([]) == {} and counters(merged) == {"generated_tokens": 112, "finished_stop": 1}


EVENTS = st.lists(st.tuples(st.sampled_from(["grow", "lose", "join", "begin anew"]), st.integers(0, 3), st.integers(0, 9)), max_size=40)


@given(EVENTS)
def test_totals_never_fall_whatever_engines_do(events: list[tuple[str, int, int]]) -> None:
    past, drawn = PastCounters(), 0
    here: dict[str, dict[str, float]] = {}
    away: dict[str, float] = {}
    for event, which, amount in events:
        worker = f"w{which}"
        if event == "join" and worker not in here:
            # What it drew while it was away counts when it is back.
            known = worker in away
            away[worker] = away.get(worker, 0.0) + amount
            drawn += amount
            stats = {"generated_tokens": away[worker]}
            last = past.take_back(worker)
            assert bool(last) == known
            past.check_growth(last, stats)
            here[worker] = stats
        elif event == "lose" and worker in here:
            away[worker] = here[worker]["generated_tokens"]
            past.add(worker, here.pop(worker))
        elif event in ("grow", "begin anew") and worker in here:
            begin = here[worker]["generated_tokens"] if event == "grow" else 0.0
            # An engine that began anew and has caught up cannot be told from one that went on.
            if event == "begin anew" and amount >= here[worker]["generated_tokens"]:
                continue
            drawn += amount
            new = {"generated_tokens": begin + amount}
            past.check_growth(here[worker], new)
            here[worker] = new
        total = past.sums.get("generated_tokens", 0.0) + sum(stats["generated_tokens"] for stats in here.values())
        assert total == drawn


def test_only_the_last_engines_are_remembered_and_all_are_counted() -> None:
    past = PastCounters()
    for number in range(300):
        past.add(f"w{number}", {"steps": 1.0})
    past.add("", {"steps": 1.0})
    assert past.sums == {"steps": 301.0} and past.take_back("w0") == {} and past.take_back("") == {}
    assert past.take_back("w299") == {"steps": 1.0} and past.sums == {"steps": 300.0}

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Figures of engines, one and several together."""

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("zmq")

from mcore_inference import EngineRunner, FinishReason, SamplingParams
from mcore_inference._figures import FIGURES, HISTOGRAMS, counters, together
from mcore_inference.coordinator._past import PastCounters
from mcore_inference.engine._latencies import Latencies
from mcore_parallel.data import ByteTokenizer


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


def test_times_of_requests_are_counted_once_each(make_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(100.0, 0.25)
    engine = make_engine(max_requests=2)
    with monkeypatch.context() as patched:
        patched.setattr(time, "monotonic", lambda: next(clock))
        params = [SamplingParams(num_tokens_to_generate=count, stop_words=None, seed=1) for count in (1, 4, 0, 3)]
        records = engine.generate([[1], [2], [3], [4]], params)
        aborted = engine.add_request([5], SamplingParams(num_tokens_to_generate=5))
        engine.step()
        engine.abort(aborted)
    times = {
        "time_to_first_token_seconds": [record.time_to_first_token for record in records],
        "e2e_request_latency_seconds": [record.latency for record in records],
        "time_per_output_token_seconds": [record.time_per_output_token for record in records],
    }
    figures = engine.latency_stats()
    for name, histogram in HISTOGRAMS.items():
        if name not in times:
            continue
        seconds = [value for value in times[name] if value is not None]
        counts = [figures[bucket] for bucket in histogram.bucket_names(name)]
        if name == "time_to_first_token_seconds":
            # The aborted request had its first token.
            assert figures[f"{name}_count"] == len(seconds) + 1 == 4 and figures[f"{name}_sum"] > sum(seconds)
            continue
        assert counts == [sum(value <= bound for value in seconds) for bound in histogram.bounds]
        assert figures[f"{name}_count"] == len(seconds) == {"e2e_request_latency_seconds": 4, "time_per_output_token_seconds": 2}[name]
        assert figures[f"{name}_sum"] == pytest.approx(sum(seconds))


def test_waits_in_the_queue_and_between_tokens_are_counted(make_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    now, engine = [100.0], make_engine(max_requests=2, run_ahead=False)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for _ in range(3):
        engine.add_request([1, 2], SamplingParams(num_tokens_to_generate=4, seed=1))
    while engine.has_unfinished_requests():
        now[0] += 0.0625
        engine.step()
    figures = engine.latency_stats()
    # Two ran at once, and the third after four steps; each has three waits between four tokens.
    assert (figures["request_queue_time_seconds_count"], figures["request_queue_time_seconds_sum"]) == (3, 2 * 0.0625 + 5 * 0.0625)
    assert (figures["inter_token_latency_seconds_count"], figures["inter_token_latency_seconds_sum"]) == (9, 9 * 0.0625)
    assert (figures["inter_token_latency_seconds_le_0.05"], figures["inter_token_latency_seconds_le_0.075"]) == (0, 9)


def test_a_preempted_request_waited_in_the_queue_once(make_engine: Callable[..., Any]) -> None:
    engine = make_engine(max_requests=2)
    engine.add_request([1, 2], SamplingParams(num_tokens_to_generate=6, seed=1))
    engine.step()
    engine.reset_prefix_cache()
    while engine.has_unfinished_requests():
        engine.step()
    figures = engine.latency_stats()
    assert engine.num_preemptions == 1 and figures["request_queue_time_seconds_count"] == 1
    assert figures["inter_token_latency_seconds_count"] == 5


def test_the_oldest_request_in_the_queue_has_waited_longest(make_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    engine, now = make_engine(max_requests=1), [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    assert engine.stats()["longest_waiting_seconds"] == 0
    for priority in (0, 5, 1):
        engine.add_request([1], SamplingParams(num_tokens_to_generate=2), priority=priority)
        now[0] += 10
    engine.step()
    # The first one runs, and the second is last in the queue.
    assert engine.stats()["longest_waiting_seconds"] == 20 and engine.stats()["waiting_requests"] == 2
    while engine.has_unfinished_requests():
        engine.step()
    assert engine.stats()["longest_waiting_seconds"] == 0
    assert together([{"longest_waiting_seconds": 3.0}, {"longest_waiting_seconds": 7.0}]) == {"longest_waiting_seconds": 7.0}


def test_histograms_of_engines_add_up_and_outlive_them() -> None:
    one = dict.fromkeys(FIGURES, 2.0)
    merged, past = together([one, one]), PastCounters()
    past.add("w", one)
    for name, histogram in HISTOGRAMS.items():
        for figure in (*histogram.bucket_names(name), f"{name}_count", f"{name}_sum"):
            assert merged[figure] == 4 and past.sums[figure] == 2
        assert list(histogram.bounds) == sorted(set(histogram.bounds)) and len(set(histogram.bucket_names(name))) == len(histogram.bounds)


def test_sums_of_times_are_those_of_any_other_order() -> None:
    engines = []
    for number in range(6):
        latencies = Latencies()
        for index in range(5):
            latencies._count("e2e_request_latency_seconds", 0.1 + 1.7**index / (number + 3))
        engines.append(latencies.figures())
    name, past = "e2e_request_latency_seconds_sum", PastCounters()
    total = together(engines)[name]
    assert {together(list(order))[name] for order in itertools.permutations(engines)} == {total}
    for number in range(4):
        past.add(f"w{number}", engines[number])
        assert together([past.sums, *engines[number + 1 :]])[name] == total


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


class NoText(ByteTokenizer):
    """Cannot decode."""

    def detokenize(self, ids: Any, skip_special: bool = True) -> str:
        raise KeyError("no text")


def test_no_counter_falls_when_texts_fail_behind_the_end(make_model: Callable[..., Any], make_engine: Callable[..., Any]) -> None:
    engine, past = make_engine(make_model(vocab_size=272, layers=1), NoText()), PastCounters()
    records = engine.generate([[1, 2]] * 3, SamplingParams(temperature=0, num_tokens_to_generate=1, ignore_eos=True))
    before = {**engine.stats(), **engine.latency_stats()}
    assert [record.finish_reason for record in records[:2]] == [FinishReason.ERROR] * 2
    after = {**engine.stats(), **engine.latency_stats()}
    grown = {name: value - before[name] for name, value in counters(after).items() if value != before[name]}
    assert grown == {"failed_texts": 2}
    # A text that nobody reads leaves the count of its end as it is.
    assert after["finished_length"] == after["e2e_request_latency_seconds_count"] == 3 and after["finished_error"] == 0
    # A coordinator does not take it for an engine that began anew.
    past.check_growth(before, after)
    assert past.sums == {}


def test_only_the_last_engines_are_remembered_and_all_are_counted() -> None:
    past = PastCounters()
    for number in range(300):
        past.add(f"w{number}", {"steps": 1.0})
    past.add("", {"steps": 1.0})
    assert past.sums == {"steps": 301.0} and past.take_back("w0") == {} and past.take_back("") == {}
    assert past.take_back("w299") == {"steps": 1.0} and past.sums == {"steps": 300.0}

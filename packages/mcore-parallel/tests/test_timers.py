# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Stop watches by name, on one rank and over several."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.training import StartupStamps, Timers
from tests.support.trainers import Rows

WAIT_S = 0.02


def test_spans_add_up_until_they_are_read() -> None:
    timers = Timers()
    for _ in range(2):
        timers("work").start()
        time.sleep(WAIT_S)
        timers("work").stop()
    with timers("work"):
        time.sleep(WAIT_S)
    total = timers("work").elapsed(reset=False)
    assert total >= 3 * WAIT_S
    assert timers("work").elapsed() == total
    assert timers("work").elapsed() == 0.0
    assert timers("work").active_time() == total, "what was read is not forgotten"


def test_reading_a_running_timer_lets_it_run_on() -> None:
    timer, begin = Timers()("work"), time.perf_counter()
    timer.start()
    time.sleep(WAIT_S)
    first = timer.elapsed()
    time.sleep(WAIT_S)
    timer.stop()
    total, second = time.perf_counter() - begin, timer.elapsed()
    assert min(first, second) >= WAIT_S and first + second <= total


def test_times_can_be_set() -> None:
    timer = Timers()("work")
    timer.set_elapsed(4.25)
    assert timer.elapsed(reset=False) == 4.25
    timer.reset()
    assert timer.elapsed() == timer.active_time() == 0.0


def test_starts_and_stops_that_do_not_pair_are_refused() -> None:
    timer = Timers()("work")
    with pytest.raises(RuntimeError, match="'work' does not run"):
        timer.stop()
    timer.start()
    with pytest.raises(RuntimeError, match="'work' runs already"):
        timer.start()
    timer.stop()
    with pytest.raises(ZeroDivisionError), timer:
        _ = 1 / 0
    timer.start()  # an exception inside stopped it
    timer.stop()


def test_timers_above_the_level_have_the_whole_interface_and_do_nothing() -> None:
    timers = Timers(log_level=1)
    real, none = timers("near", log_level=1), timers("far", log_level=2)
    public = {name for name in dir(real) if not name.startswith("_")} - {"name", "group", "device"}
    assert public <= set(dir(none))
    none.start()
    none.start(barrier=True)
    none.stop()
    none.stop()
    none.reset()
    none.set_elapsed(3.0)
    with none:
        pass
    assert none.elapsed(reset=False, barrier=True) == none.active_time() == 0.0
    assert list(timers.aggregate()) == ["near"]


def test_levels_and_options_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="log_level=3"):
        Timers(log_level=3)
    with pytest.raises(ValueError, match="log_option='mean'"):
        Timers(log_option="mean")  # type: ignore[arg-type]
    timers = Timers()
    with pytest.raises(ValueError, match=r"log_level=5 of timer 'a'"):
        timers("a", log_level=5)
    timers("a", log_level=0)
    with pytest.raises(ValueError, match="'a' has log_level=0, found 1"):
        timers("a", log_level=1)
    with pytest.raises(ValueError, match="normalizer=0"):
        timers.log(normalizer=0.0)


def test_the_first_iteration_is_set_apart() -> None:
    timers = Timers()
    timers("step").set_elapsed(9.0)
    assert timers.end_first_iteration() == {"step": 9.0} == timers.first
    timers("step").set_elapsed(1.0)
    assert timers.aggregate()["step"].largest == 1.0
    with pytest.raises(RuntimeError, match="already"):
        timers.end_first_iteration()


def test_a_log_names_times_in_milliseconds() -> None:
    timers, told = Timers(), []
    timers("b").set_elapsed(0.5)
    timers("a").set_elapsed(0.25)
    timers.log(normalizer=2.0, reset=False, emit=told.append)
    assert told == ["(min at rank, max at rank) time across ranks (ms):\n    a: 125.00 at 0, 125.00 at 0\n    b: 250.00 at 0, 250.00 at 0"]
    lines = Rows()
    timers.write(["a"], lines, 7)
    assert lines.written == {7: {"time/a": 0.25, "time/a/min": 0.25}}


def test_nothing_waits_for_the_device_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: waits.append(1))
    timers = Timers()
    for _ in range(3):
        with timers("work"):
            pass
    timers("work").elapsed()
    timers.log(emit=lambda _: None)
    assert not waits


class Events:
    """Events of a device whose clock is a counter; completes when told."""

    now = 0.0
    waits = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        Events.now += 1.0
        self.at = Events.now

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        Events.waits += 1

    def elapsed_time(self, other: "Events") -> float:
        return 1e3 * (other.at - self.at)


def test_on_a_device_events_are_recorded_and_only_reading_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Events)
    Events.now, Events.waits = 0.0, 0
    timers = Timers(device=torch.device("cuda", 0))
    for _ in range(5):
        with timers("work"):
            pass
    assert Events.waits == 0
    assert timers("work").elapsed() == 5.0
    assert Events.waits > 0
    for _ in range(500):
        with timers("work"):
            pass
    assert len(timers("work")._pairs) <= 64, "complete spans are added up on the way"
    assert timers("work").elapsed() == 500.0


def test_stamps_out_of_order_are_refused() -> None:
    with pytest.raises(ValueError, match="main_entry=1.0"):
        StartupStamps(program_start=2.0, main_entry=1.0, pretrain_entry=3.0)


def check_ranks() -> None:
    rank = dist.get_rank()
    groups = ProcessGroups.build(ParallelPlan(dp=2))
    timers = Timers(log_option="all", group=groups.world)
    timers("work").set_elapsed(1.0 + rank)
    # Stages of a pipeline have timers of their own.
    timers(f"only-{rank}").set_elapsed(0.5)
    spreads = timers.aggregate(reset=False, barrier=True)
    assert list(spreads) == ["only-0", "only-1", "work"]
    work = spreads["work"]
    assert (work.smallest, work.largest, work.smallest_rank, work.largest_rank) == (1.0, 2.0, 0, 1)
    assert (spreads["only-1"].smallest, spreads["only-1"].smallest_rank) == (0.5, 1)
    told: list[str] = []
    timers.log(["work"], reset=False, emit=told.append)
    assert told == (["times across ranks (ms):\n    work: 1000.00 2000.00"] if rank == 1 else [])
    timers.log(["work"], rank=0, emit=told.append)
    assert len(told) == 1
    assert timers("work").elapsed() == 0.0
    # Ten minutes after the epoch's billions of seconds, told apart to the microsecond.
    base = 1.7e9 + 600.0
    stamps = StartupStamps(program_start=base + 1e-3 * rank, main_entry=base + 2.0, pretrain_entry=base + 3.0)
    found = timers.startup(stamps, ready=base + 5.0)
    assert found["program-entry-spread"] == pytest.approx(1e-3 * rank, abs=1e-6)
    assert found["library-setup"] == pytest.approx(2.0 - 1e-3 * rank, abs=1e-6)
    assert (found["program-setup"], found["in-job-setup"], found["megatron-init-global"]) == (1.0, 3.0, 5.0)
    assert timers("megatron-init-local").elapsed() == found["megatron-init-local"]
    # A barrier makes the ranks' clocks meet: the first rank waits for the second, which waits until both clocks run.
    timer = timers("wait")
    timer.start(barrier=True)
    dist.barrier()
    time.sleep(10 * WAIT_S * rank)
    timer.stop(barrier=True)
    assert timers.aggregate(["wait"])["wait"].smallest >= 10 * WAIT_S


@pytest.mark.world(2)
def test_ranks_compare_their_times(world: Callable[..., list[Any]]) -> None:
    world(check_ranks)

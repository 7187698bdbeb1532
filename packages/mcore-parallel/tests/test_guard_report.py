# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What the report says, for situations of many ranks; who is taken for dead."""

import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_parallel import Group
from mcore_parallel.comm import all_reduce
from mcore_parallel.guard import Watchdog, WatchdogConfig
from mcore_parallel.guard._board import Board
from mcore_parallel.guard._collective import Collective, collectives, group_ranks, progress
from mcore_parallel.guard._inquiry import FINISHED, Inquiry, Pulse
from mcore_parallel.guard._rank_list import rank_list
from mcore_parallel.guard._report import RankStatus, compose
from mcore_parallel.guard._stack import broke_in_communication


def collective(group: str, sequence: int, operation: str = "nccl:all_reduce", *, is_p2p: bool = False) -> Collective:
    return Collective(group=group, purpose=group, sequence=sequence, operation=operation, shapes="Float[4]", is_p2p=is_p2p, finished=False)


def status(rank: int, waits: Collective | None, members: range | None = None, *, last: Collective | None = None) -> RankStatus:
    newest = {entry.group: entry for entry in (last, waits) if entry is not None}
    return RankStatus(
        rank=rank,
        step=7,
        waiting=[waits] if waits else [],
        newest=newest,
        members={waits.group: tuple(members)} if waits and members else {},
        stacks={"MainThread": ["train.py:3 in step: wait()" if waits else f"data.py:9 in load_{rank}: read()"]},
        complaint="stalled for 300 s",
    )


def test_a_chain_of_waits_leads_to_the_rank_that_holds_all_up() -> None:
    # Rank 3 reads data; rank 2 waits for it in pp; ranks 0 and 1 wait for rank 2 in dp.
    ranks = [
        status(0, collective("dp", 5), range(3)),
        status(1, collective("dp", 5), range(3)),
        status(2, collective("pp", 9), range(2, 4), last=collective("dp", 4)),
        status(3, None, last=collective("pp", 8)),
    ]
    report = compose(ranks, {}, 4)
    assert report.startswith("stalled for 300 s: ranks 0-2 wait for rank 3\n")
    assert "group dp (name dp), ranks 0-2: collective 5" in report
    assert "missing: rank 2, alive at step 7; last started 4, nccl:all_reduce; itself waits in group pp, 9, nccl:all_reduce" in report
    assert "missing: rank 3, alive at step 7; last started 8" in report
    assert report.index("in load_3") < report.index("ranks 0-2, thread MainThread:")


def test_ranks_that_run_different_collectives_are_told_apart() -> None:
    ranks = [status(rank, collective("tp", 3, "nccl:all_gather" if rank == 1 else "nccl:all_reduce"), range(3)) for rank in range(3)]
    report = compose(ranks, {}, 3)
    assert "they do not run the same: ranks 0, 2 nccl:all_reduce Float[4]; rank 1 nccl:all_gather Float[4]" in report


def test_a_dead_rank_of_a_thousand_is_named_in_a_short_report() -> None:
    ranks = [status(rank, collective("world", 12), range(1000)) for rank in range(1000) if rank != 617]
    report = compose(ranks, {617: "dead, no sign of life for 20 s"}, 1000)
    assert "ranks 0-616, 618-999 wait for rank 617" in report
    assert "missing: rank 617, dead, no sign of life for 20 s" in report
    assert len(report.splitlines()) < 12


def test_a_transfer_between_two_ranks_names_the_other() -> None:
    waits = collective("pp", 4, "nccl:recv 1<-0", is_p2p=True)
    report = compose([status(1, waits, range(2)), status(0, None)], {}, 2)
    assert "group pp (name pp), ranks 0-1: transfer 4, nccl:recv 1<-0" in report and "missing: rank 0, alive" in report


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_every_silent_rank_is_in_the_report(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 12))
    silent = data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=size - 1))
    ranks = [status(rank, collective("world", 2), range(size)) for rank in range(size) if rank not in silent]
    report = compose(ranks, {}, size)
    assert f"wait for {rank_list(silent)}" in report.replace("waits for", "wait for")
    assert all(f"rank {rank}, gave no answer" in report for rank in silent)


def test_a_status_survives_its_travel() -> None:
    before = status(2, collective("pp", 9), range(2, 4), last=collective("dp", 4))
    board, other = (Board(store, 2, 4, 10.0) for store in [dist.HashStore()] * 2)
    board.tell(0, before)
    after = other.status(0, 2)
    assert after is not None and compose([after], {}, 4) == compose([before], {}, 4)


def test_runs_of_ranks_are_joined() -> None:
    assert rank_list([3]) == "rank 3"
    assert rank_list({8, 1, 2, 3, 10}) == "ranks 1-3, 8, 10"
    assert rank_list([]) == "ranks none"


def test_a_heartbeat_that_stands_still_is_a_death_and_an_end_is_not() -> None:
    store = dist.HashStore()
    boards = [Board(store, rank, 4, 10.0) for rank in range(4)]
    boards[0].beat(1)
    boards[1].beat(1)
    boards[2].beat(5, FINISHED)
    pulse = Pulse(boards[0], 0.2)
    assert pulse.gone(range(4)) == {2: "has finished"}
    count, gone = 1, {}
    while not {1, 3} <= set(gone):
        count += 1
        boards[0].beat(count)
        time.sleep(0.02)
        gone = pulse.gone(range(4))
    assert gone == {1: "dead, no sign of life for 0.2 s", 2: "has finished", 3: "never started its watchdog"}


def test_an_inquiry_ends_though_a_living_rank_never_answers() -> None:
    store = dist.HashStore()
    boards = [Board(store, rank, 2, 10.0) for rank in range(2)]
    boards[0].tell(0, status(0, collective("world", 1), range(2)))
    inquiry, count, report = Inquiry(boards[0], 0, 0.2), 0, None
    while report is None:
        count += 1
        boards[1].beat(count)
        report = inquiry.look()
    assert "missing: rank 1, gave no answer" in report


def test_a_rank_that_was_only_slow_trains_on() -> None:
    store, reports = dist.HashStore(), []
    config = WatchdogConfig(stall_timeout_s=0.3, heartbeat_s=0.05, dead_after_s=1.0)
    other = Board(store, 1, 2, 10.0)
    with Watchdog(store, rank=0, world_size=2, config=config, on_stall=reports.append) as watchdog:
        watchdog.beat(1)
        while not other.alarmed(0):
            time.sleep(0.01)
        # The alarm is out; the step ends after all, before the other rank has answered.
        watchdog.beat(2)
        watchdog.rest()
        while other.verdict(0) is None:
            time.sleep(0.01)
        assert other.verdict(0) == ""
        assert not other.alarmed(1)
    assert reports == []


@pytest.mark.world(2)
def test_the_recorder_sees_gloo(world) -> None:
    world(check_recorder)


def check_recorder() -> None:
    before = progress()
    pg = dist.new_group([0, 1], group_desc="mcore tp")
    dist.all_reduce(torch.ones(2), group=pg)
    finished = False
    while not finished:
        (entry,) = [entry for entry in collectives() if entry.purpose == "mcore tp"]
        finished = entry.finished
    assert (entry.operation, entry.sequence, entry.shapes) == ("gloo:all_reduce", 1, "Float[2]")
    assert group_ranks(entry.group) == [0, 1] and group_ranks("no such group") == []
    assert progress() != before


def test_a_communicating_thread_is_told_from_a_working_one() -> None:
    def caught(call) -> BaseException:
        with pytest.raises((RuntimeError, ValueError)) as info:
            call()
        return info.value

    def fail() -> None:
        raise RuntimeError("out of memory")

    # No group of that name exists, so the operator below the collective raises.
    ghost = Group((0, 1), 0, name="ghost")
    assert broke_in_communication(caught(lambda: all_reduce(torch.ones(1), ghost)))
    assert not broke_in_communication(caught(fail))

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What the report says, for situations of many ranks; who is taken for dead."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_parallel import Group
from mcore_parallel.comm import all_reduce
from mcore_parallel.guard import Watchdog, WatchdogConfig
from mcore_parallel.guard._activity import broke_in_communication
from mcore_parallel.guard._liveness import FINISHED, Liveness, ProcessMark, _state
from mcore_parallel.guard._report import Collective, RankStatus, collectives, compose, group_ranks, progress, rank_list
from mcore_parallel.guard._store import StatusStore, StoreSilentError, TimedStore
from mcore_parallel.guard._watchdog import StallInvestigation
from tests.support.cable import Cable


def timed(store: dist.Store) -> TimedStore:
    return TimedStore(store, "test", 10.0)


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
    store = timed(dist.HashStore())
    status_store, other = (StatusStore(store, 2, 4) for _ in range(2))
    status_store.tell(0, before)
    after = other.status(0, 2)
    assert after is not None and compose([after], {}, 4) == compose([before], {}, 4)


def test_runs_of_ranks_are_joined() -> None:
    assert rank_list([3]) == "rank 3"
    assert rank_list({8, 1, 2, 3, 10}) == "ranks 1-3, 8, 10"
    assert rank_list([]) == "ranks none"


def test_a_heartbeat_that_stands_still_is_a_death_and_an_end_is_not() -> None:
    store = timed(dist.HashStore())
    ranks = [Liveness(store, rank, 4, 0.2) for rank in range(4)]
    ranks[0].beat()
    ranks[1].beat()
    ranks[2].beat(FINISHED)
    assert ranks[0].gone(range(4)) == {2: "has finished"}
    gone: dict[int, str] = {}
    while not {1, 3} <= set(gone):
        ranks[0].beat()
        time.sleep(0.02)
        gone = ranks[0].gone(range(4))
    assert gone == {1: "dead, no sign of life for 0.2 s", 2: "has finished", 3: "never started its watchdog"}


def test_a_process_that_dies_is_known_at_once_on_every_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    store = timed(dist.HashStore())
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        mark = ProcessMark.own()
        if not mark.host:
            pytest.skip("this system does not tell of processes")
        _, started = _state(child.pid)
        marks = [mark, ProcessMark(host=mark.host, pid=child.pid, started=started), ProcessMark(host="other", pid=1, started="1")]
        ranks = []
        for rank in range(3):
            monkeypatch.setattr(ProcessMark, "own", classmethod(lambda cls, rank=rank: marks[rank]))
            ranks.append(Liveness(store, rank, 3, 60.0))
            ranks[-1].enter()
        assert ranks[0].fallen_neighbours() == [] and ranks[2].gone([1]) == {}
        os.kill(child.pid, signal.SIGSTOP)
        assert ranks[0].gone([1]) == {}, "it may go on"
        monkeypatch.setattr(ProcessMark, "own", classmethod(lambda cls: mark))
        hasty, gone = Liveness(store, 0, 3, 0.1), {}
        while not gone:
            gone = hasty.gone([1])
        assert gone == {1: "stopped by a signal or a debugger"}
        os.kill(child.pid, signal.SIGKILL)
        while not ranks[0].fallen_neighbours():
            time.sleep(0.01)
        assert ranks[0].gone([1]) == ranks[2].gone([1]) == {1: "dead, its process is gone"}
    finally:
        child.kill()
        child.communicate()


def test_a_process_that_said_how_it_left_did_not_die(monkeypatch: pytest.MonkeyPatch) -> None:
    store = timed(dist.HashStore())
    mark = ProcessMark.own()
    if not mark.host:
        pytest.skip("this system does not tell of processes")
    here, left = Liveness(store, 0, 2, 60.0), Liveness(store, 1, 2, 60.0)
    here.enter()
    monkeypatch.setattr(left, "_own", ProcessMark(host=mark.host, pid=mark.pid, started="of an earlier process"))
    left.enter()
    left.beat(FINISHED)
    assert here.fallen_neighbours() == [] and here.gone([1]) == {1: "has finished"}


def test_an_inquiry_ends_though_a_living_rank_never_answers() -> None:
    store = timed(dist.HashStore())
    status_store, ranks = StatusStore(store, 0, 2), [Liveness(store, rank, 2, 0.2) for rank in range(2)]
    status_store.tell(0, status(0, collective("world", 1), range(2)))
    investigation, report = StallInvestigation(status_store, ranks[0], 0, dead_after_s=0.2, limit_s=0.0), None
    while report is None:
        ranks[1].beat()
        report = investigation.look()
    assert "missing: rank 1, gave no answer" in report


@pytest.mark.parametrize(("at_work", "idle_s", "ends"), [(True, 60.0, False), (True, 301.0, True), (False, 60.0, True)])
def test_a_rank_at_work_is_waited_for_within_the_limit(at_work: bool, idle_s: float, ends: bool) -> None:
    store = timed(dist.HashStore())
    busy, waiting = StatusStore(store, 1, 3), StatusStore(store, 0, 3)
    waiting.tell(0, dataclasses.replace(status(0, collective("world", 1), range(3)), idle_s=idle_s))
    busy.tell(0, dataclasses.replace(status(1, None), at_work=at_work, idle_s=idle_s))
    Liveness(store, 2, 3, 10.0).beat(FINISHED)
    report = StallInvestigation(waiting, Liveness(store, 0, 3, 10.0), 0, dead_after_s=10.0, limit_s=300.0).look()
    assert bool(report) == ends and report is not None


@pytest.mark.journey
def test_a_request_that_nobody_answers_ends_and_a_network_that_heals_is_used_again() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    cable = Cable(server.port)
    try:
        requests = TimedStore(dist.TCPStore("127.0.0.1", cable.port, is_master=False), "part", 1.0)
        requests.set("key", "value")
        assert requests.check(["key"])
        cable.cut()
        for _ in range(2):
            begin = time.monotonic()
            with pytest.raises(StoreSilentError, match="the store gave no answer within 1 s"):
                requests.check(["key"])
            assert time.monotonic() - begin < 5
        cable.mend()
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with contextlib.suppress(StoreSilentError):
                assert requests.get("key") == b"value"
                return
        pytest.fail("the store is never heard again")
    finally:
        cable.close()


def test_a_rank_that_was_only_slow_trains_on() -> None:
    store, reports = dist.HashStore(), []
    config = WatchdogConfig(stall_timeout_s=0.3, slow_allowance_s=0, heartbeat_s=0.05, dead_after_s=1.0)
    other = StatusStore(TimedStore(store, "mcore/watchdog", 10.0), 1, 2)
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


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[/build/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:11650."),
        dist.DistBackendError("remote process exited"),
        RuntimeError("NCCL communicator was aborted on rank 1."),
    ],
)
def test_a_backend_error_is_known_wherever_it_comes_out(error: RuntimeError) -> None:
    # As in the wait of a gradient's sum, or in a hook of a backward: no frame of a known module is near.
    def raised() -> BaseException:
        try:
            raise error
        except RuntimeError as link:
            try:
                raise LookupError("the trainer's own words") from link
            except LookupError as outer:
                return outer

    assert broke_in_communication(error) and broke_in_communication(raised())

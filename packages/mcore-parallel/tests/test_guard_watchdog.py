# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The watchdog: sleeping, dead and failing ranks are named, and nothing else is."""

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mcore_parallel.guard import STALLED_EXIT_CODE, StallReport, Watchdog, WatchdogConfig, _activity, _watchdog
from tests.support.world import _server

# Long enough for a loaded machine to come to each next collective, short enough to wait for.
HASTY = WatchdogConfig(stall_timeout_s=2.0, slow_allowance_s=0, heartbeat_s=0.1, dead_after_s=4.0)
# Never stalled within a test.
CALM = WatchdogConfig(stall_timeout_s=100.0, heartbeat_s=0.1, dead_after_s=20.0)
PATIENT = WatchdogConfig(stall_timeout_s=100.0, slow_allowance_s=0, heartbeat_s=0.05, dead_after_s=30.0)


def run(body: Callable[..., None], num_ranks: int, folder: Path, **inputs: Any) -> list[tuple[int | None, str]]:
    """Exit code and standard error of each rank of a gloo world whose store outlives them."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = []
    for rank in range(num_ranks):
        ranks.append(_server.Process(target=_rank_main, args=(body, rank, num_ranks, store.port, folder / str(rank), inputs)))
        ranks[-1].start()
    try:
        for process in ranks:
            process.join(60)
        return [(process.exitcode, (folder / str(rank)).read_text()) for rank, process in enumerate(ranks)]
    finally:
        for process in ranks:
            process.kill()
            process.join()


def _rank_main(body: Callable[..., None], rank: int, num_ranks: int, port: int, output: Path, inputs: dict[str, Any]) -> None:
    with output.open("wb") as file:
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    dist.barrier()
    body(store, rank, num_ranks, **inputs)
    sys.stderr.flush()


def daydream() -> None:
    time.sleep(600)


def one_rank_sleeps(store: dist.Store, rank: int, num_ranks: int) -> None:
    group = dist.new_group([0, 1, 2], group_desc="tp")
    with Watchdog(store, rank=rank, world_size=num_ranks, config=HASTY) as watchdog:
        x = torch.ones(2, 3)
        for step in range(1, 4):
            watchdog.beat(step)
            if step == 3 and rank == 1:
                daydream()
            dist.all_reduce(x, group=group)


@pytest.mark.journey
def test_a_sleeping_rank_is_named_with_group_number_and_stack(tmp_path: Path) -> None:
    results = run(one_rank_sleeps, 3, tmp_path)
    assert [code for code, _ in results] == [STALLED_EXIT_CODE] * 3
    (report,) = [text for _, text in results if "missing:" in text]
    assert "stalled for 2 s: ranks 0, 2 wait for rank 1" in report
    assert "group tp (name" in report and "ranks 0-2: collective 3, gloo:all_reduce Float[2, 3]" in report
    assert "waiting: ranks 0, 2" in report
    assert "missing: rank 1, alive at step 3; last started 2, gloo:all_reduce" in report
    # The culprit's stack comes before those of the ranks that wait.
    stack = report.index("rank 1, thread MainThread:")
    assert stack < report.index("in daydream: time.sleep(600)") < report.index("ranks 0, 2, thread MainThread:")


def one_rank_dies_in_a_collective(store: dist.Store, rank: int, num_ranks: int) -> None:
    with Watchdog(store, rank=rank, world_size=num_ranks, config=HASTY):
        if rank == 1:
            os._exit(9)
        dist.all_reduce(torch.ones(1))


def test_a_rank_that_dies_in_a_collective_is_named_in_the_error_of_another(tmp_path: Path) -> None:
    results = run(one_rank_dies_in_a_collective, 3, tmp_path)
    assert [code for code, _ in results] == [1, 9, 1]
    assert sum("rank 1: dead, its process is gone" in text for _, text in results) == 1


def one_rank_dies_unnoticed(store: dist.Store, rank: int, num_ranks: int) -> None:
    with Watchdog(store, rank=rank, world_size=num_ranks, config=CALM) as watchdog:
        for step in watchdog.watch(range(5, 7), start=5):
            dist.all_reduce(torch.ones(1))
            if step == 6 and rank == 1:
                os._exit(9)
            if step == 6:
                # Like a GPU kernel that waits for a peer: nobody tells that it is gone.
                daydream()


@pytest.mark.journey
def test_a_rank_that_dies_unnoticed_is_named(tmp_path: Path) -> None:
    results = run(one_rank_dies_unnoticed, 3, tmp_path)
    assert [code for code, _ in results] == [STALLED_EXIT_CODE, 9, STALLED_EXIT_CODE]
    (report,) = [text for _, text in results if "rank 1: dead, its process is gone" in text]
    assert "rank 1 died: no rank waits in a recorded collective; look at rank 1" in report


@pytest.mark.journey
def test_a_rank_that_left_with_an_error_is_named_with_it(tmp_path: Path) -> None:
    results = run(raise_and_leave_when_reported, 2, tmp_path)
    assert [code for code, _ in results] == [STALLED_EXIT_CODE, 0]
    assert "missing: rank 1, has raised ValueError: no more tokens" in results[0][1]


def raise_and_leave_when_reported(store: dist.Store, rank: int, num_ranks: int) -> None:
    def tell(report: StallReport) -> None:
        print(report.text, file=sys.stderr, flush=True)
        store.set("reported", "1")
        os._exit(STALLED_EXIT_CODE)

    try:
        with Watchdog(store, rank=rank, world_size=num_ranks, config=HASTY, on_stall=tell):
            if rank == 1:
                raise ValueError("no more tokens")
            dist.all_reduce(torch.ones(1))
    except ValueError:
        # Keeps its connections, so that the other waits on.
        store.wait(["reported"], timedelta(seconds=60))


def train_well(store: dist.Store, rank: int, num_ranks: int) -> None:
    def never(report: StallReport) -> None:
        print(report.text, file=sys.stderr, flush=True)
        os._exit(1)

    with Watchdog(store, rank=rank, world_size=num_ranks, config=PATIENT, on_stall=never) as watchdog:
        for _ in watchdog.watch(range(20)):
            dist.all_reduce(torch.ones(1))
        time.sleep(0.3)
    dist.barrier()


def test_a_clean_run_says_nothing_and_stops(tmp_path: Path) -> None:
    assert run(train_well, 2, tmp_path) == [(0, ""), (0, "")]


def alone_without_store(store: dist.Store, rank: int, num_ranks: int) -> None:
    own = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    if own is not None:
        store.set("port", str(own.port))
    client = own or dist.TCPStore("127.0.0.1", int(store.get("port")), is_master=False)
    dist.barrier()
    if rank == 0:
        # The rank that keeps the store goes once the other has entered.
        store.wait(["entered"], timedelta(seconds=60))
        os._exit(0)
    with Watchdog(client, rank=rank, world_size=num_ranks, config=HASTY) as watchdog:
        store.set("entered", "1")
        watchdog.beat(1)
        daydream()


@pytest.mark.journey
def test_a_rank_whose_store_is_gone_still_reports_and_ends(tmp_path: Path) -> None:
    results = run(alone_without_store, 2, tmp_path)
    assert [code for code, _ in results] == [0, STALLED_EXIT_CODE]
    assert "the store does not answer" in results[1][1] and "daydream" in results[1][1]


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), "60", True, None])
def test_times_that_are_no_positive_numbers_are_refused(value: Any) -> None:
    for name in ("stall_timeout_s", "slow_allowance_s", "heartbeat_s", "dead_after_s"):
        if not (name == "slow_allowance_s" and value == 0):
            with pytest.raises(ValueError, match=rf"{name}={value!r} must be"):
                WatchdogConfig(**{name: value})


def test_times_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="dead_after_s=5 must be at least three heartbeats of heartbeat_s=2"):
        WatchdogConfig(dead_after_s=5, heartbeat_s=2)


@pytest.mark.parametrize(("moves", "late"), [(True, "no step and no collective for 30 s"), (False, "stalled for 10 s")])
def test_a_step_may_wait_longer_for_something_else_than_ranks(moves: bool, late: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, place, waits = [0.0], [0], [False]
    monkeypatch.setattr(_activity, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(_activity, "position", lambda: place[0])
    monkeypatch.setattr(_watchdog, "waits", lambda: waits[0])
    watchdog = Watchdog(dist.HashStore(), rank=0, world_size=1, config=WatchdogConfig(stall_timeout_s=10, slow_allowance_s=20))

    def complaints(**limits: Any) -> set[str]:
        """Of 60 s in the second of two steps."""
        told = set[str]()
        for number in watchdog.watch(range(2), **limits):
            for _ in range(60 if number else 1):
                clock[0] += 1
                place[0] += moves
                told.add(watchdog._complaint())
        return told - {""}

    assert complaints() == {late}
    assert not complaints(wait_s=100)
    assert complaints(wait_s=50) == {f"{late[: late.index('for')]}for 50 s"}
    assert complaints() == {late}
    waits[0] = True
    assert complaints(wait_s=100) == (set() if moves else {late})


def test_a_minute_is_the_patience_after_the_first_step() -> None:
    config = WatchdogConfig()
    assert (config.stall_timeout_s, config.limit_s) == (60.0, 300.0)

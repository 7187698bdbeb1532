# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Ranks whose processes are gone, as those of their machine see them."""

import dataclasses
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mcore_parallel.guard import ProcessMark
from mcore_rl import RankTimeoutError, RefitTimeoutError
from mcore_rl._ranks import _rendezvous as rendezvous_module
from mcore_rl._ranks._ended import absence, announce, ended
from mcore_rl._ranks._rendezvous import rendezvous
from mcore_rl._refit import _transfer as transfer_module
from mcore_rl._refit._transfer import _finish


class CountingStore:
    """Counts what is asked of a store."""

    def __init__(self) -> None:
        self._inner, self.num_calls = dist.HashStore(), 0

    def __getattr__(self, name: str) -> Any:
        self.num_calls += 1
        return getattr(self._inner, name)


def group_of(store: Any, rank: int, size: int) -> Any:
    return SimpleNamespace(rank=rank, size=size, ranks=range(size), pg=SimpleNamespace(get_group_store=lambda: store))


@pytest.fixture
def gone() -> ProcessMark:
    """A process of this machine that has ended."""
    pid = int(subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], check=True, capture_output=True, text=True).stdout)
    return dataclasses.replace(ProcessMark.own(), pid=pid, started="0")


def announce_as(mark: ProcessMark, group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(ProcessMark, "own", lambda: mark)
        announce(group)


def test_a_look_asks_for_the_ranks_of_its_machine_alone(gone: ProcessMark, monkeypatch: pytest.MonkeyPatch) -> None:
    store, size = CountingStore(), 1024
    announce(group_of(store, 0, size))
    announce_as(gone, group_of(store, 5, size), monkeypatch)
    for rank in range(8, size):
        announce_as(dataclasses.replace(gone, host=f"machine {rank // 8}"), group_of(store, rank, size), monkeypatch)
    own, before = group_of(store, 0, size), store.num_calls
    assert ended(own, range(size)) == [5] and ended(own, [0, 9]) == []
    assert store.num_calls - before < 20
    # Of other machines nothing is known but that they are late.
    limits = {"waited_s": 0.5, "timeout_s": 0.5}
    late = "rank 5 died, no process is left, and rank 9 did not come within timeout_s=0.5 (rollouts); look at the log of that rank"
    assert absence(own, [5, 9], "did not come", "rollouts", **limits) == late
    closed = "rank 9 did not send weights, its connection is closed (bucket 1); look at the log of that rank"
    assert absence(own, [9], "did not send weights", "bucket 1", waited_s=0.1, timeout_s=300.0) == closed


def test_whoever_waits_looks_at_few_of_many_ranks(gone: ProcessMark, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_module, "_LOOK_S", 0.01)
    store, size = CountingStore(), 4096
    announce_as(gone, group_of(store, 3, size), monkeypatch)
    with pytest.raises(RankTimeoutError, match=r"^rank 3 died, no process is left \(weights\); look at the log of that rank$"):
        rendezvous(group_of(store, 0, size), 1000.0, "weights")
    assert store.num_calls < 100


class NeverDone:
    """A transfer of a device whose peer is gone."""

    def is_completed(self) -> bool:
        return False


def test_a_device_that_waits_for_a_rank_that_is_gone_names_it(gone: ProcessMark, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_module, "_LOOK_S", 0.01)
    group = group_of(dist.HashStore(), 0, 4)
    for rank in (1, 2):
        announce_as(gone if rank == 2 else ProcessMark.own(), group_of(group.pg.get_group_store(), rank, 4), monkeypatch)
    work: Any = NeverDone()
    buffer = torch.empty(4, device="meta")
    transfers = [(1, buffer, False), (2, buffer, True), (3, buffer, True)]
    begin = time.monotonic()
    with pytest.raises(RefitTimeoutError, match=r"^rank 2 died, no process is left \(bucket 2 of 5\); look at the log of that rank$"):
        _finish([work], transfers, group, 1000.0, "bucket 2 of 5")
    assert time.monotonic() - begin < 10
    # Those that live are late at the limit alone.
    with pytest.raises(RefitTimeoutError, match=r"^rank 1 did not take weights within timeout_s=0.2 \(bucket 2 of 5: the transfer is"):
        _finish([work], transfers[:1], group, 0.2, "bucket 2 of 5")


def test_a_rank_that_has_come_and_not_counted_itself_yet_is_not_late() -> None:
    store = dist.HashStore()
    store.add("mcore_rl rendezvous/1", 1)
    rendezvous(group_of(store, 0, 2), 0.05, "weights")

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Worlds of an application: results, failures by rank."""

import gc
import os
import subprocess
import sys
import time
import types

import pytest
import torch
import torch.distributed as dist

from mcore_parallel.guard import Watchdog, WatchdogConfig
from mcore_tools.launch import RankError, launch


def double(value: int) -> int:
    return 2 * value + dist.get_rank()


def fail(value: int) -> None:
    if dist.get_rank() == value:
        raise ValueError("no more tokens")
    dist.barrier()


def die() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


def dawdle(watchdog: Watchdog) -> None:
    for step in watchdog.watch(range(1, 4)):
        if dist.get_rank() == 1 and step == 3:
            time.sleep(600)
        dist.barrier()


def test_results_come_in_rank_order() -> None:
    assert launch(double, 2, value=5) == [10, 11]


def test_collections_of_a_rank_leave_out_what_was_loaded_before_it() -> None:
    assert launch(gc.get_freeze_count, 1)[0] > 100_000


def test_a_failing_rank_is_named_with_its_traceback() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1 failed.*Traceback.*no more tokens") as caught:
        launch(fail, 2, value=1)
    assert caught.value.summary == "no more tokens"


def test_a_dead_rank_is_named() -> None:
    with pytest.raises(RankError, match=r"^rank 1 died without a word \(exit code 3\)") as caught:
        launch(die, 2)
    assert caught.value.summary is None


@pytest.mark.journey
def test_ranks_that_wait_too_long_bring_the_report() -> None:
    guard = WatchdogConfig(stall_timeout_s=2.0, slow_allowance_s=0, heartbeat_s=0.1, dead_after_s=20.0)
    with pytest.raises(RankError, match=r"(?s)rank 0 waits for rank 1.*group world.*missing: rank 1, alive at step 3.*in dawdle") as caught:
        launch(dawdle, 2, guard=guard, beats=True)
    assert caught.value.summary is None


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_stuck_gpu_collective_is_reported() -> None:
    guard = WatchdogConfig(stall_timeout_s=10.0, slow_allowance_s=0, heartbeat_s=0.5, dead_after_s=20.0)
    with pytest.raises(RankError, match=r"(?s)rank 0 waits for rank 1.*nccl:.*missing: rank 1, alive at step 3.*in dawdle"):
        launch(dawdle, 2, device="cuda", guard=guard, beats=True)


def record_a_sum() -> float:
    """A graph that holds a communicator, in a cycle of objects."""
    holder = types.SimpleNamespace(graph=torch.cuda.CUDAGraph())
    holder.itself = holder
    x = torch.ones(1, device="cuda")
    dist.all_reduce(x)
    with torch.cuda.graph(holder.graph, capture_error_mode="thread_local"):
        dist.all_reduce(x)
    holder.graph.replay()
    return x.item()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_ranks_that_recorded_collectives_come_to_their_end() -> None:
    assert launch(record_a_sum, 2, device="cuda", timeout_s=60.0) == [4.0, 4.0]


@pytest.mark.journey
def test_training_needs_no_library_of_a_server_and_waits_for_no_sharding() -> None:
    check = "import sys\nfor name in ('fastapi', 'starlette', 'uvicorn'): sys.modules[name] = None\n"
    check += "import mcore_tools.distill, mcore_tools.train\nassert 'torch.distributed.fsdp' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Two hosts whose network is cut under training: the ranks of each report and end."""

import contextlib
import os
import re
import sys
import time
from pathlib import Path

import pytest

from tests.support.hosts import ADDRESSES, INTERFACE, two_hosts

PAGE = Path(__file__).parents[2] / "docs" / "launch" / "torchrun.md"
# Patience in seconds: of a rank that stands still, and of a request to the store.
STALL_S, DEAD_AFTER_S = 4.0, 4.0
PROGRAM = f"""
import os, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous
from mcore_parallel.guard import WatchdogConfig, check_network, preflight

check_network(os.environ)
store, rank, world_size = next(rendezvous("env://"))
preflight({{"steps": 1}}, store, rank=rank, world_size=world_size)
config = WatchdogConfig(stall_timeout_s={STALL_S}, slow_allowance_s=0, heartbeat_s=0.5, dead_after_s={DEAD_AFTER_S})
with config.build(store, rank=rank, world_size=world_size) as watchdog:
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=120))
    for step in watchdog.watch(range(100_000)):
        dist.all_reduce(torch.ones(1))
        if step == 3:
            print(f"trains, rank {{rank}}", flush=True)
        time.sleep(0.02)
"""


def published_command() -> str:
    """The command of the launch page, for one rank a host and the program above."""
    block = re.search(r"## Several machines.*?```bash\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    text = block[1]
    for published, own in (
        ("torchrun", f"exec {sys.executable} -m torch.distributed.run"),
        ("--nproc-per-node 8", "--nproc-per-node 1"),
        ("check_world.py --tp 4 --pp 2", "train.py"),
    ):
        assert published in text
        text = text.replace(published, own)
    return text


def read_when(path: Path, words: str, limit_s: float) -> str:
    """The text of a growing file once it holds the words."""
    deadline = time.monotonic() + limit_s
    while words not in (text := path.read_text(errors="replace")):
        assert time.monotonic() < deadline, f"{words!r} never came:\n{text}"
        time.sleep(0.1)
    return text


@pytest.mark.journey
@pytest.mark.timeout(150)
def test_ranks_on_both_sides_of_a_cut_network_report_and_end(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    outputs = [tmp_path / f"host{host}.txt" for host in range(2)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "INTERFACE": INTERFACE}
    with contextlib.ExitStack() as stack, two_hosts() as hosts:
        agents = []
        for host in range(2):
            place = {
                "FIRST_ADDRESS": ADDRESSES[0],
                "OWN_ADDRESS": ADDRESSES[host],
                "IS_FIRST": ("true", "false")[host],
                "INTERFACE": INTERFACE,
            }
            command = ["bash", "-c", "set -eu\n" + published_command()]
            output = stack.enter_context(outputs[host].open("wb"))
            agents.append(hosts.start(host, command, output, tmp_path, environment | place))
            stack.callback(agents[-1].wait, 20)
        for path in outputs:
            read_when(path, "trains, rank", 90)
        hosts.cut()
        begin = time.monotonic()
        while left := [rank for host in range(2) for rank in hosts.processes(host).values() if is_rank(rank)]:
            assert time.monotonic() - begin < STALL_S + 4 * DEAD_AFTER_S + 10, (left, [path.read_text() for path in outputs])
            time.sleep(0.2)
        texts = [path.read_text(errors="replace") for path in outputs]
    ranks = [text.partition("trains, rank ")[2][0] for text in texts]
    assert f"missing: rank {ranks[1]}, dead, no sign of life for {DEAD_AFTER_S:g} s" in texts[0]
    assert "the store does not answer" in texts[1] and "in <module>: dist.all_reduce" in texts[1]


def is_rank(command: list[str]) -> bool:
    return "train.py" in command and "torch.distributed.run" not in command

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The processes of engines that share the experts of one mixture."""

import os
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_tools.recipes import RunConfig

_MEET_S = 600.0


class ExpertRanks:
    """A context manager in which this process is one of those that share experts, with a device and an engine of its own.

    They are started together, with ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``: by ``Replicas``, or by torchrun.

    Args:
        size: engines.

    Raises:
        ValueError: the environment names no rank, or another number of them.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        world = os.environ.get("WORLD_SIZE", "1")
        if "RANK" not in os.environ or int(world) != size:
            raise ValueError(
                f"--expert-parallel with --join is one of --data-parallel {size} processes, and this world has {world}; leave out --join, "
                "or start as many by torchrun"
            )
        self.rank = int(os.environ["RANK"])

    def __enter__(self) -> "ExpertRanks":
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        store = next(rendezvous("env://"))[0]
        timeout = timedelta(seconds=_MEET_S)
        dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=self.rank, world_size=self.size, timeout=timeout)
        return self

    def __exit__(self, *_: object) -> None:
        # Where a rank is lost the process ends without it.
        pass

    def groups(self, config: RunConfig) -> ProcessGroups:
        """The groups of a model whose attention every rank has, and whose experts are spread over all.

        Raises:
            ValueError: the model has no experts, or a number of them that the ranks do not divide.
        """
        check_experts(None if config.moe is None else config.moe.num_moe_experts, self.size)
        return ProcessGroups.build(ParallelPlan(dp=self.size, ep=self.size))


def check_experts(num_experts: int | None, size: int) -> None:
    """See that so many ranks can share the experts of a model.

    Raises:
        ValueError: it has none, or a number of them that the ranks do not divide.
    """
    if num_experts is None:
        raise ValueError("--expert-parallel spreads experts over engines, and the model has none; leave it out")
    if num_experts % size:
        raise ValueError(f"--data-parallel {size} with --expert-parallel must divide num_moe_experts={num_experts}; choose another number")


def open_store() -> tuple[Store, Mapping[str, str]]:
    """Where ranks of this machine meet, and what their environment says of it."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # Rank 0 would open a store of its own, unless torch takes this for that of an agent.
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    # Each sees the one GPU that is its own.
    return store, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "LOCAL_RANK": "0", **agent}

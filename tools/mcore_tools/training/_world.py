# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""This process in the world that torchrun, Slurm or nobody started: its device, and the groups that connect it."""

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from mcore_parallel.guard import Watchdog, check_network, preflight
from mcore_parallel.nn import check_deterministic
from mcore_tools.launch import leave_world
from mcore_tools.recipes import RunConfig

_FIXED_ORDER = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}


def take_device(config: RunConfig | None = None) -> str:
    """The kind of device; of several GPUs this process gets that of its number on the machine.

    Args:
        config: of a run that may have engines on ranks of their own, which share the trainers' GPUs where there are more ranks than GPUs.

    Raises:
        ValueError: no GPU is left for this rank alone, and it may share none.
    """
    if not torch.cuda.is_available():
        return "cpu"
    number, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if number >= count:
        rank = int(os.environ.get("RANK", "0"))
        start = f"start at most {count} ranks a machine (torchrun --nproc-per-node)"
        if config is None or config.rl is None or config.rl.placement is None:
            raise ValueError(f"LOCAL_RANK={number} of rank {rank} has none of the {count} GPUs of its machine; {start}")
        if rank < config.plan.world_size:
            raise ValueError(
                f"rank {rank} trains, as {config.plan.world_size} ranks of plan do, and has none of the {count} GPUs of its machine alone, "
                f"which only engines share; {start}, or lower a degree of plan"
            )
    torch.cuda.set_device(number % count)
    return "cuda"


def device_of(kind: str) -> torch.device:
    """This rank's device."""
    return torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")


@contextlib.contextmanager
def reproducible(config: RunConfig, kind: str) -> Iterator[None]:
    """With ``train.deterministic``, torch's deterministic algorithms for as long.

    Raises:
        ValueError: what the user set in the environment lets results differ from run to run, and what to set.
    """
    if not config.train.deterministic:
        yield
        return
    fix_order(config, kind)
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        try:
            check_deterministic(os.environ, device=kind)
        except ValueError as error:
            raise ValueError(f"train.deterministic=true: {error}; or set train.deterministic=false") from None
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def fix_order(config: RunConfig, kind: str) -> None:
    """With ``train.deterministic``, what libraries of GPUs read when their first work comes; what the user set stays."""
    if config.train.deterministic and kind == "cuda":
        for name, value in _FIXED_ORDER.items():
            os.environ.setdefault(name, value)


@contextlib.contextmanager
def join(config: RunConfig, kind: str) -> Iterator[Watchdog]:
    """The world of this process: compared with the others, connected, and watched."""
    store, rank, world_size = meet(config, kind)
    watchdog = config.guard.build(store, rank=rank, world_size=world_size)
    with watchdog:
        connect(config, kind, store, rank, world_size)
        try:
            yield watchdog
        finally:
            leave_world()


def meet(config: RunConfig, kind: str) -> tuple[Store, int, int]:
    """The store, rank and size of a world whose ranks were told the same."""
    # Read by torch when the first group is made; what the user set stays.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    fix_order(config, kind)
    check_network(os.environ, backend="nccl" if kind == "cuda" else "gloo")
    store, rank, world_size = next(rendezvous("env://"))
    # Ranks that choose unlike backends would wait for each other in their first collective.
    preflight(
        {"run": config, "world": {"backend": _backend(kind)}}, store, rank=rank, world_size=world_size, timeout_s=config.guard.limit_s
    )
    return store, rank, world_size


def connect(config: RunConfig, kind: str, store: Store, rank: int, world_size: int) -> None:
    """Make the process groups of a world."""
    # The watchdog speaks before the backend ends the process.
    limit = timedelta(seconds=2 * config.guard.limit_s)
    dist.init_process_group(_backend(kind), store=store, rank=rank, world_size=world_size, timeout=limit)


def _backend(kind: str) -> str:
    if kind == "cpu":
        return "gloo"
    # NCCL connects no two ranks of one GPU. Those who share one talk over gloo, and trainers by NCCL among themselves.
    is_shared = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > torch.cuda.device_count()
    return "cpu:gloo,cuda:nccl" if is_shared else "nccl"

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Gloo worlds, fresh for each test or shared by its cases, forked from a server that has torch loaded."""

import contextlib
import gc
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

_server = multiprocessing.get_context("forkserver")
# What nearly every rank imports: loaded once in the server, it costs a rank nothing. A wheel that is not installed is passed over.
_PRELOADED = [
    "pytest", "hypothesis", "httpx", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp",
    "mcore_parallel.data_parallel", "mcore_parallel.graphs", "mcore_parallel.guard", "mcore_parallel.optim", "mcore_parallel.planner",
    "mcore_parallel.training", "mcore_ckpt", "mcore_ckpt.hf", "mcore_inference.server", "mcore_moe", "mcore_rl", "megatron_fsdp",
    "mcore_tools.assembly", "mcore_tools.reinforce", "mcore_tools.serve", "mcore_tools.train",
    "matplotlib.figure", "matplotlib.backends.backend_svg",
]  # fmt: skip
# What the first torch.compile of a process imports: seconds, for each rank that compiles. On a build for GPUs it looks for them, and CUDA
# cannot start in a process forked from one that has.
_COMPILER = [
    "torch._functorch.aot_autograd", "torch._functorch.partitioners", "torch._inductor.decomposition", "torch._inductor.lowering",
    "torch._inductor.debug", "torch._inductor.pattern_matcher", "torch._meta_registrations",
]  # fmt: skip

Task = tuple[Callable[..., Any], dict[str, Any]]
"""A check and its inputs."""


def start_server() -> None:
    """Start the process that ranks are forked from, where none runs: a process has one, and whoever starts it says what it loads."""
    _server.set_forkserver_preload(_PRELOADED if torch.version.cuda else [*_PRELOADED, *_COMPILER])
    forkserver.ensure_running()


class World:
    """Fresh ranks that run one check after the other, until one fails or they are closed.

    Args:
        num_ranks: size of the world.
        backend: with "nccl" each rank owns the GPU of its number.
        first: check and inputs that the ranks begin with; None to wait for ``run``.
    """

    def __init__(self, num_ranks: int, backend: str = "gloo", first: Task | None = None) -> None:
        start_server()
        self._folder = tempfile.TemporaryDirectory()
        # Kept open to the end: a rank leaves when its pipe closes, and others may still be connecting to it.
        self._pipes: list[Connection] = []
        self._ranks: list[Any] = []
        for rank in range(num_ranks):
            ours, theirs = _server.Pipe()
            arguments = (first, rank, num_ranks, backend, f"file://{self._folder.name}/store", theirs)
            process = _server.Process(target=_rank_main, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._ranks.append(process)

    def run(self, check: Callable[..., Any], *, timeout_s: float = 60.0, **inputs: Any) -> list[Any]:
        """As ``run`` below; tensors among the inputs are copied."""
        task = pickle.dumps((check, inputs))
        for pipe in self._pipes:
            pipe.send_bytes(task)
        return self.results(timeout_s)

    def results(self, timeout_s: float, doomed: tuple[int, ...] = ()) -> list[Any]:
        """Of the check under way, in rank order."""
        pending = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        return _collect(pending, self._ranks, time.monotonic() + timeout_s, doomed)

    def close(self) -> None:
        # Killed before their pipes close: a late rank would fail at its pipe, and its words hide why the world ended.
        for process in self._ranks:
            process.kill()
        for process in self._ranks:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()


def run(
    check: Callable[..., Any],
    num_ranks: int,
    *,
    timeout_s: float = 60.0,
    backend: str = "gloo",
    doomed: tuple[int, ...] = (),
    **inputs: Any,
) -> list[Any]:
    """Run ``check(**inputs)`` on every rank of a fresh world; return the results in rank order.

    With backend "nccl" each rank owns the GPU of its number. Ranks that are ``doomed`` may be killed; their results are None.

    Raises:
        AssertionError: a rank failed; carries its number and traceback.
        TimeoutError: ranks that gave no answer in time, by number.
    """
    world = World(num_ranks, backend, (check, inputs))
    try:
        return world.results(timeout_s, doomed)
    finally:
        world.close()


def leave_together() -> None:
    """Wait for all ranks of the world: who has ended is dead to the others, and no longer late."""
    import torch.distributed as dist

    store: Any = dist.distributed_c10d._get_default_store()
    store.add("left", 1)
    while store.add("left", 0) < dist.get_world_size():
        time.sleep(0.01)


def _collect(pending: dict[Connection, int], ranks: list[Any], deadline: float, doomed: tuple[int, ...]) -> list[Any]:
    results: dict[int, Any] = {}
    while pending:
        ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"ranks {sorted(pending.values())} gave no answer")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = pending.pop(pipe)
            try:
                ok, value = pipe.recv()
            except EOFError:
                ranks[rank].join(5)
                if rank in doomed:
                    results[rank] = None
                    continue
                raise AssertionError(f"rank {rank} died without a word, exit code {ranks[rank].exitcode}") from None
            if not ok:
                raise AssertionError(f"rank {rank}:\n{value}")
            results[rank] = value
    return [results[rank] for rank in sorted(results)]


def _rank_main(first: Task | None, rank: int, num_ranks: int, backend: str, store: str, pipe: Connection) -> None:
    assert "torch._dynamo" in sys.modules, "the preload failed (its import errors are silent)"
    # What was loaded before is no garbage: looking through it would copy the server's memory, which costs more than most checks.
    gc.freeze()
    import torch.distributed as dist

    torch.set_num_threads(1)
    fresh = torch.get_rng_state()
    try:
        device = None
        if backend == "nccl":
            device = torch.device("cuda", rank)
            torch.cuda.set_device(device)
        dist.init_process_group(backend, init_method=store, rank=rank, world_size=num_ranks, device_id=device)
        if first is not None:
            pipe.send((True, first[0](**first[1])))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    # Other ranks may still be connecting to this one: leave only when the parent kills the world, or is gone.
    with contextlib.suppress(EOFError):
        while True:
            task = pipe.recv_bytes()
            try:
                # Draws are those of a world of its own.
                torch.set_rng_state(fresh)
                check, inputs = pickle.loads(task)
                pipe.send((True, check(**inputs)))
            except BaseException:
                pipe.send((False, traceback.format_exc()))
    os._exit(0)

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Fresh gloo worlds, one a test, forked from a server that has torch loaded."""

import contextlib
import gc
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any

_server = multiprocessing.get_context("forkserver")
# What nearly every rank imports: loaded once in the server, it costs a rank nothing. A wheel that is not installed is passed over.
_PRELOADED = [
    "pytest", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp",
    # What the first torch.compile of a process imports: seconds, for each rank that compiles.
    "torch._functorch.aot_autograd", "torch._functorch.partitioners", "torch._inductor.decomposition", "torch._inductor.lowering",
    "torch._inductor.debug", "torch._inductor.pattern_matcher", "torch._meta_registrations",
    "mcore_parallel.data_parallel", "mcore_parallel.graphs", "mcore_parallel.guard", "mcore_parallel.optim", "mcore_parallel.planner",
    "mcore_parallel.training", "mcore_ckpt", "mcore_inference", "mcore_moe", "mcore_rl", "megatron_fsdp", "mcore_tools.assembly",
]  # fmt: skip


def start_server() -> None:
    """Start the process that ranks are forked from, where none runs: a process has one, and whoever starts it says what it loads."""
    _server.set_forkserver_preload(_PRELOADED)
    forkserver.ensure_running()


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
    start_server()
    with tempfile.TemporaryDirectory() as folder:
        pending: dict[Connection, int] = {}
        ranks: list[Any] = []
        for rank in range(num_ranks):
            ours, theirs = _server.Pipe()
            process = _server.Process(
                target=_rank_main, args=(check, inputs, rank, num_ranks, backend, f"file://{folder}/store", theirs), daemon=True
            )
            process.start()
            ranks.append(process)
            theirs.close()
            pending[ours] = rank
        # Kept open to the end: a rank leaves when its pipe closes, and others may still be connecting to it.
        pipes = list(pending)
        try:
            return _collect(pending, ranks, time.monotonic() + timeout_s, doomed)
        finally:
            for pipe in pipes:
                pipe.close()
            for process in ranks:
                process.kill()
                process.join()


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


def _rank_main(
    check: Callable[..., Any], inputs: dict[str, Any], rank: int, num_ranks: int, backend: str, store: str, pipe: Connection
) -> None:
    assert "torch._dynamo" in sys.modules, "the preload failed (its import errors are silent)"
    # What was loaded before is no garbage: looking through it would copy the server's memory, which costs more than most checks.
    gc.freeze()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        device = None
        if backend == "nccl":
            device = torch.device("cuda", rank)
            torch.cuda.set_device(device)
        dist.init_process_group(backend, init_method=store, rank=rank, world_size=num_ranks, device_id=device)
        pipe.send((True, check(**inputs)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    # Other ranks may still be connecting to this one: leave only when the parent kills the world, or is gone.
    with contextlib.suppress(EOFError):
        pipe.recv()
    os._exit(0)

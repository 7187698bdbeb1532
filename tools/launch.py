# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Start the ranks of a small world on this machine and bring back what they return."""

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch._dynamo", "torch.distributed"])


class RankError(RuntimeError):
    """A rank failed, died or did not answer; says which and why."""


def launch(work: Callable[..., Any], num_ranks: int, *, device: str = "cpu", timeout_s: float = 1800.0, **inputs: Any) -> list[Any]:
    """Run ``work(**inputs)`` on every rank of a fresh world; the results come back in rank order.

    On CPU the ranks talk through gloo, on CUDA each takes one GPU and they talk through NCCL.

    Raises:
        RankError: a rank raised (carries its traceback), died, or was silent past ``timeout_s``; the others are stopped.
    """
    with tempfile.TemporaryDirectory() as folder:
        pending: dict[Any, int] = {}
        processes = []
        for rank in range(num_ranks):
            ours, theirs = _context.Pipe(duplex=False)
            arguments = (work, inputs, rank, num_ranks, device, f"file://{folder}/store", timeout_s, theirs)
            process = _context.Process(target=_rank_main, args=arguments, daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pending[ours] = rank
        try:
            return _collect(pending, time.monotonic() + timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(pending: dict[Any, int], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while pending:
        ready: list[Any] = list(wait(list(pending), max(0.0, deadline - time.monotonic())))
        if not ready:
            raise RankError(f"ranks {sorted(pending.values())} gave no answer in time")
        for pipe in ready:
            rank = pending.pop(pipe)
            try:
                ok, value = pipe.recv()
            except EOFError:
                raise RankError(f"rank {rank} died without a word") from None
            if not ok:
                raise RankError(f"rank {rank} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in sorted(results)]


def _rank_main(
    work: Callable[..., Any], inputs: dict[str, Any], rank: int, num_ranks: int, device: str, store: str, timeout_s: float, pipe: Connection
) -> None:
    import torch
    import torch.distributed as dist

    try:
        if device == "cuda":
            torch.cuda.set_device(rank)
        else:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_ranks))
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            init_method=store,
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=min(timeout_s, 600)),
            device_id=torch.device("cuda", rank) if device == "cuda" else None,
        )
        result = work(**inputs)
        # Nobody leaves while another rank still talks to it.
        dist.barrier()
        dist.destroy_process_group()
        pipe.send((True, result))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    pipe.close()

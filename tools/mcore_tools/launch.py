# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Start the ranks of a small world on this machine and bring back what they return."""

import dataclasses
import gc
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from mcore_parallel.guard import STALLED_EXIT_CODE, StallReport, Watchdog, WatchdogConfig, preflight

__all__ = ["RankError", "launch", "leave_world"]

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch._dynamo", "torch.distributed"])

# Once a rank has failed in a way that may be another's fault, the others have this long to say what happened to them.
_GRACE_S = 5.0


class RankError(RuntimeError):
    """A rank failed, died or did not answer; says which and why.

    Args:
        message: all that is known, a traceback included.
        summary: one line for whoever caused it by what they asked for; None for everything that is no such mistake.
    """

    def __init__(self, message: str, summary: str | None = None) -> None:
        super().__init__(message)
        self.summary = summary


@dataclass(frozen=True, kw_only=True)
class _Seat:
    """What one rank is told about the world."""

    rank: int
    num_ranks: int
    device: str
    port: int
    guard: WatchdogConfig
    beats: bool


def launch(
    work: Callable[..., Any],
    num_ranks: int,
    *,
    device: str = "cpu",
    timeout_s: float = 1800.0,
    guard: WatchdogConfig | None = None,
    beats: bool = False,
    **inputs: Any,
) -> list[Any]:
    """Run ``work(**inputs)`` on every rank of a fresh world; the results come back in rank order.

    On CPU the ranks talk through gloo, on CUDA each takes one GPU and they talk through NCCL. The configurations among the inputs are
    compared before the first collective, and a watchdog runs beside the work.

    Args:
        work: a module-level function.
        num_ranks: size of the world.
        device: "cpu" or "cuda".
        timeout_s: limit of the whole work.
        guard: patience of the watchdog; None for its defaults.
        beats: ``work`` also takes the keyword ``watchdog`` and tells it its steps.
        inputs: keyword arguments of ``work``.

    Raises:
        RankError: a rank raised (carries its traceback), died, waited for others too long (carries the watchdog's report), or was silent
            past ``timeout_s``; the others are stopped.
    """
    # Kept here, the store outlives every rank.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pending: dict[Any, int] = {}
    processes = []
    for rank in range(num_ranks):
        ours, theirs = _context.Pipe(duplex=False)
        seat = _Seat(rank=rank, num_ranks=num_ranks, device=device, port=store.port, guard=guard or WatchdogConfig(), beats=beats)
        process = _context.Process(target=_rank_main, args=(work, inputs, seat, theirs), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        pending[ours] = rank
    try:
        return _collect(pending, processes, time.monotonic() + timeout_s)
    finally:
        for process in processes:
            process.kill()
            process.join()


def leave_world() -> None:
    """Destroy the process groups, where nobody holds a model or an engine any more.

    NCCL waits for the recorded graphs that hold its communicators: those in cycles of objects that are gone are collected first.
    """
    gc.collect()
    dist.destroy_process_group()


def _collect(pending: dict[Any, int], processes: list[Any], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, tuple[str, Any]] = {}
    while pending:
        ready: list[Any] = list(wait(list(pending), max(0.0, deadline - time.monotonic())))
        if not ready:
            break
        for pipe in ready:
            rank = pending.pop(pipe)
            try:
                kind, value = pipe.recv()
            except EOFError:
                processes[rank].join(_GRACE_S)
                kind, value = "died", _end(processes[rank].exitcode)
            if kind == "done":
                results[rank] = value
            else:
                failures[rank] = kind, value
                explained = kind == "died" or (kind == "stalled" and value) or (kind == "failed" and value[1] is not None)
                deadline = min(deadline, time.monotonic() + (0.0 if explained else _GRACE_S))
    if failures:
        raise _error(failures)
    if pending:
        raise RankError(f"ranks {sorted(pending.values())} gave no answer in time; read what they printed, and start again")
    return [results[rank] for rank in sorted(results)]


def _error(failures: Mapping[int, tuple[str, Any]]) -> RankError:
    """What to say about ranks that failed one after the other: a mistake of the user, a stall, deaths, and last what may follow of them."""
    failed = {rank: value for rank, (kind, value) in failures.items() if kind == "failed"}
    for rank, (trace, summary) in failed.items():
        if summary is not None:
            return RankError(f"rank {rank} failed:\n{trace}", summary)
    reports = [value for kind, value in failures.values() if kind == "stalled" and value]
    if reports:
        return RankError(reports[0])
    parts = [f"rank {rank} died without a word ({value})" for rank, (kind, value) in failures.items() if kind == "died"]
    parts += [f"rank {rank} failed:\n{trace}" for rank, (trace, _) in failed.items()]
    return RankError("\n".join(parts) or f"ranks {sorted(failures)} stalled, and their report is lost")


def _end(code: int | None) -> str:
    return f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"


def _rank_main(work: Callable[..., Any], inputs: dict[str, Any], seat: _Seat, pipe: Connection) -> None:
    def stalled(report: StallReport) -> None:
        pipe.send(("stalled", report.text if report.is_author else ""))
        os._exit(STALLED_EXIT_CODE)

    # What was loaded before the fork is no garbage: a collection that looks through it copies the memory that all ranks share.
    gc.freeze()
    rank, world_size = seat.rank, seat.num_ranks
    try:
        # Read by torch when the first group is made; what the user set stays.
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
        if seat.device == "cuda":
            torch.cuda.set_device(rank)
        else:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
        store = TCPStore("127.0.0.1", seat.port, is_master=False)
        configs = {name: value for name, value in inputs.items() if dataclasses.is_dataclass(value)}
        preflight(configs, store, rank=rank, world_size=world_size)
        with Watchdog(store, rank=rank, world_size=world_size, config=seat.guard, on_stall=stalled) as watchdog:
            dist.init_process_group(
                "nccl" if seat.device == "cuda" else "gloo",
                store=store,
                rank=rank,
                world_size=world_size,
                # The watchdog speaks before the backend ends the process.
                timeout=timedelta(seconds=2 * seat.guard.limit_s),
            )
            result = work(**inputs, watchdog=watchdog) if seat.beats else work(**inputs)
            # Nobody leaves while another rank still talks to it.
            dist.barrier(device_ids=[rank] if seat.device == "cuda" else None)
            leave_world()
        pipe.send(("done", result))
    except BaseException as error:
        pipe.send(("failed", (traceback.format_exc(), str(error) if isinstance(error, ValueError | OSError) else None)))
    pipe.close()

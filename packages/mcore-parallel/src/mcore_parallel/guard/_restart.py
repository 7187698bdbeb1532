# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A run that starts again in the same processes when a rank fails."""

import contextlib
import gc
import math
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.distributed_c10d import _abort_process_group

from mcore_parallel.guard._attempt import Attempt, AttemptAbortedError, Fault, exit_stuck
from mcore_parallel.guard._report import rank_list
from mcore_parallel.guard._store import StoreSilentError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RestartConfig:
    """How often, and how patiently.

    Raises:
        ValueError: a negative number of restarts, a time that is not positive.
    """

    max_restarts: int = 0
    """Failures after which all ranks start again in the same processes, from the newest checkpoint; 0 for none."""
    timeout_s: float = 120.0
    """Within this after a failure all ranks must have left the failed attempt."""

    def __post_init__(self) -> None:
        if self.max_restarts < 0:
            raise ValueError(f"max_restarts={self.max_restarts} must not be negative")
        if not 0 < self.timeout_s < math.inf:
            raise ValueError(f"timeout_s={self.timeout_s} must be positive and finite")


class RankFailedError(RuntimeError):
    """Another rank failed, and there is no restart left."""

    def __init__(self, fault: Fault, restarts: int) -> None:
        super().__init__(f"{fault} (after {restarts} restarts in these processes)")
        self.fault = fault


class RanksLostError(RuntimeError):
    """Ranks did not come back from a failed attempt; only new processes can go on.

    Args:
        ranks: rank -> what became of it.
        fault: why the attempt failed.
    """

    def __init__(self, ranks: Mapping[int, str], fault: Fault) -> None:
        lost = "; ".join(f"rank {rank}: {what}" for rank, what in ranks.items())
        super().__init__(f"{rank_list(ranks)} {'is' if len(ranks) == 1 else 'are'} lost ({lost}) after {fault}; start the run again")
        self.ranks = list(ranks)
        self.fault = fault


def print_restart(text: str) -> None:
    """To the standard error."""
    print(text, file=sys.stderr, flush=True)


def run_with_restarts(
    work: Callable[[Attempt], T],
    store: Store,
    *,
    rank: int,
    world_size: int,
    config: RestartConfig,
    final: tuple[type[BaseException], ...] = (),
    notify: Callable[[str], None] = print_restart,
    on_stuck: Callable[[str], None] = exit_stuck,
) -> T:
    """Run ``work(attempt)`` on every rank until all have done it; when one raises, all leave it and begin it again.

    A rank that raises tells the others through the store. They leave their work too: kernels of NCCL that wait for it are aborted,
    connections of gloo end with its groups, and a thread that runs Python gets an ``AttemptAbortedError``. All process groups are
    dropped, the ranks meet at the store, and the work begins anew, from its newest checkpoint if it looks for one. It must make its groups
    over ``attempt.store``, and leave nothing behind that holds them: ``DistributedDataParallel.close`` belongs into a ``finally``. A dead
    process is not replaced: the others end with ``RanksLostError``, which names it, within seconds.

    Args:
        work: what each rank does; it may call ``attempt.fail`` from another thread (a ``Watchdog`` does).
        store: reached by all ranks; it must outlive them all, as torchrun's does.
        rank: of this process.
        world_size: number of ranks.
        config: how often.
        final: errors that another attempt would meet again; they end the run at once.
        notify: given a line about each restart, on the first rank.
        on_stuck: as of ``Attempt``.

    Returns:
        What the work returned.

    Raises:
        RankFailedError: another rank failed once more than allowed, or finally. The rank itself raises its own error.
        RanksLostError: ranks died, or are stuck.
    """
    number = 0
    while True:
        attempt = Attempt(number, store, rank=rank, world_size=world_size, timeout_s=config.timeout_s, on_stuck=on_stuck)
        try:
            done: list[T] = []
            error = _try(work, attempt, done)
            fault = attempt.wait_for_end() if error is None else _fault(attempt, error, final)
            if fault is None:
                return done[0]
            done.clear()
            _drop_groups()
            if fault.is_final or number == config.max_restarts:
                if error is not None and fault.rank == rank:
                    raise error
                raise RankFailedError(fault, number) from None
            error = None
            if missing := attempt.wait_for_others():
                raise RanksLostError(missing, fault)
        finally:
            attempt.end()
        number += 1
        if rank == 0:
            notify(f"restart {number} of at most {config.max_restarts} after {fault}")


def _fault(attempt: Attempt, error: BaseException, final: tuple[type[BaseException], ...]) -> Fault:
    """Tell the others of this rank's error, and why the attempt failed; the error loses its frames."""
    if not isinstance(error, AttemptAbortedError):
        try:
            attempt.fail(_line(error), is_final=isinstance(error, final) or not isinstance(error, Exception))
        except StoreSilentError as silence:
            # Nobody can be told, and nobody can be met again.
            error.add_note(f"the other ranks were not told: {silence}")
            raise error from None
    fault = attempt.fault() or Fault(rank=attempt.rank, reason=_line(error), is_final=False)
    _forget_frames(error)
    return fault


def _try(work: Callable[[Attempt], T], attempt: Attempt, done: list[T]) -> BaseException | None:
    """Do the work once; what it raised."""
    error: BaseException | None = None
    try:
        try:
            attempt.open()
            done.append(work(attempt))
        finally:
            attempt.close()
    except BaseException as caught:
        error = caught
    # Once more: the exception may have come on the way into the first one.
    attempt.close()
    return error


def _forget_frames(error: BaseException) -> None:
    """Keep where an error came from as text: its frames hold the groups, whose connections other ranks wait on, and the model."""
    error.add_note("".join(traceback.format_exception(error)).rstrip())
    error.__traceback__ = error.__cause__ = error.__context__ = None


def _drop_groups() -> None:
    if dist.is_initialized():
        # Some may have been aborted under way.
        with contextlib.suppress(RuntimeError, ValueError):
            _abort_process_group()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip()

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""How long the parts of a run take, on this rank and over all of them."""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from mcore_parallel.comm import all_gather, all_reduce
from mcore_parallel.groups import Group
from mcore_parallel.training._protocols import Writer
from mcore_parallel.training._stopwatch import NO_TIMER, DeviceTimer, HostTimer, Timer


@dataclass(frozen=True, kw_only=True)
class TimeSpread:
    """One timer over the ranks, in seconds; ranks that lack it are left out."""

    smallest: float
    largest: float
    smallest_rank: int
    """Number in the group."""
    largest_rank: int
    by_rank: tuple[float, ...]
    """NaN where a rank lacks it."""


@dataclass(frozen=True, kw_only=True)
class StartupStamps:
    """Moments of the start of this process, in seconds since the epoch (``time.time()``)."""

    program_start: float
    """The first line of the program."""
    main_entry: float
    """Its imports are done."""
    pretrain_entry: float
    """Arguments are read; the set-up of training begins."""

    def __post_init__(self) -> None:
        if not self.program_start <= self.main_entry <= self.pretrain_entry:
            raise ValueError(
                f"program_start={self.program_start}, main_entry={self.main_entry} and pretrain_entry={self.pretrain_entry} "
                "must follow one another; take each by time.time() at its place"
            )


class Timers:
    """Timers by name: ``timers("forward").start()``, or ``with timers("forward"):``.

    On a CUDA device a timer records events on the current stream and looks at them when it is read, so that starting and stopping
    never wait for the device. Elsewhere it reads the host's monotonic clock.

    Args:
        log_level: timers of a higher level do nothing; 0 to 2.
        log_option: what ``log`` and ``write`` tell of the ranks: the "max", "minmax", or "all" of them.
        group: ranks over which times are compared; None for this rank alone.
        device: whose time is measured; None for the host's.

    Raises:
        ValueError: a level or an option that does not exist.

    Example:
        >>> timers = Timers(log_level=1)
        >>> with timers("data"):
        ...     pass
        >>> timers("data").set_elapsed(1.5)
        >>> timers("data").elapsed(reset=False), timers("detail", log_level=2).elapsed()
        (1.5, 0.0)
    """

    def __init__(
        self,
        log_level: int = 0,
        log_option: Literal["max", "minmax", "all"] = "minmax",
        *,
        group: Group | None = None,
        device: torch.device | None = None,
    ) -> None:
        if log_level not in (0, 1, 2):
            raise ValueError(f"log_level={log_level} must be 0, 1 or 2")
        if log_option not in ("max", "minmax", "all"):
            raise ValueError(f'log_option={log_option!r} must be "max", "minmax" or "all"')
        self.log_level, self.log_option = log_level, log_option
        self.group = Group.single() if group is None else group
        self.device = device
        self.first: dict[str, float] = {}
        """Seconds of each timer in the first iteration, once ``end_first_iteration`` was called."""
        self._timers: dict[str, HostTimer] = {}
        self._levels: dict[str, int] = {}

    def __call__(self, name: str, log_level: int | None = None) -> Timer:
        """The timer of that name.

        Args:
            name: made when it does not exist.
            log_level: of a new timer, 0 when None; of one that exists the same or None.

        Raises:
            ValueError: another level than the timer has, or one that does not exist.
        """
        known = self._levels.get(name)
        if known is None:
            known = self._levels[name] = 0 if log_level is None else log_level
            if known not in (0, 1, 2):
                del self._levels[name]
                raise ValueError(f"log_level={log_level} of timer {name!r} must be 0, 1 or 2")
        elif log_level is not None and log_level != known:
            raise ValueError(f"timer {name!r} has log_level={known}, found {log_level}; give one timer one level")
        if known > self.log_level:
            return NO_TIMER
        if name not in self._timers:
            events = self.device is not None and self.device.type == "cuda"
            self._timers[name] = (DeviceTimer if events else HostTimer)(name, self.group, self.device)
        return self._timers[name]

    def aggregate(self, names: Sequence[str] | None = None, *, reset: bool = True, barrier: bool = False) -> dict[str, TimeSpread]:
        """Elapsed times over all ranks of the group, each of which calls this; by name, sorted.

        Args:
            names: the same on every rank; None for all that any rank has, which costs two more collectives.
            reset: begin anew.
            barrier: let the ranks wait for one another first.
        """
        if barrier:
            self._barrier()
        wanted = self._all_names() if names is None else sorted(set(names))
        if not wanted:
            return {}
        here = [self._timers[name].elapsed(reset) if name in self._timers else math.nan for name in wanted]
        rows = all_gather(self._tensor([here]), self.group).T.tolist()
        return {name: _spread(row) for name, row in zip(wanted, rows, strict=True) if not all(map(math.isnan, row))}

    def log(
        self,
        names: Sequence[str] | None = None,
        *,
        rank: int | None = None,
        normalizer: float = 1.0,
        reset: bool = True,
        barrier: bool = False,
        emit: Callable[[str], object] = print,
    ) -> None:
        """Tell the times over the ranks in milliseconds; every rank calls this.

        Args:
            names: as of ``aggregate``, as are ``reset`` and ``barrier``.
            rank: in the group, whose ``emit`` is called; None for the last.
            normalizer: times are divided by it, for instance by the number of steps.
            reset: see ``aggregate``.
            barrier: see ``aggregate``.
            emit: takes the text.

        Raises:
            ValueError: a normalizer that is not positive.
        """
        _check_normalizer(normalizer)
        spreads = self.aggregate(names, reset=reset, barrier=barrier)
        if spreads and self.group.rank == (self.group.size - 1 if rank is None else rank):
            emit(self._text(spreads, normalizer))

    def values(
        self, names: Sequence[str] | None = None, *, normalizer: float = 1.0, reset: bool = True, barrier: bool = False
    ) -> dict[str, float]:
        """The times over the ranks as ``time/<name>`` in seconds (and ``/min``, ``/rank<n>``); every rank calls this.

        Args:
            names: as of ``aggregate``, as are ``reset`` and ``barrier``.
            normalizer: as of ``log``.
            reset: see ``aggregate``.
            barrier: see ``aggregate``.

        Raises:
            ValueError: a normalizer that is not positive.
        """
        _check_normalizer(normalizer)
        return self._values(self.aggregate(names, reset=reset, barrier=barrier), normalizer)

    def write(
        self,
        names: Sequence[str] | None,
        writer: Writer | None,
        iteration: int,
        normalizer: float = 1.0,
        reset: bool = True,
        barrier: bool = False,
    ) -> None:
        """Hand ``values`` to a writer; every rank calls this.

        Args:
            names: as of ``aggregate``, as are ``reset`` and ``barrier``.
            writer: None on ranks that have none.
            iteration: step that the numbers belong to.
            normalizer: as of ``log``.
            reset: see ``aggregate``.
            barrier: see ``aggregate``.

        Raises:
            ValueError: a normalizer that is not positive.
        """
        values = self.values(names, normalizer=normalizer, reset=reset, barrier=barrier)
        if writer is not None and values:
            writer.write(iteration, values)

    def end_first_iteration(self) -> dict[str, float]:
        """Set the first iteration apart; call once behind it.

        Its times are kept in ``first``; elapsed times begin anew, so that later ones are those of the steady state, and
        ``active_time`` still holds everything.

        Raises:
            RuntimeError: called twice.
        """
        if self.first:
            raise RuntimeError("the first iteration has been set apart already; call end_first_iteration() once")
        self.first = {name: self._timers[name].elapsed() for name in sorted(self._timers)}
        return dict(self.first)

    def startup(self, stamps: StartupStamps, *, ready: float | None = None) -> dict[str, float]:
        """Set the timers of the start-up from the stamps; every rank of the group calls this once, when training is set up.

        ``program-entry-spread`` is how much later than the earliest rank this one began. ``library-setup`` and ``program-setup`` end
        at ``main_entry`` and ``pretrain_entry``; ``in-process-setup`` is both, and ``in-job-setup`` both from the start of the earliest
        rank on. ``megatron-init-local`` and ``megatron-init-global`` last until ``ready``, from this rank's start and the earliest.

        Args:
            stamps: of this process.
            ready: when training is set up, in seconds since the epoch; None for now.

        Returns:
            Seconds by name, which are set as the timers' elapsed times.
        """
        ready = time.time() if ready is None else ready
        # float64: seconds since the epoch lose minutes in float32.
        earliest = all_reduce(self._tensor([stamps.program_start]), self.group, "min").item()
        startup_seconds = {
            "program-entry-spread": stamps.program_start - earliest,
            "library-setup": stamps.main_entry - stamps.program_start,
            "program-setup": stamps.pretrain_entry - stamps.main_entry,
            "in-process-setup": stamps.pretrain_entry - stamps.program_start,
            "in-job-setup": stamps.pretrain_entry - earliest,
            "megatron-init-local": ready - stamps.program_start,
            "megatron-init-global": ready - earliest,
        }
        for name, seconds in startup_seconds.items():
            self(name).set_elapsed(seconds)
        return startup_seconds

    def _text(self, spreads: Mapping[str, TimeSpread], normalizer: float) -> str:
        if self.log_option == "all":
            lines = ["times across ranks (ms):"]
            for name, spread in spreads.items():
                times = " ".join(f"{1e3 * value / normalizer:.2f}" for value in spread.by_rank)
                lines.append(f"    {name}: {times}")
            return "\n".join(lines)
        both = self.log_option == "minmax"
        lines = ["(min at rank, max at rank) time across ranks (ms):" if both else "max time across ranks (ms):"]
        for name, spread in spreads.items():
            largest = f"{1e3 * spread.largest / normalizer:.2f} at {spread.largest_rank}"
            smallest = f"{1e3 * spread.smallest / normalizer:.2f} at {spread.smallest_rank}, " if both else ""
            lines.append(f"    {name}: {smallest}{largest}")
        return "\n".join(lines)

    def _values(self, spreads: Mapping[str, TimeSpread], normalizer: float) -> dict[str, float]:
        values: dict[str, float] = {}
        for name, spread in spreads.items():
            values[f"time/{name}"] = spread.largest / normalizer
            if self.log_option == "minmax":
                values[f"time/{name}/min"] = spread.smallest / normalizer
            if self.log_option == "all":
                values |= {f"time/{name}/rank{rank}": value / normalizer for rank, value in enumerate(spread.by_rank) if value == value}
        return values

    def _all_names(self) -> list[str]:
        """Names that any rank has. Stages of a pipeline have different ones, so that a collective over one's own would hang."""
        if self.group.size == 1:
            return sorted(self._timers)
        text = json.dumps(sorted(self._timers)).encode()
        longest = int(all_reduce(self._tensor([float(len(text))]), self.group, "max").item())
        padded = torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8).to(self._place())
        rows = all_gather(padded[None], self.group).cpu()
        return sorted({name for row in rows for name in json.loads(bytes(row.tolist()))})

    def _tensor(self, values: list[Any]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self._place())

    def _place(self) -> torch.device:
        return torch.device("cpu") if self.device is None else self.device

    def _barrier(self) -> None:
        if self.group.size > 1:
            all_reduce(self._tensor([0.0]), self.group).item()


def _spread(row: Sequence[float]) -> TimeSpread:
    present = [(value, rank) for rank, value in enumerate(row) if value == value]
    (smallest, smallest_rank), (largest, largest_rank) = min(present), max(present)
    ranks = {"smallest_rank": smallest_rank, "largest_rank": largest_rank}
    return TimeSpread(smallest=smallest, largest=largest, by_rank=tuple(row), **ranks)


def _check_normalizer(normalizer: float) -> None:
    if not normalizer > 0.0:
        raise ValueError(f"normalizer={normalizer} must be positive")

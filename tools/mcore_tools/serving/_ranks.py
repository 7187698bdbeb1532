# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The processes of an engine that is split over several devices, or of several engines that share experts."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from mcore_inference import DynamicInferenceEngine, EngineDeadError, LoraWeights, follow_runner
from mcore_parallel import ProcessGroups
from mcore_parallel.guard import STALLED_EXIT_CODE
from mcore_tools.launch import leave_world
from mcore_tools.recipes import RunConfig
from mcore_tools.serving._layout import EngineLayout
from mcore_tools.serving._loras import lora_digest

_POLL_S = 0.05
_MEET_S = 600.0
_END_S = 10.0
PROGRAM = (sys.executable, "-m", "mcore_tools")
"""What stands before the words of a command."""


class EngineRanks:
    """A context manager that connects the processes of an engine, or of those that share experts, a device each; this one is a rank.

    Started by torchrun, srun or the like (``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` are set) it joins the others, as
    it does where ``Replicas`` started all. Else it is the first, and starts the others with the same command.

    Args:
        layout: of all ranks.
        command: starts one of the others.

    Raises:
        ValueError: another number of processes or GPUs than ranks, or a rank that ended instead of coming.
    """

    def __init__(self, layout: EngineLayout, command: Sequence[str]) -> None:
        self.size, self._layout, self._command = layout.num_ranks, layout, command
        self._is_launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
        self.rank = int(os.environ["RANK"]) if self._is_launched else 0
        if self._is_launched and int(os.environ["WORLD_SIZE"]) != self.size:
            raise ValueError(f"{layout} in a world of {os.environ['WORLD_SIZE']} processes; start as many as ranks, or one for all")
        if layout.num_sharing > 1 and not self._is_launched:
            raise ValueError(f"{layout} with --join is one of {self.size} processes; leave out --join, or start as many by torchrun")
        gpus = torch.cuda.device_count()
        if gpus and not self._is_launched and gpus < self.size:
            raise ValueError(f"{layout} needs {self.size} GPUs and {gpus} are visible; lower one")
        self._children: list[subprocess.Popen[bytes]] = []
        self._store: Store | None = None

    @property
    def starts_others(self) -> bool:
        """Whether this process is the first rank, which starts the others when it is entered."""
        return not self._is_launched

    def __enter__(self) -> "EngineRanks":
        if self._is_launched:
            self._store = next(rendezvous("env://"))[0]
        else:
            store = self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            self._children = [start_rank(self._command, rank, self.size, store.port, os.environ) for rank in range(1, self.size)]
        try:
            self._connect()
        except BaseException:
            self._end(0)
            raise
        return self

    def _connect(self) -> None:
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        else:
            torch.set_num_threads(max(1, min(torch.get_num_threads(), (os.cpu_count() or 1) // self.size)))
        self.meet("start")
        dist.init_process_group(
            "nccl" if on_gpu else "gloo", store=self._store, rank=self.rank, world_size=self.size, timeout=timedelta(seconds=_MEET_S)
        )

    def groups(self, config: RunConfig) -> ProcessGroups:
        """The groups of a model.

        Raises:
            ValueError: the layout cannot divide it.
        """
        return ProcessGroups.build(self._layout.plan(config.moe))

    def meet(self, stage: str) -> None:
        """Wait until all ranks have come to a stage of their start.

        Raises:
            ValueError: a rank ended before.
            TimeoutError: one did not come within ten minutes.
        """
        assert self._store is not None, "a world is entered before"
        self._store.set(f"serving/{stage}/{self.rank}", "here")
        missing, deadline = list(range(self.size)), time.monotonic() + _MEET_S
        while missing := [rank for rank in missing if not self._store.check([f"serving/{stage}/{rank}"])]:
            for rank, child in enumerate(self._children, start=1):
                if rank in missing and child.poll() is not None:
                    raise ValueError(
                        f"rank {rank} of the engine ended at its start with exit code {child.returncode}; the reason stands above"
                    )
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"ranks {missing} of the engine did not come within {_MEET_S:g} s (stage {stage!r}); read what they print"
                )
            time.sleep(_POLL_S)

    def check_adapters(self, loras: Mapping[str, LoraWeights]) -> None:
        """See that all ranks have read the same adapters, as a run has other newest steps from one moment to the next.

        Raises:
            ValueError: they have not, or a rank ended before.
            TimeoutError: as of ``meet``.
        """
        assert self._store is not None, "a world is entered before"
        self._store.set(f"serving/adapters/of/{self.rank}", lora_digest(loras))
        self.meet("adapters")
        if len({self._store.get(f"serving/adapters/of/{rank}") for rank in range(self.size)}) > 1:
            raise ValueError(
                "the ranks of the engine have read different adapters, such as of a run that trains; name a step by --lora, "
                "RUN/checkpoints/step_..., or start again"
            )

    def follow(self, engine: DynamicInferenceEngine) -> int:
        """Repeat what the first rank does, until it ends; signals are for that one.

        Returns:
            Exit code: 0, or 75 when the engine was given up.
        """
        # Slow to import, and only for who serves.
        from mcore_inference.server import StopSignals

        with StopSignals():
            try:
                follow_runner(engine)
            except EngineDeadError as error:
                print(f"error: rank {self.rank} of the engine: {error}", file=sys.stderr)
                return STALLED_EXIT_CODE
        return 0

    def leave(self, engine: DynamicInferenceEngine, code: int) -> None:
        """Close the engine and the groups of the ranks, where no step may hang: ``code`` is not that of an engine that was given up.

        NCCL waits for all ranks there, so nobody may wait for another's process to end before.
        """
        if code != STALLED_EXIT_CODE:
            engine.close()
            leave_world()

    def __exit__(self, kind: object = None, *_: object) -> None:
        # After an error the others may wait for this rank.
        self._end(_END_S if kind is None else 0)

    def _end(self, patience_s: float) -> None:
        """Let the processes that were started here end by themselves, and then end them."""
        deadline = time.monotonic() + patience_s
        for child in self._children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.1, deadline - time.monotonic()))
            child.kill()
            child.wait()


def start_rank(command: Sequence[str], rank: int, size: int, port: int, environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    """One process of a world on this machine.

    Args:
        command: that it runs.
        rank: of the process.
        size: of the world.
        port: of the store where its ranks meet.
        environment: of the process, to which its place is added.
    """
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    # In a session of its own: Ctrl-C is for the server, or the first rank, which lets open requests end.
    return subprocess.Popen(command, env={**environment, **place}, start_new_session=True)


def end_process(code: int) -> int:
    """The end of an engine's process; a step that hangs, or waits for lost ranks, does not hold it back.

    Returns:
        The code, where nothing hangs.
    """
    if code == STALLED_EXIT_CODE:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code

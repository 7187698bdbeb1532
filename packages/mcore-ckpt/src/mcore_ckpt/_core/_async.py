# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Asynchronous saves."""

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from mcore_ckpt._core._assets import AssetSource
from mcore_ckpt._core._commit import SaveJob, commit
from mcore_ckpt._core._sharded import ShardedTensor
from mcore_ckpt._core._staging import Staging
from mcore_ckpt._core._worker import Worker, WorkerFolder
from mcore_ckpt._errors import CheckpointingException
from mcore_ckpt._storage import LocalFolder

__all__ = ["AsyncRequest", "SaveProgress"]

_LOOK_S = 0.2


@dataclass(frozen=True)
class SaveProgress:
    """Progress of this rank's part of a save."""

    written_bytes: int
    """Of tensors and file headers, on the way to the disk."""
    total_bytes: int
    """Of tensors alone; the headers come on top."""
    idle_s: float
    """Seconds since the writer last moved a piece; 0 once it is done."""


class _Meter:
    """Progress of the writer, and its cancellation flag."""

    def __init__(self) -> None:
        self.written = 0
        self.moved_at = time.monotonic()
        self.cancelled = False
        self._lock = threading.Lock()

    def __call__(self, count: int) -> None:
        if self.cancelled:
            raise CheckpointingException("the save was cancelled")
        with self._lock:
            self.written += count
            self.moved_at = time.monotonic()


class AsyncRequest:
    """A save whose files are written while training goes on.

    The state was copied to host memory before ``save`` returned: training may change it at once. A process of its own hashes and writes
    what goes to a disk, out of memory shared with it; a folder that another process cannot reach, such as one in memory, is written by a
    thread. Neither uses collectives; the commit is part of ``wait()``, which is therefore collective. A request that is never waited
    for leaves no checkpoint.
    """

    def __init__(self, job: SaveJob, staging: Staging | None = None, worker: Worker | None = None) -> None:
        needed = {(write.name, write.box) for writes in job.files.values() for write in writes}
        self._error: BaseException | None = None
        self._meter = _Meter()
        self._total = sum(write.num_bytes for writes in job.files.values() for write in writes)
        self._rows: list[list[Any]] = []
        self._then: list[Callable[[], None]] = []
        self._release: Callable[[], None] | None = None
        self._remote: WorkerFolder | None = None
        # A worker of this save alone ends with it.
        self._own_worker = Worker() if worker is None else None
        shards: dict[Any, ShardedTensor] = {}
        assets: dict[str, AssetSource] = {}
        try:
            assets = {file: asset.held() for file, asset in job.assets.items()}
            staged = (staging or Staging()).copy({key: shard for key, shard in job.shards.items() if key in needed})
            shards, self._release = staged.shards, staged.release
            if type(job.directory) is LocalFolder and staged.memory is not None and sys.executable:
                worker = worker or self._own_worker
                assert worker is not None
                worker.start()
                self._worker, self._remote = worker, WorkerFolder(job.directory.path, worker, staged.memory)
        except Exception as error:
            # The other ranks have returned already: wait() raises it on all of them, like any failed write.
            self._error = error
        self._job: SaveJob | None = replace(job, shards=shards, assets=assets)
        writer_job = self._job if self._remote is None else replace(self._job, directory=self._remote)
        self._thread = threading.Thread(target=self._write, args=(writer_job,), name=f"save {job.directory}", daemon=True)
        self._thread.start()

    def _write(self, job: SaveJob) -> None:
        try:
            if self._error is None:
                self._rows = job.write(self._meter)
        except Exception as error:
            self._error = error
        finally:
            if self._own_worker is not None:
                self._own_worker.close()

    def done(self) -> bool:
        """Whether this rank's files are written, or failed; ``wait()`` then has only the commit left to do. Not collective."""
        return not self._thread.is_alive()

    def progress(self) -> SaveProgress:
        """Progress of this rank. Not collective."""
        meter = self._meter
        idle = 0.0 if self.done() else time.monotonic() - meter.moved_at
        return SaveProgress(meter.written, self._total, idle)

    def cancel(self) -> None:
        """Abort the save: the writer stops at its next piece and removes its files. Not collective; any one rank may call it.

        ``wait()`` must still be called by all ranks, and raises. A save whose files are all written by then is committed all the same.
        """
        self._meter.cancelled = True
        if self._remote is not None:
            self._remote.cancel()

    def then(self, action: Callable[[], None]) -> None:
        """Call ``action`` on this rank once the checkpoint is committed, inside ``wait()``."""
        self._then.append(action)

    def wait(self, *, stalled_s: float | None = None) -> None:
        """Wait for the files of all ranks and commit the checkpoint. Collective; a second call does nothing.

        Args:
            stalled_s: give up when this rank's writer moved nothing for so many seconds, as on a file system that hangs; None waits
                for ever.

        Raises:
            CheckpointingException: on every rank, when any of them could not write, cancelled, or stalled.
        """
        # The copy of the state, and the group, are not kept past the commit by whoever keeps the request.
        job, self._job = self._job, None
        if job is None:
            return
        release, self._release = self._release, None
        try:
            commit(job, lambda: self._result(stalled_s))
        finally:
            # A stalled writer may still read the copy: its memory then goes with it.
            if release is not None and self.done():
                release()
            self._remote = None
        for action in self._then:
            action()

    def _result(self, stalled_s: float | None) -> list[list[Any]]:
        while self._thread.is_alive():
            self._thread.join(None if stalled_s is None else _LOOK_S)
            idle = self.progress().idle_s
            if stalled_s is not None and idle > stalled_s:
                self.cancel()
                if self._remote is not None:
                    # Its thread then ends, and the memory serves again.
                    self._worker.kill()
                written = f"{self._meter.written} of {self._total} bytes"
                raise CheckpointingException(f"the writer moved nothing for {idle:.0f} s after {written}; does the storage answer?")
        if self._error is not None:
            raise self._error
        return self._rows

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A folder of numbered checkpoints, and their retention."""

import re
import warnings
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from mcore_ckpt._core._async import AsyncRequest
from mcore_ckpt._core._control import Control
from mcore_ckpt._core._load import load
from mcore_ckpt._core._load_plan import Strictness
from mcore_ckpt._core._manifest import MANIFEST_NAME, is_checkpoint
from mcore_ckpt._core._save import SaveOptions, check_format, run_save
from mcore_ckpt._core._save_plan import PlanCache
from mcore_ckpt._core._staging import Staging
from mcore_ckpt._core._worker import Worker
from mcore_ckpt._errors import CheckpointingException
from mcore_ckpt._storage import Folder, LocalFolder, is_link, open_folder

__all__ = ["CheckpointManager"]

_STEP = re.compile(r"step_([0-9]{8,})")


class CheckpointManager:
    """Checkpoints ``directory/step_00000010`` and so on. ``save`` and ``load`` are collective over ``group``.

    A step exists when its manifest does; there is no pointer file that could disagree. Older steps go only after a newer one is committed.

    Args:
        directory: a path on a file system all ranks share, an address such as ``s3://bucket/run``, or a `mcore_ckpt.storage.Folder`.
            It need not exist.
        keep: how many of the newest steps stay; None for all. Saves that never finished go in any case. A step that is a link is read,
            but neither counted nor removed: what it points to belongs to another run.
        keep_every: steps that are multiples of it stay, too; None for no others.
        group: None for the default group, or for this process alone where torch.distributed is not initialised.
        format: as for `mcore_ckpt.save`.
        max_pending: asynchronous saves whose copies of the state may be in host memory at a time; the next save waits for the oldest.
        stalled_s: see `AsyncRequest.wait`.
        assets: kept with every step, as for `mcore_ckpt.save`; files are read at each save.

    Raises:
        ValueError: ``keep``, ``keep_every`` or ``max_pending`` below 1, ``stalled_s`` not above 0, or an unknown format.
    """

    def __init__(
        self,
        directory: str | Path | Folder,
        *,
        keep: int | None = 3,
        keep_every: int | None = None,
        group: dist.ProcessGroup | None = None,
        format: str = "native",
        max_pending: int = 1,
        stalled_s: float | None = None,
        assets: Mapping[str, str | Path | bytes] | None = None,
    ) -> None:
        if keep is not None and keep < 1:
            raise ValueError(f"keep={keep} must be at least 1, or None to keep all")
        if keep_every is not None and keep_every < 1:
            raise ValueError(f"keep_every={keep_every} must be at least 1, or None to keep the newest only")
        if max_pending < 1:
            raise ValueError(f"max_pending={max_pending} must be at least 1")
        if stalled_s is not None and not stalled_s > 0:
            raise ValueError(f"stalled_s={stalled_s} must be above 0, or None to wait for ever")
        self._folder = open_folder(directory)
        self.keep, self.keep_every = keep, keep_every
        check_format(format)
        self._format, self._cache = format, PlanCache()
        self._assets = dict(assets or {})
        self._group = group
        self._stalled_s = stalled_s
        # One buffer for each save that may be pending; they serve in turn.
        self._staging = deque(Staging() for _ in range(max_pending))
        self._pending: deque[tuple[int, AsyncRequest]] = deque()
        self._worker = Worker()

    @property
    def directory(self) -> Path:
        """Where the steps lie on the disk.

        Raises:
            ValueError: they lie elsewhere; use ``folder``.
        """
        if not isinstance(self._folder, LocalFolder):
            raise ValueError(f"{self._folder} is not on a disk; use folder(step)")
        return self._folder.path

    def path(self, step: int) -> Path:
        """Path of a step on the disk; see ``directory``."""
        return self.directory / _name(step)

    def folder(self, step: int) -> Folder:
        """Folder of a step, wherever it lies; `mcore_ckpt.save` and `mcore_ckpt.load` take it."""
        return self._folder.child(_name(step))

    def steps(self) -> list[int]:
        """Committed steps, ascending, as this rank sees the folder now."""
        while True:
            present = self._present()
            committed = [step for step in present if is_checkpoint(self.folder(step))]
            # Between looking at the folder and at its steps, retention may have taken all of them for newer ones: look again.
            if committed or present == self._present():
                return sorted(committed)

    def latest(self) -> int | None:
        """The newest committed step, None when there is none."""
        return max(self.steps(), default=None)

    def save(
        self, step: int, state: Mapping[str, Any], extra: Mapping[str, Any] | None = None, *, asynchronous: bool = False
    ) -> AsyncRequest | None:
        """Save ``state`` as ``step``, then remove older steps that are not to be kept; see `mcore_ckpt.save`.

        Steps are committed in the order in which they were saved: a save that is not asynchronous commits the pending ones first, an
        asynchronous one the oldest of ``max_pending``. Where that fails, this save is not begun.

        Raises:
            CheckpointingException: the step exists, or the save failed on some rank. The older steps are all still there.
        """
        if type(step) is not int or step < 0:
            raise ValueError(f"step={step!r} must be an int of at least 0")
        while self._pending and (not asynchronous or len(self._pending) >= len(self._staging)):
            self._commit_oldest()
        # The newest buffer in use is never the first: it was moved to the end when its save began.
        staging = self._staging[0]
        self._staging.rotate(-1)
        options = SaveOptions(format=self._format, cache=self._cache, staging=staging, worker=self._worker, assets=self._assets)
        request = run_save(state, self.folder(step), extra, self._group, options, asynchronous=asynchronous)
        if request is None:
            self._prune()
        else:
            request.then(self._prune)
            self._pending.append((step, request))
        return request

    def wait(self) -> None:
        """Commit the pending asynchronous saves, oldest first. Collective.

        Raises:
            CheckpointingException: one failed; the others are committed all the same.
        """
        failures: list[CheckpointingException] = []
        while self._pending:
            try:
                self._commit_oldest()
            except CheckpointingException as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def _commit_oldest(self) -> None:
        _, request = self._pending.popleft()
        request.wait(stalled_s=self._stalled_s)

    def load(
        self, state: Mapping[str, Any], step: int | None = None, *, strict: bool | Strictness = True, verify: bool | Literal["first"] = True
    ) -> tuple[int, dict[str, Any]]:
        """Fill ``state`` from ``step``, by default the newest; returns the step and its extra values. See `mcore_ckpt.load`.

        Raises:
            CheckpointingException: no such step, or it cannot be loaded.
        """
        self.wait()
        control = Control(self._group)
        # The first rank looks, so that all load the same step even while another job is writing.
        step = control.run(f"finding a step in {self._folder}", lambda: self._choose(step) if control.rank == 0 else None)[0]
        assert step is not None
        return step, load(state, self.folder(step), strict=strict, verify=verify, group=self._group)

    def _choose(self, step: int | None) -> int:
        steps = self.steps()
        if not steps:
            raise CheckpointingException(f"{self._folder} holds no checkpoint")
        if step is None:
            return steps[-1]
        if step not in steps:
            raise CheckpointingException(f"{self._folder} has no step {step}; it has {steps}")
        return step

    def _present(self) -> list[int]:
        """Steps that have a folder, finished or not."""
        matches = ((_STEP.fullmatch(name), name) for name in self._folder.names())
        return [int(match[1]) for match, name in matches if match and _name(int(match[1])) == name]

    def _prune(self) -> None:
        if Control(self._group).rank:
            return
        present = [step for step in self._present() if not is_link(self.folder(step))]
        committed = sorted(set(present).intersection(self.steps()))
        old = [] if self.keep is None else committed[: -self.keep]
        gone = {step for step in old if self.keep_every is None or step % self.keep_every}
        # Folders without a manifest that are older than what was just committed are saves that never finished.
        staying = {*committed, *(step for step, _ in self._pending)}
        gone |= {step for step in present if step < max(committed, default=0) and step not in staying}
        for step in sorted(gone):
            folder = self.folder(step)
            try:
                # Without its manifest a step is no checkpoint: no reader meets a half-removed one.
                folder.remove(MANIFEST_NAME)
                folder.sync()
                folder.remove_all()
            except OSError as error:
                warnings.warn(f"could not remove old checkpoint {folder}: {error}", RuntimeWarning, stacklevel=3)


def _name(step: int) -> str:
    return f"step_{step:08d}"

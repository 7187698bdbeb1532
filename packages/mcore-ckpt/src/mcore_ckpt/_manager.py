# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A folder of numbered checkpoints, of which the newest few are kept."""

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mcore_ckpt._control import Control
from mcore_ckpt._errors import CheckpointingException
from mcore_ckpt._load import load
from mcore_ckpt._plan import PlanCache
from mcore_ckpt._save import DEFAULT_FILE_BYTES, AsyncRequest, check_format, run_save
from mcore_ckpt._storage import Folder, LocalFolder, open_folder
from mcore_ckpt.manifest import MANIFEST_NAME, is_checkpoint

__all__ = ["CheckpointManager"]

_STEP = re.compile(r"step_([0-9]{8,})")


class CheckpointManager:
    """Checkpoints ``directory/step_00000010`` and so on. ``save`` and ``load`` are collective over ``group``.

    A step exists when its manifest does; there is no pointer file that could disagree. Older steps go only after a newer one is committed.

    Args:
        directory: a path on a file system all ranks share, an address such as ``s3://bucket/run``, or a `mcore_ckpt.storage.Folder`.
            It need not exist.
        keep: how many of the newest steps stay; None for all.
        group: None for the default group, or for this process alone where torch.distributed is not initialised.
        format: as for `mcore_ckpt.save`.

    Raises:
        ValueError: ``keep`` below 1, or an unknown format.
    """

    def __init__(
        self, directory: str | Path | Folder, *, keep: int | None = 3, group: dist.ProcessGroup | None = None, format: str = "native"
    ) -> None:
        if keep is not None and keep < 1:
            raise ValueError(f"keep={keep} must be at least 1, or None to keep all")
        self._folder = open_folder(directory)
        self.keep = keep
        check_format(format)
        self._format, self._cache = format, PlanCache()
        self._group = group
        self._pending: AsyncRequest | None = None

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
        """Save ``state`` as ``step``, then remove what is older than the newest ``keep``; see `mcore_ckpt.save`.

        A pending asynchronous save is committed first: steps appear in the order in which they were saved.

        Raises:
            CheckpointingException: the step exists, or the save failed on some rank. The older steps are all still there.
        """
        if type(step) is not int or step < 0:
            raise ValueError(f"step={step!r} must be an int of at least 0")
        self.wait()
        request = run_save(state, self.folder(step), extra, self._group, self._format, asynchronous, DEFAULT_FILE_BYTES, self._cache)
        if request is None:
            self._prune()
        else:
            request.then(self._prune)
        self._pending = request
        return request

    def wait(self) -> None:
        """Commit a pending asynchronous save, if there is one. Collective."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()

    def load(
        self, state: Mapping[str, Any], step: int | None = None, *, strict: bool = True, verify: bool = True
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
        if self.keep is None or Control(self._group).rank:
            return
        committed = self.steps()
        gone = set(committed[: -self.keep])
        # Folders without a manifest that are older than what was just committed are saves that never finished.
        gone |= {step for step in self._present() if step < committed[-1] and step not in committed}
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

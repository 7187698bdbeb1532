# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A folder of numbered checkpoints, of which the newest few are kept."""

import re
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mcore_ckpt._control import Control
from mcore_ckpt._errors import CheckpointingException
from mcore_ckpt._load import load
from mcore_ckpt._save import AsyncRequest, save
from mcore_ckpt._storage import remove_file, sync_folder
from mcore_ckpt.manifest import MANIFEST_NAME, is_checkpoint

__all__ = ["CheckpointManager"]

_STEP = re.compile(r"step_([0-9]{8,})")


class CheckpointManager:
    """Checkpoints ``directory/step_00000010`` and so on. ``save`` and ``load`` are collective over ``group``.

    A step exists when its manifest does; there is no pointer file that could disagree. Older steps go only after a newer one is committed.

    Args:
        directory: need not exist; on a file system all ranks share.
        keep: how many of the newest steps stay; None for all.
        group: None for the default group, or for this process alone where torch.distributed is not initialised.
    """

    def __init__(self, directory: str | Path, *, keep: int | None = 3, group: dist.ProcessGroup | None = None) -> None:
        if keep is not None and keep < 1:
            raise ValueError(f"keep={keep} must be at least 1, or None to keep all")
        self.directory = Path(directory)
        self.keep = keep
        self._group = group
        self._pending: AsyncRequest | None = None

    def path(self, step: int) -> Path:
        """Folder of a step."""
        return self.directory / f"step_{step:08d}"

    def steps(self) -> list[int]:
        """Committed steps, ascending, as this rank sees the folder now."""
        return sorted(step for step, path in self._folders().items() if is_checkpoint(path))

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
        if asynchronous:
            self._pending = save(state, self.path(step), extra=extra, group=self._group, asynchronous=True)
            self._pending.then(self._prune)
            return self._pending
        save(state, self.path(step), extra=extra, group=self._group)
        self._prune()
        return None

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
        step = control.run(f"finding a step in {self.directory}", lambda: self._choose(step) if control.rank == 0 else None)[0]
        assert step is not None
        return step, load(state, self.path(step), strict=strict, verify=verify, group=self._group)

    def _choose(self, step: int | None) -> int:
        steps = self.steps()
        if not steps:
            raise CheckpointingException(f"{self.directory} holds no checkpoint")
        if step is None:
            return steps[-1]
        if step not in steps:
            raise CheckpointingException(f"{self.directory} has no step {step}; it has {steps}")
        return step

    def _folders(self) -> dict[int, Path]:
        if not self.directory.is_dir():
            return {}
        matches = ((_STEP.fullmatch(entry.name), entry) for entry in self.directory.iterdir())
        return {int(match[1]): entry for match, entry in matches if match and self.path(int(match[1])) == entry}

    def _prune(self) -> None:
        if self.keep is None or Control(self._group).rank:
            return
        committed = self.steps()
        gone = set(committed[: -self.keep])
        # Folders without a manifest that are older than what was just committed are saves that never finished.
        gone |= {step for step in self._folders() if step < committed[-1] and step not in committed}
        for step in sorted(gone):
            try:
                # Without its manifest a step is no checkpoint: no reader meets a half-removed one.
                remove_file(self.path(step) / MANIFEST_NAME)
                sync_folder(self.path(step))
                shutil.rmtree(self.path(step))
            except OSError as error:
                warnings.warn(f"could not remove old checkpoint {self.path(step)}: {error}", RuntimeWarning, stacklevel=3)

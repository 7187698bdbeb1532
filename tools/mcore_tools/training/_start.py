# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Where a run begins."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mcore_ckpt import CheckpointingException, CheckpointManager, find_mismatches, load
from mcore_ckpt.inspect import resolve_folder
from mcore_ckpt.manifest import is_checkpoint, read_manifest
from mcore_ckpt.storage import Folder
from mcore_parallel.optim import MegatronOptimizer
from mcore_tools.recipes import LoadConfig
from mcore_tools.training._conversion import stored_dtypes
from mcore_tools.training._pretrained import HuggingFaceFolder, is_huggingface
from mcore_tools.training._stored import fill_model
from mcore_tools.training._upcycling import Upcycling

_OPTIMIZER = "optimizer."
Source = CheckpointManager | Folder | HuggingFaceFolder
"""A folder of steps, one checkpoint, or a published model."""


def find_source(
    config: LoadConfig, own: CheckpointManager, *, may_be_local: bool = False, group: dist.ProcessGroup | None = None
) -> Source | None:
    """The folder of steps, the checkpoint or the Hugging Face folder that a run begins with; None for its own step, or random weights.

    Args:
        config: what it begins with.
        own: the checkpoints of the run.
        may_be_local: its steps may also lie on the nodes; ``load.required`` is then judged when these are read.
        group: ranks that load together; None for all.

    Raises:
        ValueError: there is none, and ``config`` wants one.
    """
    if own.latest() is not None:
        return None
    if not config.path:
        if config.required and not may_be_local:
            raise ValueError(nothing_to_load(str(own.directory)))
        return None
    return find_base(config, group)


def nothing_to_load(places: str) -> str:
    """Why ``load.required`` refuses a run, whose steps would lie in ``places``."""
    return (
        f"load.required=true, and {places} holds no checkpoint; set output to the folder of the run that is to go on, "
        "load.path to what it begins with, or load.required=false"
    )


def find_base(config: LoadConfig, group: dist.ProcessGroup | None = None) -> Source:
    """What ``config.path`` names: a folder of steps, a checkpoint or a Hugging Face folder, read by the ranks of ``group``, None for all.

    Raises:
        ValueError: there is none, or not what ``config`` wants of it.
    """
    if is_huggingface(config.path):
        if config.take != "weights" or config.step is not None:
            raise ValueError(
                f"load.take={config.take!r} and load.step={config.step} choose from a run, and load.path={config.path!r} is a Hugging Face "
                "folder, which has weights only; set load.take=weights load.step=none"
            )
        return HuggingFaceFolder(directory=Path(config.path))
    path = steps_folder(config.path)
    try:
        newest = resolve_folder(path)
    except CheckpointingException as error:
        raise ValueError(f"load.path={config.path!r} has nothing to begin with: {error}; name a checkpoint or a folder of steps") from None
    check_names(newest, config.path)
    manager = CheckpointManager(path, group=group)
    steps = [] if is_checkpoint(path) else manager.steps()
    if config.step is not None and config.step not in steps:
        contents = f"has {steps}; name one of them" if steps else "is one checkpoint; set load.step=none"
        raise ValueError(f"load.step={config.step} is not in load.path={config.path!r}, which {contents}")
    return manager if steps else newest


def steps_folder(path: str | Path) -> str | Path:
    """The folder of steps of a run where ``path`` is that of the run; else ``path``."""
    inside = Path(path) / "checkpoints"
    return inside if inside.is_dir() and not is_checkpoint(path) else path


def check_names(folder: Folder, path: str) -> None:
    """Refuse weights under names that no model here has; ``path`` named the folder.

    Raises:
        ValueError: says which command gives them ours.
    """
    names = read_manifest(folder).tensors
    if any(".self_attention.linear_" in name or name.endswith("word_embeddings.weight") for name in names):
        remedy = f"is a checkpoint of Megatron-LM; `mcore convert import-megatron {path} OUT` makes one that runs begin with"
    elif any(name.startswith("model.") for name in names):
        remedy = f"names its weights model.*; `mcore convert edit {path} OUT --rename 'model\\.(.*)' '\\1'` makes a copy without"
    else:
        return
    raise ValueError(f"{path} {remedy}")


def first_folder(config: LoadConfig, own: CheckpointManager, source: Source | None = None) -> Folder | HuggingFaceFolder | None:
    """The checkpoint whose weights a run takes; None for random ones.

    Args:
        config: what it begins with.
        own: the checkpoints of the run.
        source: of ``find_source``.
    """
    if isinstance(source, Folder | HuggingFaceFolder):
        return source
    manager, step = (own, None) if source is None else (source, config.step)
    step = manager.latest() if step is None else step
    return None if step is None else manager.folder(step)


class RunCheckpoints:
    """The checkpointer of a run: saves its steps, and loads the newest of them, or what it begins with while there is none.

    Args:
        config: what that is.
        own: the checkpoints of the run.
        source: of ``find_source``.
        optimizer: of the run.
        described: what each step says of its model beside (``extra``), so that it can be exported.
        group: ranks that save and load together; None for all.
        progress: what it also says, made of what the trainer says of the step.
        asynchronous: save beside training; whoever made ``own`` commits by its ``wait()``.
        upcycling: what makes the model of the dense one in ``source``; None where that is the model itself.
    """

    def __init__(
        self,
        config: LoadConfig,
        own: CheckpointManager,
        source: Source | None,
        optimizer: MegatronOptimizer,
        described: Mapping[str, Any] | None = None,
        group: dist.ProcessGroup | None = None,
        *,
        progress: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
        asynchronous: bool = False,
        upcycling: Upcycling | None = None,
    ) -> None:
        self._upcycling = upcycling
        self._group, self._progress, self._asynchronous = group, progress, asynchronous
        self._config, self._own, self._source, self._optimizer = config, own, source, optimizer
        self._described = described or {}
        self.loaded = ""
        """What was loaded, in words."""

    def latest(self) -> int | None:
        """The newest step, None when there is nothing to load."""
        return self.newest_own() if self._source is None else self._config.step or 0

    def newest_own(self) -> int | None:
        """The newest step of the run itself; None while there is none."""
        return self._own.latest()

    def save(self, step: int, state: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
        """Save a step of the run."""
        progress = {} if self._progress is None else self._progress(extra)
        self._own.save(step, state, {**self._described, **progress, **extra}, asynchronous=self._asynchronous)

    def load(self, state: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        """Fill ``state``; returns the step to go on after, and the extra values that the trainer asks for. Collective.

        Raises:
            CheckpointingException: it does not fit, or cannot be read.
            ValueError: the checkpoint has weights that the model has not, or no position to go on from.
        """
        if self._source is None:
            step, extra = self._own.load(state)
            self.loaded = f"step {step} of {self._own.directory}"
            return step, extra
        if self._config.take == "all":
            return self._position(*self._fill(self._source, state))
        wanted = {name: value for name, value in state.items() if not name.startswith(_OPTIMIZER)}
        stored = wanted if self._upcycling is None else self._upcycling.dense(wanted)
        folder, extra = self._fill(self._source, stored)
        if self._upcycling is not None:
            self._upcycling.fill(wanted, stored)
        self._optimizer.reload_model_params()
        if self._config.take == "weights":
            return 0, {"trainer": {}, "optimizer_step": 0}
        step, extra = self._position(folder, extra)
        return step, {"trainer": extra["trainer"], "optimizer_step": 0}

    def _fill(self, source: Source, wanted: Mapping[str, Any]) -> tuple[Folder | HuggingFaceFolder, dict[str, Any]]:
        """All that is wanted; what is there beside weights is left only where none of it is wanted."""
        if isinstance(source, HuggingFaceFolder):
            fill_model(wanted, source)
            self.loaded = f"weights of {source}"
            return source, {}
        strict = self._config.take == "all"
        folder = first_folder(self._config, self._own, source)
        assert isinstance(folder, Folder), "a folder of steps has one"
        with nullcontext(wanted) if strict else stored_dtypes(wanted, folder) as stored:
            if isinstance(source, CheckpointManager):
                step, extra = source.load(stored, self._config.step, strict=strict)
                folder = source.folder(step)
            else:
                extra = load(stored, folder, strict=strict, group=self._group)
        unexpected = () if strict else find_mismatches(wanted, folder, group=self._group).unexpected
        left = [name for name in unexpected if not name.startswith(_OPTIMIZER)]
        if left:
            named = ", ".join(left[:8]) + (" ..." if len(left) > 8 else "")
            raise ValueError(
                f"{folder} has weights that this model has not: {named}; make model that of its run.yaml, or leave them out of a copy "
                "(mcore-ckpt edit --drop)"
            )
        self.loaded = f"{self._config.take} of {folder}"
        return folder, extra

    def _position(self, folder: Folder | HuggingFaceFolder, extra: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if "trainer" not in extra:
            raise ValueError(f"load.take={self._config.take!r} goes on with a run, and {folder} is of none; set load.take=weights")
        return extra["trainer"]["step"], extra

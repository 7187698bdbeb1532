# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Checkpoints of a run on its nodes, beside those that outlive them."""

import dataclasses
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
import yaml

from mcore_ckpt import LocalCheckpoints
from mcore_tools.recipes import RunConfig, config_text
from mcore_tools.training._start import RunCheckpoints, nothing_to_load
from mcore_tools.training._stored import check_model, model_of_run
from mcore_tools.whole_file import write_whole

_RUN_NAME = "local_checkpoints"
_RUN = "run"


def open_local(config: RunConfig) -> tuple[LocalCheckpoints, str] | None:
    """The steps of a run on its nodes, and their folder; None where it keeps none. Collective.

    Raises:
        ValueError: more copies than nodes; nothing was written.
    """
    train = config.train
    if not train.local_checkpoint_interval:
        return None
    num_nodes = len(set(_gather(socket.gethostname())))
    if train.local_checkpoint_copies > num_nodes:
        raise ValueError(
            f"train.local_checkpoint_copies={train.local_checkpoint_copies} must be at most the number of nodes, {num_nodes}; lower it"
        )
    output = Path(config.output)
    folder = Path(train.local_checkpoint_folder) / f"{output.resolve().name}-{_run_name(output)}"
    copies, keep = train.local_checkpoint_copies, train.local_checkpoints_kept
    return LocalCheckpoints(folder, copies=copies, keep=keep, timeout_s=config.guard.limit_s), str(folder)


def may_be_local(config: RunConfig) -> bool:
    """Whether steps of the run in ``config.output`` may lie on the nodes: it keeps some there, and has begun."""
    return bool(config.train.local_checkpoint_interval) and (Path(config.output) / _RUN_NAME).exists()


class NodeCheckpoints:
    """The checkpointer of a run that also keeps steps on its nodes: saves like the other one, and loads the newest step of both.

    Args:
        config: the run.
        steps: its other checkpointer.
        local: of ``open_local``.
    """

    def __init__(self, config: RunConfig, steps: RunCheckpoints, local: tuple[LocalCheckpoints, str]) -> None:
        self._config, self._steps = config, steps
        self._local, self._folder = local
        self._run = yaml.safe_load(config_text(config))
        self.loaded = ""
        """What was loaded, and why it was no newer step, in words."""

    def latest(self) -> int:
        """The newest step that outlives the nodes; 0 where there is none."""
        return self._steps.newest_own() or 0

    def save(self, step: int, state: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
        """Save a step of the run."""
        self._steps.save(step, state, extra)

    def keep(self, step: int, state: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
        """Keep a step on the nodes; returns once the state is copied to host memory. Collective.

        Raises:
            CheckpointingException: the one before could not be kept.
        """
        self._local.save(step, state, {_RUN: self._run, **extra}, asynchronous=True)

    def clear(self) -> None:
        """Remove the steps on the nodes, after a newer one was saved. Collective."""
        self._local.clear()

    def load(self, state: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        """Fill ``state`` from the newest step, or with what the run begins with. Collective.

        Raises:
            CheckpointingException: it does not fit, or cannot be read.
            ValueError: it is of another model, or there is none and ``load.required`` wants one.
        """
        required = self._config.load.required and not self._config.load.path
        other = _Fallback(self._steps, f"{Path(self._config.output) / 'checkpoints'} or {self._folder}" if required else "")
        step, extra = self._local.load(state, other)
        self.loaded = other.steps.loaded
        if not other.taken:
            self.loaded = f"step {step} in {self._folder}"
            check_model(self._config, *model_of_run(extra[_RUN]), self.loaded)
        if self._local.skipped:
            self.loaded = f"{self.loaded or 'the beginning'}: in {self._folder} {self._local.skipped}"
        return step, extra


@dataclasses.dataclass
class _Fallback:
    """What is loaded where the nodes have nothing newer; steps of the run itself count, what it begins with does not."""

    steps: RunCheckpoints
    required: str = ""
    """Where a step must lie; empty where random weights will do."""
    taken: bool = False

    def latest(self) -> int:
        return self.steps.newest_own() or 0

    def load(self, state: Mapping[str, Any], /) -> tuple[int, dict[str, Any]]:
        self.taken = True
        if self.steps.latest() is None:
            if self.required:
                raise ValueError(nothing_to_load(self.required))
            # The weights are those of the seed.
            return 0, {"trainer": {}, "optimizer_step": 0}
        return self.steps.load(state)


def _run_name(output: Path) -> str:
    """Of the run in this folder, which the first rank gives it: steps of a run whose folder was removed are not of the next one."""
    name = ""
    if not dist.is_initialized() or dist.get_rank() == 0:
        file = output / _RUN_NAME
        if not file.exists():
            write_whole(file, secrets.token_hex(4))
        name = file.read_text(encoding="ascii")
    return _gather(name)[0]


def _gather(text: str) -> list[str]:
    """One of each rank."""
    if not dist.is_initialized():
        return [text]
    texts = [""] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    return texts

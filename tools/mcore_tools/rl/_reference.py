# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The weights from which a run measures its divergence, and their checkpoints."""

from pathlib import Path

import torch.distributed as dist

from mcore_ckpt import CheckpointManager
from mcore_parallel.training import model_state
from mcore_rl import FrozenWeights
from mcore_tools.assembly import Parts
from mcore_tools.recipes import RunConfig
from mcore_tools.rl._left_over import forget_after

REFERENCE = "reference"
"""Folder of a run with these weights, where ``rl.kl_beta``, ``rl.kl_in_reward`` or ``rl.dpo`` asks for them."""


class RunReference:
    """The first weights of a run; with ``rl.ref_model_sync_steps`` they follow the policy.

    A step of the folder is that of the policy with which they were saved; they stay the same until the next one.

    Args:
        config: the run.
        parts: of the policy.
        group: ranks that save them; None for all.
    """

    def __init__(self, config: RunConfig, parts: Parts, group: dist.ProcessGroup | None = None) -> None:
        assert config.rl is not None
        self._parts, self._rl = parts, config.rl
        # One that is newer than the policy's checkpoint, and the one before.
        self._checkpoints = CheckpointManager(Path(config.output) / REFERENCE, keep=2, group=group)
        self._has_changed = True
        self.frozen: FrozenWeights | None = None

    def begin(self) -> None:
        """With the weights of the policy."""
        forget_after(self._checkpoints, -1, self._parts.groups)
        self.frozen = FrozenWeights(self._parts.model)
        self.save(0)

    def load(self, step: int) -> None:
        """Those of a step of the policy, whose own weights are not loaded yet.

        Raises:
            ValueError: nothing was saved up to then.
        """
        if not any(saved <= step for saved in self._checkpoints.steps()):
            raise ValueError(
                f"{self._checkpoints.directory} has no weights of step {step} or before: the run began without a reference; begin another "
                "one with load.path, or set rl.kl_beta=0, rl.kl_in_reward=0 and rl.dpo=none"
            )
        forget_after(self._checkpoints, step, self._parts.groups)
        self._checkpoints.load(model_state(self._parts.model, self._parts.groups))
        self.frozen, self._has_changed = FrozenWeights(self._parts.model), False

    def follow(self, step: int) -> None:
        """After an iteration: the policy, where that is its turn."""
        every = self._rl.ref_model_sync_steps
        if every and step % every == 0:
            assert self.frozen is not None
            self.frozen.refresh(self._rl.ref_model_mixup_alpha)
            self._has_changed = True

    def save(self, step: int) -> None:
        """Before the policy's step, where they are others than those that were saved."""
        if self._has_changed and self.frozen is not None:
            with self.frozen.swapped():
                self._checkpoints.save(step, model_state(self._parts.model, self._parts.groups))
            self._has_changed = False

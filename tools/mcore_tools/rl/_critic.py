# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The critic of a run with PPO: its parts, its first weights, its checkpoints."""

import dataclasses
from pathlib import Path

import torch
import torch.distributed as dist

from mcore_ckpt import CheckpointManager
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import add_value_head
from mcore_parallel.optim import MegatronOptimizer
from mcore_parallel.training import TensorShard, model_state, optimizer_state
from mcore_rl import Critic, ValueObjective
from mcore_tools.assembly import Parts, build_stage
from mcore_tools.recipes import RunConfig
from mcore_tools.rl._left_over import forget_after

CRITIC = "critic"
"""Folder of a run with the checkpoints of its critic, one for each of the policy's newest two."""


class RunCritic:
    """A model of the policy's layout with a value head; its optimizer is the policy's but for the learning rate.

    Args:
        config: the run.
        parts: of the policy.
        device: of the critic.
        group: ranks that save it; None for all.
    """

    def __init__(self, config: RunConfig, parts: Parts, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        assert config.rl is not None
        settings = config.rl.critic
        # Heads that predict further tokens give no value.
        model = build_stage(dataclasses.replace(config, model=dataclasses.replace(config.model, mtp_num_layers=0)), parts.groups, device)
        head = add_value_head(model)
        sliced = config.optimizer.use_distributed_optimizer
        wanted = config.ddp or DistributedDataParallelConfig(use_distributed_optimizer=sliced)
        sync = DistributedDataParallel(wanted, model, parts.groups)
        rule = dataclasses.replace(config.optimizer, lr=settings.lr, min_lr=min(config.optimizer.min_lr, settings.lr))
        self._optimizer = MegatronOptimizer(rule, sync, parts.groups)
        self._policy, self._groups, self._sync = parts.model, parts.groups, sync
        self._checkpoints = CheckpointManager(Path(config.output) / CRITIC, keep=2, group=group)
        objective = ValueObjective(head=head, clip=settings.clip)
        self.critic = Critic(model=model, objective=objective, sync=sync, optimizer=self._optimizer, lr=settings.lr)

    def begin(self) -> None:
        """With the weights of the policy."""
        forget_after(self._checkpoints, -1, self._groups)
        own = {**dict(self._policy.named_parameters()), **dict(self._policy.named_buffers())}
        with torch.no_grad():
            for name, value in (*self.critic.model.named_parameters(), *self.critic.model.named_buffers()):
                if name in own:
                    value.copy_(own[name])
        self._optimizer.reload_model_params()

    def load(self, step: int) -> None:
        """What was saved with a step of the policy.

        Raises:
            ValueError: nothing was.
        """
        if step not in (steps := self._checkpoints.steps()):
            raise ValueError(
                f"{self._checkpoints.directory} has steps {steps}, and the policy is at {step}: the run began without rl.gae; begin "
                "another one with load.path, or set rl.gae=none"
            )
        forget_after(self._checkpoints, step, self._groups)
        _, extra = self._checkpoints.load(self._state(), step)
        self._optimizer.load_step_count(int(extra["optimizer_step"]))

    def save(self, step: int) -> None:
        """Before the policy's step, so that each of those has its critic."""
        self._checkpoints.save(step, self._state(), {"optimizer_step": self._optimizer.step_count})

    def close(self) -> None:
        """Give up hooks."""
        self._sync.close()

    def _state(self) -> dict[str, TensorShard | list[TensorShard]]:
        return {**model_state(self.critic.model, self._groups), **optimizer_state(self._optimizer, self._groups)}

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The critic of a run with PPO: its parts, its first weights, its checkpoints."""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_ckpt import CheckpointManager
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.graphs import GraphedModel
from mcore_parallel.models import GPTModel, add_value_head
from mcore_parallel.optim import MegatronOptimizer
from mcore_parallel.pipeline import ModelChunks
from mcore_parallel.training import TensorShard, model_state, optimizer_state
from mcore_rl import Critic, ValueObjective, refit
from mcore_tools.assembly import Parts, build_stage, graph_stage, shard_stage
from mcore_tools.recipes import RunConfig
from mcore_tools.rl._left_over import forget_after

CRITIC = "critic"
"""Folder of a run with the checkpoints of its critic, one for each of the policy's newest two."""


class RunCritic:
    """A model of the policy's layout with a value head, sharded as the policy is; its optimizer is the policy's but for the learning rate.

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
        rule = dataclasses.replace(config.optimizer, lr=settings.lr, min_lr=min(config.optimizer.min_lr, settings.lr))
        self._replicated: DistributedDataParallel | None = None
        self.graphs: GraphedModel | None = None
        if config.data_parallel == "ddp":
            wanted = config.ddp or DistributedDataParallelConfig(use_distributed_optimizer=rule.use_distributed_optimizer)
            sync = self._replicated = DistributedDataParallel(wanted, model, parts.groups)
            # Those of the policy, which has heads that the critic has not.
            held, names = () if parts.graphs is None else parts.graphs.blocks, dict(model.named_modules())
            self.graphs = graph_stage(config, model, [name for name in held if name in names])
        else:
            assert isinstance(model, GPTModel | ModelChunks), "RunConfig refuses encoders with rl"
            model = sync = shard_stage(config, model, parts.groups)
            rule = dataclasses.replace(rule, use_distributed_optimizer=True)
        self._optimizer = MegatronOptimizer(rule, sync, parts.groups)
        self._policy, self._groups = parts.model, parts.groups
        self._checkpoints = CheckpointManager(Path(config.output) / CRITIC, keep=2, group=group)
        objective = ValueObjective(head=head, clip=settings.clip)
        self.critic = Critic(model=model, objective=objective, sync=sync, optimizer=self._optimizer, lr=settings.lr)

    def begin(self) -> None:
        """With the weights of the policy."""
        forget_after(self._checkpoints, -1, self._groups)
        if self._replicated is None:
            # Its value head may have the two cut at other places.
            refit(self._policy, self._groups, _Shards(model_state(self.critic.model, self._groups)))
        else:
            self._copy()
        self._optimizer.reload_model_params()

    @torch.no_grad()
    def _copy(self) -> None:
        """From the policy on this rank, which has the same parts of them."""
        own = {**dict(self._policy.named_parameters()), **dict(self._policy.named_buffers())}
        for name, value in (*self.critic.model.named_parameters(), *self.critic.model.named_buffers()):
            if name in own:
                value.copy_(own[name])

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
        """Give up graphs and hooks."""
        if self.graphs is not None:
            self.graphs.remove()
        if self._replicated is not None:
            self._replicated.close()

    def _state(self) -> dict[str, TensorShard | list[TensorShard]]:
        return {**model_state(self.critic.model, self._groups), **optimizer_state(self._optimizer, self._groups)}


class _Shards:
    """A sharded model as a sink of weights: this rank's boxes of them."""

    def __init__(self, state: Mapping[str, TensorShard | list[TensorShard]]) -> None:
        self._state = state

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]], /) -> None:
        """Keep what lies in the boxes of each whole weight; weights without a box here are another rank's, or of no use."""
        for name, whole in weights:
            boxes = self._state.get(name, [])
            for box in boxes if isinstance(boxes, list) else [boxes]:
                within = tuple(slice(begin, begin + size) for begin, size in zip(box.offset, box.data.shape, strict=True))
                box.data.copy_(whole[within])

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Iterations of PPO on rollouts that nobody has to draw; layers of policy and critic may be replayed from graphs."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from mcore_parallel import ProcessGroups
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.graphs import GraphedModel, GraphReport
from mcore_parallel.models import GPTModel, TransformerConfig, add_value_head
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_rl import (
    Critic,
    FrozenWeights,
    GAEConfig,
    GRPOConfig,
    GRPOObjective,
    Learner,
    MemorySwitch,
    PackingConfig,
    PackingContext,
    TokenRollout,
    ValueObjective,
)
from mcore_rl._loop._update import update
from mcore_rl._reference import token_logprobs
from mcore_rl._rollouts._collect import Collection

# The plain formula of attention: the others add their gradients up in any order on a GPU.
SIZES = TransformerConfig(
    num_layers=2,
    hidden_size=128,
    num_attention_heads=4,
    ffn_hidden_size=256,
    vocab_size=256,
    init_method_std=0.1,
    attention_backend="reference",
)
PACKING = PackingConfig(bin_size=64, max_sequences_per_bin=12, device_bounds=True)


class StandingEngine:
    """An engine that draws nothing; conforms to what `MemorySwitch` asks."""

    is_suspended = False

    def suspend(self) -> None:
        self.is_suspended = True

    def resume(self) -> None:
        self.is_suspended = False


@dataclass
class Learnt:
    """What iterations left behind."""

    losses: list[float] = field(default_factory=list)
    """Of all updates, and their gradients' norms; of the critic, too."""
    logprobs: list[Tensor] = field(default_factory=list)
    """Of the policy and of its reference, behind each iteration."""
    weights: list[Tensor] = field(default_factory=list)
    """Of policy and critic in the end."""
    reports: list[GraphReport] = field(default_factory=list)
    """Of policy and critic."""
    calls: list[int] = field(default_factory=list)
    """Of their layers."""


def iterate(
    count: int,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float64,
    packing: PackingConfig | None = PACKING,
    memory: MemorySwitch | None = None,
    graphs: Callable[[nn.Module], GraphedModel] | None = None,
    meanwhile: Callable[[Learner], None] = lambda learner: None,
) -> Learnt:
    """Iterations of four updates, each scored by policy, reference and critic before; the reference follows the policy half of the way.

    Args:
        count: of iterations.
        device: of the models.
        dtype: theirs.
        packing: of the rollouts; None for rows.
        memory: what the trainer gives up while answers are drawn; None for nothing.
        graphs: replays the layers of a model; None for none.
        meanwhile: called while answers are drawn.
    """
    memory = MemorySwitch() if memory is None else memory
    config = GRPOConfig(
        num_groups=4,
        group_size=8,
        seq_len=16,
        micro_batch_size=6,
        num_mini_batches=2,
        num_epochs=2,
        packing=packing,
        gae=GAEConfig(),
        kl_in_reward=0.05,
    )
    groups, learnt, engine = ProcessGroups.single(), Learnt(), StandingEngine()
    policy, values = (GPTModel(SIZES, groups, device=device, dtype=dtype, seed=seed) for seed in (3, 5))
    head = add_value_head(values)
    ddp = DistributedDataParallelConfig(gradient_accumulation_fusion=True)
    syncs = [DistributedDataParallel(ddp, model, groups) for model in (policy, values)]
    optimizers = [MegatronOptimizer(OptimizerConfig(lr=1e-3), sync, groups) for sync in syncs]
    learnt.calls = [0, 0]

    def count_call(model: int, *_: object) -> None:
        learnt.calls[model] += 1

    for number, model in enumerate((policy, values)):
        for layer in model.layers.values():
            layer.register_forward_hook(partial(count_call, number))
    held = [] if graphs is None else [graphs(model) for model in (policy, values)]
    critic = Critic(model=values, objective=ValueObjective(head=head), sync=syncs[1], optimizer=optimizers[1], lr=1e-3)
    reference = FrozenWeights(policy)
    learner = Learner(
        model=policy,
        groups=groups,
        objective=GRPOObjective(kl_beta=0.1),
        sync=syncs[0],
        optimizer=optimizers[0],
        reference=reference,
        critic=critic,
    )
    same = PackingContext.pack(_rollouts(0, 4)[0], PACKING).on(device).batches
    memory.training(engine)
    for number in range(count):
        with memory.generating(optimizer=optimizers[0], sync=syncs[0], engine=engine, critic=critic):
            meanwhile(learner)
        done = update(config, Collection.of(config, _rollouts(number, 4)), learner, 1e-3)
        learnt.losses += [value for report in (*done.policy, *done.critic) for value in (report.loss, report.grad_norm)]
        for scored in (policy, reference):
            learnt.logprobs += token_logprobs(scored, same, groups)
        if number == 0:
            reference.refresh(0.5)
    learnt.weights = [parameter.detach().clone() for model in (policy, values) for parameter in model.parameters()]
    learnt.reports = [graphed.report() for graphed in held]
    for graphed in held:
        graphed.remove()
    for sync in syncs:
        sync.close()
    return learnt


def _rollouts(seed: int, num_groups: int) -> list[list[TokenRollout]]:
    """Groups of eight, of other lengths each time."""
    return [[_rollout(random.Random(f"{seed} {group} {number}"), group) for number in range(8)] for group in range(num_groups)]


def _rollout(draws: random.Random, group: int) -> TokenRollout:
    length = draws.randint(4, 15)
    return TokenRollout(
        trajectory=[draws.randrange(SIZES.vocab_size) for _ in range(length)],
        reward=draws.random(),
        generation_mask=[position > 1 for position in range(length)],
        logprobs=[-4.0 - draws.random() / 10] * (length - 2),
        env_id="env",
        problem_id=f"problem {group}",
    )

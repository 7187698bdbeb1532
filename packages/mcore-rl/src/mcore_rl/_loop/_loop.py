# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Roll out, judge, update, refit; again."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from mcore_parallel.models import check_follows_prefixes, check_takes_device_bounds
from mcore_parallel.training import TrainReport
from mcore_rl._aggregation import Aggregation
from mcore_rl._config import GRPOConfig
from mcore_rl._loop._engine_share import draw_share
from mcore_rl._loop._policy_forward import check_policy_forward
from mcore_rl._loop._update import Learner, is_distillation, update
from mcore_rl._loop._vocabulary import check_vocabulary, num_drawn, num_trained
from mcore_rl._objective._advantage import AdvantageConfig
from mcore_rl._objective._correction import MismatchReport
from mcore_rl._objective._objective import GRPOObjective
from mcore_rl._objective._preference import DPOObjective
from mcore_rl._ranks._rendezvous import agree
from mcore_rl._refit._refit import WeightSink
from mcore_rl._refit._transfer import refit
from mcore_rl._rollouts._collect import Collection, Drawn, draw, exchange, told_to_others
from mcore_rl._rollouts._statistics import EnvironmentReport, environment_reports, group_rewards, truncated_share
from mcore_rl._stability import experimental_api
from mcore_rl._types import TokenRollout
from mcore_rl.agent import GroupedRolloutGenerator
from mcore_rl.inference import InferenceInterface

# What a teacher's divergence, which asks for no reward, does not read.
_FOR_REWARDS: dict[str, Any] = {
    "advantage": AdvantageConfig(), "gae": None, "aggregation": Aggregation(), "kl_in_reward": 0.0, "overlong": None, "reward_clip": None,
    "filter_equal_groups": False, "old_logprobs": "trainer", "replay_old_routing": False,
}  # fmt: skip


@experimental_api
@dataclass(frozen=True, kw_only=True)
class IterationReport:
    """What one iteration did; the same on every rank."""

    mean_reward: float
    std_reward: float
    mean_length: float
    """Generated tokens an answer."""
    num_rollouts: int
    num_dropped: int
    """Answers asked for that are missing: late, or their judge failed. Of pairs those of the pairs that are missing for it."""
    num_filtered: int
    """Groups of equal rewards that others replaced; of pairs those that none replaced, too."""
    updates: tuple[TrainReport, ...]
    """In their order; none where only the critic was trained, or on a rank that only serves."""
    rollout_s: float
    """With the hand-over of memory in both directions. Where engines are ahead of the trainer, what was waited for the rollouts."""
    train_s: float
    refit_s: float
    without_logprobs: float = 0.0
    """Share of the generated tokens of which the engine gave no log-probability; no correction weighs them."""
    to_generation_s: float = 0.0
    """Of ``rollout_s``, until the engine has the memory (``GRPOConfig.memory``)."""
    to_training_s: float = 0.0
    """Of ``rollout_s``, until the trainer has it again; copies that go on beside the training are not in it."""
    generate_s: float = 0.0
    """Of ``rollout_s``, until this rank's answers are judged. Where engines are ahead of the trainer, it is beside ``train_s`` instead."""
    exchange_s: float = 0.0
    """Of ``rollout_s``, until all ranks have the rollouts that they train on."""
    pack_s: float = 0.0
    """Of ``train_s``, until rollouts are in micro-batches on the device."""
    score_s: float = 0.0
    """Of ``train_s``, until the log-probabilities and values that the updates need are queued."""
    mismatch: MismatchReport | None = None
    """Of the log-probabilities of engine and trainer, over all tokens that are learnt from; None where nothing is compared."""
    critic_updates: tuple[TrainReport, ...] = ()
    """Of the critic of PPO."""
    lag: int = 0
    """Refits between the weights at which the first of the rollouts was begun and those that were trained on them."""
    token_lag: float | None = None
    """Mean over tokens of the refits between the weights that drew each and those that were trained on it; None where nobody says so."""
    tokens_by_lag: Mapping[int, int] = field(default_factory=dict)
    """How many tokens were drawn from weights of so many refits before those that were trained on them; empty where nobody says so."""
    max_length: int = 0
    """Of the longest answer, in tokens."""
    truncated: float = 0.0
    """Share of the answers that the limit of tokens ended."""
    group_similarity: float | None = None
    """How alike the answers of a group are: the share of their pairs of neighbouring tokens that two of them have in common, 1 where all
    are equal; None without two answers to a problem."""
    min_length: int = 0
    """Of the shortest answer."""
    std_length: float = 0.0
    """Of the lengths of the answers, in tokens."""
    lengths: tuple[int, ...] = ()
    """Of all answers, in tokens."""
    mean_turns: float = 1.0
    """Times that the policy wrote in a trajectory."""
    packing_efficiency: float | None = None
    """Places of the bins of all ranks that labels fill, mean over the updates of an epoch; None for rows."""
    group_rewards: tuple[tuple[float, float], ...] = ()
    """Mean and standard deviation of the rewards of each group."""
    environments: Mapping[str, EnvironmentReport] = field(default_factory=dict)
    """By ``env_id``."""
    examples: tuple[TokenRollout, ...] = ()
    """The best and the worst answer to the first problem."""

    @property
    def train(self) -> TrainReport:
        """The last update."""
        return self.updates[-1]


@experimental_api
def grpo_iteration(
    config: GRPOConfig,
    *,
    agent: GroupedRolloutGenerator,
    interface: InferenceInterface,
    engine: WeightSink,
    learner: Learner,
    lr: float,
    train_policy: bool = True,
) -> IterationReport:
    """One iteration of group-relative policy optimisation on every rank of ``learner.groups``.

    The ranks share the problems: each asks the engine it holds, then gets the answers that it trains on. Each update is one
    `train_step`, after the last of which every engine receives the new weights.

    An engine may span ranks, in a layout of its own of the same world. The first of them asks, the others follow
    (``MegatronLocal.drawing``), and the engines, which are the data-parallel ranks of that layout, share the problems.

    Args:
        config: sizes, advantages, number of updates.
        agent: poses problems and judges.
        interface: answers.
        engine: takes over the new weights.
        learner: the policy, its objective and its optimizer.
        lr: learning rate of the policy.
        train_policy: False trains the critic alone, as in the first iterations of PPO; nothing is refitted.

    Raises:
        ValueError: what cannot be trained on, before anything is generated, an engine that draws from more or fewer ids than the policy
            among it; a reward that is no finite number.
        RankTimeoutError: a rank has not drawn within ``config.rollout_timeout_s`` and ``learner.transfer.timeout_s`` more; named.
        RefitTimeoutError: a rank did not come to the refit within ``learner.transfer.timeout_s``; named.
        RuntimeError: rollouts failed on some rank, or it refused what it was to train on; none is there in time, or none of them counts.
    """
    model, groups = learner.model, learner.groups
    limit_s = config.rollout_timeout_s + learner.transfer.timeout_s
    takes_turns: dict[str, Any] = {"optimizer": learner.optimizer, "sync": learner.sync, "engine": engine, "critic": learner.critic}

    def check() -> None:
        check_iteration(config, learner)
        if not train_policy and learner.critic is None:
            raise ValueError("train_policy=False leaves nothing to train without a critic; pass Learner(critic=...)")
        config.memory.check(**takes_turns)

    agree(groups.world, limit_s, "an iteration", check)
    begin = time.perf_counter()
    with told_to_others(groups.world):
        config.memory.training(engine)
        with config.memory.generating(**takes_turns):
            begun = time.perf_counter()
            drawn = _draw(config, agent, interface, engine, learner)
            answered = time.perf_counter()
    # The trainer's memory comes back, and its state with it, while ranks that are done sooner wait for the others' answers.
    handed_over = time.perf_counter()
    collected = exchange(config, drawn, groups, next(model.parameters()).device, timeout_s=limit_s)
    rolled_out = time.perf_counter()
    done = update(config, collected, learner, lr, train_policy=train_policy)
    trained = time.perf_counter()
    if not done.policy and not done.critic:
        raise RuntimeError(f"no token of the rollouts counts: mask_truncated={config.mask_truncated}, and all are truncated or empty")
    if done.policy:
        refit(model, groups, engine, learner.transfer)
    return iteration_report(
        config,
        collected,
        updates=done.policy,
        critic_updates=done.critic,
        rollout_s=rolled_out - begin,
        train_s=trained - rolled_out,
        refit_s=time.perf_counter() - trained,
        to_generation_s=begun - begin,
        to_training_s=handed_over - answered,
        generate_s=answered - begun,
        exchange_s=rolled_out - handed_over,
        pack_s=done.pack_s,
        score_s=done.score_s,
        mismatch=done.mismatch,
    )


def _draw(config: GRPOConfig, agent: GroupedRolloutGenerator, interface: InferenceInterface, engine: WeightSink, learner: Learner) -> Drawn:
    """This rank's groups; with a vocabulary that does not fit, which a pipeline stage without an output layer cannot see, the failure."""
    failure: Exception | None = None
    if isinstance(learner.objective, GRPOObjective):
        try:
            check_vocabulary(num_drawn(engine), num_trained(learner.model))
        except ValueError as error:
            failure = error
    world = learner.groups.world
    return draw_share(interface, engine, world, config.num_groups, partial(draw, config, agent, interface), failure=failure)


def iteration_report(config: GRPOConfig, collected: Collection, *, num_asked: int | None = None, **parts: Any) -> IterationReport:
    """What the rollouts say of an iteration, with the other fields of its report; None for as many answers as the config asks for."""
    return IterationReport(**rollout_means(config, collected, num_asked), **parts)


def rollout_means(config: GRPOConfig, collected: Collection, num_asked: int | None) -> dict[str, Any]:
    """The fields of a report that the rollouts alone say."""
    flat, (shared, most) = collected.headers, collected.pair_counts
    rewards = torch.tensor([header.reward for header in flat], dtype=torch.float64)
    lengths = [header.num_generated for header in flat]
    filled = [planned.bins.efficiency for planned in collected.updates if planned.bins is not None]
    return {
        "mean_reward": rewards.mean().item(),
        "std_reward": rewards.std(correction=0).item(),
        "mean_length": sum(lengths) / len(flat),
        "max_length": max(lengths),
        "min_length": min(lengths),
        "std_length": torch.tensor(lengths, dtype=torch.float64).std(correction=0).item(),
        "lengths": tuple(lengths),
        "mean_turns": sum(header.num_turns for header in flat) / len(flat),
        "packing_efficiency": sum(filled) / len(filled) if filled else None,
        "without_logprobs": sum(header.num_generated for header in flat if not header.has_logprobs) / max(1, sum(lengths)),
        "truncated": truncated_share(collected.groups),
        "group_similarity": shared / most if most else None,
        "group_rewards": group_rewards(collected.groups),
        "environments": environment_reports(collected.groups),
        "examples": collected.examples,
        "num_rollouts": len(flat),
        "num_dropped": (config.num_groups * config.group_size if num_asked is None else num_asked) - len(flat) - 2 * collected.num_unpaired,
        "num_filtered": collected.num_filtered,
    }


def check_iteration(config: GRPOConfig, learner: Learner) -> None:
    """Whether an iteration can be trained on, before it is generated."""
    objective, reference, groups = learner.objective, learner.reference, learner.groups
    check_policy_forward(learner.model)
    count = config.num_groups * config.group_size
    if count % (groups.dp.size * config.num_mini_batches):
        raise ValueError(
            f"num_groups * group_size = {count} must be divisible by dp={groups.dp.size}"
            + (f" * num_mini_batches={config.num_mini_batches}" if config.num_mini_batches > 1 else "")
        )
    if config.packing is not None and config.packing.share_prompts:
        _check_models(learner, check_follows_prefixes, "share_prompts")
    if config.packing is not None and config.packing.device_bounds:
        _check_models(learner, check_takes_device_bounds, "device_bounds")
    if config.packing is not None and groups.cp.size > 1 and config.packing.alignment % (2 * groups.cp.size):
        raise ValueError(f"packing.alignment={config.packing.alignment} must be a multiple of 2 * cp = {2 * groups.cp.size}")
    layout = getattr(reference, "groups", groups)
    if layout is not groups and layout.plan != groups.plan:
        raise ValueError(f"reference has the layout {layout.plan}, the model {groups.plan}; build both in one layout")
    if (config.gae is None) != (learner.critic is None):
        raise ValueError(
            f"gae={config.gae} and critic={'None' if learner.critic is None else 'given'} go together: PPO needs both; pass both or neither"
        )
    if config.kl_in_reward and reference is None:
        raise ValueError(f"kl_in_reward={config.kl_in_reward} needs a frozen reference; pass reference, or set kl_in_reward=0")
    if isinstance(objective, DPOObjective):
        raise ValueError("DPOObjective learns from pairs; call dpo_iteration")
    if (learner.teacher is None) == is_distillation(objective):
        teacher = "None" if learner.teacher is None else "given"
        raise ValueError(
            f"teacher={teacher} and an objective of {type(objective).__name__} do not go together: DistillationObjective compares with "
            "Learner(teacher=...), and nothing else does; pass both or neither"
        )
    if learner.teacher is not None:
        for name, default in _FOR_REWARDS.items():
            if (value := getattr(config, name)) != default:
                raise ValueError(f"{name}={value} has no effect on a distillation, a mean over tokens; leave it at its default")
    if not isinstance(objective, GRPOObjective):
        return
    if objective.kl_beta and reference is None:
        raise ValueError(f"kl_beta={objective.kl_beta} needs a frozen reference model; pass reference, or set kl_beta=0")
    if objective.temperature != config.temperature:
        raise ValueError(
            f"objective.temperature={objective.temperature} must be that of generation_args, {config.temperature}: "
            "the policy that is trained is the one that draws"
        )
    if name := config.generation_args.truncated_by:
        raise ValueError(
            f"generation_args.{name}={getattr(config.generation_args, name)} draws from another distribution than the one that is trained; "
            "leave it out: evaluations alone may have it"
        )


def _check_models(learner: Learner, check: Callable[[nn.Module], None], name: str) -> None:
    """Whether all models that read packed sequences can do what a field of the packing asks for."""
    parts: dict[str, list[nn.Module]] = {
        "model": [learner.model],
        "reference": [learner.reference] if isinstance(learner.reference, nn.Module) else [],
        "critic": [] if learner.critic is None else [learner.critic.model],
        "teacher": [] if learner.teacher is None else learner.teacher.chunks,
    }
    for part, models in parts.items():
        for model in models:
            try:
                check(model)
            except ValueError as error:
                raise ValueError(f"packing.{name}=True with {part}: {error}; or set {name}=False") from error

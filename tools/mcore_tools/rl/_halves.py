# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A run whose trainer and engines have ranks of their own: what the two halves tell each other, and what a rank with an engine does."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from mcore_inference import DynamicInferenceEngine, ExecutionConfig
from mcore_parallel import ProcessGroups
from mcore_parallel.data import Tokenizer
from mcore_parallel.guard import Watchdog
from mcore_rl import BestAndWorst, DisjointLoop, GRPOConfig, Learner, Placement, RolloutServer, StreamPosition
from mcore_tools.recipes import RunConfig
from mcore_tools.rl._attempts import attempt_seed
from mcore_tools.rl._conversations import local_interfaces, open_policy_tokenizer
from mcore_tools.rl._engines import sampling_limit_s, watched
from mcore_tools.rl._environment import close_environment, open_environment
from mcore_tools.rl._evaluation import evaluation_means, evaluation_sums, num_problems
from mcore_tools.serving import build_engine


class Halves:
    """The two halves of a run on this rank; every rank of the world makes it.

    Args:
        config: the run.
    """

    def __init__(self, config: RunConfig) -> None:
        assert config.rl is not None and config.rl.placement is not None
        self.config, self.settings = config, config.rl.placement
        self.placement = Placement.split(config.plan)
        # The trainers save alone. A layout of one rank has no communicator, and without one the whole world would be waited for.
        group: Any = dist.new_group(list(range(self.placement.num_trainers)), backend="gloo")
        self.checkpoint_group: dist.ProcessGroup | None = group if self.placement.trains else None

    def begin(self, step: int = 0, position: StreamPosition | None = None, attempt: int = 0) -> tuple[int, StreamPosition, int]:
        """On every rank: the step and the position in the problems at which the trainers go on, and how often a run began there before."""
        problems = None if position is None else dataclasses.asdict(position)
        step, problems, attempt = self.gather([step, problems, attempt], "the step that the run goes on from")[0]
        return step, StreamPosition.of(**problems), attempt

    def loop(self, grpo: GRPOConfig, *, learner: Learner | None = None, server: RolloutServer | None = None) -> DisjointLoop:
        """The iterations of this half."""
        limits: dict[str, Any] = {"max_lag": self.settings.max_lag, "timeout_s": self.settings.timeout_s}
        # Pairs are made of many groups.
        limits["partial"] = self.settings.partial and self.config.rl is not None and self.config.rl.dpo is None
        return DisjointLoop(grpo, self.placement, learner=learner, server=server, **limits)

    def evaluated(self, env_ids: Sequence[str], sums: list[list[float]] | None = None) -> dict[str, float]:
        """The numbers of an evaluation of these environments on every rank; ``sums`` are those of a rank with an engine."""
        limit_s = self.settings.timeout_s + sampling_limit_s(self.config)
        shares = self.placement.gather(sums, limit_s, "answers of an evaluation")[self.placement.num_trainers :]
        totals = [[sum(column) for column in zip(*rows, strict=True)] for rows in zip(*shares, strict=True)]
        return dict(evaluation_means(self.config, env_ids, totals))

    def agree(self, wanted: bool) -> bool:
        """Whether any rank wants to stop."""
        return any(self.gather(wanted, "the end of an iteration"))

    def gather(self, value: Any, purpose: str) -> list[Any]:
        """Of all ranks; one that does not come is named."""
        return self.placement.gather(value, self.settings.timeout_s, purpose)


def run_grpo(config: RunConfig, tokenizer: Tokenizer) -> GRPOConfig:
    """An iteration of a run."""
    assert config.rl is not None
    train = config.train
    sizes = {"seq_len": train.seq_len, "micro_batch_size": train.micro_batch_size, "global_batch_size": train.global_batch_size}
    return config.rl.grpo(**sizes, pad_id=tokenizer.pad or 0, bos_id=tokenizer.bos, eod_id=tokenizer.eod)


def build_run_engine(
    config: RunConfig, tokenizer: Tokenizer, device: torch.device, seed: int, groups: ProcessGroups | None = None
) -> DynamicInferenceEngine:
    """The engine that draws the answers of a run, whole on this rank unless ``groups`` divide it; its weights come by a refit."""
    assert config.rl is not None
    return build_engine(
        config,
        tokenizer,
        device,
        seed=seed,
        max_length=config.train.seq_len,
        max_requests=config.rl.max_requests,
        cache_gb=config.rl.cache_gb,
        kv_cache_dtype=config.rl.kv_cache_dtype,
        weight_dtype=config.rl.weight_dtype,
        groups=groups,
        execution=ExecutionConfig(record_routing=config.rl.router_replay is True),
    )


def serve_half(
    config: RunConfig, halves: Halves, device: torch.device, watchdog: Watchdog | None, stop: Callable[[], bool]
) -> tuple[float, int | None]:
    """The iterations of a rank with an engine; the last reward, and the step after which it was stopped."""
    rl, train, rank, num_ranks = config.rl, config.train, halves.placement.engine_rank, halves.placement.num_engines
    assert rl is not None
    environment = open_environment(rl)
    tokenizer = open_policy_tokenizer(config, environment)
    first, position, attempt = halves.begin()
    environment.start_at(position, rank=rank, num_ranks=num_ranks)
    # What was drawn before the run was interrupted is not drawn again.
    seed = attempt_seed(train.seed, rank=rank, step=first, attempt=attempt)
    engine = build_run_engine(config, tokenizer, device, seed)
    interface, evaluator = local_interfaces(engine, environment, seed)
    agent = environment if rl.dpo is None else BestAndWorst(environment, group_size=rl.group_size)
    server = RolloutServer(agent=agent, interface=interface, engine=engine)
    numbers, reward = range(first + 1, train.steps + 1), float("nan")

    def evaluated() -> dict[str, float]:
        sums = evaluation_sums(config, environment, evaluator, num_problems(config, rank, num_ranks))
        return halves.evaluated(environment.env_ids, sums)

    with contextlib.ExitStack() as stack, halves.loop(run_grpo(config, tokenizer), server=server) as loop:
        stack.callback(close_environment, environment)
        if rl.eval_on_start and not first:
            loop.begin()
            evaluated()
        for step in watched(config, numbers, watchdog):
            # The learning rate is the other half's matter.
            reward = loop.iterate(0.0, train_policy=rl.trains_policy(step)).mean_reward
            if train.eval_interval and step % train.eval_interval == 0:
                reward = evaluated().get("eval/reward", reward)
            if halves.agree(stop()):
                return reward, step if step < train.steps else None
    return reward, None

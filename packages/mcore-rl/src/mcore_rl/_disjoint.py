# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Trainer and engines on ranks of their own: the ones generate while the others train."""

import asyncio
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from mcore_rl._collect import Collection, ask, checked, joined, share
from mcore_rl._config import GRPOConfig
from mcore_rl._loop import IterationReport, check_iteration, iteration_report
from mcore_rl._memory import MemorySwitch
from mcore_rl._placement import Placement
from mcore_rl._refit import WeightSink
from mcore_rl._stability import experimental_api
from mcore_rl._transfer import WeightTransfer, refit
from mcore_rl._types import TokenRollout
from mcore_rl._update import Learner, update
from mcore_rl.agent import GroupedRolloutGenerator, NumberedProblems
from mcore_rl.inference import InferenceInterface


@experimental_api
@dataclass(frozen=True, kw_only=True)
class RolloutServer:
    """What a rank that serves works with."""

    agent: GroupedRolloutGenerator
    """Poses problems and judges answers."""
    interface: InferenceInterface
    """Answers."""
    engine: WeightSink
    """Behind the interface; takes over new weights."""


@dataclass(frozen=True)
class _Drawn:
    """Rollouts of one iteration."""

    collected: Collection
    version: int
    """Refits before they were drawn."""
    seconds: float
    position: int
    """Problems before this number were posed by then."""


@experimental_api
class DisjointLoop:
    """GRPO whose trainer and engines have ranks of their own; every rank of the placement makes it, and calls ``iterate`` together.

    With ``max_lag=0`` the halves take turns: rollouts of the newest weights, then updates. With 1 the engines draw the next rollouts
    while the trainers learn from the last ones, which come from the weights before (one step off); with more they stay so many iterations
    ahead. The importance correction of the objective weighs what older weights drew. The first iteration begins with a refit.

    Args:
        config: of each iteration. The serving ranks share its problems.
        placement: who trains and who serves.
        learner: the policy, on ranks that train.
        server: agent and engine, on ranks that serve.
        max_lag: refits between the weights that draw and those that learn.
        timeout_s: limit of waiting for the other half, beyond the time that its work takes, and of each bucket of a refit, on both
            halves; that of ``learner.transfer`` is not used.

    Raises:
        ValueError: a rank without its part, or with the other half's; what cannot be trained on; memory to be switched.
    """

    def __init__(
        self,
        config: GRPOConfig,
        placement: Placement,
        *,
        learner: Learner | None = None,
        server: RolloutServer | None = None,
        max_lag: int = 1,
        timeout_s: float = 3600.0,
    ) -> None:
        if (learner is not None) != placement.trains or (server is not None) == placement.trains:
            half, part = ("trains", "learner") if placement.trains else ("serves", "server")
            raise ValueError(f"rank {placement.world.rank} {half}: pass {part}, and nothing else")
        if max_lag < 0 or not timeout_s > 0:
            raise ValueError(f"max_lag={max_lag} must not be negative, and timeout_s={timeout_s} must be positive")
        if config.memory != MemorySwitch():
            raise ValueError(f"memory={config.memory} has no effect where trainer and engines have ranks of their own; leave it out")
        if learner is not None:
            check_iteration(config, learner)
        self.config, self.placement, self.max_lag, self.timeout_s = config, placement, max_lag, timeout_s
        self._learner, self._server = learner, server
        # One limit on both halves: who gave up earlier would leave the other one waiting.
        buckets = {} if learner is None else {"bucket_bytes": learner.transfer.bucket_bytes}
        self._transfer = WeightTransfer(**buckets, timeout_s=timeout_s)
        self._drawn: deque[_Drawn] = deque()
        self.version = -1
        """Of the weights in the engines: refits after the first one."""
        self.position = 0
        """Where `NumberedProblems` go on after what was trained on, on every rank; engines that are ahead have posed more."""

    def iterate(self, lr: float) -> IterationReport:
        """One iteration; the same report on every rank, but for ``updates``, which only those that train have.

        Args:
            lr: learning rate of the policy.

        Raises:
            RankTimeoutError: a rank of the other half did not come within ``timeout_s``; named.
            RuntimeError: a rank failed, on the others; none of the rollouts counts.
        """
        if self.version < 0:
            self._refit()
        while len(self._drawn) < max(1, self.max_lag):
            self._work(lr, None, draws=True)
        batch = self._drawn.popleft()
        version = self.version
        begin = time.perf_counter()
        updates = self._work(lr, batch, draws=self.max_lag > 0)
        trained = time.perf_counter()
        self._refit()
        self.position = batch.position
        return iteration_report(
            self.config,
            batch.collected,
            **updates,
            rollout_s=batch.seconds,
            train_s=trained - begin,
            refit_s=time.perf_counter() - trained,
            lag=version - batch.version,
        )

    def _work(self, lr: float, batch: _Drawn | None, *, draws: bool) -> dict[str, Any]:
        """Each half does its part, then all see what was drawn; a failure of one is raised on all."""
        begin = time.perf_counter()
        own: list[list[TokenRollout]] = []
        num_filtered, failure = 0, None
        updates: dict[str, Any] = {"updates": ()}
        try:
            if self._learner is not None and batch is not None:
                updates = self._train(self._learner, batch, lr)
            elif self._server is not None and draws:
                number = len(range(self.placement.engine_rank, self.config.num_groups, self.placement.num_engines))
                own, num_filtered = asyncio.run(ask(self.config, self._server.agent, self._server.interface, number))
        except Exception as error:
            failure = error
        seconds = time.perf_counter() - begin
        sent = {**share(own, num_filtered, failure), "seconds": seconds, "position": self._posed()}
        shares = self.placement.gather(sent, self.timeout_s, "rollouts" if draws else "updates")
        if failure is not None:
            raise failure
        collected = joined(shares)
        if draws:
            served = shares[self.placement.num_trainers :]
            seconds, position = (max(part[name] for part in served) for name in ("seconds", "position"))
            self._drawn.append(_Drawn(checked(self.config, collected), self.version, seconds, position))
        return updates

    def _posed(self) -> int:
        """Position of this rank's problems; 0 where they have none."""
        agent = None if self._server is None else self._server.agent
        return agent.position if isinstance(agent, NumberedProblems) else 0

    def _train(self, learner: Learner, batch: _Drawn, lr: float) -> dict[str, Any]:
        updates, critic_updates = update(self.config, batch.collected.groups, learner, lr)
        if not updates:
            raise RuntimeError(
                f"no token of the rollouts counts: mask_truncated={self.config.mask_truncated}, and all are truncated or empty"
            )
        return {"updates": tuple(updates), "critic_updates": tuple(critic_updates)}

    def _refit(self) -> None:
        learner, server = self._learner, self._server
        refit(
            None if learner is None else learner.model,
            self.placement.groups,
            None if server is None else server.engine,
            self._transfer,
            placement=self.placement,
        )
        self.version += 1

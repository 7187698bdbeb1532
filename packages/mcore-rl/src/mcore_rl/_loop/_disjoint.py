# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Trainer and engines on ranks of their own: the ones generate while the others train."""

import functools
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from mcore_rl._config import GRPOConfig
from mcore_rl._loop._dpo import ask_pairs, check_pairs, update_pairs
from mcore_rl._loop._engine_share import spans_ranks
from mcore_rl._loop._handover import Handover, RolloutBatch
from mcore_rl._loop._loop import IterationReport, check_iteration
from mcore_rl._loop._update import Learner, update
from mcore_rl._loop._vocabulary import check_vocabulary, num_drawn, num_trained
from mcore_rl._memory import MemorySwitch
from mcore_rl._objective._objective import GRPOObjective
from mcore_rl._objective._preference import DPOObjective
from mcore_rl._ranks._placement import Placement, exchange_parcels, half_names
from mcore_rl._ranks._rendezvous import meet, withdraw
from mcore_rl._refit._refit import WeightSink
from mcore_rl._refit._transfer import WeightTransfer, refit, take_over
from mcore_rl._rollouts._collect import Drawn, ask, check_failures, delivered, own_failure_first, run_async, share_of
from mcore_rl._rollouts._stream import LiveWeights, RolloutStream
from mcore_rl._stability import experimental_api
from mcore_rl.agent import BestAndWorst, ContrastiveRolloutGenerator, GroupedRolloutGenerator, NumberedAgent
from mcore_rl.inference import InferenceInterface


@experimental_api
@dataclass(frozen=True, kw_only=True)
class RolloutServer:
    """What a rank that serves works with.

    Raises:
        ValueError: an engine over several ranks.
    """

    agent: GroupedRolloutGenerator | ContrastiveRolloutGenerator
    """Poses problems and judges answers, or makes pairs of them for a `DPOObjective`."""
    interface: InferenceInterface
    """Answers."""
    engine: WeightSink
    """Behind the interface; takes over new weights."""
    in_flight: Literal["recompute", "keep"] = "recompute"
    """What answers in flight do when weights change: compute their keys and values again, or keep them."""

    def __post_init__(self) -> None:
        if spans_ranks(self.engine):
            raise ValueError("engine spans several ranks, and each rank that serves has one of its own; build it with tp=1 and pp=1")


@experimental_api
class DisjointLoop:
    """GRPO, PPO, distillation or DPO whose trainer and engines have ranks of their own; every rank of the placement makes it, and calls
    ``iterate`` together.

    With ``max_lag=0`` the halves take turns: rollouts of the newest weights, then updates. With 1 the engines draw the next rollouts
    while the trainers learn from the last ones, which were begun with the weights before (one step off); with more they stay so many
    iterations ahead. The importance correction of the objective weighs what older weights drew. The first iteration begins with a refit,
    which ``begin`` makes for whoever asks the engines before it.

    With ``partial`` engines never wait: they draw while weights come, and answers in flight keep their tokens and go on with the new ones
    (``TokenRollout.weight_versions``). Groups are handed over in the order in which they were posed, each once: in a thread, which also
    writes their micro-batches, beside the training of those before. Use the loop as a context, or ``close`` it on every rank at the end.

    Args:
        config: of each iteration. The serving ranks share its problems.
        placement: who trains and who serves.
        learner: the policy, on ranks that train.
        server: agent and engine, on ranks that serve.
        max_lag: refits between the weights that rollouts begin with and those that learn from them.
        partial: rollouts go on across refits; it has no effect with ``max_lag=0``. The same on both halves. False where the interface
            cannot take weights while it answers, and for pairs: a refit waits for all rollouts of its iteration then.
        timeout_s: limit of waiting for the other half, beyond the time that its work takes, and of each bucket of a refit, on both
            halves; that of ``learner.transfer`` is not used. Longer than ``config.rollout_timeout_s``, for trainers wait for rollouts.

    Raises:
        ValueError: a rank without its part, or with the other half's; what cannot be trained on; memory to be switched; ``partial`` with
            what cannot do it; a ``timeout_s`` that ends before rollouts have to.
    """

    def __init__(
        self,
        config: GRPOConfig,
        placement: Placement,
        *,
        learner: Learner | None = None,
        server: RolloutServer | None = None,
        max_lag: int = 1,
        partial: bool = True,
        timeout_s: float = 10800.0,
    ) -> None:
        self.config, self.placement, self.max_lag, self.timeout_s = config, placement, max_lag, timeout_s
        self.partial = partial and max_lag > 0
        self._learner, self._server = learner, server
        try:
            self._check()
            self._stream = None if server is None or not self.partial else self._open_stream(server)
        except Exception as error:
            # The others hear of it as they begin.
            withdraw(placement.world, "the loop", error, names=half_names(placement), refused=True)
            raise
        # One limit on both halves: who gave up earlier would leave the other one waiting.
        buckets = {} if learner is None else {"bucket_bytes": learner.transfer.bucket_bytes}
        self._transfer = WeightTransfer(**buckets, timeout_s=timeout_s)
        self._drawn: deque[RolloutBatch] = deque()
        self._handover: Handover | None = None
        self.version = -1
        """Of the weights in the engines: refits after the first one."""
        self.num_posed: tuple[int, ...] = ()
        """By each engine's `NumberedAgent`, with the last problem that was trained on; the same on every rank. Engines that are ahead have
        posed more. Empty before the first iteration."""

    def __enter__(self) -> "DisjointLoop":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give up what was drawn ahead; every rank does, and may do so again."""
        if self._stream is not None:
            self._stream.close()
        if self._handover is not None:
            self._handover.close()

    def begin(self) -> None:
        """The first refit, for whoever asks the engines before the first iteration, as an evaluation does; without effect behind it. Every
        rank calls it, or leaves it to ``iterate``.

        Raises:
            RankTimeoutError, RefitTimeoutError: a rank did not come within ``timeout_s``; named.
            RuntimeError: a rank could not make its loop; named, and why.
            ValueError: the engines draw from more or fewer ids than the policy.
        """
        if self.version < 0:
            meet(self.placement.world, self.timeout_s, "the loop", names=half_names(self.placement))
            self._check_vocabularies()
            self._refit()

    def iterate(self, lr: float, *, train_policy: bool = True) -> IterationReport:
        """One iteration; the same report on every rank, but for ``updates``, which only those that train have.

        Args:
            lr: learning rate of the policy.
            train_policy: False trains the critic alone, as in the first iterations of PPO; nothing is refitted. The same on all ranks.

        Raises:
            RankTimeoutError: a rank of the other half did not come within ``timeout_s``; named.
            RuntimeError: a rank failed, on the others; none of the rollouts counts.
            ValueError: the engines draw from more or fewer ids than the policy.
        """
        self.begin()
        came = time.perf_counter()
        if self.partial:
            batch = self._take()
        else:
            while len(self._drawn) < max(1, self.max_lag):
                self._work(lr, None, draws=True)
            batch = self._drawn.popleft()
        version = self.version
        begin = time.perf_counter()
        updates = self._work(lr, batch, draws=not self.partial and self.max_lag > 0, train_policy=train_policy)
        trained = time.perf_counter()
        if train_policy:
            self._refit()
        self.num_posed = batch.num_posed
        ahead = self.max_lag > 0
        return IterationReport(
            **batch.means,
            **updates,
            rollout_s=begin - came,
            generate_s=batch.seconds,
            exchange_s=0.0 if ahead else max(0.0, begin - came - batch.seconds),
            train_s=trained - begin,
            refit_s=time.perf_counter() - trained,
            lag=version - batch.version,
            token_lag=batch.token_lag(version),
            tokens_by_lag=batch.tokens_by_lag(version),
        )

    def _check(self) -> None:
        """What this rank can see of its arguments."""
        config, placement, learner, timeout_s = self.config, self.placement, self._learner, self.timeout_s
        if (learner is not None) != placement.trains or (self._server is not None) == placement.trains:
            half, part = ("trains", "learner") if placement.trains else ("serves", "server")
            raise ValueError(f"rank {placement.world.rank} {half}: pass {part}, and nothing else")
        if self.max_lag < 0 or not 0 < timeout_s < math.inf:
            raise ValueError(f"max_lag={self.max_lag} must not be negative, and timeout_s={timeout_s} must be positive and finite")
        if timeout_s <= config.rollout_timeout_s:
            raise ValueError(
                f"timeout_s={timeout_s:g} must be above rollout_timeout_s={config.rollout_timeout_s:g} of the config: trainers wait for "
                "rollouts as long; raise timeout_s, or lower rollout_timeout_s"
            )
        if config.memory != MemorySwitch():
            raise ValueError(f"memory={config.memory} has no effect where trainer and engines have ranks of their own; leave it out")
        if learner is not None:
            self._check_learner(learner)

    def _check_learner(self, learner: Learner) -> None:
        if isinstance(learner.objective, DPOObjective):
            check_pairs(self.config, learner)
            if self.partial:
                raise ValueError("partial=True hands over groups one by one, and pairs are made of many; pass partial=False, or max_lag=0")
            return
        check_iteration(self.config, learner)

    def _check_vocabularies(self) -> None:
        """Whether the engines draw from the ids that the policy's distribution is over; an error is raised on all ranks."""
        learner, server = self._learner, self._server
        drawn = None if server is None else num_drawn(server.engine)
        trained = num_trained(learner.model) if learner is not None and isinstance(learner.objective, GRPOObjective) else None
        by_rank = self.placement.gather([drawn, trained], self.timeout_s, "vocabularies")
        for of_engine in {drawn for drawn, _ in by_rank}:
            for of_policy in {trained for _, trained in by_rank}:
                check_vocabulary(of_engine, of_policy)

    def _open_stream(self, server: RolloutServer) -> RolloutStream:
        if not isinstance(server.agent, GroupedRolloutGenerator):
            raise ValueError("partial=True hands over groups one by one, and pairs are made of many; pass partial=False, or max_lag=0")
        if not isinstance(server.interface, LiveWeights):
            name = type(server.interface).__name__
            raise ValueError(
                f"partial=True needs an interface that takes weights while it answers, and a {name} does not; pass partial=False"
            )
        return RolloutStream(self.config, server.agent, server.interface, self._own_groups(), self.max_lag)

    def _own_groups(self) -> int:
        """Of the problems of an iteration, those of this rank."""
        return len(range(self.placement.engine_rank, self.config.num_groups, self.placement.num_engines))

    def _take(self) -> RolloutBatch:
        """What the engines hand over, while the next rollouts set out; a failure of one is raised on all."""
        # One that fails is not asked again.
        handover, self._handover = self._handover or self._hand_over(), None
        batch = handover.result()
        if self._stream is not None:
            # Not sooner: groups that are open when weights come are one refit older.
            self._stream.pose_ahead()
        self._handover = self._hand_over()
        return batch

    def _hand_over(self) -> Handover:
        layout = None if self._learner is None else self._learner.groups
        return Handover(self.config, self.placement, self._stream, layout, self.timeout_s)

    def _work(self, lr: float, batch: RolloutBatch | None, *, draws: bool, train_policy: bool = True) -> dict[str, Any]:
        """Each half does its part, then what was drawn goes to those who train on it; a failure of one is raised on all."""
        begin = time.perf_counter()
        drawn, failure, pairs = Drawn(groups=[]), None, False
        updates: dict[str, Any] = {"updates": ()}
        try:
            if self._learner is not None and batch is not None:
                updates = self._train(self._learner, batch, lr, train_policy)
            elif self._server is not None and draws:
                pairs = isinstance(self._server.agent, ContrastiveRolloutGenerator)
                drawn = run_async(self._ask(self._server))
        except Exception as error:
            failure = error
        seconds = time.perf_counter() - begin
        replica = None if self._learner is None else self._learner.groups.dp.rank
        about = {"num_unpaired": drawn.num_unpaired, "replica": replica, "pairs": pairs, "lost": drawn.lost}
        share = share_of(drawn.groups, drawn.num_filtered, failure, **about)
        sent = share | {"seconds": seconds, "num_posed": self._num_posed()}
        with own_failure_first(failure):
            shares = self.placement.gather(sent, self.timeout_s, "rollouts" if draws else "updates")
        check_failures(shares)
        if draws:
            self._keep(shares, drawn)
        return updates

    async def _ask(self, server: RolloutServer) -> Drawn:
        """Rollouts of this rank, as many as are there in time."""
        if isinstance(server.agent, ContrastiveRolloutGenerator):
            return await ask_pairs(self.config, server.agent, server.interface, self._own_groups())
        return await ask(self.config, server.agent, server.interface, self._own_groups())

    def _keep(self, shares: Sequence[Mapping[str, Any]], drawn: Drawn) -> None:
        """What was drawn, for an iteration to come."""
        placement = self.placement

        def swap(parcels: list[Tensor], sizes: list[int]) -> list[Tensor]:
            return exchange_parcels(placement, parcels, sizes, self.timeout_s, "rollouts")

        collected = delivered(self.config, shares, placement.world.rank, drawn.groups, swap, lost=drawn.lost)
        served = shares[placement.num_trainers :]
        num_asked = self.config.num_groups * (2 if any(part["pairs"] for part in served) else self.config.group_size)
        self._drawn.append(RolloutBatch.of(self.config, collected, served, self.version, num_asked))

    def _num_posed(self) -> int:
        """Of this rank's problems; 0 where they have no numbers."""
        agent: object = None if self._server is None else self._server.agent
        if isinstance(agent, BestAndWorst):
            agent = agent.agent
        return agent.num_posed if isinstance(agent, NumberedAgent) else 0

    def _train(self, learner: Learner, batch: RolloutBatch, lr: float, train_policy: bool) -> dict[str, Any]:
        if not train_policy and learner.critic is None:
            raise ValueError("train_policy=False leaves nothing to train without a critic; pass Learner(critic=...)")
        if isinstance(learner.objective, DPOObjective):
            return {"updates": tuple(update_pairs(self.config, batch.collected, learner, lr, timeout_s=self.timeout_s))}
        written = None if batch.written is None else batch.written.result
        done = update(self.config, batch.collected, learner, lr, train_policy=train_policy, written=written, timeout_s=self.timeout_s)
        if not done.policy and not done.critic:
            raise RuntimeError(
                f"no token of the rollouts counts: mask_truncated={self.config.mask_truncated}, and all are truncated or empty"
            )
        return {
            "updates": done.policy,
            "critic_updates": done.critic,
            "pack_s": done.pack_s,
            "score_s": done.score_s,
            "mismatch": done.mismatch,
        }

    def _refit(self) -> None:
        learner, server, placement = self._learner, self._server, self.placement
        if self._stream is not None and server is not None:
            load = functools.partial(self._stream.load_weights, version=self.version + 1, in_flight=server.in_flight)
            take_over(
                load, self._transfer.weights(None, None, server.engine, placement=placement), placement.world, placement, self.timeout_s
            )
        else:
            model, engine = (None if learner is None else learner.model), (None if server is None else server.engine)
            refit(model, placement.groups, engine, self._transfer, placement=placement)
        self.version += 1

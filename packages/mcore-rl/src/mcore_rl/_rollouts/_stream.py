# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Groups of rollouts that are drawn ahead of the trainer, and go on while weights change."""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

from mcore_rl._config import GRPOConfig
from mcore_rl._late import LATE
from mcore_rl._lost import check_all_lost, last_reason
from mcore_rl._objective._shaping import same_reward
from mcore_rl._rollouts._collect import fitting
from mcore_rl._types import TokenRollout
from mcore_rl.agent import GroupedRolloutGenerator, NumberedAgent
from mcore_rl.inference import InferenceInterface

_log = logging.getLogger(__name__)
T = TypeVar("T")


@runtime_checkable
class LiveWeights(Protocol):
    """An interface that takes new weights while it answers."""

    async def load_weights(
        self,
        weights: Iterable[tuple[str, Any]],
        version: int | None = None,
        *,
        in_flight: Literal["recompute", "keep", "drain"] = ...,
    ) -> None: ...


@dataclass(frozen=True, kw_only=True)
class TakenGroups:
    """What was handed over for one iteration."""

    groups: list[list[TokenRollout]]
    num_filtered: int
    num_asked: int
    """Answers that the groups were to hold."""
    oldest: int
    """Weights when the first of the groups was posed."""
    num_posed: int
    """Problems that a `NumberedAgent` had posed with the last of these groups."""
    seconds: float
    """Of drawing them, from the call on."""
    lost: Exception | None = None
    """As of ``Drawn``."""


@dataclass(frozen=True)
class _Posed:
    task: asyncio.Task[list[TokenRollout]]
    version: int


class RolloutStream:
    """Draws groups in a thread of its own, and hands them over in the order in which they were posed.

    So many groups are open that none is handed over more than ``max_lag`` refits after it was posed. A refit stops none of them: each
    answer keeps its tokens and goes on with the new weights.

    Args:
        config: sizes and limits of an iteration.
        agent: poses problems and judges.
        interface: answers; a `LiveWeights`.
        num_groups: this rank's share of an iteration.
        max_lag: iterations that groups are posed ahead, at least 1.
    """

    def __init__(
        self, config: GRPOConfig, agent: GroupedRolloutGenerator, interface: InferenceInterface, num_groups: int, max_lag: int
    ) -> None:
        self._config, self._agent, self._interface = config, agent, interface
        self._num_groups, self._num_ahead = num_groups, num_groups * max_lag
        self._open: deque[_Posed] = deque()
        self._num_taken = agent.num_posed if isinstance(agent, NumberedAgent) else 0
        self._version = 0
        self._num_draws, self._num_expected = 0, 0
        self._wanted = asyncio.Event()
        self._drawing: asyncio.Task[Any] | None = None
        self._is_closing = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="mcore-rollouts", daemon=True)
        self._thread.start()

    def take(self) -> TakenGroups:
        """The next groups, as many as there are in time, and pose those of the iterations to come; blocks.

        Raises:
            Exception: what the environment or the engine raised.
        """
        self.expect()
        taken = self.draw()
        self.pose_ahead()
        return taken

    def draw(self) -> TakenGroups:
        """The next groups; blocks, and may be called in another thread than the rest. Of ``rollout_timeout_s`` it knows from ``expect``.

        Raises:
            Exception: what the environment or the engine raised.
            RuntimeError: the stream was closed meanwhile.
        """
        return self._run(self._draw())

    def expect(self) -> None:
        """Whoever draws waits for nothing else from now on: groups have ``rollout_timeout_s`` left."""

        def count() -> None:
            self._num_expected += 1
            self._wanted.set()

        self._loop.call_soon_threadsafe(count)

    def pose_ahead(self) -> None:
        """Open the groups of the iterations to come, with the weights that are newest now."""
        self._run(self._pose_ahead())

    def load_weights(self, weights: Iterable[tuple[str, Any]], version: int, in_flight: Literal["recompute", "keep"]) -> None:
        """New weights for the answers that are open, too; blocks.

        Raises:
            Exception: as of the interface.
        """
        interface = self._interface
        assert isinstance(interface, LiveWeights)
        self._run(interface.load_weights(weights, version, in_flight=in_flight))
        self._version = version

    def close(self) -> None:
        """Give up what is open, and end the thread; may be called again."""
        if self._loop.is_closed():
            return
        self._run(self._give_up())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()

    async def _pose_ahead(self) -> None:
        self._pose(self._num_ahead)

    async def _draw(self) -> TakenGroups:
        limit = self._loop.create_task(self._limit(self._num_draws))
        self._num_draws += 1
        self._drawing = asyncio.current_task()
        try:
            return await self._draw_until(limit)
        finally:
            limit.cancel()
            await asyncio.wait([limit])
            self._drawing = None

    async def _limit(self, number: int) -> None:
        """Ends when the groups of a draw have to do with the answers that they have."""
        while self._num_expected <= number:
            self._wanted.clear()
            await self._wanted.wait()
        await asyncio.sleep(self._config.rollout_timeout_s)

    async def _draw_until(self, limit: "asyncio.Task[None]") -> TakenGroups:
        config, begin = self._config, time.perf_counter()
        most = int(self._num_groups * config.max_filter_ratio) if config.filter_equal_groups else self._num_groups
        useful: list[list[TokenRollout]] = []
        equal: list[list[TokenRollout]] = []
        num_taken, oldest = 0, self._version
        while len(useful) < self._num_groups and num_taken < most:
            self._pose(min(self._num_groups - len(useful), most - num_taken))
            posed = self._open[0]
            try:
                group = fitting(config, await self._in_time(posed.task, limit), self._interface)
            finally:
                # One that failed is left behind, too.
                if not self._is_closing:
                    self._open.popleft()
            num_taken += 1
            oldest = min(oldest, posed.version)
            is_equal = config.filter_equal_groups and same_reward([config.clipped(rollout.reward) for rollout in group])
            (equal if is_equal and group else useful).append(group)
        filled = equal[: max(0, self._num_groups - len(useful))]
        if filled:
            _log.warning("%d of %d groups have equal rewards, after %d were asked for", len(filled), self._num_groups, num_taken)
        self._num_taken += num_taken
        check_all_lost(useful, num_taken, is_alone=self._num_groups == config.num_groups)
        return TakenGroups(
            groups=[group for group in (*useful, *filled) if group],
            num_filtered=len(equal) - len(filled),
            num_asked=(len(useful) + len(filled)) * config.group_size,
            oldest=oldest,
            num_posed=self._num_taken,
            seconds=time.perf_counter() - begin,
            lost=last_reason(useful),
        )

    def _pose(self, count: int) -> None:
        """At least so many groups are open."""
        for _ in range(count - len(self._open)):
            call = self._agent.group_rollout(self._interface, size=self._config.group_size, args=self._config.drawing_args)
            self._open.append(_Posed(self._loop.create_task(call), self._version))

    async def _in_time(self, task: "asyncio.Task[list[TokenRollout]]", limit: "asyncio.Task[None]") -> list[TokenRollout]:
        """The group of a task; after the limit what of it is there."""
        await asyncio.wait([task, limit], return_when=asyncio.FIRST_COMPLETED)
        if self._is_closing:
            raise RuntimeError("the rollouts are given up: the loop was closed")
        if not task.done():
            _log.warning(
                "a group is not there within rollout_timeout_s=%s; it ends with the answers it has", self._config.rollout_timeout_s
            )
            task.cancel(LATE)
            await asyncio.wait([task])
        return [] if task.cancelled() else task.result()

    async def _give_up(self) -> None:
        self._is_closing = True
        tasks = [posed.task for posed in self._open]
        self._open.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._drawing is not None:
            await asyncio.wait([self._drawing])

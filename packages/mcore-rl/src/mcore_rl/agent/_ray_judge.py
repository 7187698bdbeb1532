# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Environments that judge on other machines."""

from collections.abc import Callable

from mcore_rl._ray_workers import RayOptions, RayWorkers
from mcore_rl._stability import experimental_api
from mcore_rl.agent._judged import Problem
from mcore_rl.agent._judged_elsewhere import JudgedElsewhere
from mcore_rl.agent._numbered import NumberedProblems


@experimental_api
class RayJudge(JudgedElsewhere):
    """An environment whose problems are posed here, and whose answers are judged by copies of it in workers of a Ray cluster.

    Ray places the copies, starts one again that died, and repeats its calls; a judgement that is lost all the same, or takes longer than
    ``judge_timeout_s``, loses its answer alone, as of any environment.

    Args:
        make: makes the environment, here and in each worker.
        options: workers and limits.

    Raises:
        ModuleNotFoundError: Ray is not installed; names the extra.
        ValueError: there is no connection to a cluster.
        RayWorkerError: the workers did not start.

    Example:
        >>> ray.init(address="auto")
        >>> environment = RayJudge(Countdown, RayOptions(num_workers=64))
    """

    def __init__(self, make: Callable[[], NumberedProblems], options: RayOptions | None = None) -> None:
        super().__init__(make)
        self.workers = RayWorkers(make, options, name=self._own.env_id)

    async def get_reward(self, response: str, problem: Problem) -> float:
        return await self.workers.call("get_reward", response, problem)

    def close(self) -> None:
        """End the workers; may be called again."""
        self.workers.close()

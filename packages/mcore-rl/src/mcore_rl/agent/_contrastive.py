# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Pairs of a better and a worse answer to one problem."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from mcore_rl._lost import GroupPairs, LostGroup, check_all_lost
from mcore_rl._stability import experimental_api
from mcore_rl._text_rollouts import in_tokens
from mcore_rl._types import GenericGenerationArgs, TokenRollout
from mcore_rl.agent._base import GroupedRolloutGenerator
from mcore_rl.inference import InferenceInterface


@experimental_api
@dataclass(frozen=True, kw_only=True)
class ContrastiveRollout:
    """Two answers to one problem, the first preferred: what DPO learns from.

    Raises:
        ValueError: different problems or prompts, or the chosen one earned no more than the rejected one.
    """

    chosen: TokenRollout
    rejected: TokenRollout

    def __post_init__(self) -> None:
        chosen, rejected = self.chosen, self.rejected
        if (chosen.env_id, chosen.problem_id, _prompt(chosen)) != (rejected.env_id, rejected.problem_id, _prompt(rejected)):
            raise ValueError(
                f"chosen answers problem {chosen.problem_id!r} of {chosen.env_id!r}, rejected {rejected.problem_id!r} of "
                f"{rejected.env_id!r}; pair answers to one prompt"
            )
        if not chosen.reward > rejected.reward:
            raise ValueError(f"chosen.reward={chosen.reward} must lie above rejected.reward={rejected.reward}; swap them, or drop the pair")

    @property
    def prompt_length(self) -> int:
        """Tokens that both begin with and the policy did not write."""
        return len(_prompt(self.chosen))

    @property
    def margin(self) -> float:
        """How much more the chosen one earned, above 0."""
        return self.chosen.reward - self.rejected.reward


@experimental_api
class ContrastiveRolloutGenerator(ABC):
    """Produces pairs of a preferred and a rejected answer."""

    @abstractmethod
    async def get_contrastive_rollouts(
        self, interface: InferenceInterface, *, num_pairs: int, args: GenericGenerationArgs, timeout_s: float | None = None
    ) -> list[ContrastiveRollout]:
        """``num_pairs`` pairs, or as many as there are within the generator's limits and ``timeout_s``; None for no limit of time."""


@experimental_api
class BestAndWorst(ContrastiveRolloutGenerator):
    """The best and the worst answer of each group of an agent; a group of equal rewards has none, and another is asked for.
    At the end of the time each group ends with the answers that are judged by then, and no other is asked for. Where no problem can be
    posed, what the last one raised is.

    Args:
        agent: produces the groups.
        group_size: answers of a group.
        max_filter_ratio: groups asked for, at most, for each pair that is wanted; then fewer pairs come.

    Raises:
        ValueError: a group of fewer than 2, or a ratio below 1.
    """

    def __init__(self, agent: GroupedRolloutGenerator, *, group_size: int = 8, max_filter_ratio: float = 3.0) -> None:
        if group_size < 2:
            raise ValueError(f"group_size={group_size} must be at least 2: a pair needs two answers")
        if not max_filter_ratio >= 1:
            raise ValueError(f"max_filter_ratio={max_filter_ratio} must be at least 1")
        self.agent, self.group_size, self.max_filter_ratio = agent, group_size, max_filter_ratio

    async def get_contrastive_rollouts(
        self, interface: InferenceInterface, *, num_pairs: int, args: GenericGenerationArgs, timeout_s: float | None = None
    ) -> list[ContrastiveRollout]:
        pairs: list[ContrastiveRollout] = []
        lost: list[LostGroup] = []
        most = left = int(num_pairs * self.max_filter_ratio)
        clock = asyncio.get_running_loop().time
        end = None if timeout_s is None else clock() + timeout_s
        # For each pair that is missing, whether the last group that was asked for has equal rewards.
        missing, num_equal = [False] * num_pairs, 0
        while missing and left and (left == most or end is None or clock() < end):
            wanted = min(len(missing), left)
            left -= wanted
            limit_s = None if end is None else max(0.0, end - clock())
            sizes = {"num_groups": wanted, "size": self.group_size}
            stream = self.agent.get_grouped_rollouts(interface, **sizes, args=args, timeout_s=limit_s, in_order=True)
            num_before, equal = len(pairs), 0
            async for group in stream:
                if isinstance(group, LostGroup):
                    lost.append(group)
                elif (pair := _pair([in_tokens(one, interface) for one in group])) is not None:
                    pairs.append(pair)
                elif len(group) > 1:
                    equal += 1
            num_equal += equal
            num_lost = wanted - equal - (len(pairs) - num_before)
            missing = [*missing[wanted:], *[True] * equal, *[False] * num_lost]
        check_all_lost(lost, most - left, is_alone=False)
        return GroupPairs(pairs, num_equal=num_equal, num_unpaired=sum(missing))


def _pair(group: Sequence[TokenRollout]) -> ContrastiveRollout | None:
    """The first of the best and the first of the worst; None where all earned the same."""
    if not group:
        return None
    best, worst = max(group, key=lambda rollout: rollout.reward), min(group, key=lambda rollout: rollout.reward)
    return ContrastiveRollout(chosen=best, rejected=worst) if best.reward > worst.reward else None


def _prompt(rollout: TokenRollout) -> list[int]:
    """The tokens before the first that the policy wrote."""
    length = next((i for i, written in enumerate(rollout.generation_mask) if written), len(rollout.trajectory))
    return list(rollout.trajectory[:length])

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The rollouts of one iteration: each rank asks for its share, all see all."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mcore_parallel import ProcessGroups
from mcore_rl._config import GRPOConfig
from mcore_rl._exchange import all_gather_json
from mcore_rl._shaping import same_reward
from mcore_rl._types import TokenRollout
from mcore_rl.agent import GroupedRolloutGenerator
from mcore_rl.inference import InferenceInterface

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Collection:
    """What is there to train on, in the order of the ranks."""

    groups: list[list[TokenRollout]]
    num_filtered: int
    """Groups of equal rewards that others replaced."""


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """What this rank has drawn, or why it has not."""

    groups: list[list[TokenRollout]]
    num_filtered: int = 0
    failure: Exception | None = None


def draw(config: GRPOConfig, agent: GroupedRolloutGenerator, interface: InferenceInterface, num_groups: int) -> Drawn:
    """Groups of this rank's share. A failure waits for ``exchange``: a rank that raised at once would leave the others waiting for it."""
    try:
        groups, num_filtered = asyncio.run(ask(config, agent, interface, num_groups))
    except Exception as error:
        return Drawn(groups=[], failure=error)
    return Drawn(groups=groups, num_filtered=num_filtered)


def exchange(drawn: Drawn, groups: ProcessGroups, device: torch.device) -> Collection:
    """What all ranks have drawn; where one of them failed, all raise.

    Raises:
        RuntimeError: drawing failed on some rank.
    """
    if groups.world.size == 1:
        if drawn.failure is not None:
            raise drawn.failure
        return Collection(groups=drawn.groups, num_filtered=drawn.num_filtered)
    gathered = all_gather_json(share(drawn.groups, drawn.num_filtered, drawn.failure), groups.world, device)
    if drawn.failure is not None:
        raise drawn.failure
    return joined(gathered)


def share(groups: Sequence[Sequence[TokenRollout]], num_filtered: int, failure: BaseException | None) -> dict[str, Any]:
    """What a rank tells the others, as JSON."""
    return {
        "failure": failure and repr(failure),
        "groups": [[rollout.to_json() for rollout in group] for group in groups],
        "num_filtered": num_filtered,
    }


def joined(shares: Sequence[Mapping[str, Any]]) -> Collection:
    """The rollouts of all ranks, in their order.

    Raises:
        RuntimeError: ranks failed; carries what they raised.
    """
    if failed := {rank: part["failure"] for rank, part in enumerate(shares) if part["failure"] is not None}:
        raise RuntimeError(f"ranks failed: {failed}")
    rollouts = [[TokenRollout.from_json(rollout) for rollout in group] for part in shares for group in part["groups"]]
    return Collection(groups=rollouts, num_filtered=sum(part["num_filtered"] for part in shares))


def checked(config: GRPOConfig, collected: Collection) -> Collection:
    """Raises:
    RuntimeError: nothing is there to train on.
    """
    if not any(collected.groups):
        raise RuntimeError(
            f"no rollout of {config.num_groups} groups of {config.group_size} is left: all came late (rollout_timeout_s="
            f"{config.rollout_timeout_s}) or lost their judge; the log names each"
        )
    return collected


async def ask(
    config: GRPOConfig, agent: GroupedRolloutGenerator, interface: InferenceInterface, num_groups: int
) -> tuple[list[list[TokenRollout]], int]:
    """Groups of this rank, as many as are there in time, and how many others replaced."""
    groups: list[list[TokenRollout]] = []
    equal: list[list[TokenRollout]] = []
    num_asked, most = 0, int(num_groups * config.max_filter_ratio)
    clock = asyncio.get_running_loop().time
    end = clock() + config.rollout_timeout_s
    while num_asked < num_groups or (config.filter_equal_groups and len(groups) < num_groups and num_asked < most):
        wanted = num_groups if not num_asked else min(num_groups - len(groups), most - num_asked)
        if num_asked and clock() > end:
            break
        num_asked += wanted
        stream = agent.get_grouped_rollouts(
            interface, num_groups=wanted, size=config.group_size, args=config.generation_args, timeout_s=max(0.0, end - clock())
        )
        async for group in stream:
            useless = config.filter_equal_groups and same_reward([rollout.reward for rollout in group])
            (equal if useless else groups).append(group)
    if (missing := num_groups - len(groups) - len(equal)) > 0:
        limit_s = config.rollout_timeout_s
        _log.warning("%d of %d groups are dropped, not there within rollout_timeout_s=%s", missing, num_groups, limit_s)
    filled = equal[: max(0, num_groups - len(groups))]
    if filled:
        _log.warning("%d of %d groups have equal rewards, after %d were asked for", len(filled), num_groups, num_asked)
    return groups + filled, len(equal) - len(filled)

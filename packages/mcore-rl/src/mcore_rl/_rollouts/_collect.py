# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The rollouts of one iteration: each rank asks for its share, and gets those that it trains on."""

import asyncio
import contextlib
import dataclasses
import logging
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from mcore_parallel import Group, ProcessGroups
from mcore_rl._config import GRPOConfig
from mcore_rl._lost import LostGroup, check_all_lost, described, last_reason
from mcore_rl._objective._shaping import same_reward
from mcore_rl._packing._header import RolloutHeader
from mcore_rl._ranks._exchange import all_gather_json, all_to_all_bytes
from mcore_rl._ranks._rendezvous import rendezvous, withdraw
from mcore_rl._rollouts._delivery import Delivery
from mcore_rl._rollouts._special_tokens import TrajectoryError, check_turn_ends, doubled_beginning
from mcore_rl._rollouts._statistics import example_numbers, pair_counts, token_versions
from mcore_rl._rollouts._update_plan import UpdatePlan, plan_updates
from mcore_rl._text_rollouts import in_tokens
from mcore_rl._types import Rollout, TokenRollout
from mcore_rl.agent import GroupedRolloutGenerator
from mcore_rl.inference import InferenceInterface

_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Collection:
    """What is there to train on, the same on every rank but for ``rollouts``."""

    groups: list[list[RolloutHeader]]
    """Of all ranks, in their order."""
    rollouts: Mapping[int, TokenRollout]
    """By their numbers among all, those that this rank trains on."""
    updates: Sequence[UpdatePlan]
    """Who trains on which, in their order."""
    examples: tuple[TokenRollout, ...]
    """The best and the worst answer to the first problem, without routing."""
    num_filtered: int = 0
    """Groups of equal rewards that others replaced, or that have no pair."""
    num_unpaired: int = 0
    """As of ``Drawn``."""
    pair_counts: tuple[int, int] = (0, 0)
    """As of the function."""
    token_versions: Counter[int] = field(default_factory=Counter)
    """Number of tokens by the weights that drew them, of those of which that is known."""

    @classmethod
    def of(
        cls,
        config: GRPOConfig,
        groups: Sequence[Sequence[TokenRollout]],
        *,
        num_ranks: int = 1,
        num_filtered: int = 0,
        num_unpaired: int = 0,
        pairs: bool = False,
        lost: Exception | None = None,
    ) -> "Collection":
        """Of rollouts that all are here.

        Args:
            config: of the iteration.
            groups: all rollouts.
            num_ranks: data ranks that share them.
            num_filtered: as of the field.
            num_unpaired: as of the field.
            pairs: as of ``plan_updates``.
            lost: as of ``Drawn``.

        Raises:
            RuntimeError: there is none; its cause is ``lost``.
            ValueError: as of ``plan_updates``.
        """
        share = share_of(groups, num_filtered, None, num_unpaired=num_unpaired, pairs=pairs, lost=lost)
        collected, _ = joined(config, [share], num_ranks=num_ranks, lost=lost)
        return dataclasses.replace(collected, **_here(collected, dict(enumerate(flat(groups)))))

    @property
    def headers(self) -> list[RolloutHeader]:
        """Of all rollouts."""
        return flat(self.groups)


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """What this rank has drawn, or why it has not."""

    groups: list[list[TokenRollout]]
    num_filtered: int = 0
    num_unpaired: int = 0
    """Pairs that are missing because all answers of their group earned the same, which no other group replaced."""
    failure: Exception | None = None
    lost: Exception | None = None
    """Of the groups that are not there, why the last one that says so is not."""


def draw(config: GRPOConfig, agent: GroupedRolloutGenerator, interface: InferenceInterface, num_groups: int) -> Drawn:
    """Groups of this rank's share. A failure waits for ``exchange``: a rank that raised at once would leave the others waiting for it."""
    try:
        return run_async(ask(config, agent, interface, num_groups))
    except Exception as error:
        return Drawn(groups=[], failure=error)


def run_async(call: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run`` for a call that gives many rollouts. Python formats the task that it ran when it restores Ctrl-C, with a result whose
    tokens take long; this one has none.
    """
    results: list[T] = []

    async def keep() -> None:
        results.append(await call)

    asyncio.run(keep())
    return results[0]


def exchange(
    config: GRPOConfig, drawn: Drawn, groups: ProcessGroups, device: torch.device, *, pairs: bool = False, timeout_s: float = math.inf
) -> Collection:
    """What all ranks have drawn, with the rollouts that this rank trains on; where one of them failed, all raise.

    Args:
        config: of the iteration.
        drawn: of this rank.
        groups: the layout of the policy.
        device: where tensors must be to go over its world.
        pairs: rollouts are pairs.
        timeout_s: limit of waiting for the others to have drawn.

    Raises:
        RankTimeoutError: ranks did not come; names them. It is the cause of this rank's own failure, where there is one.
        RuntimeError: drawing failed on some rank, or nothing is there to train on.
        ValueError: a rollout that cannot be trained on.
    """
    if groups.world.size == 1:
        if drawn.failure is not None:
            raise drawn.failure
        counts = {"num_filtered": drawn.num_filtered, "num_unpaired": drawn.num_unpaired}
        return Collection.of(config, drawn.groups, **counts, pairs=pairs, lost=drawn.lost)
    with own_failure_first(drawn.failure):
        rendezvous(groups.world, timeout_s, "rollouts")
        about = {"num_unpaired": drawn.num_unpaired, "replica": groups.dp.rank, "pairs": pairs, "lost": drawn.lost}
        share = share_of(drawn.groups, drawn.num_filtered, drawn.failure, **about)
        shares = all_gather_json(share, groups.world, device)

    def swap(parcels: list[Tensor], sizes: list[int]) -> list[Tensor]:
        return all_to_all_bytes(parcels, sizes, groups.world, device)

    return delivered(config, shares, groups.world.rank, drawn.groups, swap, lost=drawn.lost)


@contextlib.contextmanager
def told_to_others(world: Group) -> Iterator[None]:
    """What fails before ``exchange`` ends that of the others, who would wait for this rank to their limit."""
    try:
        yield
    except Exception as error:
        withdraw(world, "rollouts", error, refused=True)
        raise


@contextlib.contextmanager
def own_failure_first(failure: Exception | None) -> Iterator[None]:
    """Around what tells the others of a failure: raises it behind that, and instead of an error of theirs, or that some of them never came.

    Args:
        failure: of this rank; None where there is none.
    """
    try:
        yield
    except Exception as error:
        if failure is not None:
            raise failure from error
        raise
    if failure is not None:
        raise failure


def share_of(
    groups: Sequence[Sequence[TokenRollout]],
    num_filtered: int,
    failure: BaseException | None,
    *,
    num_unpaired: int = 0,
    replica: int | None = None,
    pairs: bool = False,
    lost: Exception | None = None,
) -> dict[str, Any]:
    """What a rank tells all others of what it has drawn, as JSON: headers, and counts over its tokens.

    Args:
        groups: what it drew.
        num_filtered: as of ``Collection``.
        failure: why there is nothing.
        num_unpaired: as of ``Drawn``.
        replica: data rank of the rank; None where it does not train.
        pairs: rollouts are pairs.
        lost: as of ``Drawn``.
    """
    return {
        "failure": described(failure) if failure else None,
        "lost": described(lost) if lost else None,
        "groups": [[RolloutHeader.of(rollout).to_json() for rollout in group] for group in groups],
        "num_filtered": num_filtered,
        "num_unpaired": num_unpaired,
        "pair_counts": pair_counts(groups),
        "token_versions": sorted(token_versions(groups).items()),
        "replica": replica,
        "pairs": pairs,
    }


def check_failures(shares: Sequence[Mapping[str, Any]]) -> None:
    """Raises:
    RuntimeError: ranks failed; carries what they raised.
    """
    if failed := {rank: part["failure"] for rank, part in enumerate(shares) if part["failure"] is not None}:
        raise RuntimeError(f"ranks failed: {failed}")


def joined(
    config: GRPOConfig, shares: Sequence[Mapping[str, Any]], *, num_ranks: int = 0, lost: Exception | None = None
) -> tuple[Collection, Delivery]:
    """What the shares of all ranks say, in their order, without rollouts, and how those come to where they are trained on.

    Args:
        config: of the iteration.
        shares: as of ``share_of``.
        num_ranks: data ranks; 0 for as many as ``shares`` names.
        lost: as of ``Drawn``, of this rank.

    Raises:
        RuntimeError: ranks failed, which carries what they raised; or nothing is there to train on, whose cause is ``lost``.
        ValueError: as of ``plan_updates``.
    """
    check_failures(shares)
    pairs = any(part["pairs"] for part in shares)
    groups = [[RolloutHeader.from_json(header) for header in group] for part in shares for group in part["groups"]]
    headers = flat(groups)
    if not headers:
        raise RuntimeError(_nothing(config, pairs, [part["lost"] for part in shares])) from lost
    if config.old_logprobs == "inference" and (silent := next((header for header in headers if not header.has_logprobs), None)):
        raise ValueError(
            f"old_logprobs='inference' takes the engine's log-probabilities, and an answer to problem {silent.problem_id!r} of environment "
            f"{silent.env_id!r} has none; set old_logprobs='trainer'"
        )
    replicas = [part["replica"] for part in shares]
    num_ranks = num_ranks or 1 + max(replica for replica in replicas if replica is not None)
    updates = plan_updates(config, headers, num_ranks, pairs=pairs)
    wanted = [frozenset(number for update in updates for number in update.shares[rank]) for rank in range(num_ranks)]
    collected = Collection(
        groups=groups,
        rollouts={},
        updates=updates,
        examples=(),
        num_filtered=sum(part["num_filtered"] for part in shares),
        num_unpaired=sum(part["num_unpaired"] for part in shares),
        pair_counts=(sum(part["pair_counts"][0] for part in shares), sum(part["pair_counts"][1] for part in shares)),
        token_versions=sum((Counter(dict(part["token_versions"])) for part in shares), Counter()),
    )
    delivery = Delivery(
        headers=headers,
        sources=[rank for rank, part in enumerate(shares) for group in part["groups"] for _ in group],
        wanted=[frozenset() if replica is None else wanted[replica] for replica in replicas],
        examples=example_numbers(groups),
    )
    return collected, delivery


def delivered(
    config: GRPOConfig,
    shares: Sequence[Mapping[str, Any]],
    rank: int,
    drawn: Sequence[Sequence[TokenRollout]],
    swap: Callable[[list[Tensor], list[int]], list[Tensor]],
    *,
    lost: Exception | None = None,
) -> Collection:
    """What the shares of all ranks say, with the rollouts that ``rank`` trains on; all ranks call it together.

    Args:
        config: of the iteration.
        shares: as of ``share_of``.
        rank: this one.
        drawn: groups of this rank.
        swap: gives a parcel to each rank, and takes one of so many bytes from each.
        lost: as of ``Drawn``, of this rank.

    Raises:
        RuntimeError, ValueError: as of ``joined``, on all ranks.
    """
    collected, delivery = joined(config, shares, lost=lost)
    own = dict(enumerate(flat(drawn), bisect_left(delivery.sources, rank)))
    parcels = swap(delivery.parcels(rank, own), [delivery.size(source, rank) for source in range(len(shares))])
    return dataclasses.replace(collected, **_here(collected, delivery.received(rank, parcels, own), delivery.wanted[rank]))


def flat(groups: Sequence[Sequence[T]]) -> list[T]:
    """All members of all groups."""
    return [member for group in groups for member in group]


def _here(collected: Collection, rollouts: Mapping[int, TokenRollout], wanted: frozenset[int] | None = None) -> dict[str, Any]:
    """The fields of a collection that hold rollouts."""
    numbers = rollouts.keys() if wanted is None else sorted(wanted)
    examples = tuple(dataclasses.replace(rollouts[number], routed_experts=None) for number in example_numbers(collected.groups))
    return {"rollouts": {number: rollouts[number] for number in numbers}, "examples": examples}


def _nothing(config: GRPOConfig, pairs: bool, lost: Sequence[str | None]) -> str:
    """Why there is nothing to train on.

    Args:
        config: of the iteration.
        pairs: rollouts are pairs.
        lost: as of ``share_of``, of each rank.
    """
    named = {rank: reason for rank, reason in enumerate(lost) if reason is not None}
    last = f"; last of each rank: {named}" if named else ""
    if pairs and named:
        return f"no pair of {config.num_groups} is left, the log names each that was lost{last}"
    if pairs:
        return (
            f"no pair of {config.num_groups}: in every group all answers earned the same, but for those that the log names as lost; ask "
            "harder or easier problems"
        )
    return (
        f"no rollout of {config.num_groups} groups of {config.group_size} is left: all came late (rollout_timeout_s="
        f"{config.rollout_timeout_s}), or were lost with their problem, request, tokens or judge; the log names each{last}"
    )


def fitting(config: GRPOConfig, made: Sequence[TokenRollout | Rollout], interface: InferenceInterface | None) -> list[TokenRollout]:
    """The rollouts of a group that can be trained on, those of text in tokens; the log names the others. A group whose prompts all begin
    twice is a `LostGroup`, and one that is stays so.

    Args:
        config: says how long they may be.
        made: by the agent.
        interface: whose ``encode`` makes tokens; None where an agent makes no texts.

    Raises:
        TypeError: as of ``in_tokens``.
        TrajectoryError: a turn of the policy that goes on behind its end: an engine does not stop there.
    """
    if isinstance(made, LostGroup):
        return made
    most, group, doubled = config.longest_trajectory, [], []
    for rollout in (in_tokens(one, interface) for one in made):
        check_turn_ends(rollout, config.eod_id)
        if reason := doubled_beginning(rollout, config.bos_id, config.eod_id):
            _log.warning("an answer is dropped: %s", reason)
            doubled.append(reason)
            continue
        if (length := len(rollout.trajectory)) > most:
            name = f"seq_len={config.seq_len}" if config.packing is None else f"packing.bin_size={config.packing.bin_size}"
            where = f"environment {rollout.env_id!r}: an answer to problem {rollout.problem_id!r}"
            _log.warning("%s is dropped, it has %d tokens with its prompt and %s admits %d; raise it", where, length, name, most)
            continue
        group.append(rollout)
    return LostGroup(TrajectoryError(doubled[-1])) if doubled and len(doubled) == len(made) else group


async def ask(config: GRPOConfig, agent: GroupedRolloutGenerator, interface: InferenceInterface, num_groups: int) -> Drawn:
    """Groups of this rank, as many as are there in time.

    A group without a rollout is lost, not replaced.

    Raises:
        Exception: what the agent or the interface raised; or as of ``check_all_lost``.
    """
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
        sizes = {"num_groups": wanted, "size": config.group_size}
        limit_s = max(0.0, end - clock())
        # Which update a group is in must not depend on who was faster.
        stream = agent.get_grouped_rollouts(interface, **sizes, args=config.drawing_args, timeout_s=limit_s, in_order=True)
        async for drawn in stream:
            group = fitting(config, drawn, interface)
            is_equal = config.filter_equal_groups and same_reward([config.clipped(rollout.reward) for rollout in group])
            (equal if is_equal and group else groups).append(group)
    if (missing := num_groups - len(groups) - len(equal)) > 0:
        text = "%d of %d groups are dropped, not there within rollout_timeout_s=%s"
        _log.warning(text, missing, num_groups, config.rollout_timeout_s)
    filled = equal[: max(0, num_groups - len(groups))]
    if filled:
        _log.warning("%d of %d groups have equal rewards, after %d were asked for", len(filled), num_groups, num_asked)
    check_all_lost(groups, num_asked, is_alone=num_groups == config.num_groups)
    own = [group for group in (*groups, *filled) if group]
    return Drawn(groups=own, num_filtered=len(equal) - len(filled), lost=last_reason(groups))

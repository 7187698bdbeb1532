# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Who trains on which rollouts: planned from headers alone, alike on every rank."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from mcore_rl._config import GRPOConfig
from mcore_rl._packing._header import RolloutHeader
from mcore_rl._packing._packed import BinPlan, plan_bins

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class UpdatePlan:
    """One update, on a consecutive part of the rollouts."""

    shares: list[list[int]]
    """Numbers of the rollouts of each data rank, among all, in the order of their places."""
    begin: int
    """Number of the first rollout of the part."""
    num_rows: int
    """Rows of the data rank that has most; all have as many."""
    bins: BinPlan | None = None
    """Of packed rollouts, whose numbers count from ``begin``."""


def plan_updates(config: GRPOConfig, headers: Sequence[RolloutHeader], num_ranks: int, *, pairs: bool = False) -> list[UpdatePlan]:
    """The updates of an epoch; one without a token that counts is left out.

    Args:
        config: sizes, mini-batches, packing.
        headers: of all rollouts, in their order.
        num_ranks: data ranks.
        pairs: rollouts are pairs, each of which stays together; they are neither packed nor left out.

    Raises:
        ValueError: a trajectory that no row or no bin holds; names its problem.
    """
    width = 2 if pairs else 1
    updates = []
    for number in range(config.num_mini_batches):
        begin, end = (width * bound for bound in part_of(len(headers) // width, number, config.num_mini_batches))
        if not any(_num_counted(config, header) for header in headers[begin:end]) and not (pairs and begin < end):
            if not pairs:
                _log.warning(
                    "mini-batch %d of %d is left out: none of its %d rollouts counts", number, config.num_mini_batches, end - begin
                )
            continue
        if config.packing is not None:
            bins = plan_bins(headers[begin:end], config.packing, num_ranks)
            shares = [[begin + member for member in bins.members(rank)] for rank in range(num_ranks)]
            updates.append(UpdatePlan(shares=shares, begin=begin, num_rows=len(bins.shares[0]), bins=bins))
            continue
        bounds = [part_of((end - begin) // width, rank, num_ranks) for rank in range(num_ranks)]
        shares = [list(range(begin + width * first, begin + width * last)) for first, last in bounds]
        _check_rows(config, headers[begin:end])
        # Answers may be missing, but all ranks have as many micro-batches.
        updates.append(UpdatePlan(shares=shares, begin=begin, num_rows=width * -(-((end - begin) // width) // num_ranks)))
    return updates


def part_of(count: int, part: int, num_parts: int) -> tuple[int, int]:
    """First and last but one of a consecutive part of ``count``."""
    return part * count // num_parts, (part + 1) * count // num_parts


def _num_counted(config: GRPOConfig, header: RolloutHeader) -> int:
    return 0 if config.mask_truncated and header.finish_reason == "length" else header.num_counted


def _check_rows(config: GRPOConfig, headers: Sequence[RolloutHeader]) -> None:
    for header in headers:
        if header.num_tokens > config.seq_len + 1:
            raise ValueError(
                f"trajectory of {header.problem_id} has {header.num_tokens} tokens, seq_len={config.seq_len} admits "
                f"{config.seq_len + 1}; raise seq_len"
            )

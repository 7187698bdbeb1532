# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What the choice of experts may be asked for: of a `MoEConfig`, whose fields have a prefix, and of the functions that choose."""

import math
from collections.abc import Sequence

SCORE_FUNCTIONS = ("softmax", "sigmoid", "sqrtsoftplus")


def check_topk(num_experts: int, topk: int, *, prefix: str = "", experts: str = "num_experts") -> None:
    """Experts a token.

    Args:
        num_experts: of the layer.
        topk: of a token.
        prefix: of the names in messages.
        experts: what ``num_experts`` is called.

    Raises:
        ValueError: names field, value and what to change, as all of this file.
    """
    if num_experts < 1:
        raise ValueError(f"{experts}={num_experts} must be at least 1")
    if not 1 <= topk <= num_experts:
        raise ValueError(f"{prefix}topk={topk} must lie in 1..{experts}={num_experts}")


def check_groups(
    num_experts: int, topk: int, num_groups: int | None, group_topk: int | None, *, prefix: str = "", experts: str = "num_experts"
) -> None:
    """A choice limited to groups: each is scored by its best topk // group_topk experts, of which there must be one at least."""
    if (num_groups is None) != (group_topk is None):
        raise ValueError(f"{prefix}num_groups={num_groups} and {prefix}group_topk={group_topk} go together; set both or none")
    if num_groups is None or group_topk is None:
        return
    if num_groups < 1 or num_experts % num_groups:
        raise ValueError(f"{prefix}num_groups={num_groups} must divide {experts}={num_experts}")
    if not 1 <= group_topk <= num_groups:
        raise ValueError(f"{prefix}group_topk={group_topk} must lie in 1..{prefix}num_groups={num_groups}")
    if topk % group_topk:
        raise ValueError(f"{prefix}group_topk={group_topk} must divide {prefix}topk={topk}: so many of a group score it")
    if topk // group_topk > num_experts // num_groups:
        raise ValueError(
            f"{prefix}topk={topk} asks {prefix}group_topk={group_topk} groups for {topk // group_topk} experts each, but "
            f"{num_groups} groups have {num_experts // num_groups}; lower {prefix}topk or raise {prefix}group_topk"
        )


def check_score_function(score_function: str, *, pre_softmax: bool = False, prefix: str = "") -> None:
    """How logits become scores."""
    if score_function not in SCORE_FUNCTIONS:
        raise ValueError(f"{prefix}score_function={score_function!r} must be {' or '.join(SCORE_FUNCTIONS)}")
    if pre_softmax and score_function != "softmax":
        raise ValueError(f"{prefix}pre_softmax=True needs {prefix}score_function='softmax', found {score_function!r}; leave one out")


def check_drop_policy(field: str, policy: str) -> None:
    """Which picks an expert keeps."""
    if policy not in ("probs", "position"):
        raise ValueError(f"{field}={policy!r} must be probs or position")


def check_shape(field: str, shape: Sequence[int], expected: Sequence[int], what: str) -> None:
    """Of a tensor; ``what`` says of what its dimensions are."""
    if list(shape) != list(expected):
        raise ValueError(f"{field} has shape {list(shape)}, must be {list(expected)}: {what}")


def check_above_zero(field: str, value: float, remedy: str) -> None:
    """A factor."""
    if not 0 < value < math.inf:
        raise ValueError(f"{field}={value} must be above 0 and finite; {remedy}")


def check_not_negative(field: str, value: float, remedy: str) -> None:
    """A coefficient or a rate."""
    if not 0 <= value < math.inf:
        raise ValueError(f"{field}={value} must not be negative, and finite; {remedy}")

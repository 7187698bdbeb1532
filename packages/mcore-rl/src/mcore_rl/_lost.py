# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What costs one answer, or one group, and nothing else."""

from collections.abc import Sequence
from typing import TypeVar

from mcore_rl._stability import experimental_api
from mcore_rl._types import TokenRollout

T = TypeVar("T")


@experimental_api
class LostError(RuntimeError):
    """One answer is lost; whatever answers, or judges, goes on.

    Args:
        reason: what is wrong, in words.
        is_transient: whether the same request can succeed a moment later.
    """

    def __init__(self, reason: str, *, is_transient: bool = False) -> None:
        super().__init__(reason)
        self.is_transient = is_transient


class LostGroup(list[TokenRollout]):
    """A group without a rollout, and why.

    Args:
        reason: what cost all of its answers.
    """

    def __init__(self, reason: Exception) -> None:
        super().__init__()
        self.reason = reason


class GroupPairs(list[T]):
    """Pairs of groups, and of those that gave none because all of their answers earned the same, how many there were.

    Args:
        pairs: that there are.
        num_equal: groups without a pair.
        num_unpaired: of these, those that no other group replaced: pairs that are missing for it.
    """

    def __init__(self, pairs: Sequence[T], *, num_equal: int, num_unpaired: int) -> None:
        super().__init__(pairs)
        self.num_equal, self.num_unpaired = num_equal, num_unpaired


def last_reason(groups: Sequence[Sequence[TokenRollout]]) -> Exception | None:
    """Of the last group that says why it was lost; None where none does."""
    return next((group.reason for group in reversed(groups) if isinstance(group, LostGroup)), None)


def check_all_lost(groups: Sequence[Sequence[TokenRollout]], num_asked: int, *, is_alone: bool) -> None:
    """Whether a draw failed as a whole, as it does where its environment or its tokenizer is broken. Of several ranks one that asked for a
    single group goes on: one bad problem is no more than that.

    Args:
        groups: that came.
        num_asked: groups that were asked for.
        is_alone: nobody else draws for the iteration.

    Raises:
        Exception: the reason of the last group, where each says that it was lost.
    """
    lost = [group for group in groups if isinstance(group, LostGroup)]
    if lost and len(lost) == num_asked and (is_alone or num_asked > 1):
        raise lost[-1].reason


def described(error: BaseException) -> str:
    """An error with its notes."""
    return ", ".join([repr(error), *getattr(error, "__notes__", ())])

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Tokens that begin and end texts, where a trajectory has them."""

import contextlib
from collections.abc import Iterator, Sequence

from mcore_rl._stability import experimental_api
from mcore_rl._types import TokenRollout


@experimental_api
class TrajectoryError(ValueError):
    """Tokens that no policy is to learn from; names environment and problem."""


def doubled_beginning(rollout: TokenRollout, bos_id: int | None, eod_id: int | None) -> str:
    """What is wrong with a prompt or a reply that has a beginning twice in a row; empty where none has.

    Whatever the policy drew may hold ``bos_id``.

    Args:
        rollout: of an agent.
        bos_id: token that begins a text; None where there is none.
        eod_id: token that ends one; None where there is none.
    """
    tokens, written = rollout.trajectory, rollout.generation_mask
    for place in () if bos_id == eod_id else _places(tokens, bos_id):
        # Templates may begin each message with it.
        if place and not written[place] and tokens[place - 1] == bos_id:
            return (
                f"{_whose(rollout)} has bos_id={bos_id} twice in a row at place {place} of its prompt; have the chat template or the "
                "tokenizer write it, not both"
            )
    return ""


def check_turn_ends(rollout: TokenRollout, eod_id: int | None) -> None:
    """Whether each turn of the policy ends with its end. Between its turns there may be any number of ``eod_id``.

    Args:
        rollout: of an agent.
        eod_id: token that ends a text; None where there is none.

    Raises:
        TrajectoryError: a turn that goes on behind its end.
    """
    tokens, written = rollout.trajectory, rollout.generation_mask
    for place in _places(tokens, eod_id):
        if written[place] and place + 1 < len(tokens) and written[place + 1]:
            raise TrajectoryError(
                f"{_whose(rollout)} goes on behind eod_id={eod_id} at place {place}, which the policy drew; let the engine stop there, "
                "without ignore_eos"
            )


def _whose(rollout: TokenRollout) -> str:
    return f"an answer to problem {rollout.problem_id!r} of environment {rollout.env_id!r}"


def _places(tokens: Sequence[int], token: int | None) -> Iterator[int]:
    """Where a token is; none for None."""
    place = -1
    # Looking each token up would take many times as long.
    with contextlib.suppress(ValueError):
        while token is not None:
            place = tokens.index(token, place + 1)
            yield place

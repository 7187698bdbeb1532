# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The transfers between the actions of a stage."""

from collections.abc import Sequence
from dataclasses import dataclass

from mcore_parallel.pipeline._schedule import Action


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Transfers of one batch, by micro-batch; None for no transfer.

    What an action produced leaves in the same batch in which the input of the next action comes, so that two
    neighbours that turn to each other at the same time never wait for each other.
    """

    recv_activation: int | None = None
    """From the previous stage."""
    send_activation: int | None = None
    """To the next stage."""
    recv_grad: int | None = None
    """From the next stage."""
    send_grad: int | None = None
    """To the previous stage."""


def exchanges(actions: Sequence[Action], num_stages: int, stage: int) -> list[Exchange]:
    """The exchange before each action and one after the last: ``len(actions) + 1`` entries, empty ones included.

    Example:
        >>> [entry.recv_grad for entry in exchanges([Action("F", 0), Action("B", 0)], num_stages=2, stage=0)]
        [None, 0, None]
    """
    first, last = stage == 0, stage == num_stages - 1
    found: list[Exchange] = []
    for done, due in zip([None, *actions], [*actions, None], strict=True):
        found.append(
            Exchange(
                recv_activation=due.microbatch if due and due.kind == "F" and not first else None,
                send_activation=done.microbatch if done and done.kind == "F" and not last else None,
                recv_grad=due.microbatch if due and due.kind == "B" and not last else None,
                send_grad=done.microbatch if done and done.kind == "B" and not first else None,
            )
        )
    return found

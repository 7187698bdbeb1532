# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Which problem of a file has which number."""

import functools
import random

_EVALUATED_SHARE, _MOST_EVALUATED = 5, 128


def check_env_id(env_id: str) -> None:
    """Raises:
    ValueError: it is no name.
    """
    if not env_id or "/" in env_id:
        raise ValueError(f"env_id={env_id!r} must be a name without /")


class FileOrder:
    """The first problems of a file are for evaluations; each other one is posed once, then again in another order.

    Args:
        name: of the environment.
        path: of the file, for errors.
        num_problems: in it.
        num_evaluation: those of evaluations, or all; None for a fifth of the file, 128 at most.
        seed: of the orders.

    Raises:
        ValueError: it has not so many, or nothing is left for training where nobody asked for that.
    """

    def __init__(self, name: str, path: str, num_problems: int, num_evaluation: int | None, seed: int) -> None:
        self._name, self._seed = name, seed
        share = max(1, num_problems // _EVALUATED_SHARE)
        self.num_evaluation = min(_MOST_EVALUATED, share) if num_evaluation is None else num_evaluation
        self.num_trained = num_problems - self.num_evaluation
        if self.num_trained < (1 if num_evaluation is None else 0):
            raise ValueError(
                f"{path} has {num_problems} problems, num_evaluation={self.num_evaluation} of which are kept back; lower it, or name a "
                "longer file"
            )
        self._order = functools.lru_cache(maxsize=2)(self._shuffled)

    def trained(self, number: int) -> int:
        """Row of problem ``number`` of training.

        Raises:
            ValueError: all are for evaluations.
        """
        if not self.num_trained:
            raise ValueError(f"environment {self._name!r} evaluates all problems of its file; train on another one, with weight 0 for this")
        epoch, place = divmod(number, self.num_trained)
        return self.num_evaluation + self._order(epoch)[place]

    def evaluated(self, number: int) -> int:
        """Row of problem ``number`` of evaluations."""
        return number % self.num_evaluation

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(self.num_trained))
        random.Random(f"{self._name} {self._seed} {epoch}").shuffle(order)
        return order

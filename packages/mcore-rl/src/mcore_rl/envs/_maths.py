# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Maths problems of a file, whose final answers are compared."""

import functools
import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_rl._stability import experimental_api
from mcore_rl.agent import NumberedProblems, Problem
from mcore_rl.envs._maths_answer import find_answer, same_answer


@experimental_api
@dataclass(frozen=True, kw_only=True)
class MathsConfig:
    """Which file, and what answers earn.

    Raises:
        ValueError: a field out of its range.
    """

    path: str = ""
    """JSON lines with ``question`` and ``answer``; of an answer with ``####``, as in GSM8K, what stands behind it."""
    prompt: str = "{question}\nThink step by step, and put the final answer in \\boxed{}.\n"
    """With {question}."""
    format_reward: float = 0.0
    """Of a wrong answer in tags or in a box."""
    num_evaluation: int = 128
    """Problems at the beginning of the file that are not trained on."""
    seed: int = 0
    """Of the order, another one each time that the file is seen."""

    def __post_init__(self) -> None:
        if "{question}" not in self.prompt:
            raise ValueError(f"prompt={self.prompt!r} must hold {{question}}")
        if not (math.isfinite(self.format_reward) and 0 <= self.format_reward < 1):
            raise ValueError(f"format_reward={self.format_reward} must lie from 0 to below 1")
        if self.num_evaluation < 1:
            raise ValueError(f"num_evaluation={self.num_evaluation} must be at least 1")

    def build(self) -> "Maths":
        """The environment.

        Raises:
            ValueError: no path, or a line that is no problem; names file and line.
            OSError: the file cannot be read.
        """
        return Maths(self)


@experimental_api
class Maths(NumberedProblems):
    """1 for the right final answer, ``format_reward`` for another one, 0 for none.

    The last answer in <answer> tags counts, else the last in \\\\boxed. Numbers and fractions are compared by value, in time that is linear
    in the response: nothing that a model writes is evaluated.

    Args:
        config: the file and the rewards.

    Raises:
        ValueError, OSError: as of ``MathsConfig.build``.
    """

    def __init__(self, config: MathsConfig) -> None:
        super().__init__("maths")
        if not config.path:
            raise ValueError("maths.path is empty; name a file of JSON lines with question and answer")
        self.config = config
        self._rows = _read(Path(config.path))
        self._num_trained = len(self._rows) - config.num_evaluation
        if self._num_trained < 1:
            raise ValueError(
                f"{config.path} has {len(self._rows)} problems, num_evaluation={config.num_evaluation} of which are kept back; lower it"
            )
        self._order = functools.lru_cache(maxsize=2)(self._shuffled)

    def problem(self, number: int) -> Problem:
        """Problem ``number``: each of the file once, then again in another order."""
        config = self.config
        if number >= self.FIRST_EVALUATION:
            row = (number - self.FIRST_EVALUATION) % config.num_evaluation
        else:
            epoch, place = divmod(number, self._num_trained)
            row = config.num_evaluation + self._order(epoch)[place]
        question, answer = self._rows[row]
        return Problem(problem_id=f"maths/{row}", prompt=config.prompt.replace("{question}", question), golden=answer)

    def attempt(self, problem: Problem, generator: random.Random) -> str:
        """The answer to some problem of the file."""
        _, answer = self._rows[self.config.num_evaluation + generator.randrange(self._num_trained)]
        return f"\\boxed{{{answer}}}"

    def num_problems(self, *, validation: bool = False) -> int:
        return self.config.num_evaluation if validation else self._num_trained

    async def get_reward(self, response: str, problem: Problem) -> float:
        answer = find_answer(response)
        if answer is None:
            return 0.0
        return 1.0 if same_answer(answer, problem.golden) else self.config.format_reward

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(self._num_trained))
        random.Random(f"maths {self.config.seed} {epoch}").shuffle(order)
        return order


def _read(path: Path) -> list[tuple[str, str]]:
    """Questions and final answers."""
    rows: list[tuple[str, str]] = []
    if not path.is_file():
        raise ValueError(f"maths.path={str(path)!r} is no file; name one of JSON lines with question and answer")
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                value: Any = json.loads(line)
            except (json.JSONDecodeError, RecursionError):
                raise ValueError(f"{path}:{number} is no JSON; write one problem a line") from None
            if not isinstance(value, Mapping) or not all(isinstance(value.get(name), str | int | float) for name in ("question", "answer")):
                raise ValueError(f'{path}:{number} must be {{"question": ..., "answer": ...}}, found {line.strip()[:60]}')
            answer = str(value["answer"]).rpartition("####")[2].strip()
            rows.append((str(value["question"]), answer))
    return rows

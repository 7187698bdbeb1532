# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Maths problems of a file, whose final answers are compared."""

import math
import random
from dataclasses import dataclass
from pathlib import Path

from mcore_rl._stability import experimental_api
from mcore_rl.agent import NumberedProblems, Problem
from mcore_rl.envs._file_order import FileOrder, check_env_id
from mcore_rl.envs._math_verify import MathVerify
from mcore_rl.envs._maths_answer import same_answer, split_answer
from mcore_rl.envs._maths_file import read_problems

_OWN = Path(__file__).with_name("maths.jsonl")


@experimental_api
@dataclass(frozen=True, kw_only=True)
class MathsConfig:
    """Which file, and what answers earn.

    Raises:
        ValueError: a field out of its range.
    """

    env_id: str = "maths"
    """Under which rewards are reported."""
    path: str = ""
    """JSON lines with a question and an answer, in the columns of GSM8K, MATH, DAPO, AIME, Big-Math, OpenMathInstruct and their like; of
    an answer with ``\\boxed`` what the last one holds, of one with ``####`` what stands behind it. A question counts once. Empty for the 54
    of this package."""
    question_field: str = ""
    """Of a line, a.b for field b of field a; empty for the first of question, problem, prompt."""
    answer_field: str = ""
    """Empty for the first of answer, expected_answer, ground_truth, reward_model.ground_truth, solution."""
    judge: str = "own"
    """own: numbers and fractions by value, other answers by their spelling, in linear time. math-verify: expressions, sets, intervals and
    matrices by that library (extra ``maths``), in processes with limits (`mcore_rl.ProcessJudge`)."""
    prompt: str = "{question}\nThink step by step, and put the final answer in \\boxed{}.\n"
    """With {question}."""
    evaluation_path: str = ""
    """A file of its own for evaluations, as AIME beside DAPO: no problem of it is trained on, and all of ``path`` are else. Empty for the
    first problems of ``path``."""
    evaluation_prompt: str = ""
    """Of ``evaluation_path``, with {question}; empty for ``prompt``."""
    format_reward: float = 0.0
    """Of a wrong answer in tags or in a box."""
    negative_reward: float = 0.0
    """Of a response without an answer, at most ``format_reward``; it may lie below 0."""
    partial_end_reward: float | None = None
    """Of the right answer with text behind it, from ``format_reward`` to 1; None for 1."""
    num_evaluation: int | None = None
    """Problems at the beginning of the file that are not trained on, or all of them; None for a fifth of it, 128 at most. With
    ``evaluation_path`` those at the beginning of that; None for all."""
    seed: int = 0
    """Of the order, another one each time that the file is seen."""

    def __post_init__(self) -> None:
        check_env_id(self.env_id)
        if "{question}" not in self.prompt:
            raise ValueError(f"prompt={self.prompt!r} must hold {{question}}")
        if self.evaluation_prompt and ("{question}" not in self.evaluation_prompt or not self.evaluation_path):
            raise ValueError(f"evaluation_prompt={self.evaluation_prompt!r} must hold {{question}}, and is for an evaluation_path")
        if self.judge not in ("own", "math-verify"):
            raise ValueError(f"judge={self.judge!r} must be own or math-verify")
        if not (math.isfinite(self.format_reward) and 0 <= self.format_reward < 1):
            raise ValueError(f"format_reward={self.format_reward} must lie from 0 to below 1")
        if not (math.isfinite(self.negative_reward) and self.negative_reward <= self.format_reward):
            raise ValueError(f"negative_reward={self.negative_reward} must be finite and at most format_reward={self.format_reward}")
        if self.partial_end_reward is not None and not self.format_reward <= self.partial_end_reward <= 1:
            raise ValueError(f"partial_end_reward={self.partial_end_reward} must lie from format_reward={self.format_reward} to 1")
        if self.num_evaluation is not None and self.num_evaluation < 1:
            raise ValueError(f"num_evaluation={self.num_evaluation} must be at least 1")

    def build(self) -> "Maths":
        """The environment.

        Raises:
            ValueError: no file, or a line that is no problem; names file and line.
            OSError: the file cannot be read.
            ModuleNotFoundError: ``judge`` needs a library that is not installed; names the extra.
        """
        return Maths(self)


@experimental_api
class Maths(NumberedProblems):
    """1 for the right final answer, ``format_reward`` for another one, ``negative_reward`` for none.

    The last answer in <answer> tags counts, else the last in \\\\boxed, else what a last line has behind Answer:. With ``judge="own"`` the
    time is linear in the response: nothing that a model writes is evaluated. With "math-verify" it is, without limits: judge in a
    `mcore_rl.ProcessJudge`, which has them.

    Args:
        config: the file and the rewards.

    Raises:
        ValueError, OSError, ModuleNotFoundError: as of ``MathsConfig.build``.
    """

    def __init__(self, config: MathsConfig) -> None:
        super().__init__(config.env_id)
        self.config = config
        self._same = MathVerify().same if config.judge == "math-verify" else same_answer
        columns, path, num_evaluation = (config.question_field, config.answer_field), config.path or "maths.jsonl", config.num_evaluation
        self._rows = read_problems(Path(config.path or _OWN), *columns)
        if config.evaluation_path:
            evaluated = read_problems(Path(config.evaluation_path), *columns, name="maths.evaluation_path")
            if not 1 <= (num_evaluation := num_evaluation or len(evaluated)) <= len(evaluated):
                raise ValueError(f"{config.evaluation_path} has {len(evaluated)} problems, and num_evaluation={num_evaluation}; lower it")
            questions = {question for question, _ in evaluated}
            self._rows = evaluated[:num_evaluation] + [row for row in self._rows if row[0] not in questions]
        self._order = FileOrder(self.env_id, path, len(self._rows), num_evaluation, config.seed)

    def problem(self, number: int) -> Problem:
        """Problem ``number``: each of the file once, then again in another order."""
        config = self.config
        order, first = self._order, self.FIRST_EVALUATION
        row = order.trained(number) if number < first else order.evaluated(number - first)
        question, answer = self._rows[row]
        prompt = config.prompt if number < first else config.evaluation_prompt or config.prompt
        return Problem(problem_id=f"{self.env_id}/{row}", prompt=prompt.replace("{question}", question), golden=answer)

    def attempt(self, problem: Problem, generator: random.Random) -> str:
        """The answer to some problem of the file."""
        _, answer = self._rows[self._order.num_evaluation + generator.randrange(self._order.num_trained)]
        return f"\\boxed{{{answer}}}"

    def num_problems(self, *, validation: bool = False) -> int:
        return self._order.num_evaluation if validation else self._order.num_trained

    async def get_reward(self, response: str, problem: Problem) -> float:
        config, split = self.config, split_answer(response)
        if split is None:
            return config.negative_reward
        answer, rest = split
        if not self._same(answer, problem.golden):
            return config.format_reward
        return 1.0 if not rest or config.partial_end_reward is None else config.partial_end_reward

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Sums with a calculator: the smallest task with a tool."""

import dataclasses
import importlib
import json
import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mcore_rl._stability import experimental_api
from mcore_rl.agent import Episode, NumberedConversations, Problem
from mcore_rl.envs._arithmetic import ExpressionError, evaluate
from mcore_rl.envs._sums import Arithmetic, ArithmeticConfig

if TYPE_CHECKING:
    from mcore_inference.tool_calls import ToolCall

_NAME = "calculate"
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "The exact value of a sum of whole numbers with + - * / and parentheses.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}


@experimental_api
class Calculator(NumberedConversations):
    """The problems and rewards of `Arithmetic`, and a tool that works sums out.

    A turn with calls ``<tool_call>{"name": "calculate", "arguments": {"expression": "3+4"}}</tool_call>`` (the form of Hermes and Qwen) is
    answered by a message of the role ``tool`` for each. The first turn without a call is the answer, whose reward is that of `Arithmetic`;
    a conversation that ends with a call earns 0. Nothing that the policy writes is run: sums are evaluated exactly, in bounded time.

    Args:
        config: of the sums.
    """

    def __init__(self, config: ArithmeticConfig) -> None:
        super().__init__("calculator", max_turns=4)
        # What replies need, before processes that judge are forked from one that has made it.
        importlib.import_module("mcore_inference.tool_calls")
        self._sums = Arithmetic(config)

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        return (_TOOL,)

    def problem(self, number: int) -> Problem:
        """Problem ``number`` of `Arithmetic`.

        Raises:
            ValueError: as of that.
        """
        problem = self._sums.problem(number)
        return dataclasses.replace(problem, problem_id=problem.problem_id.replace(self._sums.env_id, self.env_id, 1))

    def attempt_turns(self, problem: Problem, generator: random.Random) -> Sequence[str]:
        """In the share ``worked`` of all cases a call and the value that it gives; else the single answer of `Arithmetic`."""
        posed, _, value = problem.golden.partition("=")
        if generator.random() >= self._sums.config.worked:
            return (self._sums.attempt(problem, generator),)
        call = json.dumps({"name": _NAME, "arguments": {"expression": posed}})
        return f"<tool_call>{call}</tool_call>", f"={value}"

    def begin(self, problem: Problem) -> Episode:
        return _Calculation(self._sums, problem)


class _Calculation(Episode):
    """One conversation about a sum."""

    def __init__(self, sums: Arithmetic, problem: Problem) -> None:
        self._sums, self._problem = sums, problem
        self._final: str | None = None

    async def start(self) -> Sequence[Mapping[str, Any]]:
        return [{"role": "user", "content": self._problem.prompt}]

    async def reply(self, answer: str) -> Sequence[Mapping[str, Any]]:
        # Whoever has an engine has imported it already; agents without one need not.
        from mcore_inference.tool_calls import ToolCall, ToolCallParser, tool_format

        parser = ToolCallParser(tool_format("hermes"), [_NAME])
        calls = [part for part in (*parser.push(answer), *parser.finish()) if isinstance(part, ToolCall)]
        if not calls:
            self._final = answer
        return [{"role": "tool", "content": _value(call)} for call in calls]

    async def reward(self) -> float:
        return 0.0 if self._final is None else await self._sums.get_reward(self._final, self._problem)


def _value(call: "ToolCall") -> str:
    """What a call gives: the value of its sum, or what is wrong with it."""
    try:
        expression = json.loads(call.arguments).get("expression")
    except (ValueError, RecursionError):
        expression = None
    if not isinstance(expression, str):
        return "error: expression must be a text"
    try:
        return str(evaluate(expression)[0])
    except ExpressionError as error:
        return f"error: {error}"

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Environments that are named by where they are."""

import asyncio
import dataclasses
import multiprocessing
import os
import secrets
import signal
import socket
import time
from pathlib import Path

from mcore_rl import Conversation, Episode, NumberedConversations, NumberedProblems, Problem


class Vowels(NumberedProblems):
    """The share of an answer's characters that are vowels."""

    def __init__(self) -> None:
        super().__init__("vowels")

    def problem(self, number: int) -> Problem:
        return Problem(problem_id=str(number), prompt=f"{number % 10}:")

    async def get_reward(self, response: str, problem: Problem) -> float:
        return sum(character in "aeiou" for character in response) / max(1, len(response))


class OneTooLong(Vowels):
    """The prompts of problem 5, and of the second of an evaluation, are longer than any row."""

    def problem(self, number: int) -> Problem:
        problem = super().problem(number)
        return dataclasses.replace(problem, prompt=" ".join(map(str, range(700)))) if number in (5, self.FIRST_EVALUATION + 1) else problem


class Gaps(Vowels):
    """Problem 0 cannot be posed, and neither can problem 3."""

    def problem(self, number: int) -> Problem:
        if number in (0, 3):
            raise LookupError(f"row {number} is broken")
        return super().problem(number)


class Hostile(NumberedProblems):
    """Does to the judge's process what the response says."""

    def __init__(self) -> None:
        super().__init__("hostile")

    def problem(self, number: int) -> Problem:
        return Problem(problem_id=str(number), prompt="?")

    async def get_reward(self, response: str, problem: Problem) -> float:
        word, _, port = response.partition(" ")
        if word == "exit":
            os._exit(3)
        if word == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        while word == "loop":
            pass
        if word == "memory":
            return float(len(bytearray(4 << 30)))
        if word == "raise":
            raise ValueError("of the judge")
        if word == "text":
            return "much"  # type: ignore[return-value]  # pyright: ignore[reportReturnType]
        if word == "network":
            with socket.create_connection(("127.0.0.1", int(port or 9)), timeout=5):
                return 0.5
        return float(word == "good")


class Nodding(NumberedConversations):
    """Says "yes" to the first answer; a reward of how long both are."""

    def __init__(self) -> None:
        super().__init__("nodding", max_turns=2)

    def problem(self, number: int) -> Problem:
        return Problem(problem_id=str(number), prompt=f"{number % 10}:")

    def begin(self, problem: Problem) -> Episode:
        return _Nod(problem)


class _Nod(Episode):
    def __init__(self, problem: Problem) -> None:
        self._problem, self._length = problem, 0

    async def start(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self._problem.prompt}]

    async def reply(self, answer: str) -> list[dict[str, str]]:
        self._length += len(answer)
        return [{"role": "user", "content": "yes"}]

    async def reward(self) -> float:
        return float(self._length)


class HostileTool(NumberedConversations):
    """A tool does to its process what the policy says; "end" ends the conversation, whose reward is the number of its turns."""

    def __init__(self) -> None:
        super().__init__("hostile_tool", max_turns=4)

    def problem(self, number: int) -> Problem:
        return Problem(problem_id=str(number), prompt=f"say {number}")

    def begin(self, problem: Problem) -> Episode:
        return _HostileTool(problem)


class _HostileTool(Episode):
    def __init__(self, problem: Problem) -> None:
        self._problem, self._judge, self._num_turns = problem, Hostile(), 0

    async def start(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self._problem.prompt}]

    async def reply(self, answer: str) -> list[dict[str, str]]:
        self._num_turns += 1
        if answer == "end":
            return []
        if answer == "slow":
            await asyncio.sleep(0.9)
        if answer == "draw":
            return [{"role": "tool", "content": secrets.token_hex(8)}]
        if answer == "other":
            return [{"role": "tool", "text": "no content"}]
        if answer == "flood":
            return [{"role": "tool", "content": "x" * (2 << 20)}]
        return [{"role": "tool", "content": f"{self._num_turns}: {await self._judge.get_reward(answer, self._problem):g}"}]

    async def reward(self) -> float:
        return float(self._num_turns)


class Drawing(HostileTool):
    """The same, which goes on with what was said."""

    def resume(self, conversation: Conversation) -> Episode:
        episode = _HostileTool(conversation.problem)
        episode._num_turns = len(conversation.turns)
        return episode


class Noting(NumberedConversations):
    """A tool that writes each answer down in a file, line by line; the reward is the number of turns."""

    def __init__(self, calls: Path) -> None:
        super().__init__("noting", max_turns=6)
        self.calls = calls

    def problem(self, number: int) -> Problem:
        return Problem(problem_id=str(number), prompt=f"say {number}")

    def begin(self, problem: Problem) -> Episode:
        return _Noting(problem, self.calls)


class _Noting(Episode):
    def __init__(self, problem: Problem, calls: Path) -> None:
        self._problem, self._calls, self._num_turns = problem, calls, 0
        self._held, self._lock = bytearray(), asyncio.Lock()
        self._begun: asyncio.Task[str] | None = None

    async def start(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self._problem.prompt}]

    async def reply(self, answer: str) -> list[dict[str, str]]:
        self._num_turns += 1
        with self._calls.open("a") as file:
            file.write(f"{answer}\n")
        outcome = answer
        if answer == "hold":
            self._held, outcome = bytearray(200 << 20), "held"
        if answer == "use":
            outcome = "used" if bytearray(450 << 20) else ""
        if answer == "thread":
            # Nobody waits for what it begins.
            asyncio.get_running_loop().run_in_executor(None, self._write_later)
        if answer == "begin":
            self._begun = asyncio.create_task(asyncio.sleep(0, "begun"))
        if answer == "lock":
            # A lock belongs to the loop in which somebody waits for it.
            async with self._lock:
                waiting = asyncio.create_task(self._lock.acquire())
                await asyncio.sleep(0)
            await waiting
            self._lock.release()
            outcome = "waited"
        if answer == "finish":
            assert self._begun is not None
            outcome = await self._begun
        if answer == "raise":
            raise ValueError("of the tool")
        return [{"role": "tool", "content": f"{answer}: {outcome}"}]

    def _write_later(self) -> None:
        time.sleep(0.5)
        with self._calls.open("a") as file:
            file.write("written\n")

    async def reward(self) -> float:
        return float(self._num_turns)


def here_alone() -> Hostile:
    """An environment that can be made in the first process only."""
    if multiprocessing.parent_process() is not None:
        raise OSError("no data here")
    return Hostile()

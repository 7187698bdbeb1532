# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Programs that a model writes, run on inputs whose outputs are known."""

import asyncio
import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_rl import _confine
from mcore_rl._stability import experimental_api
from mcore_rl.agent import NumberedProblems, Problem
from mcore_rl.envs._file_order import FileOrder, check_env_id

_OWN = Path(__file__).with_name("code.jsonl")
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
_MOST_OUTPUT_BYTES = 1 << 20
_END_S = 5.0


@experimental_api
@dataclass(frozen=True, kw_only=True)
class CodeConfig:
    """Which file, what programs may use, and what they earn.

    Raises:
        ValueError: a field out of its range.
    """

    env_id: str = "code"
    """Under which rewards are reported."""
    path: str = ""
    """JSON lines with ``question`` and ``tests``, a list of {"input": TEXT, "output": TEXT}; empty for the 36 of this package."""
    prompt: str = "{question}\nWrite a Python program that reads standard input, in a block of ```python.\n"
    """With {question}."""
    format_reward: float = 0.0
    """Of a response with a program that fails a test."""
    time_s: float = 5.0
    """Limit of a program on one input, in seconds."""
    memory_gb: float = 0.5
    """GiB of memory that a program may take, and each process that it starts."""
    max_programs: int = 4
    """Programs that run at a time."""
    num_evaluation: int | None = None
    """Problems at the beginning of the file that are not trained on, or all of them; None for a fifth of it, 128 at most."""
    seed: int = 0
    """Of the order, another one each time that the file is seen."""

    def __post_init__(self) -> None:
        check_env_id(self.env_id)
        if "{question}" not in self.prompt:
            raise ValueError(f"prompt={self.prompt!r} must hold {{question}}")
        if not (math.isfinite(self.format_reward) and 0 <= self.format_reward < 1):
            raise ValueError(f"format_reward={self.format_reward} must lie from 0 to below 1")
        for name in ("time_s", "memory_gb"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ValueError(f"{name}={getattr(self, name)} must be a finite number above 0")
        for name in ("max_programs", "num_evaluation"):
            if (number := getattr(self, name)) is not None and number < 1:
                raise ValueError(f"{name}={number} must be at least 1")

    def build(self) -> "Code":
        """The environment.

        Raises:
            ValueError: no file, or a line that is no problem; names file and line.
            OSError: the file cannot be read.
        """
        return Code(self)


@experimental_api
class Code(NumberedProblems):
    """1 for a program that writes the output of every test, ``format_reward`` for another program, 0 for none.

    The last block of three backticks counts. It runs as a process of its own with limits of time and memory, without network, in an empty
    folder that is removed; all that it started ends with it. Outputs are compared without the blanks at the ends of lines, and never are
    where the program runs. Files that this user may read or write are open to it: give a run that judges programs a user of its own. Linux
    only.

    Args:
        config: the file, the limits and the rewards.

    Raises:
        ValueError, OSError: as of ``CodeConfig.build``.
    """

    def __init__(self, config: CodeConfig) -> None:
        super().__init__(config.env_id)
        self.config = config
        self._rows = _read(Path(config.path or _OWN))
        self._order = FileOrder(self.env_id, config.path or "code.jsonl", len(self._rows), config.num_evaluation, config.seed)
        self._room: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    def problem(self, number: int) -> Problem:
        """Problem ``number``: each of the file once, then again in another order."""
        config = self.config
        order, first = self._order, self.FIRST_EVALUATION
        row = order.trained(number) if number < first else order.evaluated(number - first)
        question, tests = self._rows[row]
        return Problem(problem_id=f"{self.env_id}/{row}", prompt=config.prompt.replace("{question}", question), golden=json.dumps(tests))

    def num_problems(self, *, validation: bool = False) -> int:
        return self._order.num_evaluation if validation else self._order.num_trained

    async def get_reward(self, response: str, problem: Problem) -> float:
        program = find_program(response)
        if program is None:
            return 0.0
        async with self._slots():
            passed = await asyncio.to_thread(self._passes, program, json.loads(problem.golden))
        return 1.0 if passed else self.config.format_reward

    def _passes(self, program: str, tests: list[tuple[str, str]]) -> bool:
        limits = self.config.time_s, int(self.config.memory_gb * 2**30)
        return all(_lines(run_program(program, given, *limits)) == _lines(expected) for given, expected in tests)

    def _slots(self) -> asyncio.Semaphore:
        """Of this event loop: each iteration has its own."""
        loop = asyncio.get_running_loop()
        if self._room is None or self._room[0] is not loop:
            self._room = (loop, asyncio.Semaphore(self.config.max_programs))
        return self._room[1]


def find_program(response: str) -> str | None:
    """The last block of a response."""
    blocks = _BLOCK.findall(response)
    return blocks[-1] if blocks else None


def run_program(program: str, given: str, time_s: float, memory_bytes: int) -> str | None:
    """What a program writes to standard output; None where it fails, takes too long or writes no text.

    Raises:
        RuntimeError: this machine cannot run one without network.
    """
    place = Path(tempfile.mkdtemp(prefix="program-"))
    try:
        (place / "program.py").write_text(program, encoding="utf-8", errors="replace")
        (place / "input").write_text(given, encoding="utf-8")
        (place / "work").mkdir()
        command = [sys.executable, "-I", _confine.__file__, str(os.getpid()), str(memory_bytes), str(place / "program.py")]
        with (place / "input").open("rb") as stdin, (place / "output").open("wb") as stdout, (place / "errors").open("wb") as stderr:
            process = subprocess.Popen(
                command, stdin=stdin, stdout=stdout, stderr=stderr, cwd=place / "work", env={"LANG": "C.UTF-8"}, start_new_session=True
            )
            try:
                code = process.wait(time_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(process)
        if code == -_confine.REFUSED_SIGNAL:
            raise RuntimeError((place / "errors").read_bytes()[:500].decode(errors="replace").strip())
        if code != 0 or (place / "output").stat().st_size > _MOST_OUTPUT_BYTES:
            return None
        with contextlib.suppress(UnicodeDecodeError):
            return (place / "output").read_text(encoding="utf-8")
        return None
    finally:
        _remove(place)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a program that still runs, and all that it started."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _remove(place: Path) -> None:
    """Remove a folder, however deep: what lies in a folder of it goes up, until that is empty."""
    # Of what a program can make, some nobody can remove; its reward does not depend on it.
    with contextlib.suppress(OSError):
        place.chmod(0o700)
        while entries := list(os.scandir(place)):
            for entry in entries:
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)
                    continue
                os.chmod(entry.path, 0o700)
                for inner in list(os.scandir(entry.path)):
                    if inner.is_dir(follow_symlinks=False):
                        os.chmod(inner.path, 0o700)
                    os.rename(inner.path, place / uuid.uuid4().hex)
                os.rmdir(entry.path)
        place.rmdir()


def _lines(text: str | None) -> list[str] | None:
    return None if text is None else [line.rstrip() for line in text.rstrip().splitlines()]


def _read(path: Path) -> list[tuple[str, list[tuple[str, str]]]]:
    """Questions with inputs and outputs."""
    rows: list[tuple[str, list[tuple[str, str]]]] = []
    if not path.is_file():
        raise ValueError(f"code.path={str(path)!r} is no file; name one of JSON lines with question and tests")
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                value: Any = json.loads(line)
            except (json.JSONDecodeError, RecursionError):
                raise ValueError(f"{path}:{number} is no JSON; write one problem a line") from None
            tests = value.get("tests") if isinstance(value, Mapping) else None
            if not isinstance(tests, list) or not tests or not isinstance(value.get("question"), str) or not all(map(_is_test, tests)):
                form = '{"question": TEXT, "tests": [{"input": TEXT, "output": TEXT}, ...]}'
                raise ValueError(f"{path}:{number} must be {form}, found {line.strip()[:60]}")
            rows.append((value["question"], [(test["input"], test["output"]) for test in tests]))
    return rows


def _is_test(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("input"), str) and isinstance(value.get("output"), str)

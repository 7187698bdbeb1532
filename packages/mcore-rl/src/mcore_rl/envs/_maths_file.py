# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Files of maths problems, in the columns that data sets are published with."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mcore_rl.envs._maths_answer import boxed

# The first that a line has counts. A solution is prose, whose last \boxed is the answer.
_QUESTIONS = ("question", "problem", "prompt")
_ANSWERS = ("answer", "expected_answer", "ground_truth", "reward_model.ground_truth", "solution")
_PROSE = "solution"


def read_problems(path: Path, question: str = "", answer: str = "", *, name: str = "maths.path") -> list[tuple[str, str]]:
    """Questions and final answers of JSON lines; a question that comes again counts once, with its first answer.

    Args:
        path: the file.
        question: field of the question, a.b for field b of field a; empty for question, problem or prompt, whichever is there first.
        answer: field of the answer; empty for answer, expected_answer, ground_truth, reward_model.ground_truth or solution.
        name: of the field that names the file, for errors.

    Raises:
        ValueError: no file, or a line that is no problem; names file and line.
        OSError: the file cannot be read.
    """
    if not path.is_file():
        raise ValueError(f"{name}={str(path)!r} is no file; name one of JSON lines with question and answer")
    rows: dict[str, str] = {}
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                value: Any = json.loads(line)
            except (json.JSONDecodeError, RecursionError):
                raise ValueError(f"{path}:{number} is no JSON; write one problem a line") from None
            try:
                text = _question(*_field(value, question, _QUESTIONS))
                rows.setdefault(text, _answer(*_field(value, answer, _ANSWERS), is_prose=not answer))
            except _NoProblemError as error:
                raise ValueError(f"{path}:{number} {error}, found {line.strip()[:60]}") from None
    return list(rows.items())


class _NoProblemError(Exception):
    """What a line lacks."""


def _field(row: Any, wanted: str, known: tuple[str, ...]) -> tuple[str, Any]:
    """Name and value of the field that is wanted, else of the first known one, large letters being small ones."""
    for name in (wanted,) if wanted else known:
        value = row
        for part in name.split("."):
            value = _small(value).get(part.lower()) if isinstance(value, Mapping) else None
        if value is not None:
            return name, value
    if wanted:
        raise _NoProblemError(f"has no {wanted}")
    raise _NoProblemError('must be {"question": ..., "answer": ...}')


def _small(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name.lower(): value for name, value in row.items()}


def _question(name: str, value: Any) -> str:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], Mapping) and value[0].get("role") == "user":
        value = value[0].get("content")
    if not isinstance(value, str) or not value.strip():
        raise _NoProblemError(f"must have a text in {name}, or one message of the user")
    return value


def _answer(name: str, value: Any, *, is_prose: bool) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise _NoProblemError(f"must have a text or a number in {name}")
    text = str(value)
    answer = boxed(text)
    if answer is None:
        if is_prose and name == _PROSE and isinstance(value, str) and "####" not in text:
            raise _NoProblemError(f"must have a \\boxed answer in {name}; name the field of the final answer by maths.answer_field")
        answer = text.rpartition("####")[2]
    if not answer.strip():
        raise _NoProblemError(f"must have an answer in {name}")
    return answer.strip()

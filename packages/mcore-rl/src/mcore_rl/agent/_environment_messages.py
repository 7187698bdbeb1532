# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What an environment's server and its clients say to each other: JSON objects whose fields and types are known, and no others."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from mcore_rl.agent._judged import Problem

VERSION = 1
_PROBLEM = {field.name: str for field in fields(Problem)}


class MessageError(ValueError):
    """What comes is no message; says what is wrong with it."""


def read_message(content: bytes, types: Mapping[str, type | tuple[type, ...]]) -> dict[str, Any]:
    """The fields of a message, which has these and no others.

    Raises:
        MessageError: another one.
    """
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"no JSON: {error}") from None
    return _checked(value, types, "a message")


def _checked(value: Any, types: Mapping[str, type | tuple[type, ...]], where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise MessageError(f"{where} must be an object, found {json.dumps(value)[:60]}")
    if unknown := sorted(set(value) - set(types)):
        raise MessageError(f"{where} has an unknown field {unknown[0][:60]!r}; it has {', '.join(types)}")
    for name, wanted in types.items():
        if name not in value:
            raise MessageError(f"{where} has no {name}")
        # True is an int of Python, and none of JSON; NaN is a number of Python alone.
        got = value[name]
        if isinstance(got, bool) or not isinstance(got, wanted) or (isinstance(got, float) and not math.isfinite(got)):
            allowed = wanted if isinstance(wanted, tuple) else (wanted,)
            raise MessageError(f"{name} of {where} must be {' or '.join(one.__name__ for one in allowed)}, found {json.dumps(got)[:60]}")
    return value


def read_problem(value: Any) -> Problem:
    """A problem of a message.

    Raises:
        MessageError: it is none.
    """
    return Problem(**_checked(value, _PROBLEM, "a problem"))


@dataclass(frozen=True, kw_only=True)
class EnvironmentCard:
    """What a server says of its environment."""

    version: int
    env_id: str
    num_problems: int
    num_evaluation: int
    prompt_timeout_s: float
    answer_timeout_s: float
    judge_timeout_s: float

    @classmethod
    def read(cls, content: bytes) -> "EnvironmentCard":
        """Of a reply.

        Raises:
            MessageError: it is none, or of another version.
        """
        numbers: dict[str, Any] = dict.fromkeys(("prompt_timeout_s", "answer_timeout_s", "judge_timeout_s"), (int, float))
        card = cls(**read_message(content, {"version": int, "env_id": str, "num_problems": int, "num_evaluation": int, **numbers}))
        if card.version != VERSION:
            raise MessageError(f"version={card.version} must be {VERSION}; use the same release on both sides")
        return card


def problem_fields(problem: Problem) -> dict[str, Any]:
    """A problem as it stands in a message."""
    return asdict(problem)

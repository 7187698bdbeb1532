# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What environments elsewhere and their clients say to each other: JSON objects whose fields and types are known, and no others."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from types import NoneType
from typing import Any

from mcore_rl.agent._conversation import Conversation, Turn, TurnLimits
from mcore_rl.agent._judged import Problem

VERSION = 2
MOST_BYTES = 16 << 20
"""Of a request."""
Types = Mapping[str, type | tuple[type, ...]]
_PROBLEM = {field.name: str for field in fields(Problem)}
_CONVERSATION: Types = {"problem": dict, "opening": list, "turns": list}
_TURN: Types = {"answer": str, "replies": list}
_CHAT: dict[str, type] = {"role": str, "content": str}
_CHAT_OPTIONAL: dict[str, type] = {"name": str, "tool_call_id": str, "tool_calls": list}
"""What chat templates know beside."""
_TOOL: Types = {"type": str, "function": dict}
_LIMITS: Types = {"max_turns": int, "max_tokens": (int, NoneType)}


class MessageError(ValueError):
    """What comes is no message; says what is wrong with it."""


def read_message(content: bytes, types: Types) -> dict[str, Any]:
    """The fields of a message, which has these and no others.

    Raises:
        MessageError: another one.
    """
    return checked(_json(content), types, "a message")


def _json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"no JSON: {error}") from None


def checked(value: Any, types: Types, where: str) -> dict[str, Any]:
    """An object that has these fields and no others.

    Raises:
        MessageError: another one; says so of ``where``.
    """
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
    return Problem(**checked(value, _PROBLEM, "a problem"))


def read_conversation(value: Any, check_turns: Callable[[Problem, int], None] | None = None) -> Conversation:
    """A conversation of a message.

    Args:
        value: as it was read.
        check_turns: called with problem and number of turns before these are read.

    Raises:
        MessageError: it is none, or goes on behind its end.
    """
    parts = checked(value, _CONVERSATION, "a conversation")
    problem = read_problem(parts["problem"])
    if check_turns is not None:
        check_turns(problem, len(parts["turns"]))
    turns = [checked(turn, _TURN, "a turn") for turn in parts["turns"]]
    for number, turn in enumerate(turns[:-1], 1):
        if not turn["replies"]:
            raise MessageError(f"turn {number} of a conversation has no replies, which ends it, and another one follows")
    return Conversation(
        problem=problem,
        opening=read_chat(parts["opening"]),
        turns=[Turn(answer=turn["answer"], replies=read_chat(turn["replies"])) for turn in turns],
    )


def read_chat(value: Sequence[Any]) -> list[dict[str, Any]]:
    """Messages of a chat: ``role`` and ``content`` are texts, and so are ``name`` and ``tool_call_id``, where they are; ``tool_calls`` is
    a list.

    Raises:
        MessageError: they are none.
    """
    return [checked(message, _CHAT | _optional_fields(message), "a chat message") for message in value]


def _optional_fields(message: Any) -> dict[str, type]:
    return {name: kind for name, kind in _CHAT_OPTIONAL.items() if isinstance(message, dict) and name in message}


def as_chat(messages: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """What an environment says, as it comes out of a message; nothing of None.

    Raises:
        RuntimeError: no messages of a chat.
    """
    try:
        return read_chat(json.loads(json.dumps(list(messages or ()), allow_nan=False)))
    except (TypeError, ValueError, RecursionError) as error:
        raise RuntimeError(f"the environment says what is no message: {error}") from None


@dataclass(frozen=True, kw_only=True)
class EnvironmentCard:
    """What a server says of its environment."""

    version: int
    env_id: str
    num_problems: int
    num_evaluation: int
    turn_limits: Mapping[str, TurnLimits | None]
    """Of each environment, by the name that its rollouts have; None for one of single answers."""
    tools: Sequence[Mapping[str, Any]]
    """In OpenAI's form."""
    prompt_timeout_s: float
    answer_timeout_s: float
    judge_timeout_s: float

    @classmethod
    def read(cls, content: bytes) -> "EnvironmentCard":
        """Of a reply.

        Raises:
            MessageError: it is none, or of another version.
        """
        value = _json(content)
        version = value.get("version") if isinstance(value, dict) else None
        if type(version) is int and version != VERSION:
            raise MessageError(f"version={version} must be {VERSION}; use the same release on both sides")
        types: dict[str, Any] = {"version": int, "env_id": str, "num_problems": int, "num_evaluation": int, "turn_limits": dict}
        types |= {"tools": list, **dict.fromkeys(("prompt_timeout_s", "answer_timeout_s", "judge_timeout_s"), (int, float))}
        card: dict[str, Any] = checked(value, types, "a message")
        for tool in card["tools"]:
            _check_tool(tool)
        try:
            card["turn_limits"] = {name: _read_limits(one) for name, one in card["turn_limits"].items()}
        except MessageError:
            raise
        except ValueError as error:
            raise MessageError(str(error)) from None
        if not card["turn_limits"]:
            raise MessageError("turn_limits of a message names no environment")
        return cls(**card)


def _read_limits(value: Any) -> TurnLimits | None:
    return None if value is None else TurnLimits(**checked(value, _LIMITS, "a limit of turns"))


def _check_tool(value: Any) -> None:
    function = checked(value, _TOOL, "a tool")["function"]
    if not isinstance(function.get("name"), str):
        raise MessageError(f"the function of a tool has no name: {json.dumps(function)[:60]}")


def problem_fields(problem: Problem) -> dict[str, Any]:
    """A problem as it stands in a message."""
    return asdict(problem)


def conversation_fields(conversation: Conversation) -> dict[str, Any]:
    """A conversation as it stands in a message."""
    return asdict(conversation)

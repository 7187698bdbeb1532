# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Messages and tools in the bodies of chats, every field bounded."""

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, field_validator, model_validator

_MAX_TEXT = 2**22
_MAX_TOOLS = 128
_MAX_MESSAGES = 4096
_MAX_LEVELS = 32
_MAX_VALUES = 2**16


def _bounded(value: dict[str, Any]) -> dict[str, Any]:
    """JSON of any form, refused where it is deep or large; each level is counted before it is looked at."""
    level: list[Any] = [value]
    for _ in range(_MAX_LEVELS):
        if (count := sum(map(len, level))) > _MAX_VALUES:
            raise ValueError(f"it has {count} values at one depth; at most {_MAX_VALUES} are allowed")
        values = [part for each in level for part in (each.values() if isinstance(each, dict) else each)]
        level = [part for part in values if isinstance(part, dict | list)]
        if not level:
            return value
    raise ValueError(f"it is nested deeper than {_MAX_LEVELS} levels; nest it less")


def _few(messages: object) -> object:
    """Refuse too many before the first is looked at."""
    if isinstance(messages, list) and len(messages) > _MAX_MESSAGES:
        raise ValueError(f"List should have at most {_MAX_MESSAGES} items, not {len(messages)}")
    return messages


Schema = Annotated[dict[str, Any], AfterValidator(_bounded)]
Text = Annotated[str, StringConstraints(max_length=_MAX_TEXT)]
FunctionName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
CallId = Annotated[str, StringConstraints(min_length=1, max_length=256)]

# An unknown field is an error: silently ignoring a setting would change what the client asked for. So is another type: a number in quotes,
# a boolean for a number, NaN.
EXACT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

# What JSON schema can say of roles and what they may have: text or calls of the assistant, and results of tools.
_ABSENT = {"type": "null"}
_TEXT = {"type": ["string", "array"]}
_ROLES: list[dict[str, Any]] = [
    {
        "required": ["content"],
        "properties": {
            "role": {"enum": ["system", "developer", "user", "assistant"]},
            "content": _TEXT,
            "tool_calls": _ABSENT,
            "tool_call_id": _ABSENT,
        },
    },
    {"required": ["content"], "properties": {"role": {"const": "tool"}, "content": _TEXT, "tool_calls": _ABSENT}},
    {
        "required": ["tool_calls"],
        "properties": {"role": {"const": "assistant"}, "tool_calls": {"type": "array"}, "tool_call_id": _ABSENT},
    },
]


class TextPart(BaseModel):
    """A part of a message; only text parts are known."""

    model_config = EXACT

    type: Literal["text"]
    text: Text


class CalledFunction(BaseModel):
    """What a call calls."""

    model_config = EXACT

    name: FunctionName
    arguments: Text
    """A JSON object as text."""

    @field_validator("arguments")
    @classmethod
    def _is_object(cls, arguments: str) -> str:
        try:
            read = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            read = None
        if not isinstance(read, dict):
            raise ValueError("arguments must be the text of a JSON object")
        _bounded(read)
        return arguments


class MessageCall(BaseModel):
    """A call that an assistant's message holds."""

    model_config = EXACT

    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunction

    def plain(self) -> dict[str, Any]:
        """As chat templates take it: the arguments are an object."""
        arguments = json.loads(self.function.arguments or "{}")
        return {"id": self.id, "type": self.type, "function": {"name": self.function.name, "arguments": arguments}}


class Message(BaseModel):
    """One message of a conversation."""

    model_config: ClassVar[ConfigDict] = {**EXACT, "json_schema_extra": {"anyOf": [*_ROLES]}}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Field(min_length=1, max_length=256, fail_fast=True)] | None = None
    """None only beside ``tool_calls``."""
    name: Annotated[str, StringConstraints(min_length=1, max_length=256)] | None = None
    """Of who speaks or of the tool, where the chat template writes it."""
    tool_calls: Annotated[list[MessageCall], Field(min_length=1, max_length=_MAX_TOOLS, fail_fast=True)] | None = None
    """Of the assistant."""
    tool_call_id: CallId | None = None
    """The call that a tool's message answers."""
    refusal: None = None
    """Clients send an answer back as they got it."""

    @model_validator(mode="after")
    def _fits_role(self) -> "Message":
        if self.tool_calls is not None and self.role != "assistant":
            raise ValueError(f"tool_calls are of the assistant and the role is {self.role!r}")
        if self.tool_call_id is not None and self.role != "tool":
            raise ValueError(f"tool_call_id is of a tool's message and the role is {self.role!r}")
        if self.content is None and self.tool_calls is None:
            raise ValueError("content is missing; only a message with tool_calls may have none")
        return self

    def plain(self) -> dict[str, Any]:
        """Role, name and joined text, calls and the call that is answered, as chat templates take it."""
        content = self.content or ""
        plain: dict[str, Any] = {"role": self.role}
        plain["content"] = content if isinstance(content, str) else "".join(part.text for part in content)
        if self.name is not None:
            plain["name"] = self.name
        if self.tool_calls is not None:
            plain["tool_calls"] = [call.plain() for call in self.tool_calls]
        if self.tool_call_id is not None:
            plain["tool_call_id"] = self.tool_call_id
        return plain


Messages = Annotated[list[Message], Field(min_length=1, max_length=_MAX_MESSAGES, fail_fast=True), BeforeValidator(_few)]


class FunctionTool(BaseModel):
    """A function that the model may call."""

    model_config = EXACT

    name: FunctionName
    description: Text | None = None
    parameters: Schema | None = None
    """JSON schema of the arguments; None for no arguments."""
    strict: bool | None = None
    """Hold the arguments to the schema even where the model is free to call or not."""

    @property
    def arguments_schema(self) -> dict[str, Any]:
        """Of an object in any case."""
        if self.parameters is None:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return {"type": "object", **self.parameters}

    @field_validator("parameters")
    @classmethod
    def _describes_object(cls, parameters: dict[str, Any] | None) -> dict[str, Any] | None:
        if parameters is not None and parameters.get("type", "object") != "object":
            raise ValueError("parameters must describe an object; set type to 'object'")
        return parameters


class Tool(BaseModel):
    """One entry of ``tools``."""

    model_config = EXACT

    type: Literal["function"]
    function: FunctionTool

    def plain(self) -> dict[str, Any]:
        """As chat templates take it."""
        named = {"name": self.function.name, "description": self.function.description or ""}
        return {"type": self.type, "function": {**named, "parameters": self.function.arguments_schema}}


class ChosenFunction(BaseModel):
    """Name of the function in ``tool_choice``."""

    model_config = EXACT

    name: FunctionName


class ChosenTool(BaseModel):
    """``tool_choice`` of one function."""

    model_config = EXACT

    type: Literal["function"]
    function: ChosenFunction


Tools = Annotated[list[Tool], Field(min_length=1, max_length=_MAX_TOOLS, fail_fast=True)]

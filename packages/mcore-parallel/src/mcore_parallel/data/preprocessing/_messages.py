# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Messages and tools of conversations, as OpenAI and ShareGPT write them, in the one form that chat templates take."""

import json
from collections.abc import Mapping
from typing import Any

from mcore_parallel.data._errors import DocumentError

_CALLS = "function_call"
"""The role of a ShareGPT turn, or OpenAI's field before ``tool_calls``."""
_ROLES = {
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard"), "assistant"),
    **dict.fromkeys(("observation", "function_response", "function"), "tool"),
}
"""Names that data sets have for roles."""


def as_message(message: Mapping[str, Any], place: str) -> dict[str, Any]:
    """``message`` with its role, its content as text and the arguments of its calls as objects; entries without a value are left out.

    Args:
        message: ``{"role", "content"}`` or ``{"from", "value"}``; content is text, or a list of text parts. An assistant's may have
            ``tool_calls`` (or one ``function_call``) instead of content; ``value`` of ShareGPT's ``function_call`` is these as JSON.
        place: for messages of errors.

    Raises:
        DocumentError: no role, content that is neither, or calls without a name or with arguments that are no object.
    """
    fields = {name: value for name, value in message.items() if value is not None}
    if "role" not in fields and "from" in fields:
        fields["role"], fields["content"] = fields.pop("from"), fields.pop("value", None)
        if fields["role"] == _CALLS:
            fields |= {"role": "assistant", "tool_calls": _parsed(fields.pop("content"), f"{place}: its value")}
    role = fields.get("role")
    fields["role"] = _ROLES.get(role, role) if isinstance(role, str) else role
    if call := fields.pop(_CALLS, None):
        fields["tool_calls"] = call
    if calls := fields.pop("tool_calls", None):
        if fields["role"] != "assistant":
            raise DocumentError(f"{place} has tool_calls and the role {fields['role']!r}; only an assistant calls tools")
        calls = calls if isinstance(calls, list) else [calls]
        fields["tool_calls"] = [_as_call(call, f"{place}.tool_calls[{number}]") for number, call in enumerate(calls)]
        fields.setdefault("content", "")
    content = fields.get("content")
    if isinstance(content, list):
        fields["content"] = "".join(_part(part, place) for part in content)
    if not (isinstance(fields["role"], str) and isinstance(fields.get("content"), str)):
        shown = {name: value for name, value in fields.items() if value is not None}
        raise DocumentError(f'{place} must have "role" and "content" as text, found {str(shown)[:80]}')
    return fields


def as_tools(tools: Any, place: str) -> list[dict[str, Any]]:
    """Tools in OpenAI's form, ``{"type": "function", "function": {"name", ...}}``, from a list of these or of bare functions, or its JSON.

    Raises:
        DocumentError: it is none, or a function has no name.
    """
    tools = _parsed(tools, f"{place}: tools") if isinstance(tools, str) and tools.strip() else tools or []
    if not isinstance(tools, list):
        raise DocumentError(f"{place}: tools must be a list of functions, or its JSON as text, found {type(tools).__name__}")
    plain = [tool if isinstance(tool, dict) and "function" in tool else {"type": "function", "function": tool} for tool in tools]
    for number, tool in enumerate(plain):
        if not (isinstance(tool["function"], dict) and isinstance(tool["function"].get("name"), str)):
            raise DocumentError(f'{place}: tools[{number}] must be a function with a "name", found {str(tools[number])[:80]}')
    return plain


def _as_call(call: Any, place: str) -> dict[str, Any]:
    """A call in OpenAI's form, from that or a bare function; the arguments become an object."""
    entries = dict(call) if isinstance(call, Mapping) else {}
    function = entries.pop("function", None) or {name: entries.pop(name) for name in ("name", "arguments") if name in entries}
    if not (isinstance(function, Mapping) and isinstance(function.get("name"), str) and function["name"]):
        raise DocumentError(f'{place} must be a function with a "name" and "arguments", found {str(call)[:80]}')
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _parsed(arguments, f"{place}: arguments") if arguments.strip() else {}
    if not isinstance(arguments, Mapping | None):
        raise DocumentError(f"{place}: arguments must be an object, or its JSON as text, found {type(arguments).__name__}")
    return {**entries, "type": "function", "function": {**function, "arguments": dict(arguments or {})}}


def _parsed(text: Any, what: str) -> Any:
    try:
        return json.loads(text) if isinstance(text, str) else text
    except ValueError as error:
        raise DocumentError(f"{what} is no JSON: {error}; found {text[:80]}") from None


def _part(part: Any, place: str) -> str:
    text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise DocumentError(f"{place} has a part of type {kind!r} in its content; only text is learnt, remove the others")
    return text

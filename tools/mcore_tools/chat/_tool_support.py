# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What a chat template writes of tools, calls and results, found by rendering a small conversation that has all three."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_tools.chat._spans import Messages, TemplateError

Tools = Sequence[Mapping[str, Any]]
RenderTools = Callable[[Messages, Tools], str]

_TOOL, _CALL, _RESULT, _KEY, _VALUE = "probed_tool", "probed_call", "probed_result", "probed_key", "probed_value"
_QUESTION = {"role": "user", "content": "a"}
_ANSWER = {"role": "assistant", "content": "b"}


@dataclass(frozen=True, kw_only=True)
class ToolSupport:
    """Of a template: what it writes, so that nothing is dropped in silence."""

    tools: bool
    """The list of tools."""
    calls: bool
    """An assistant's ``tool_calls``."""
    results: bool
    """Messages of role ``tool``."""
    arguments_as_text: bool
    """It takes the arguments of a call as JSON text, and no object."""


def find_tool_support(render: RenderTools) -> ToolSupport:
    """Probe a template. What it refuses counts as written: it refuses a conversation with that in its own words."""
    tool = {"name": _TOOL, "description": "c", "parameters": {"type": "object", "properties": {_KEY: {"type": "string"}}}}
    listed = _rendered(render, [_QUESTION], [{"type": "function", "function": tool}])
    # Templates that print an object of Python as it is need the text.
    as_object, as_text = (_rendered(render, _called(form), ()) for form in ({_KEY: _VALUE}, f'{{"{_KEY}": "{_VALUE}"}}'))
    takes_text = as_text is not None and (as_object is None or f"{{'{_KEY}'" in as_object)
    called = as_text if takes_text else as_object
    arguments = f'{{"{_KEY}": "{_VALUE}"}}' if takes_text else {_KEY: _VALUE}
    answered = _rendered(
        render, [*_called(arguments), {"role": "tool", "name": _CALL, "tool_call_id": "probe0000", "content": _RESULT}, _ANSWER], ()
    )
    return ToolSupport(
        tools=listed is None or _TOOL in listed,
        calls=called is None or (_CALL in called and _VALUE in called),
        results=answered is None or _RESULT in answered,
        arguments_as_text=takes_text,
    )


def _called(arguments: Any) -> Messages:
    # Some templates want ids of nine letters and digits.
    call = {"id": "probe0000", "type": "function", "function": {"name": _CALL, "arguments": arguments}}
    return [_QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}]


def _rendered(render: RenderTools, messages: Messages, tools: Tools) -> str | None:
    """The text; None where the template refuses."""
    try:
        return render(messages, tools)
    except TemplateError:
        return None

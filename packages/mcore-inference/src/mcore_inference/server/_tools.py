# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What a chat with tools asks of the engine, and how calls look in its answer."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_inference.sampling import StructuredOutput
from mcore_inference.server._errors import ApiError
from mcore_inference.server._messages import ChosenTool, Tool
from mcore_inference.server._schema import ChatBody, TextFormat
from mcore_inference.tool_calls import ToolCall, ToolCallParser, ToolFormat


@dataclass(frozen=True, kw_only=True)
class ToolUse:
    """How the outputs of one chat may call tools."""

    form: ToolFormat
    tools: Sequence[Mapping[str, Any]]
    """As the chat template takes them."""
    names: Sequence[str]
    """That can be called."""
    max_calls: int | None
    structured_output: StructuredOutput | None
    """The form of the outputs, where calls are held to one."""

    @classmethod
    def of(cls, body: ChatBody, form: ToolFormat | None) -> "ToolUse | None":
        """What the body asks for; None where the model may call nothing.

        Args:
            body: of the request.
            form: of calls; None where the server has no parser.

        Raises:
            ApiError: 400 for fields that do not go together, 422 for names of tools.
        """
        choice = body.tool_choice
        if body.tools is None:
            if choice not in (None, "none"):
                raise ApiError(400, "tool_choice needs tools; give them, or leave tool_choice out", param="tool_choice")
            return None
        names = [tool.function.name for tool in body.tools]
        if len(set(names)) < len(names):
            raise ApiError(422, f"tools: two have the name {_repeated(names)!r}; rename one", code="invalid_body", param="tools")
        if choice == "none":
            return None
        if form is None:
            message = (
                "tools need a tool-call parser and this server has none; start it with --tool-call-parser hermes, llama3_json or mistral "
                "(tool_call_parser= of serve), or send tool_choice='none'"
            )
            raise ApiError(400, message, param="tools")
        if body.structured_outputs is not None or not (body.response_format is None or isinstance(body.response_format, TextFormat)):
            message = "response_format and structured_outputs leave no room for calls; leave out tools, or send tool_choice='none'"
            raise ApiError(400, message, param="tools")
        if isinstance(choice, ChosenTool):
            names = [choice.function.name]
        max_calls = 1 if isinstance(choice, ChosenTool) or body.parallel_tool_calls is False else None
        return cls(
            form=form,
            tools=[tool.plain() for tool in body.tools],
            names=names,
            max_calls=max_calls,
            structured_output=_grammar(form, _called(body.tools, names), choice not in (None, "auto"), max_calls is None),
        )

    def parser(self) -> ToolCallParser:
        """For the text of one output."""
        return ToolCallParser(self.form, self.names, self.max_calls)

    def split(self, parts: Iterable[str | ToolCall], first: int) -> tuple[str, list[dict[str, Any]]]:
        """Content and calls in OpenAI's form.

        Args:
            parts: from the parser.
            first: calls before these.
        """
        content, calls = "", []
        for part in parts:
            if isinstance(part, str):
                content += part
            else:
                function = {"name": part.name, "arguments": part.arguments}
                calls.append({"index": first + len(calls), "id": self.form.new_id(), "type": "function", "function": function})
        return content, calls


def _called(tools: Sequence[Tool], names: Sequence[str]) -> list[Tool]:
    """The tools of these names.

    Raises:
        ApiError: 400; there is none of one.
    """
    by_name = {tool.function.name: tool for tool in tools}
    for name in names:
        if name not in by_name:
            raise ApiError(400, f"tool_choice names {name!r}, which is none of tools {sorted(by_name)}", param="tool_choice")
    return [by_name[name] for name in names]


def _grammar(form: ToolFormat, tools: Sequence[Tool], required: bool, many: bool) -> StructuredOutput | None:
    """Holds calls to their schemas where a call is required; where it is not, those of tools that ask for it."""
    if not required and not any(tool.function.strict for tool in tools):
        return None
    schemas = {tool.function.name: tool.function.arguments_schema for tool in tools}
    if not required:
        schemas = {tool.function.name: tool.function.arguments_schema if tool.function.strict else {"type": "object"} for tool in tools}
    try:
        return StructuredOutput(grammar=form.grammar(schemas, required=required, many=many))
    except ValueError as error:
        raise ApiError(400, str(error), param="tools") from error


def _repeated(names: Sequence[str]) -> str:
    return next(name for name in names if names.count(name) > 1)

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""How models write calls of tools, one class for each way."""

import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any

from mcore_inference._stability import experimental_api
from mcore_inference.tool_calls._scan import BLANKS, Cursor, NoCall, ToolCall, as_text, items, members

Schemas = Mapping[str, Mapping[str, Any]]
"""Name of each tool, and the JSON schema of its arguments."""
_WHITESPACE = {"x-guidance": {"whitespace_pattern": " ?"}}
# Other members that models write beside these two, and that say nothing more.
_EXTRA = frozenset({"type", "id"})


@experimental_api
class ToolFormat(ABC):
    """How one family of models writes calls."""

    marker: str = ""
    """A call begins with it, anywhere in the text; empty where there is none."""
    begins_bare: bool = False
    """Whether calls may begin without the marker, before all other text."""

    def begin(self, text: str, at: int, *, bare: bool) -> int:
        """Where from ``at`` on a call, or the beginning of a marker, may stand; the length of the text for nowhere.

        Args:
            text: so far.
            at: place in it.
            bare: whether a call without marker may stand here.
        """
        end = len(text)
        if self.marker:
            end = text.find(self.marker, at)
            if end < 0:
                ends = range(min(len(self.marker) - 1, len(text) - at), 0, -1)
                end = len(text) - next((length for length in ends if text.endswith(self.marker[:length])), 0)
        if bare and self.begins_bare:
            end = min(end, len(text) - len(text[at:].lstrip(BLANKS)))
        return end

    @abstractmethod
    def read(self, cursor: Cursor, names: Collection[str], *, follows: bool) -> list[ToolCall]:
        """The calls at the cursor, which moves behind them.

        Args:
            cursor: at a place that ``begin`` named.
            names: of the tools.
            follows: whether a call stands before, with at most blanks between.

        Raises:
            Unfinished, NoCall: as of ``Cursor.take``.
        """

    @abstractmethod
    def grammar(self, schemas: Schemas, *, required: bool, many: bool) -> str:
        """A Lark grammar of outputs whose calls fit the schemas.

        Args:
            schemas: of the tools.
            required: whether the output is calls and nothing else; text around them is allowed otherwise.
            many: whether there may be more than one call.

        Raises:
            ValueError: the format cannot hold calls to their schemas in free text.
        """

    def new_id(self) -> str:
        """An id for a call."""
        return f"call_{secrets.token_hex(12)}"


class HermesFormat(ToolFormat):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` anywhere in the text: Hermes, Qwen."""

    marker = "<tool_call>"

    def read(self, cursor: Cursor, names: Collection[str], *, follows: bool) -> list[ToolCall]:
        cursor.take(self.marker)
        cursor.skip_blanks()
        call = _call(cursor.take_json("{"), names, "arguments")
        cursor.skip_blanks()
        cursor.take("</tool_call>")
        return [call]

    def grammar(self, schemas: Schemas, *, required: bool, many: bool) -> str:
        rest = r'"\n" call "\n</tool_call>"' + "\n"
        if required:
            more = r' ("\n" one)*' if many else ""
            return f'start: one{more}\none: "<tool_call>" {rest}{_rules(schemas, "arguments")}'
        # Text ends where the marker is complete; what follows it is a call.
        start = f"start: (opening rest){'*' if many else '?'} TEXT\n"
        lexemes = 'opening[lazy]: TEXT "<tool_call>"\nTEXT: /(.|\\n)*/\n'
        return f"{start}{lexemes}rest: {rest}{_rules(schemas, 'arguments')}"


class Llama3JsonFormat(ToolFormat):
    """``{"name": ..., "parameters": {...}}``, several with ``;`` between, before all other text: Llama 3."""

    begins_bare = True

    def read(self, cursor: Cursor, names: Collection[str], *, follows: bool) -> list[ToolCall]:
        if follows and cursor.take(";", "{") == ";":
            cursor.skip_blanks()
        elif follows:
            cursor.at -= 1
        return [_call(cursor.take_json("{"), names, "parameters", "arguments")]

    def grammar(self, schemas: Schemas, *, required: bool, many: bool) -> str:
        start = 'start: call ("; " call)*' if many else "start: call"
        # What begins with a brace is a call.
        other = "" if required else " | OTHER\nOTHER: /([^{ \\t\\r\\n](.|\\n)*)?/"
        return f"{start}{other}\n{_rules(schemas, 'parameters')}"


class MistralFormat(ToolFormat):
    """``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]``, or ``[TOOL_CALLS]name[ARGS]{...}``: Mistral.

    Most tokenizers drop the marker as a special token, so calls before all other text need none.
    """

    marker = "[TOOL_CALLS]"
    begins_bare = True

    def read(self, cursor: Cursor, names: Collection[str], *, follows: bool) -> list[ToolCall]:
        plain = [f"{name}{{" for name in names]
        words = ["[", *plain, *(f"{name}[ARGS]" for name in names)]
        begin = cursor.at
        word = cursor.take(self.marker, *words)
        if word == self.marker:
            cursor.skip_blanks()
            begin = cursor.at
            word = cursor.take(*words)
        if word == "[":
            cursor.at = begin
            return _calls(cursor.take_json("["), names)
        cursor.at -= word in plain
        cursor.skip_blanks()
        arguments = cursor.take_json("{")
        members(arguments)
        return [ToolCall(name=word.removesuffix("[ARGS]").removesuffix("{"), arguments=arguments)]

    def grammar(self, schemas: Schemas, *, required: bool, many: bool) -> str:
        if not required:
            raise ValueError(
                "strict=true with tool_choice='auto' is not available with the tool-call parser 'mistral', whose marker is a special "
                "token; set tool_choice='required', name a function, or leave strict out"
            )
        more = ' (", " call)*' if many else ""
        return f'start: "[" call{more} "]"\n{_rules(schemas, "arguments")}'

    def new_id(self) -> str:
        # The templates of these models refuse other ids.
        return secrets.token_hex(5)[:9]


_FORMATS: Mapping[str, ToolFormat] = {"hermes": HermesFormat(), "llama3_json": Llama3JsonFormat(), "mistral": MistralFormat()}


@experimental_api
def tool_format(name: str) -> ToolFormat:
    """The format ``hermes``, ``llama3_json`` or ``mistral``.

    Raises:
        ValueError: another name.
    """
    if name not in _FORMATS:
        raise ValueError(f"tool_call_parser={name!r} is unknown; choose one of {', '.join(_FORMATS)}, or None for no tools")
    return _FORMATS[name]


def _call(text: str, names: Collection[str], *keys: str) -> ToolCall:
    """The call in an object, whose arguments are under one of the keys."""
    values = members(text)
    given = [key for key in keys if key in values]
    name = as_text(values.get("name", ""))
    if name is None or len(given) != 1 or name not in names or set(values) - {"name", *given} - _EXTRA:
        raise NoCall
    arguments = values[given[0]]
    members(arguments)
    return ToolCall(name=name, arguments=arguments)


def _calls(text: str, names: Collection[str]) -> list[ToolCall]:
    calls = [_call(item, names, "arguments") for item in items(text)]
    if not calls:
        raise NoCall
    return calls


def _rules(schemas: Schemas, key: str) -> str:
    """The rule ``call``: an object with the name of a tool, and arguments of its schema."""
    lines = [f"call: {' | '.join(f'tool_{number}' for number in range(len(schemas)))}"]
    for number, (name, schema) in enumerate(schemas.items()):
        head = json.dumps(f'{{"name": {json.dumps(name)}, "{key}": ')
        lines.append(f'tool_{number}: {head} args_{number} "}}"')
        lines.append(f"args_{number}: %json {json.dumps({**schema, **_WHITESPACE})}")
    return "\n".join(lines) + "\n"

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Telling calls of tools from other text while it comes."""

from collections.abc import Collection
from typing import Any

from mcore_inference._stability import experimental_api
from mcore_inference.tool_calls._formats import ToolFormat
from mcore_inference.tool_calls._scan import BLANKS, Cursor, NoCall, ToolCall, Unfinished


@experimental_api
class ToolCallParser:
    """Divides the text of one output into calls and content.

    However the text is cut into pieces, calls and joined content are the same. A call is held back until it is complete and valid; what
    turns out to be none is content, character by character. Blanks beside a call are dropped.

    Args:
        form: how the model writes calls.
        names: of the tools; a call of another is content.
        max_calls: further calls are content; None for no limit.

    Example:
        >>> parser = ToolCallParser(tool_format("hermes"), ["now"])
        >>> parser.push('One moment. <tool_call>{"name": "now", "argu')
        ['One moment.']
        >>> parser.push('ments": {}}</tool_call>')
        [ToolCall(name='now', arguments='{}')]
        >>> parser.finish()
        []
    """

    def __init__(self, form: ToolFormat, names: Collection[str], max_calls: int | None = None) -> None:
        self._form, self._names, self._max_calls = form, frozenset(names), max_calls
        self._text = ""
        self._at = 0
        """Everything before is handed out."""
        self._endings: dict[int, Any] = {}
        self._bare = True
        """Nothing but calls was handed out."""
        self._follows = False
        """What was handed out last is a call."""
        self.num_calls = 0
        """Calls that were handed out."""

    def push(self, text: str) -> list[str | ToolCall]:
        """Take a piece of the text; what became certain by it, in order."""
        return self._advance(text, is_last=False)

    def finish(self) -> list[str | ToolCall]:
        """What was held back, at the end of the text."""
        return self._advance("", is_last=True)

    def _advance(self, text: str, *, is_last: bool) -> list[str | ToolCall]:
        parts: list[str | ToolCall] = []
        self._text += text
        while self._at < len(self._text) and self._next(parts, is_last):
            pass
        if self._at:
            # Places of brackets that are still open are counted from the beginning of a call, which is now the beginning of the text.
            self._text, self._at, self._endings = self._text[self._at :], 0, {}
        return parts

    def _next(self, parts: list[str | ToolCall], is_last: bool) -> bool:
        """Hand out the content before the next call, and the call; False when more text is needed."""
        text = self._text
        may_call = self._max_calls is None or self.num_calls < self._max_calls
        begin = self._form.begin(text, self._at, bare=self._bare) if may_call else len(text)
        head = text[self._at : begin].rstrip(BLANKS)
        if head:
            self._content(parts, self._at + len(head))
            return True
        if begin == len(text):
            if is_last:
                self._content(parts, begin, blanks=True)
            return False
        cursor = Cursor(text, begin, self._endings)
        try:
            calls = self._form.read(cursor, self._names, follows=self._follows)
            if self._max_calls is not None and self.num_calls + len(calls) > self._max_calls:
                raise NoCall
        except Unfinished:
            if not is_last:
                return False
            self._refuse(parts, begin)
        except NoCall:
            self._refuse(parts, begin)
        else:
            parts += calls
            self.num_calls += len(calls)
            self._at, self._follows = cursor.at, True
        return True

    def _refuse(self, parts: list[str | ToolCall], begin: int) -> None:
        """What begins there is no call; it may begin one with a marker, else it is content."""
        self._endings.clear()
        if self._bare:
            self._bare = False
        else:
            self._content(parts, min(begin + len(self._form.marker), len(self._text)))

    def _content(self, parts: list[str | ToolCall], end: int, *, blanks: bool = False) -> None:
        text = self._text[self._at : end]
        if self._follows:
            text = text.lstrip(BLANKS)
        if text:
            parts.append(text)
            self._bare = self._follows = False
        self._at = end

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Reading JSON out of text that is still growing."""

import json
from dataclasses import dataclass

from mcore_inference._stability import experimental_api

BLANKS = " \t\r\n"
_MAX_DEPTH = 64
# What JSON holds outside of strings.
_OUTSIDE = frozenset(BLANKS + ":,+-.0123456789truefalsnE")
# Numbers are checked, never converted: what a call says is handed on as it was written.
_DECODER = json.JSONDecoder(parse_int=str, parse_float=str)


@experimental_api
@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A call of a tool."""

    name: str
    arguments: str
    """A JSON object, character by character as the model wrote it."""


class Unfinished(Exception):
    """More text decides."""


class NoCall(Exception):
    """The text is no call."""


class _Ending:
    """Where a JSON object or array ends in a text that grows; each character is read once."""

    def __init__(self, begin: int) -> None:
        self._at, self._depth, self._in_string, self._escaped = begin, 0, False, False
        self._end: int | None = None

    def find(self, text: str) -> int:
        if self._end is not None:
            return self._end
        for at in range(self._at, len(text)):
            letter = text[at]
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif letter == "\\":
                    self._escaped = True
                elif letter < " ":
                    raise NoCall
                else:
                    self._in_string = letter != '"'
            elif letter == '"':
                self._in_string = True
            elif letter in "{[":
                self._depth += 1
                if self._depth > _MAX_DEPTH:
                    raise NoCall
            elif letter in "}]":
                self._depth -= 1
                if not self._depth:
                    self._end = at + 1
                    return self._end
            elif letter not in _OUTSIDE:
                raise NoCall
        self._at = len(text)
        raise Unfinished


class Cursor:
    """A place in a text that grows.

    Args:
        text: so far.
        at: the place.
        endings: filled here, and given again while the text grows and its beginning stays.
    """

    def __init__(self, text: str, at: int, endings: dict[int, _Ending]) -> None:
        self.text, self.at, self._endings = text, at, endings

    def skip_blanks(self) -> None:
        self.at = _skip(self.text, self.at)

    def take(self, *words: str) -> str:
        """The longest of the words that stands here.

        Raises:
            Unfinished: a word, or a longer one, may still come.
            NoCall: none does.
        """
        rest = self.text[self.at : self.at + max(map(len, words))]
        if any(len(word) > len(rest) and word.startswith(rest) for word in words):
            raise Unfinished
        longest = max((word for word in words if rest.startswith(word)), key=len, default=None)
        if longest is None:
            raise NoCall
        self.at += len(longest)
        return longest

    def take_json(self, opening: str) -> str:
        """The object (opening ``{``) or array (``[``) that stands here; valid as far as its brackets and strings go.

        Raises:
            Unfinished, NoCall: as ``take``.
        """
        begin = self.at
        self.take(opening)
        self.at = self._endings.setdefault(begin, _Ending(begin)).find(self.text)
        return self.text[begin : self.at]


def members(text: str) -> dict[str, str]:
    """Name and value, as it is written, of each member of a JSON object.

    Raises:
        NoCall: no JSON object, or a name comes twice.
    """
    fields: dict[str, str] = {}
    for key, value in _parts(text, "{}"):
        if key in fields:
            raise NoCall
        fields[key] = value
    return fields


def items(text: str) -> list[str]:
    """The items of a JSON array, as they are written.

    Raises:
        NoCall: no JSON array.
    """
    return [value for _, value in _parts(text, "[]")]


def as_text(value: str) -> str | None:
    """What a JSON string says; None where the value is none."""
    return json.loads(value) if value.startswith('"') else None


def _parts(text: str, brackets: str) -> list[tuple[str, str]]:
    try:
        return _read_parts(text, brackets)
    except (ValueError, IndexError, RecursionError):
        raise NoCall from None


def _read_parts(text: str, brackets: str) -> list[tuple[str, str]]:
    parts: list[tuple[str, str]] = []
    last, at = len(text) - 1, _skip(text, 1)
    if text[0] != brackets[0] or text[last] != brackets[1]:
        raise NoCall
    while at < last or parts:
        key = ""
        if brackets == "{}":
            if text[at] != '"':
                raise NoCall
            key, at = _DECODER.raw_decode(text, at)
            at = _skip(text, at)
            if text[at] != ":":
                raise NoCall
            at = _skip(text, at + 1)
        begin = at
        _, at = _DECODER.raw_decode(text, begin)
        parts.append((key, text[begin:at]))
        at = _skip(text, at)
        if at == last:
            break
        if text[at] != ",":
            raise NoCall
        at = _skip(text, at + 1)
    return parts


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in BLANKS:
        at += 1
    return at

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Sums that a model wrote, evaluated without running them."""

import re
from fractions import Fraction

_TOKEN = re.compile(r"\s*(\d+|[-+*/()])")
_MAX_CHARACTERS, _MAX_DIGITS, _MAX_DEPTH = 256, 12, 32


class ExpressionError(ValueError):
    """A text that is no sum of whole numbers."""


def evaluate(text: str) -> tuple[Fraction, list[int]]:
    """The exact value of a sum, and the numbers in it from left to right.

    The grammar is + - * /, parentheses and whole numbers, with the usual precedence; there are no signs and no powers. The work is linear
    in the length.

    Raises:
        ExpressionError: another text; more than 256 characters, 12 digits or 32 open parentheses; a division by zero.

    Example:
        >>> evaluate("(3 + 5) * 2")
        (Fraction(16, 1), [3, 5, 2])
    """
    if len(text) > _MAX_CHARACTERS:
        raise ExpressionError(f"{len(text)} characters exceed {_MAX_CHARACTERS}")
    return _Parser(_tokens(text)).parse()


def _tokens(text: str) -> list[str]:
    tokens, position, text = [], 0, text.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None or not match[1].isascii() or len(match[1]) > _MAX_DIGITS:
            raise ExpressionError(f"no sum from character {position} on")
        tokens.append(match[1])
        position = match.end()
    return tokens


class _Parser:
    """Recursive descent: a sum of products of factors."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens, self._next, self._depth = tokens, 0, 0
        self._numbers: list[int] = []

    def parse(self) -> tuple[Fraction, list[int]]:
        value = self._sum()
        if self._next < len(self._tokens):
            raise ExpressionError(f"{self._tokens[self._next]!r} is not expected there")
        return value, self._numbers

    def _take(self, choices: str) -> str | None:
        if self._next < len(self._tokens) and self._tokens[self._next] in choices:
            self._next += 1
            return self._tokens[self._next - 1]
        return None

    def _sum(self) -> Fraction:
        value = self._product()
        while operator := self._take("+-"):
            term = self._product()
            value = value + term if operator == "+" else value - term
        return value

    def _product(self) -> Fraction:
        value = self._factor()
        while operator := self._take("*/"):
            factor = self._factor()
            if operator == "/" and not factor:
                raise ExpressionError("a division by zero")
            value = value * factor if operator == "*" else value / factor
        return value

    def _factor(self) -> Fraction:
        if self._take("("):
            self._depth += 1
            if self._depth > _MAX_DEPTH:
                raise ExpressionError(f"more than {_MAX_DEPTH} open parentheses")
            value = self._sum()
            if not self._take(")"):
                raise ExpressionError("a parenthesis stays open")
            self._depth -= 1
            return value
        if self._next == len(self._tokens) or not self._tokens[self._next].isdigit():
            raise ExpressionError("a number is missing")
        self._next += 1
        self._numbers.append(int(self._tokens[self._next - 1]))
        return Fraction(self._numbers[-1])

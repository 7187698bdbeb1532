# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Final answers of maths problems: found in a text, and compared by value, in time that is linear in its length."""

import re
from fractions import Fraction

_OPEN, _CLOSE, _BOXED, _WORD = "<answer>", "</answer>", "\\boxed{", "\nAnswer:"
_ENDS = " \t\r\n.$*\\)]}"
"""Behind an answer these close a sentence or a formula."""
_MAX_CHARACTERS, _MAX_DEPTH = 256, 16
_DROPPED = re.compile(r"\\left|\\right|\\[!,;: ]|\\?\$|\\?%|\^\{?\\circ\}?|\\degrees?|\\displaystyle|[\s~]")
_WORDS = re.compile(r"\\(?:text|mathrm|mbox|textbf)\{([^{}]*)\}")
_UNITS = re.compile(
    r"(?<=\d)(?:cm|mm|km|m|kg|g|inch(?:es)?|feet|foot|ft|miles?|met(?:er|re)s?|dollars?|cents?|degrees?|hours?|minutes?|seconds?|days?|years?"
    r"|percent|units?)$"
)
_FRACTION = re.compile(r"\\frac(?:\{([^{}]*)\}\{([^{}]*)\}|(\d)(\d))")
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_NUMBER = r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)"
_RATIO = re.compile(rf"\(?({_NUMBER})\)?(?:/\(?({_NUMBER})\)?)?")
_NAMED = re.compile(r"[a-z]=(.+)")
_BRACKETS = {"(": ")", "[": "]", "{": "}"}


def split_answer(text: str) -> tuple[str, str] | None:
    """What the last pair of <answer> tags holds, else what the last \\boxed does, else what stands behind Answer: at the beginning of a
    line, the last one; and what follows it, without marks of typesetting. None where there is none of them."""
    end = text.rfind(_CLOSE)
    begin = text.rfind(_OPEN, 0, max(end, 0))
    if begin >= 0:
        return text[begin + len(_OPEN) : end], text[end + len(_CLOSE) :].strip(_ENDS)
    begin = text.rfind(_BOXED) + len(_BOXED)
    inside = boxed(text)
    return _after_word(text) if inside is None else (inside, text[begin + len(inside) + 1 :].strip(_ENDS))


def boxed(text: str) -> str | None:
    """What the last \\boxed holds; None where there is none, or it does not end."""
    begin = text.rfind(_BOXED)
    return None if begin < 0 else _inside(text, begin + len(_BOXED))


def _after_word(text: str) -> tuple[str, str] | None:
    _, found, rest = ("\n" + text).rpartition(_WORD)
    answer, _, behind = rest.partition("\n")
    answer = answer.strip(" \t\r$*")
    return (answer, behind.strip(_ENDS)) if found and answer else None


def _inside(text: str, begin: int) -> str | None:
    """Up to the brace that closes the one before ``begin``."""
    depth = 1
    for place in range(begin, min(len(text), begin + _MAX_CHARACTERS)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if not depth:
            return text[begin:place]
    return None


def same_answer(left: str, right: str) -> bool:
    """Whether two answers are one: numbers and fractions by value, tuples by their parts, and other texts by their spelling without units,
    spaces and typesetting.

    Answers of more than 256 characters are equal to none.

    Example:
        >>> same_answer(r"\\\\dfrac{1}{2}", "0.5"), same_answer("1,000 dollars", "1000"), same_answer("(1, 2)", "(2, 1)")
        (True, True, False)
    """
    if max(len(left), len(right)) > _MAX_CHARACTERS:
        return False
    return _same(_plain(left), _plain(right), _MAX_DEPTH)


def _same(left: str, right: str, depth: int) -> bool:
    if not left or not right:
        return False
    ours, theirs = _value(left), _value(right)
    if ours is not None and theirs is not None:
        return ours == theirs
    if left == right:
        return True
    if not depth or (left[0], left[-1]) != (right[0], right[-1]) or _BRACKETS.get(left[0]) != left[-1]:
        return False
    here, there = _parts(left[1:-1]), _parts(right[1:-1])
    return len(here) == len(there) > 1 and all(_same(one, other, depth - 1) for one, other in zip(here, there, strict=True))


def _plain(text: str) -> str:
    """Spelled in one way."""
    text = text.strip().removesuffix(".")
    outside = _WORDS.sub("", text)
    text = outside if outside.strip() else _WORDS.sub(r"\1", text)
    text = _DROPPED.sub("", text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")).lower()
    text = _UNITS.sub("", text)
    for _ in range(_MAX_DEPTH):
        text, changed = _FRACTION.subn(lambda match: f"({match[1] or match[3]})/({match[2] or match[4]})", text)
        if not changed:
            break
    if (named := _NAMED.fullmatch(text)) is not None:
        text = named[1]
    return text.replace(",", "") if _THOUSANDS.fullmatch(text) else text


def _value(text: str) -> Fraction | None:
    """Of a number or of a ratio of two."""
    match = _RATIO.fullmatch(text.replace(",", "") if _THOUSANDS.fullmatch(text) else text)
    if match is None:
        return None
    numerator, denominator = Fraction(match[1]), Fraction(match[2] or 1)
    return numerator / denominator if denominator else None


def _parts(text: str) -> list[str]:
    """Between the commas that stand in no bracket."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return parts

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Final answers of maths problems: found in a text, and compared by value, in time that is linear in its length."""

import re
from fractions import Fraction

_OPEN, _CLOSE, _BOXED, _LINE = "<answer>", "</answer>", "\\boxed{", "\nAnswer:"
_ENDS = " \t\r\n.$*\\)]}"
"""Behind an answer these close a sentence or a formula."""
_MAX_CHARACTERS, _MAX_DEPTH = 256, 16
_DROPPED = re.compile(r"(?:\\left|\\right|\\[!,;: ]|\\?\$|\\?%|\^\{?\\circ\}?|\\degrees?|\\displaystyle|[\s~])+")
_THIN_SPACES = re.compile(r"(?<=\d)(?<!\d{4})(?:\\[!,;: ])+(?=\d{3}(?!\d))")
"""Between thousands."""
_WORDS = re.compile(r"(?:\\(?:text|mathrm|mbox|textbf)\{[^{}]*\}\s*)+")
_WORD = re.compile(r"\{([^{}]*)\}")
_UNITS = re.compile(
    r"(?<=\d)(?:cm|mm|km|m|kg|g|inch(?:es)?|feet|foot|ft|miles?|met(?:er|re)s?|dollars?|cents?|degrees?|hours?|minutes?|seconds?|days?|years?"
    r"|percent|units?)$"
)
_FRACTION = re.compile(r"\\frac(?:\{([^{}]*)\}\{([^{}]*)\}|(\d) ?(\d))")
_MIXED_FRACTION = re.compile(r"(?<![\w.^/*])(\d+)\\frac(?:\{(\d+)\}\{(\d+)\}|(\d) ?(\d))")
_MIXED = re.compile(r"([-+]?)(\d+) (\d+)/(\d+)")
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_NUMBER = r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)"
_RATIO = re.compile(rf"([-+](?=\())?\(?({_NUMBER})\)?(?:/\(?({_NUMBER})\)?)?")
_NAMED = re.compile(r"[a-z]=(.+)")
_OPERATORS = "=<>+-*/^_:"
_BRACKETS = {"(": ")", "[": "]", "{": "}"}


def split_answer(text: str) -> tuple[str, str] | None:
    """What the last pair of <answer> tags holds, or the last \\boxed in it, else what the last \\boxed of the text does, else what stands
    behind Answer: at the beginning of a line, the last one; and what follows it, without marks of typesetting. None where there is none of
    them."""
    end = text.rfind(_CLOSE)
    begin = text.rfind(_OPEN, 0, max(end, 0))
    if begin < 0:
        return _split_boxed(text) or _after_word(text)
    inside, rest = _split_boxed(text[begin + len(_OPEN) : end]) or (text[begin + len(_OPEN) : end], "")
    return inside, (rest + text[end + len(_CLOSE) :]).strip(_ENDS)


def _split_boxed(text: str) -> tuple[str, str] | None:
    inside = boxed(text)
    return None if inside is None else (inside, text[text.rfind(_BOXED) + len(_BOXED) + len(inside) + 1 :].strip(_ENDS))


def boxed(text: str) -> str | None:
    """What the last \\boxed holds; None where there is none, or it does not end."""
    begin = text.rfind(_BOXED)
    return None if begin < 0 else _inside(text, begin + len(_BOXED))


def _after_word(text: str) -> tuple[str, str] | None:
    _, found, rest = ("\n" + text).rpartition(_LINE)
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
    """Whether two answers are one: numbers, fractions and mixed numbers by value, tuples by their parts, and other texts by their spelling
    without units, spaces, typesetting and words before or behind them.

    Answers of more than 256 characters are equal to none.

    Example:
        >>> same_answer(r"\\\\dfrac{1}{2}", "0.5"), same_answer("1,000 dollars", "1000"), same_answer("(1, 2)", "(2, 1)")
        (True, True, False)
    """
    if max(len(left), len(right)) > _MAX_CHARACTERS:
        return False
    return _same(_plain(left), _plain(right), _MAX_DEPTH)


def _same(left: str, right: str, depth: int) -> bool:
    left, right = left.strip(), right.strip()
    if not left or not right:
        return False
    ours, theirs = _value(left), _value(right)
    if ours is not None and theirs is not None:
        return ours == theirs
    # The blank behind a comma tells a list from thousands, and says no more.
    if left.replace(", ", ",") == right.replace(", ", ","):
        return True
    if not depth or (left[0], left[-1]) != (right[0], right[-1]) or _BRACKETS.get(left[0]) != left[-1]:
        return False
    here, there = _parts(left[1:-1]), _parts(right[1:-1])
    return len(here) == len(there) > 1 and all(_same(one, other, depth - 1) for one, other in zip(here, there, strict=True))


def _plain(text: str) -> str:
    """Spelled in one way. What is dropped between digits leaves a blank, so that two numbers never become one."""
    text = _WORDS.sub(_words, text.strip().removesuffix("."))
    text = _DROPPED.sub(_mark, _THIN_SPACES.sub("", text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac"))).lower()
    text = _MIXED_FRACTION.sub(lambda match: f"{match[1]} {match[2] or match[4]}/{match[3] or match[5]}", _UNITS.sub("", text))
    for _ in range(_MAX_DEPTH):
        text, changed = _FRACTION.subn(lambda match: f"({match[1] or match[3]})/({match[2] or match[4]})", text)
        if not changed:
            break
    return text if (named := _NAMED.fullmatch(text)) is None else named[1]


def _words(match: re.Match[str]) -> str:
    """Nothing for words before or behind an answer or a part of it, else what they say."""
    before, behind = match.string[: match.start()].rstrip()[-1:], match.string[match.end() :].lstrip()[:1]
    begins, ends = before in ("", *"([,"), behind in ("", *")],")
    is_dropped = before not in _OPERATORS if ends else begins and behind not in _OPERATORS.replace("-", "")
    return " " if is_dropped and begins != ends else " ".join(_WORD.findall(match[0]))


def _mark(match: re.Match[str]) -> str:
    """A blank between digits, and behind a comma before one, else nothing."""
    before, behind = match.string[max(0, match.start() - 1) : match.start()], match.string[match.end() : match.end() + 1]
    apart = before.isdecimal() or before == "." or (before == "," and any(one.isspace() or one == "~" for one in match[0]))
    return " " if apart and (behind.isdecimal() or behind == ".") else ""


def _value(text: str) -> Fraction | None:
    """Of a number, a ratio of two or a mixed number."""
    if (mixed := _MIXED.fullmatch(text)) is not None:
        whole, numerator, denominator = map(int, mixed.groups()[1:])
        return (-1 if mixed[1] == "-" else 1) * (whole + Fraction(numerator, denominator)) if denominator else None
    match = _RATIO.fullmatch(text.replace(",", "") if _THOUSANDS.fullmatch(text) else text)
    if match is None:
        return None
    numerator, denominator = Fraction(match[2]), Fraction(match[3] or 1)
    return (-1 if match[1] == "-" else 1) * numerator / denominator if denominator else None


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

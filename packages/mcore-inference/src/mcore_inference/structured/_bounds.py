# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What a form may ask of its compiler, which calls itself for each rule, each ``$ref`` and each level of a schema.

A stack that overflows ends the process, so forms are bounded before the library sees them, and compiled on a stack that holds what the
bounds allow: at most 33 KB a rule (with all the brackets that one may nest) and 11 KB a level of a schema, measured with llguidance 1.9.

The compiler's limits do not count the states that it visits to see whether a number or a terminal can be written at all, so what multiplies
those states is bounded here: ``multipleOf``, and terminals that a grammar intersects or negates.
"""

import decimal
import math
import re
import threading
from collections.abc import Callable
from typing import TypeVar

_MAX_RULES = 320
"""Of a grammar. Where RUST_BACKTRACE is set, an error at the end of a chain takes the square of its length to describe."""
_MAX_LEVELS = 2**14
_MAX_NESTING = 128
"""The library reads no JSON that is nested deeper."""
_STACK_BYTES = 2**29
"""More than twice what the bounds allow; the system gives memory to the part that is used."""
_MAX_MULTIPLE = 10_000
"""Of the least common multiple of a form's ``multipleOf``: 0.1 s to compile. An integer of 1048576 took 3.5 s."""
_RULE = re.compile(r"^[ \t]*[!?]*[A-Za-z_]", re.MULTILINE)
_REFERENCE = re.compile(r'"\$(?:dynamic|recursive)?[rR]ef"\s*:\s*"((?:[^"\\]|\\.)*)"')
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_MULTIPLE = re.compile(r'"multipleOf"\s*:\s*([-+.\w]+)')
# As the library reads them; what is left of a grammar is operators, names and numbers.
_WORDS_OF_GRAMMAR = re.compile(r"""(?:\#|//)[^\n]*|"(?:[^"\\]|\\.)*"|/(?:[^/\\]|\\.)+/|<[^<>\s]+>""")
_INTERSECTION = re.compile(r"&|~(?![ \t]*[0-9])")
"""``~`` before a number repeats."""
_ESCAPED_LETTER = re.compile(r"\\u00(24|[46][1-9a-fA-F]|[57][0-9aA])")

# The size of a thread's stack is set for the whole process, and back: one thread is started at a time.
_STARTING = threading.Lock()
Result = TypeVar("Result")


def check_form(name: str, text: str) -> None:
    """See that a form can be compiled on the stack of ``on_deep_stack``, and in a time that the library's limits bound.

    Raises:
        ValueError: too many rules, too deep by its references, multiples with too large a common one, or terminals that are intersected or
            negated; names how many, and the bound.
    """
    if name == "grammar":
        if (num_rules := len(_RULE.findall(text))) > _MAX_RULES:
            raise ValueError(f"it has {num_rules} rules and terminals; at most {_MAX_RULES} are allowed")
        if operator := _INTERSECTION.search(_WORDS_OF_GRAMMAR.sub(" ", text)):
            raise ValueError(
                f"it has the operator {operator[0]}, and nothing bounds the time to intersect or negate terminals; write what is allowed"
            )
    # A reference leads at most once into a schema, and that at most as deep as it is nested. Grammars may hold schemas.
    if name in ("json_schema", "grammar"):
        text = _ESCAPED_LETTER.sub(lambda found: chr(int(found[1], 16)), text)
        references = len(set(_REFERENCE.findall(text)))
        nesting = min(_nesting(text), _MAX_NESTING) if name == "json_schema" else _MAX_NESTING
        if references * nesting > _MAX_LEVELS:
            raise ValueError(
                f"it has {references} different $ref in {nesting} levels, whose product is at most {_MAX_LEVELS}; "
                "use fewer definitions, or nest them less"
            )
        _check_multiples(text)


def _check_multiples(text: str) -> None:
    """Of numbers that a schema may ask for at one place it visits the remainders by their least common multiple."""
    common = 1
    for value in set(_MULTIPLE.findall(text)):
        try:
            # Zeros at the end, as the point, are for free.
            digits = decimal.Decimal(value).normalize(decimal.Context(prec=50)).as_tuple().digits
        except decimal.DecimalException:
            # No number: the library says so.
            continue
        common = math.lcm(common, int("".join(map(str, digits)) or "1") or 1)
        if common > _MAX_MULTIPLE:
            raise ValueError(
                f"the least common multiple of its multipleOf, without point and zeros at the end, is at most {_MAX_MULTIPLE}, and "
                f"multipleOf={value[:50]} leads beyond; use smaller ones, or fewer that differ"
            )


def _nesting(text: str) -> int:
    """Of a JSON text."""
    depth = deepest = 0
    for bracket in re.findall(r"[\[{}\]]", _STRING.sub("", text)):
        depth += 1 if bracket in "[{" else -1
        deepest = max(deepest, depth)
    return deepest


def on_deep_stack(call: Callable[[], Result]) -> Result:
    """What a call returns or raises, in a thread with a stack of 512 MiB; the caller's may be small.

    Raises:
        MemoryError: the system has no room for the stack.
    """
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="mcore-grammar")
    with _STARTING:
        previous = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        except RuntimeError as error:
            raise MemoryError(f"no thread with a stack of {_STACK_BYTES} bytes: {error}") from error
        finally:
            threading.stack_size(previous)
    thread.join()
    if errors:
        raise errors[0]
    return results[0]

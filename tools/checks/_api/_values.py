# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Values that stand in the source: defaults, constants, members of enumerations. Two spellings of one value are equal."""

import ast
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import griffe

from tools.checks._api._surface import Surface
from tools.checks._api._types import resolve

_ARITHMETIC = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.BitOr: operator.or_,
    ast.LShift: operator.lshift,
}


@dataclass(frozen=True)
class Unknown:
    """A value that only running the code would tell; ``text`` spells it with every name from its root."""

    text: str


@dataclass
class _Reader:
    surface: Surface
    scope: griffe.Object
    steps: set[str] = field(default_factory=set)

    def read(self, node: ast.expr) -> Any:
        """The value, with its type in front so that 1, 1.0 and True differ; ``Unknown`` inside it where it cannot be read."""
        match node:
            case ast.Constant():
                return type(node.value).__name__, node.value
            case ast.Tuple() | ast.List():
                return type(node).__name__, tuple(self.read(element) for element in node.elts)
            case ast.Set():
                return "Set", tuple(sorted((self.read(element) for element in node.elts), key=repr))
            case ast.Dict():
                keys = tuple(self.read(key) if key is not None else None for key in node.keys)
                return "Dict", (keys, tuple(self.read(value) for value in node.values))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return self._calculate(lambda value: -value, operand) or Unknown(ast.unparse(node))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                return self._calculate(_ARITHMETIC[type(op)], left, right) or Unknown(ast.unparse(node))
            case ast.Name() | ast.Attribute():
                return self._name(node)
            case ast.Call():
                arguments = tuple(self.read(argument) for argument in node.args)
                keywords = tuple(sorted((keyword.arg or "", self.read(keyword.value)) for keyword in node.keywords))
                return "call", self.read(node.func), arguments, keywords
        return Unknown(ast.unparse(node))

    def _calculate(self, function: Any, *operands: ast.expr) -> Any:
        values = [self.read(operand) for operand in operands]
        if any(not isinstance(value, tuple) or value[0] not in ("int", "float") for value in values):
            return None
        try:
            result = function(*(value[1] for value in values))
        except (ArithmeticError, TypeError, ValueError):
            return None
        return type(result).__name__, result

    def _name(self, node: ast.Name | ast.Attribute) -> Any:
        first, *rest = ast.unparse(node).split(".")
        path = ".".join([resolve(self.scope, first) or first, *rest])
        obj = self.surface.lookup(path) if self.surface.is_internal(path) else None
        if isinstance(obj, griffe.Attribute) and obj.value is not None and path not in self.steps and len(self.steps) < 8:
            self.steps.add(path)
            value = _Reader(surface=self.surface, scope=obj, steps=self.steps).read(_parse(obj.value))
            # A private sentinel such as object() means "left out" whatever its name; members of enumerations go by theirs.
            in_class = obj.parent is not None and obj.parent.is_class
            return Unknown(self.surface.public(path)) if in_class else value
        return Unknown(self.surface.public(path))


def _parse(value: str | griffe.Expr) -> ast.expr:
    return ast.parse(str(value).strip(), mode="eval").body


def value_of(value: str | griffe.Expr | None, scope: griffe.Object, surface: Surface) -> Any:
    """The value of an expression where it stands; None if there is none."""
    if value is None:
        return None
    try:
        return _Reader(surface=surface, scope=scope).read(_parse(value))
    except (SyntaxError, RecursionError):
        return Unknown(str(value))


def is_assigned_to_self(attribute: griffe.Attribute) -> bool:
    """Whether a method sets the attribute and the class body does not."""
    return "instance-attribute" in attribute.labels and "class-attribute" not in attribute.labels


def literal_type(attribute: griffe.Attribute, surface: Surface) -> str:
    """Name of the builtin type of a constant without annotation; empty if it cannot be told, or is None."""
    parent = attribute.parent
    if attribute.value is None or is_assigned_to_self(attribute) or parent is None or not (parent.is_module or parent.is_class):
        return ""
    value = value_of(attribute.value, attribute, surface)
    if not isinstance(value, tuple) or value[0] in ("call", "ellipsis"):
        return ""
    kind = str(value[0])
    return {"Tuple": "tuple", "List": "list", "Set": "set", "Dict": "dict", "NoneType": "None"}.get(kind, kind)


def is_literal(value: Any) -> bool:
    """Whether a value can be read whole, without running anything."""
    if isinstance(value, Unknown):
        return False
    return all(is_literal(part) for part in value) if isinstance(value, tuple) and value[:1] != ("call",) else not isinstance(value, tuple)


def enum_values(cls: griffe.Class, surface: Surface) -> Iterator[tuple[str, Any]]:
    """(member, value) with ``auto()`` counted as Python counts it."""
    texts = any(str(base).rpartition(".")[2] == "StrEnum" for base in cls.bases)
    flags = any("Flag" in str(base) for base in cls.bases)
    last: int = 0
    for name, member in cls.members.items():
        if not isinstance(member, griffe.Attribute) or member.value is None or name.startswith("_"):
            continue
        value = value_of(member.value, member, surface)
        if str(member.value).rpartition(".")[2] == "auto()":
            number = (1 << last.bit_length()) if flags else last + 1
            value = ("str", name.lower()) if texts else ("int", number)
        if isinstance(value, tuple) and value[0] == "int":
            last = max(last, int(value[1]))
        yield name, value

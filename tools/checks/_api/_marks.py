# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Stability marks, read from the decorators of an object and of what contains it."""

import ast
import contextlib
from dataclasses import dataclass

import griffe

from tools.checks._api._surface import PROPERTY_DECORATORS

LADDER = ("internal", "experimental", "stable")
_DECORATORS = {"internal_api": "internal", "experimental_api": "experimental", "deprecated": "deprecated"}
_PEP702 = {"warnings.deprecated", "typing_extensions.deprecated"}
_CLOCK = ("version", "removal_version", "alternative")


@dataclass(frozen=True, kw_only=True)
class Deprecation:
    """Arguments of ``deprecated``; None where they are missing or no plain string."""

    version: str | None = None
    removal_version: str | None = None
    alternative: str | None = None


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Where an object stands on the ladder, and its deprecation, own or of the class around it."""

    level: str = "stable"
    deprecation: Deprecation | None = None


def mark_of(obj: griffe.Object) -> Mark:
    """The lowest level and the nearest deprecation among the object and its parents."""
    level, deprecation = "stable", None
    node: griffe.Object | griffe.Alias | None = obj
    while node is not None and not node.is_module:
        for name, value in _decorators(node):
            if name == "deprecated":
                deprecation = deprecation or _deprecation(value)
            elif LADDER.index(name) < LADDER.index(level):
                level = name
        node = node.parent
    return Mark(level=level, deprecation=deprecation)


def own_deprecation(obj: griffe.Object) -> Deprecation | None:
    """The deprecation written on the object itself."""
    return next((_deprecation(value) for name, value in _decorators(obj) if name == "deprecated"), None)


def is_seen_by_type_checkers(obj: griffe.Object) -> bool:
    """Whether a mark of PEP 702 stands on the object: type checkers know no other."""
    return any(path in _PEP702 or path.rpartition(".")[2] == "pep702_deprecated" for path, _ in _all_decorators(obj))


def _decorators(obj: griffe.Object | griffe.Alias) -> list[tuple[str, str]]:
    # The last part must match exactly: a decorator whose name or arguments merely contain the word marks nothing.
    found = []
    for path, value in _all_decorators(obj):
        mark = _DECORATORS.get(path.rpartition(".")[2])
        if mark and path not in _PEP702:
            found.append((mark, value))
    return found


def _all_decorators(obj: griffe.Object | griffe.Alias) -> list[tuple[str, str]]:
    """(path, source) of each decorator."""
    if not isinstance(obj, griffe.Attribute):
        return [(decorator.callable_path, str(decorator.value)) for decorator in getattr(obj, "decorators", ())]
    found = []
    for node in obj.extra[PROPERTY_DECORATORS].get("nodes", ()):
        head = node.func if isinstance(node, ast.Call) else node
        first, *rest = ast.unparse(head).split(".")
        with contextlib.suppress(griffe.NameResolutionError):
            first = obj.resolve(first)
        found.append((".".join([first, *rest]), ast.unparse(node)))
    return found


def _deprecation(source: str) -> Deprecation:
    call = ast.parse(source.strip().removeprefix("@"), mode="eval").body
    if not isinstance(call, ast.Call):
        return Deprecation()
    arguments = dict(zip(_CLOCK, call.args, strict=False)) | {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    plain = {name: node.value for name, node in arguments.items() if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return Deprecation(**{name: plain.get(name) for name in _CLOCK})

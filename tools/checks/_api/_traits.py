# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What instances of a class can do without a member of that name in the source: be hashed, compared, ordered, matched."""

import ast
from collections.abc import Iterator

import griffe

from tools.checks._api._surface import Surface, follow
from tools.checks._api._types import resolve

# Losing one of these breaks users; gaining it does not.
_WORDS = {
    "any attribute": "a read of a computed attribute fails",
    "dataclass": "dataclasses.replace, fields and asdict fail",
    "equality": "equal contents are no longer equal",
    "frozen": "a frozen subclass fails",
    "generic": "a subscript of the class fails",
    "hash": "instances cannot be keys any more",
    "order": "instances can no longer be compared by <",
    "positional patterns": "case Class(x) fails",
}


def dataclass_options(cls: griffe.Class) -> dict[str, bool] | None:
    """Boolean arguments of the dataclass decorator; None if there is none."""
    for decorator in cls.decorators:
        if decorator.callable_path.rpartition(".")[2] == "dataclass":
            call = ast.parse(str(decorator.value).removeprefix("@"), mode="eval").body
            keywords = call.keywords if isinstance(call, ast.Call) else []
            return {k.arg: k.value.value is True for k in keywords if k.arg and isinstance(k.value, ast.Constant)}
    return None


def lost_traits(old: griffe.Class, new: griffe.Class, before: Surface, after: Surface) -> Iterator[tuple[str, str]]:
    """(trait, what fails without it) for each trait that only the old class has."""
    was, now = _traits(old, before), _traits(new, after)
    for trait in sorted(was - now):
        if trait == "positional patterns" and "dataclass" not in now:
            continue  # said by the dataclass
        if trait == "order" and any(name in new.members for name in ("__lt__", "__gt__")):
            continue
        yield trait, _WORDS[trait]


def _traits(cls: griffe.Class, surface: Surface) -> set[str]:
    found = set()
    options = dataclass_options(cls)
    if options is not None:
        found.add("dataclass")
        found |= {name for name in ("order", "frozen") if options.get(name)}
        if options.get("match_args", True) and not options.get("kw_only"):
            found.add("positional patterns")
    lineage = [cls, *_parents(cls)]
    if _is_hashable(lineage):
        found.add("hash")
    if any("__eq__" in parent.members or _compares_by_value(parent) for parent in lineage):
        found.add("equality")
    if any(name in parent.members for parent in lineage for name in ("__getattr__", "__getattribute__")):
        found.add("any attribute")
    if _is_generic(cls, surface):
        found.add("generic")
    return found


def _parents(cls: griffe.Class) -> list[griffe.Class]:
    """Classes above in the same package, nearest first."""
    try:
        return list(cls.mro())
    except (griffe.GriffeError, ValueError, KeyError):
        return []


def _compares_by_value(cls: griffe.Class) -> bool:
    options = dataclass_options(cls)
    return options is not None and options.get("eq", True)


def _is_hashable(lineage: list[griffe.Class]) -> bool:
    for cls in lineage:
        own = cls.members.get("__hash__")
        if own is not None:
            obj = follow(own)
            return not (isinstance(obj, griffe.Attribute) and str(obj.value) == "None")
        options = dataclass_options(cls) or {}
        if options.get("unsafe_hash"):
            return True
        if _compares_by_value(cls):
            return bool(options.get("frozen"))
        if "__eq__" in cls.members:
            return False
    return True


def _is_generic(cls: griffe.Class, surface: Surface) -> bool:
    if list(getattr(cls, "type_parameters", ())) or "__class_getitem__" in cls.members:
        return True
    for base in cls.bases:
        head, bracket, inside = str(base).partition("[")
        if not bracket:
            continue
        if head.rpartition(".")[2] in ("Generic", "Protocol"):
            return True
        for node in ast.walk(ast.parse(f"[{inside}", mode="eval")):
            obj = surface.lookup(resolve(cls, node.id) or "") if isinstance(node, ast.Name) else None
            if isinstance(obj, griffe.Attribute) and str(obj.value).partition("(")[0].rpartition(".")[2] in ("TypeVar", "TypeVarTuple"):
                return True
    return False

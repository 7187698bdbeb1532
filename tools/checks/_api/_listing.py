# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The public surface as text, one line a name: what a reviewer sees change."""

import difflib
from pathlib import Path

import griffe
from griffe import ParameterKind

from tools.checks._api._finding import Finding
from tools.checks._api._marks import mark_of
from tools.checks._api._surface import Entry, Surface
from tools.checks._api._traits import dataclass_options

_STARS = {ParameterKind.var_positional: "*", ParameterKind.var_keyword: "**"}


def listing(surface: Surface, wheel: str) -> str:
    """Text of ``api/<wheel>.txt``."""
    head = [f"# Public surface of {wheel}. Written by: python tools/checks/api.py --wheel {wheel} --write-surface", ""]
    lines = [line for entry in surface.entries.values() if (line := _line(entry, surface))]
    return "\n".join([*head, *sorted(lines), ""])


def stale(surface: Surface, wheel: str, committed: Path, root: Path) -> list[Finding]:
    """One finding with the difference if the committed text is not that of the code."""
    fresh = listing(surface, wheel)
    found = committed.read_text() if committed.is_file() else ""
    if found == fresh:
        return []
    name = committed.relative_to(root).as_posix()
    diff = "".join(difflib.unified_diff(found.splitlines(True), fresh.splitlines(True), f"{name} (committed)", f"{name} (code)", n=0))
    text = f"run: python tools/checks/api.py --wheel {wheel} --write-surface"
    return [Finding(kind="surface_stale", path=name, text=text, file=name, detail=diff)]


def _line(entry: Entry, surface: Surface) -> str:
    obj = entry.obj
    if obj is None:
        return f"{entry.path} = {entry.foreign}"
    if entry.inherited and surface.shortest.get(obj.path) != entry.path:
        return ""  # stands with the class that declares it
    short = surface.shortest.get(obj.path, entry.path)
    if short != entry.path:
        # Members of a class that is exported twice are listed once.
        return f"{entry.path} = {short}" if not (obj.parent is not None and obj.parent.is_class) else ""
    if isinstance(obj, griffe.Module):
        return f"{entry.path}: module"
    if isinstance(obj, griffe.Function) and obj.overloads:
        return "\n".join(f"{entry.path} overload {n} {_describe(overload)}" for n, overload in enumerate(obj.overloads, start=1))
    text = f"{entry.path}{_describe(obj)}"
    mark = mark_of(obj)
    notes = [mark.level] if mark.level != "stable" else []
    if mark.deprecation is not None:
        notes.append(f"deprecated, goes in {mark.deprecation.removal_version}")
    return f"{text}  [{'; '.join(notes)}]" if notes else text


def _describe(obj: griffe.Object) -> str:
    if isinstance(obj, griffe.Function):
        result = f" -> {obj.returns}" if obj.returns is not None else ""
        nature = "async def" if "async" in obj.labels else "def"
        kind = next((f"{label} " for label in ("staticmethod", "classmethod") if label in obj.labels), "")
        return f"({_parameters(obj)}){result}: {kind}{nature}"
    if isinstance(obj, griffe.Class):
        bases = f"({', '.join(str(base) for base in obj.bases)})" if obj.bases else ""
        options = dataclass_options(obj)
        kind = "class" if options is None else " ".join(["dataclass", *sorted(name for name, value in options.items() if value)])
        return f"{bases}: {kind}"
    if isinstance(obj, griffe.Attribute):
        annotation = f" {obj.annotation}" if obj.annotation is not None else ""
        if "property" in obj.labels:
            return f":{annotation} property{' with setter' if 'writable' in obj.labels else ''}"
        return f":{annotation or f' = {obj.value}' if obj.value is not None and len(str(obj.value)) < 60 else annotation} attribute"
    return f": {obj.kind.value}"


def _parameters(function: griffe.Function) -> str:
    parts, bare_star, positional_only = [], False, False
    for parameter in function.parameters:
        if positional_only and parameter.kind is not ParameterKind.positional_only:
            parts.append("/")
        positional_only = parameter.kind is ParameterKind.positional_only
        if parameter.kind is ParameterKind.keyword_only and not bare_star:
            parts.append("*")
        bare_star |= parameter.kind in (ParameterKind.keyword_only, ParameterKind.var_positional)
        stars = _STARS.get(parameter.kind, "") if parameter.kind is not None else ""
        annotation = f": {parameter.annotation}" if parameter.annotation is not None else ""
        default = f" = {parameter.default}" if parameter.default is not None and not stars else ""
        parts.append(f"{stars}{parameter.name}{annotation}{default}")
    return ", ".join([*parts, "/"] if positional_only else parts)

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Rules that a public surface keeps whatever its version: the clock of deprecations, exports, configurations."""

import re
from collections.abc import Iterator
from dataclasses import replace

import griffe
from packaging.version import InvalidVersion, Version

from tools.checks._api._finding import Finding
from tools.checks._api._marks import Deprecation, is_seen_by_type_checkers, own_deprecation
from tools.checks._api._surface import Entry, Surface
from tools.checks._api._traits import dataclass_options


def earliest_removal(version: Version) -> Version:
    """Two minor versions later."""
    return Version(f"{version.major}.{version.minor + 2}.0")


def clock_findings(
    surface: Surface, version: Version, *, old: Surface | None = None, old_version: Version | None = None
) -> Iterator[Finding]:
    """Each deprecation says since when and until when, keeps the promise, and ends.

    Args:
        surface: the tree under check.
        version: its version.
        old: the last release, which tells which marks are new; None if there is none.
        old_version: its version.
    """
    seen: set[int] = set()
    for entry in sorted(surface.entries.values(), key=lambda entry: entry.rank):
        if entry.obj is None or id(entry.obj) in seen:
            continue
        seen.add(id(entry.obj))
        deprecation = own_deprecation(entry.obj)
        if deprecation is not None:
            file, line = surface.location(entry.obj)
            before = old.entries.get(entry.path) if old is not None else None
            released = own_deprecation(before.obj) if before is not None and before.obj is not None else None
            found = [*_clock(entry, deprecation, surface, version), *_dates(entry.path, deprecation, released, version, old_version)]
            if not is_seen_by_type_checkers(entry.obj):
                text = "write @pep702_deprecated under the deprecation, or warnings.deprecated with category=None"
                found.append(Finding(kind="deprecation_unseen", path=entry.path, text=text))
            for finding in found:
                yield replace(finding, file=file, line=line)


def _dates(
    path: str, deprecation: Deprecation, released: Deprecation | None, version: Version, old_version: Version | None
) -> Iterator[Finding]:
    """A deprecation names the release that first carries it, and never ends earlier than a release promised."""
    try:
        since, until = Version(deprecation.version or ""), Version(deprecation.removal_version or "")
        first, promised = (Version(released.version or ""), Version(released.removal_version or "")) if released else (None, None)
    except InvalidVersion:
        return
    if first is None:
        first = Version(version.base_version)
        if old_version is not None and first <= old_version < since:
            return  # the version has yet to grow, which the new mark asks for
    if promised is not None and until < promised:
        yield Finding(kind="deprecation_shortened", path=path, text=f"was to go in {promised}, is to go in {until} now")
    if since > first:
        yield Finding(kind="deprecation_postdated", path=path, text=f"says {since}, and {first} carries the mark; write {first}")
    if since < first and (released is not None or old_version is not None):
        text = f"says {since}, and {first} is the first release that carries the mark; write {first}"
        yield Finding(kind="deprecation_backdated", path=path, text=text)


def _clock(entry: Entry, deprecation: Deprecation, surface: Surface, version: Version) -> Iterator[Finding]:
    try:
        since, until = Version(deprecation.version or ""), Version(deprecation.removal_version or "")
    except InvalidVersion:
        text = f"version={deprecation.version!r}, removal_version={deprecation.removal_version!r}; write both as plain strings"
        yield Finding(kind="deprecation_incomplete", path=entry.path, text=text)
        return
    if until < since or (until.major == since.major and until < earliest_removal(since)):
        text = f"deprecated in {since}, to go in {until}; {earliest_removal(since)} is the earliest"
        yield Finding(kind="deprecation_too_short", path=entry.path, text=text)
    if Version(version.base_version) >= until:
        yield Finding(kind="removal_overdue", path=entry.path, text=f"was to go in {until} and this is {version}; remove it")
    alternative = deprecation.alternative
    if alternative and not _alternative_exists(alternative, entry, surface):
        yield Finding(kind="alternative_unknown", path=entry.path, text=f"{alternative!r} is no public name")


def _alternative_exists(alternative: str, entry: Entry, surface: Surface) -> bool:
    name = alternative.removesuffix("()")
    if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", name):
        return True  # a phrase for people
    if "." in name and not surface.is_internal(name) and not any(path.endswith(f".{name}") for path in surface.entries):
        # A dotted name of another package cannot be looked up here; one of a class of this package is found above.
        first = name.partition(".")[0]
        return not any(path.rpartition(".")[2] == first for path in surface.entries)
    parent = entry.path.rpartition(".")[0]
    return any(path in surface.entries for path in (name, f"{parent}.{name}", f"{surface.package}.{name}")) or any(
        path.endswith(f".{name}") for path in surface.entries
    )


def export_findings(surface: Surface) -> Iterator[Finding]:
    """What __all__ lists exists."""
    for module, name in surface.unresolved:
        file, _ = surface.location(module)
        yield Finding(kind="export_unresolved", path=f"{module.path}.{name}", text="listed in __all__ and not there", file=file)


def shape_findings(surface: Surface) -> Iterator[Finding]:
    """Public modules say what they export; configurations are built by keyword."""
    for module in surface.without_all:
        file, _ = surface.location(module)
        text = "define __all__ as a list of strings, or begin the module's name with an underscore"
        yield Finding(kind="all_missing", path=module.path, text=text, file=file)
    for module, name in surface.shadowed:
        file, _ = surface.location(module)
        text = "is a submodule and an imported name at once; rename the file, for instance with an underscore in front"
        yield Finding(kind="name_shadowed", path=f"{module.path}.{name}", text=text, file=file)
    for entry in sorted(surface.entries.values(), key=lambda entry: entry.rank):
        obj = entry.obj
        if isinstance(obj, griffe.Class) and entry.path == surface.public(obj.path) and obj.name.endswith("Config"):
            options = dataclass_options(obj)
            if options is not None and not options.get("kw_only"):
                file, line = surface.location(obj)
                yield Finding(kind="config_not_keyword_only", path=entry.path, text="add kw_only=True", file=file, line=line)

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Breaks that were accepted on purpose, one entry each, for one version."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.version import InvalidVersion, Version

from tools.checks._api._finding import KINDS, CheckError, Finding

_KEYS = {"kind", "path", "reason", "version"}


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """One entry of ``api/<wheel>.accept.toml``.

    Args:
        kind: kind of the finding.
        path: path of the finding.
        reason: why the break is worth it, for the reader of the release notes.
        version: release that carries it.
    """

    kind: str
    path: str
    reason: str
    version: Version


def read_acceptances(file: Path) -> list[Acceptance]:
    """Entries of a file; none if there is no file.

    Raises:
        CheckError: an entry that cannot mean anything.
    """
    if not file.is_file():
        return []
    try:
        document = tomllib.loads(file.read_text())
    except tomllib.TOMLDecodeError as error:
        raise CheckError(f"{file.name} is no TOML: {error}") from error
    if set(document) - {"accept"}:
        raise CheckError(f"{file.name} has unknown tables {sorted(set(document) - {'accept'})}; write [[accept]] entries only")
    entries = []
    for number, entry in enumerate(document.get("accept", []), start=1):
        where = f"{file.name}, entry {number}"
        if set(entry) != _KEYS or not all(isinstance(value, str) and value.strip() for value in entry.values()):
            raise CheckError(f"{where}: needs exactly the texts {', '.join(sorted(_KEYS))}, has {', '.join(sorted(entry)) or 'none'}")
        if entry["kind"] not in KINDS:
            raise CheckError(f"{where}: kind={entry['kind']!r} is unknown; copy it from the report")
        try:
            version = Version(entry["version"])
        except InvalidVersion as error:
            raise CheckError(f"{where}: version={entry['version']!r} is no version") from error
        entries.append(Acceptance(**(entry | {"version": version})))
    return entries


def apply_acceptances(findings: Sequence[Finding], acceptances: Sequence[Acceptance], version: Version, file: str) -> list[Finding]:
    """Findings with accepted ones exempt, and one more for each acceptance that has no use.

    Args:
        findings: what was found.
        acceptances: entries of the wheel.
        version: version of the tree under check.
        file: name of the file with the entries, for reports.
    """
    remaining = list(findings)
    problems = []
    for entry in acceptances:
        path = f"{entry.kind} {entry.path}"
        if Version(version.base_version) > entry.version:
            text = f"was for {entry.version} and this is {version}; remove the entry"
            problems.append(Finding(kind="acceptance_void", path=path, text=text, file=file))
            continue
        used = [n for n, finding in enumerate(remaining) if (finding.kind, finding.path) == (entry.kind, entry.path) and finding.counts]
        if not used:
            problems.append(Finding(kind="acceptance_unused", path=path, text="nothing like it was found; remove the entry", file=file))
        for number in used:
            remaining[number] = replace(remaining[number], exempt=f"accepted for {entry.version}: {entry.reason}")
    return remaining + problems

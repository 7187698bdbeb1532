# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The catalogue of edits: what a gate must find, what it must leave alone, and why."""

import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.version import Version

from tools.checks._api import Bump, Checker, Finding, compare_metadata, compare_surfaces, load, read_metadata

FOLDER = Path(__file__).with_name("catalogue")
EXPECTATIONS = {"nothing": Bump.NONE, "exempt": Bump.NONE, "addition": Bump.ADDITION, "break": Bump.BREAK, "never": Bump.NEVER}
_STABILITY = """
def internal_api(obj): return obj
def experimental_api(obj): return obj
def deprecated(version, removal_version, alternative=None): return lambda obj: obj
def pep702_deprecated(message): return lambda obj: obj
"""


@dataclass(frozen=True, kw_only=True)
class CatalogueEdit:
    """One edit of one small package.

    Args:
        topic: file that holds it.
        name: what is edited, in words.
        old: source of the package's ``__init__.py`` in the last release.
        new: the same after the edit.
        expect: what the edit asks for, a key of ``EXPECTATIONS``.
        reason: why.
        findings: breaking findings that must be reported, and no others; for an addition, some of the findings.
        old_files: further files of the old package.
        new_files: further files of the new package.
        old_version: version of the last release.
        new_version: version under check.
        strict: judged as a wheel of this repository, clock of deprecations included.
        old_project: lines of the old pyproject.toml under ``[project]``; such an edit is one of metadata.
        new_project: the same after the edit.
    """

    topic: str
    name: str
    old: str
    new: str
    expect: str
    reason: str
    findings: Sequence[str] = ()
    old_files: Mapping[str, str] = field(default_factory=dict)
    new_files: Mapping[str, str] = field(default_factory=dict)
    old_version: str = "0.1.0"
    new_version: str = "0.1.1"
    strict: bool = False
    old_project: str | None = None
    new_project: str | None = None

    @property
    def package(self) -> str:
        """Name of the edit's folder in the trees."""
        return "edit_" + "".join(character if character.isalnum() else "_" for character in self.name.lower())

    @property
    def group(self) -> tuple[str, str, bool]:
        """Edits of one group are judged in one comparison."""
        return self.old_version, self.new_version, self.strict


def read_catalogue(folder: Path = FOLDER) -> list[CatalogueEdit]:
    """Every edit, by topic.

    Raises:
        ValueError: an entry that cannot mean anything.
    """
    edits = []
    for file in sorted(folder.glob("*.toml")):
        for entry in tomllib.loads(file.read_text())["edit"]:
            edit = CatalogueEdit(topic=file.stem, **entry)
            if edit.expect not in EXPECTATIONS:
                raise ValueError(f"{file.name}: expect={edit.expect!r} of {edit.name!r} is none of {', '.join(EXPECTATIONS)}")
            edits.append(edit)
    names = [edit.package for edit in edits]
    if doubled := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"two edits share a name: {', '.join(sorted(doubled))}")
    return edits


def write_trees(edits: Iterable[CatalogueEdit], folder: Path) -> tuple[Path, Path]:
    """(old, new) trees of a package ``catalogue`` with one subpackage an edit."""
    edits = list(edits)
    roots = folder / "old", folder / "new"
    for root in roots:
        _write(root / "catalogue" / "__init__.py", "__all__ = []\n")
        _write(root / "catalogue" / "_stability.py", _STABILITY)
    for edit in edits:
        for root, source, files in zip(roots, (edit.old, edit.new), (edit.old_files, edit.new_files), strict=True):
            package = root / "catalogue" / edit.package
            _write(package / "__init__.py", source.lstrip("\n") + "\n")
            for name, text in files.items():
                _write(package / name, text.lstrip("\n") + "\n")
    return roots


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def judge(edits: Iterable[CatalogueEdit], *, checker: Checker | None = None) -> dict[str, list[Finding]]:
    """Findings of the gate by name of the edit; their paths are relative to the edit's package."""
    findings: dict[str, list[Finding]] = {}
    groups: dict[Any, list[CatalogueEdit]] = defaultdict(list)
    for edit in edits:
        findings[edit.name] = []
        if edit.old_project is None or edit.new_project is None:
            groups[edit.group].append(edit)
        else:
            findings[edit.name] = compare_metadata(*(read_metadata(_project(text)) for text in (edit.old_project, edit.new_project)))
    for (old_version, new_version, strict), members in groups.items():
        with tempfile.TemporaryDirectory() as folder:
            surfaces = [load("catalogue", root) for root in write_trees(members, Path(folder))]
            versions = Version(old_version), Version(new_version)
            found = compare_surfaces(surfaces[0], surfaces[1], *versions, checker=checker, strict=strict)
        packages = {edit.package: edit.name for edit in members}
        for finding in found:
            if finding.path == "version":
                for edit in members:
                    findings[edit.name].append(finding)
                continue
            _, package, *rest = finding.path.split(".", 2)
            if rest:
                findings[packages[package]].append(_relative(finding, rest[0]))
    return findings


def _project(text: str) -> dict[str, Any]:
    return tomllib.loads(f"[project]\n{text}\n")["project"]


def _relative(finding: Finding, path: str) -> Finding:
    return Finding(kind=finding.kind, path=path, text=finding.text, exempt=finding.exempt, detail=finding.detail)


def disagreement(edit: CatalogueEdit, findings: Sequence[Finding]) -> str:
    """How the findings differ from what the edit expects; empty if they agree."""
    counted = [finding for finding in findings if finding.counts]
    asked = max((finding.bump for finding in counted), default=Bump.NONE)
    if asked is not EXPECTATIONS[edit.expect]:
        shown = "; ".join(f"{finding.kind} {finding.path}: {finding.text} {finding.detail}" for finding in counted)
        return f"expects {edit.expect}, the gate asks for {asked.name.lower()}: {shown or 'nothing found'}"
    if edit.expect == "exempt" and not any(finding.exempt for finding in findings):
        return "expects an exempt finding, there is none"
    shown_for = [finding for finding in findings if finding.exempt] if edit.expect == "exempt" else counted
    relevant = {f"{finding.kind} {finding.path}" for finding in shown_for if finding.bump >= min(asked, Bump.BREAK)}
    wanted = set(edit.findings)
    if wanted and not (wanted <= relevant if asked is Bump.ADDITION else wanted == relevant):
        return f"expects {', '.join(sorted(wanted))}; the gate reports {', '.join(sorted(relevant)) or 'nothing'}"
    return ""

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""One wheel, or any two trees, from source to report."""

import tempfile
import time
from dataclasses import replace
from pathlib import Path

from packaging.version import Version

from tools.checks._api._accept import apply_acceptances, read_acceptances
from tools.checks._api._baseline import find_baseline
from tools.checks._api._compare import compare
from tools.checks._api._finding import CheckError, Finding
from tools.checks._api._listing import stale
from tools.checks._api._metadata import Metadata, compare_metadata, read_metadata, read_wheel_metadata
from tools.checks._api._policy import clock_findings, export_findings, shape_findings
from tools.checks._api._source import Tree, open_tree, project_table, project_version
from tools.checks._api._surface import Surface, load
from tools.checks._api._verdict import Report
from tools.checks._api._witness import Checker
from tools.checks._tree import Wheel


def check_wheel(wheel: Wheel, repository: Path) -> Report:
    """Compare a wheel of the repository with its last release, and hold it to the rules.

    Raises:
        CheckError: the check could not run.
    """
    start = time.perf_counter()
    source = wheel.folder / "src"
    prefix = source.relative_to(repository).as_posix()
    new = load(wheel.module, source)
    findings = [*export_findings(new), *shape_findings(new)]
    findings += stale(new, wheel.name, repository / "api" / f"{wheel.name}.txt", repository)
    baseline = find_baseline(wheel.name, wheel.version, repository)
    accept_file = f"api/{wheel.name}.accept.toml"
    acceptances = read_acceptances(repository / accept_file)
    names = (0, len(new.entries))
    if baseline is None:
        findings += clock_findings(new, wheel.version)
    else:
        with tempfile.TemporaryDirectory() as folder:
            old_source = baseline.unpack(wheel.name, repository, Path(folder)) / "src"
            declared = project_version(old_source.parent / "pyproject.toml")
            if declared != baseline.version:
                raise CheckError(f"{baseline.label} should hold {wheel.name} {baseline.version} and holds {declared}")
            old = load(wheel.module, old_source)
            findings += clock_findings(new, wheel.version, old=old, old_version=baseline.version)
            projects = (old_source.parent, wheel.folder)
            findings += compare_metadata(*(read_metadata(project_table(folder / "pyproject.toml")) for folder in projects))
            siblings = [path for path in sorted(repository.glob("packages/*/src")) if path != source]
            findings += compare(old, new, wheel.version, Checker(extra=siblings))
            findings += _version_findings(baseline.version, wheel.version)
            names = (len(old.entries), len(new.entries))
    return Report(
        name=wheel.name,
        old_version=baseline.version if baseline is not None else None,
        new_version=wheel.version,
        baseline=baseline.label if baseline is not None else "",
        findings=apply_acceptances(findings, acceptances, wheel.version, accept_file),
        prefix=prefix,
        seconds=time.perf_counter() - start,
        names=names,
        notice="first release, nothing to compare with" if baseline is None else "",
        strict=True,
    )


def check_trees(
    old: str,
    new: str,
    package: str,
    *,
    repository: Path,
    old_version: str | None = None,
    new_version: str | None = None,
    strict: bool = False,
) -> Report:
    """Compare any two trees of a package: folders, wheel files, commits.

    Args:
        old: the last release.
        new: the tree under check.
        package: import name.
        repository: where commits are looked up.
        old_version: version of the old tree, if it does not say.
        new_version: version of the new tree, if it does not say.
        strict: judge as a wheel of this repository, clock of deprecations included.

    Raises:
        CheckError: the check could not run.
    """
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        scratch = [Path(folder, name) for name in ("old", "new")]
        for place in scratch:
            place.mkdir()
        before = open_tree(old, package, scratch[0], repository=repository, version=old_version)
        after = open_tree(new, package, scratch[1], repository=repository, version=new_version)
        for tree, option in ((before, "--old-version"), (after, "--new-version")):
            if tree.version is None:
                raise CheckError(f"{tree.label} does not say its version; give {option}")
        assert before.version is not None and after.version is not None
        surfaces = load(before.package, before.root), load(after.package, after.root)
        findings = compare_surfaces(*surfaces, before.version, after.version, strict=strict)
        promises = [_tree_metadata(tree) for tree in (before, after)]
        if promises[0] is not None and promises[1] is not None:
            findings += compare_metadata(promises[0], promises[1])
        report = Report(
            name=package,
            old_version=before.version,
            new_version=after.version,
            baseline=before.label,
            findings=findings,
            prefix="" if after.root.is_relative_to(folder) else _relative(after.root),
            names=(len(surfaces[0].entries), len(surfaces[1].entries)),
            strict=strict,
        )
    return replace(report, seconds=time.perf_counter() - start)


def compare_surfaces(
    old: Surface, new: Surface, old_version: Version, new_version: Version, *, checker: Checker | None = None, strict: bool = False
) -> list[Finding]:
    """The rules that hold for any package: changes, broken exports, a version that shrank.

    Args:
        old: the last release.
        new: the tree under check.
        old_version: its version.
        new_version: its version.
        checker: judges what depends on types.
        strict: deprecations keep the clock of this repository.
    """
    broken_before = {finding.path for finding in export_findings(old)}
    findings = [finding for finding in export_findings(new) if finding.path not in broken_before]
    if strict:
        findings += clock_findings(new, new_version, old=old, old_version=old_version)
    findings += compare(old, new, new_version, checker or Checker())
    return findings + _version_findings(old_version, new_version)


def _version_findings(old: Version, new: Version) -> list[Finding]:
    if new < old:
        return [Finding(kind="version_decreased", path="version", text=f"{new} comes before the released {old}")]
    return []


def _tree_metadata(tree: Tree) -> Metadata | None:
    if tree.metadata is None:
        return None
    if tree.metadata.is_dir():
        return read_wheel_metadata(tree.metadata)
    project = project_table(tree.metadata)
    # What a build computes cannot be read here.
    dynamic = {"dependencies", "optional-dependencies", "requires-python", "scripts", "entry-points"} & set(project.get("dynamic", ()))
    return None if dynamic or not project else read_metadata(project)


def _relative(folder: Path) -> str:
    here = Path.cwd()
    return folder.relative_to(here).as_posix() if folder.is_relative_to(here) else folder.as_posix()

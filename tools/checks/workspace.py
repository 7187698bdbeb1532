# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The workspace is consistent: sibling ranges admit this tree, every range has a lower bound, no file names a machine."""

import re
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from tools.checks._tree import ROOT, Wheel, distributions, report, tracked_files, wheels

LOWER = {">=", ">", "==", "~="}
UPPER = {"<", "<=", "==", "~="}
# Hosts that documentation may link to. A registry or an index never stands in a file: pip and uv are told elsewhere.
LINKABLE_HOSTS = {
    "127.0.0.1",
    "arxiv.org",
    "creativecommons.org",
    "cyclonedx.org",
    "docs.pytorch.org",
    "docs.python.org",
    "example.com",
    "git-scm.com",
    "github.com",
    "huggingface.co",
    "json.schemastore.org",
    "keepachangelog.com",
    "localhost",
    "peps.python.org",
    "purl.org",
    "semver.org",
    "www.apache.org",
    "www.w3.org",
}
_URL = re.compile(r"(?:https?|ftp)://([A-Za-z0-9.-]+\.[A-Za-z]+|[A-Za-z0-9.]+)")
_INDEX = re.compile(r"--(?:extra-)?index-url[ =]|--find-links[ =][./~]|\bpypi\.org\b|\bpythonhosted\.org\b|\bnpmjs\.(?:org|com)\b")
_MACHINE_PATH = re.compile(r"(?<![\w.}$\\)/-])/(?:home|mnt|opt|root|tmp|Users|work)/\w|(?<!\w)[A-Z]:\\\\?Users\\")


def dependency_findings(tree: dict[str, Wheel]) -> list[str]:
    """Ranges without the bound that they need, and siblings of this tree that a range excludes."""
    findings = []
    for wheel in tree.values():
        for requirement in [*wheel.dependencies, *(one for extra in wheel.extras.values() for one in extra)]:
            findings += [f"{wheel.name}: {problem}" for problem in _requirement_problems(requirement, tree)]
    return findings


def _requirement_problems(requirement: Requirement, tree: dict[str, Wheel]) -> list[str]:
    operators = {specifier.operator for specifier in requirement.specifier}
    problems = []
    if not operators & LOWER:
        problems.append(f"'{requirement}' has no lower bound; name the oldest version whose API is used")
    if requirement.name == "torch" and operators & UPPER:
        problems.append(f"'{requirement}' has an upper bound; a newer torch is the user's choice")
    if (sibling := tree.get(requirement.name)) is not None:
        if not operators & UPPER:
            problems.append(f"'{requirement}' has no upper bound; cap a sibling at its next breaking version")
        if not requirement.specifier.contains(sibling.version, prereleases=True):
            problems.append(f"'{requirement}' excludes the {sibling.name} {sibling.version} of this tree; widen or move the range")
    return problems


def member_findings(tree: dict[str, Wheel], root: dict) -> list[str]:
    """Wheels that the root or the wheel's own metadata forgets."""
    findings = []
    sources = root["tool"]["uv"]["sources"]
    for wheel in tree.values():
        if wheel.name != wheel.folder.name:
            findings.append(f"packages/{wheel.folder.name}: the project is named {wheel.name}; folder and name must agree")
        if wheel.name not in sources:
            findings.append(f"pyproject.toml: {wheel.name} is missing from [tool.uv.sources]")
        if wheel.project.get("requires-python") != root["project"]["requires-python"]:
            findings.append(f"{wheel.name}: requires-python differs from the root's {root['project']['requires-python']}")
        if "version" in wheel.project.get("dynamic", []):
            findings.append(f"{wheel.name}: version is dynamic; write it down, the release check compares it with the tag")
    return findings


def group_findings(root: dict) -> list[str]:
    """Tools of the dependency groups without a lower bound."""
    findings = []
    for group, entries in root.get("dependency-groups", {}).items():
        for requirement in (Requirement(entry) for entry in entries if isinstance(entry, str)):
            if not {specifier.operator for specifier in requirement.specifier} & LOWER:
                findings.append(f"pyproject.toml: group {group}: '{requirement}' has no lower bound")
    return findings


def trace_findings(text: str) -> list[tuple[int, str]]:
    """Line and reason of every host that is no documentation, index option and machine path in a text."""
    findings = []
    for number, line in enumerate(text.splitlines(), 1):
        if match := _INDEX.search(line):
            findings.append((number, f"index or registry: {match[0].strip()}"))
        if match := _MACHINE_PATH.search(line):
            findings.append((number, f"path of a machine: {match[0]}"))
        for host in _URL.findall(line):
            if host.lower().removesuffix(".") not in LINKABLE_HOSTS:
                findings.append((number, f"host {host} is not in LINKABLE_HOSTS of tools/checks/workspace.py"))
    return findings


def file_findings(paths: list[Path], root: Path = ROOT) -> list[str]:
    """The traces of machines and registries in files; binary files are passed over."""
    findings = []
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        findings += [f"{path.relative_to(root)}:{number}: {reason}" for number, reason in trace_findings(text)]
    return findings


def main() -> int:
    tree, released = wheels(), distributions()
    root = tomllib.loads((ROOT / "pyproject.toml").read_text())
    files = tracked_files()
    findings = dependency_findings(released) + member_findings(tree, root) + group_findings(root) + file_findings(files)
    listed = ", ".join(f"{wheel.name} {wheel.version}" for wheel in released.values())
    return report(findings, f"workspace: {listed}; {len(files)} files name no machine")


if __name__ == "__main__":
    sys.exit(main())

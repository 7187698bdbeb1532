# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Where the two trees of a comparison come from: a folder, a wheel file, a commit."""

import email.parser
import io
import subprocess
import tarfile
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from tools.checks._api._finding import CheckError


@dataclass(frozen=True, kw_only=True)
class Tree:
    """A package to read.

    Args:
        package: import name.
        root: folder that would be on the import path.
        version: its version, if the tree says it.
        label: where it came from, for reports.
        metadata: pyproject.toml, or the ``.dist-info`` folder of an unpacked wheel.
    """

    package: str
    root: Path
    version: Version | None
    label: str
    metadata: Path | None = None


def git(repository: Path, *arguments: str) -> str:
    """Output of a git command; raises ``CheckError`` with git's own words."""
    return _git(repository, *arguments).decode().strip()


def _git(repository: Path, *arguments: str) -> bytes:
    try:
        done = subprocess.run(["git", "-C", str(repository), *arguments], capture_output=True, check=False)
    except FileNotFoundError as error:
        raise CheckError("git is not installed, so no earlier release can be read") from error
    if done.returncode:
        raise CheckError(f"git {' '.join(arguments[:3])} failed: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout


def archive(repository: Path, commit: str, folder: Path, subfolder: str = "") -> Path:
    """Write the files of a commit into a folder. No worktree and no branch is made, so many can run at once.

    Raises:
        CheckError: the commit or the subfolder in it does not exist.
    """
    paths = ["--", subfolder] if subfolder else []
    with tarfile.open(fileobj=io.BytesIO(_git(repository, "archive", "--format=tar", commit, *paths))) as bundle:
        bundle.extractall(folder, filter="data")
    return folder / subfolder


def open_tree(where: str, package: str, scratch: Path, *, repository: Path, version: str | None = None) -> Tree:
    """A tree from a folder, a wheel file or a commit of the repository.

    Args:
        where: path of a folder or wheel file, or any name git has for a commit.
        package: import name, or name of the distribution.
        scratch: empty folder to unpack into.
        repository: where a commit is looked up.
        version: overrides what the tree says.

    Raises:
        CheckError: there is nothing there, or the package is not in it.
    """
    path = Path(where)
    if path.is_file() and path.suffix == ".whl":
        zipfile.ZipFile(path).extractall(scratch)
        folder, label = scratch, path.name
    elif path.is_dir():
        folder, label = path.resolve(), where
    else:
        commit = git(repository, "rev-parse", "--verify", "--quiet", f"{where}^{{commit}}")
        folder, label = archive(repository, commit, scratch), f"{where} ({commit[:12]})"
    module, root = _find_package(folder, package, label)
    metadata = _metadata_of(root, folder, package)
    found = Version(version) if version else _declared_version(metadata)
    return Tree(package=module, root=root, version=found, label=label, metadata=metadata)


def _find_package(folder: Path, package: str, label: str) -> tuple[str, Path]:
    modules = dict.fromkeys([package, package.replace("-", "_"), package.replace("-", ".")])
    roots = [folder, folder / "src", *sorted(folder.glob("packages/*/src"))]
    for module in modules:
        for root in roots:
            place = root.joinpath(*module.split("."))
            if all(part.isidentifier() for part in module.split(".")) and (place.is_dir() or place.with_suffix(".py").is_file()):
                return module, root
    raise CheckError(f"package {package!r} is not in {label}; give its import name, or the folder that holds it")


def _metadata_of(root: Path, folder: Path, package: str) -> Path | None:
    """The metadata folder of an unpacked wheel, or the nearest pyproject.toml with a project in it."""
    wanted = package.replace("-", "_").replace(".", "_").lower()
    records = sorted(root.glob("*.dist-info/METADATA"), key=lambda path: not path.parent.name.lower().startswith(wanted))
    if records:
        return records[0].parent
    for place in (root, *root.parents):
        if (place / "pyproject.toml").is_file() and project_table(place / "pyproject.toml"):
            return place / "pyproject.toml"
        if place == folder:
            break
    return None


def _declared_version(metadata: Path | None) -> Version | None:
    if metadata is None:
        return None
    if metadata.is_dir():
        return _version(email.parser.HeaderParser().parsestr((metadata / "METADATA").read_text(encoding="utf-8"))["Version"])
    return project_version(metadata)


def project_table(pyproject: Path) -> dict[str, Any]:
    """The table ``[project]`` of a pyproject.toml; empty if there is none."""
    return tomllib.loads(pyproject.read_text(encoding="utf-8")).get("project", {})


def project_version(pyproject: Path) -> Version | None:
    """The fixed version of a pyproject.toml."""
    return _version(project_table(pyproject).get("version"))


def _version(text: str | None) -> Version | None:
    try:
        return Version(text) if text else None
    except InvalidVersion:
        return None

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What the checks know of the tree: its wheels, their metadata, its files."""

import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """One wheel of the workspace, as its pyproject.toml declares it."""

    folder: Path
    """Of its changelog and README."""
    project: dict[str, Any]
    sources: str = "src"
    """Folder of its package, in its own."""

    @property
    def name(self) -> str:
        return self.project["name"]

    @property
    def module(self) -> str:
        """Name that users import."""
        return self.name.replace("-", "_")

    @property
    def source(self) -> Path:
        return self.folder / self.sources / self.module

    @property
    def version(self) -> Version:
        return Version(self.project["version"])

    @property
    def dependencies(self) -> list[Requirement]:
        return [Requirement(text) for text in self.project.get("dependencies", [])]

    @property
    def extras(self) -> dict[str, list[Requirement]]:
        declared = self.project.get("optional-dependencies", {})
        return {extra: [Requirement(text) for text in texts] for extra, texts in declared.items()}


def wheels(root: Path = ROOT) -> dict[str, Wheel]:
    """The wheels by name, in alphabetical order."""
    by_name = {}
    for path in sorted(root.glob("packages/*/pyproject.toml")):
        wheel = Wheel(folder=path.parent, project=tomllib.loads(path.read_text())["project"])
        by_name[wheel.name] = wheel
    return by_name


def distributions(root: Path = ROOT) -> dict[str, Wheel]:
    """What is built and released: the wheels, and the application, which the root's pyproject.toml declares."""
    application = Wheel(folder=root / "tools", project=tomllib.loads((root / "pyproject.toml").read_text())["project"], sources="")
    return {**wheels(root), application.name: application}


def tracked_files(root: Path = ROOT) -> list[Path]:
    """Files that git tracks, and new ones that it does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    output = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    paths = (root / name for name in sorted(set(output.split("\0"))) if name)
    return [path for path in paths if path.is_file()]


def python_files(folder: Path) -> Iterator[Path]:
    """Python files under a folder, in a stable order."""
    return (path for path in sorted(folder.rglob("*.py")) if "__pycache__" not in path.parts)


def report(findings: list[str], passed: str) -> int:
    """Print the findings, or what passed; the exit status."""
    print("\n".join(findings) if findings else passed)
    return 1 if findings else 0

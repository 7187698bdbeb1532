# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What a wheel says of itself: Python, dependencies, extras, commands. A narrower promise is a break like any other."""

import configparser
import email.parser
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from tools.checks._api._finding import CheckError, Finding


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """Promises of a wheel to whoever installs it.

    Args:
        python: accepted versions of Python.
        dependencies: by name, or ``extra:name`` for what an extra brings.
        extras: their names.
        commands: scripts, and other entry points as ``group:name``.
    """

    python: SpecifierSet = field(default_factory=SpecifierSet)
    dependencies: Mapping[str, SpecifierSet] = field(default_factory=dict)
    extras: frozenset[str] = frozenset()
    commands: frozenset[str] = frozenset()


def read_metadata(project: Mapping[str, Any]) -> Metadata:
    """From the table ``[project]`` of a pyproject.toml.

    Raises:
        CheckError: a requirement that cannot be read.
    """
    extras = {canonicalize_name(name): lines for name, lines in project.get("optional-dependencies", {}).items()}
    commands = {*project.get("scripts", {}), *project.get("gui-scripts", {})}
    commands |= {f"{group}:{name}" for group, names in project.get("entry-points", {}).items() for name in names}
    requirements = [("", line) for line in project.get("dependencies", [])]
    requirements += [(extra, line) for extra, lines in extras.items() for line in lines]
    return _metadata(project.get("requires-python", ""), requirements, extras, commands)


def read_wheel_metadata(dist_info: Path) -> Metadata:
    """From the ``.dist-info`` folder of an unpacked wheel.

    Raises:
        CheckError: a requirement that cannot be read.
    """
    record = email.parser.HeaderParser().parsestr((dist_info / "METADATA").read_text(encoding="utf-8"))
    extras = [canonicalize_name(name) for name in record.get_all("Provides-Extra", [])]
    requirements = []
    for line in record.get_all("Requires-Dist", []):
        match = re.search(r"""extra\s*==\s*['"]([^'"]+)['"]""", line)
        requirements.append((canonicalize_name(match[1]) if match else "", line))
    commands: set[str] = set()
    if (listed := dist_info / "entry_points.txt").is_file():
        parser = configparser.ConfigParser(delimiters=("=",))
        parser.optionxform = str  # type: ignore[assignment,method-assign]
        parser.read_string(listed.read_text(encoding="utf-8"))
        for group in parser.sections():
            script = group in ("console_scripts", "gui_scripts")
            commands |= {name if script else f"{group}:{name}" for name in parser[group]}
    return _metadata(record["Requires-Python"] or "", requirements, extras, commands)


def _metadata(python: str, requirements: Iterable[tuple[str, str]], extras: Iterable[str], commands: Iterable[str]) -> Metadata:
    try:
        dependencies: dict[str, SpecifierSet] = {}
        for extra, line in requirements:
            requirement = Requirement(line)
            name = canonicalize_name(requirement.name)
            key = f"{extra}:{name}" if extra else name
            dependencies[key] = dependencies.get(key, SpecifierSet()) & requirement.specifier
        return Metadata(python=SpecifierSet(python), dependencies=dependencies, extras=frozenset(extras), commands=frozenset(commands))
    except (InvalidRequirement, InvalidSpecifier) as error:
        raise CheckError(f"the metadata of the wheel cannot be read: {error}") from error


def compare_metadata(old: Metadata, new: Metadata) -> list[Finding]:
    """What an installation that fits the old wheel would notice."""
    return list(_compare(old, new))


def _compare(old: Metadata, new: Metadata) -> Iterator[Finding]:
    if _narrower(old.python, new.python):
        yield Finding(kind="python_narrowed", path="requires-python", text=f"{old.python or 'any'} became {new.python}")
    for extra in sorted(old.extras - new.extras):
        yield Finding(kind="extra_removed", path=extra, text="the extra is gone")
    for extra in sorted(new.extras - old.extras):
        yield Finding(kind="extra_added", path=extra, text="new")
    for command in sorted(old.commands - new.commands):
        yield Finding(kind="command_removed", path=command, text="the command is gone")
    for command in sorted(new.commands - old.commands):
        yield Finding(kind="command_added", path=command, text="new")
    for name, versions in sorted(new.dependencies.items()):
        extra = name.rpartition(":")[0]
        if extra and extra not in old.extras:
            continue  # the new extra is reported
        if name not in old.dependencies:
            yield Finding(kind="dependency_added", path=name, text=f"new: {versions or 'any version'}")
        elif _narrower(old.dependencies[name], versions):
            yield Finding(kind="dependency_narrowed", path=name, text=f"{old.dependencies[name] or 'any version'} became {versions}")


def _narrower(old: SpecifierSet, new: SpecifierSet) -> bool:
    """Whether a version that the old range admits is refused by the new one; ranges change at the versions they name."""
    return any(old.contains(version, prereleases=True) and not new.contains(version, prereleases=True) for version in _probes(old, new))


def _probes(*ranges: SpecifierSet) -> list[Version]:
    """Each version named by a range, the ones just below and just above it, and one beyond all."""
    probes = {Version("0"), Version("99999")}
    for specifier in (specifier for group in ranges for specifier in group):
        try:
            version = Version(specifier.version.removesuffix(".*"))
        except InvalidVersion:
            continue
        release = [*version.release, 0, 0][:3]
        probes |= {version, Version(".".join(map(str, [*release, 1])))}
        for place in (2, 1, 0):
            if release[place]:
                probes.add(Version(".".join(map(str, [*release[:place], release[place] - 1, 99999]))))
                break
        for place in range(len(version.release)):
            probes.add(Version(".".join(map(str, [*version.release[:place], version.release[place] + 1]))))
    return sorted(probes)

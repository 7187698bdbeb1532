# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A tag `<wheel>-vX.Y.Z` releases one wheel: tag, declared version and changelog must agree."""

import argparse
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

from tools.checks._tree import ROOT, Wheel, distributions

_TAG = re.compile(r"(?P<wheel>[a-z0-9][a-z0-9-]*?)-v(?P<version>\d\S*)")
_HEADING = re.compile(r"## (?P<title>Unreleased|(?P<version>\S+) \((?P<date>\d{4}-\d{2}-\d{2})\))\s*")


@dataclass(frozen=True, kw_only=True)
class Section:
    """One part of a changelog; `version` is None for what is not released yet."""

    version: Version | None
    text: str


def parse_tag(tag: str) -> tuple[str, Version]:
    """(wheel, version) of a tag.

    Raises:
        ValueError: the tag is no release tag.
    """
    match = _TAG.fullmatch(tag.removeprefix("refs/tags/"))
    if match is None:
        raise ValueError(f"tag {tag!r} does not read <wheel>-vX.Y.Z; name it like mcore-parallel-v0.2.0")
    try:
        return match["wheel"], Version(match["version"])
    except InvalidVersion:
        raise ValueError(f"tag {tag!r}: {match['version']!r} is not a version; name it like mcore-parallel-v0.2.0") from None


def sections(changelog: str) -> list[Section]:
    """The parts of a changelog, newest first.

    Raises:
        ValueError: a second-level heading that is neither `Unreleased` nor `X.Y.Z (YYYY-MM-DD)`.
    """
    sections: list[Section] = []
    version: Version | None = None
    lines: list[str] | None = None
    for line in changelog.splitlines():
        if not line.startswith("## "):
            if lines is not None:
                lines.append(line)
            continue
        match = _HEADING.fullmatch(line)
        if match is None:
            raise ValueError(f"changelog heading {line!r} is neither '## Unreleased' nor '## X.Y.Z (YYYY-MM-DD)'")
        if lines is not None:
            sections.append(Section(version=version, text="\n".join(lines).strip()))
        version, lines = (Version(match["version"]) if match["version"] else None), []
    if lines is not None:
        sections.append(Section(version=version, text="\n".join(lines).strip()))
    return sections


def release_notes(tag: str, tree: dict[str, Wheel]) -> tuple[Wheel, str]:
    """(wheel, its notes) when the tag may be released.

    Raises:
        ValueError: tag, version and changelog disagree; says which and what to do.
    """
    name, version = parse_tag(tag)
    if name not in tree:
        raise ValueError(f"tag {tag!r} names {name!r}, which is no wheel here; the wheels are {', '.join(tree)}")
    wheel = tree[name]
    if wheel.version != version:
        raise ValueError(f"tag {tag!r} but {name}/pyproject.toml says version {wheel.version}; move the tag or the version")
    parts = sections((wheel.folder / "CHANGELOG.md").read_text(encoding="utf-8"))
    released = [part for part in parts if part.version is not None]
    if not released or released[0].version != version:
        newest = released[0].version if released else "none"
        raise ValueError(f"tag {tag!r} but the newest version in the changelog of {name} is {newest}; add '## {version} (YYYY-MM-DD)'")
    if any(part.text for part in parts if part.version is None):
        raise ValueError(f"the changelog of {name} still has lines under Unreleased; move them under '## {version}'")
    if not released[0].text:
        raise ValueError(f"the changelog of {name} says nothing under {version}; write what changed for a user")
    versions = [part.version for part in released if part.version is not None]
    if versions != sorted(set(versions), reverse=True):
        raise ValueError(f"the changelog of {name} does not list its versions once each, newest first")
    return wheel, released[0].text


def branches_with(tag: str, repository: Path = ROOT) -> list[str]:
    """Branches that may be released from and hold the tag: main, release, release/*, here or at origin.

    Raises:
        ValueError: the tag does not exist, or lies on none of them.
    """

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=repository, capture_output=True, text=True, check=True).stdout

    try:
        names = git("branch", "--all", "--format=%(refname)", "--contains", f"refs/tags/{tag.removeprefix('refs/tags/')}").split()
    except subprocess.CalledProcessError as error:
        raise ValueError(f"tag {tag!r} is not in this clone; fetch tags, or make it on the commit to release") from error
    short = [name.removeprefix("refs/heads/").removeprefix("refs/remotes/origin/") for name in names]
    branches = sorted({name for name in short if name in ("main", "release") or name.startswith("release/")})
    if not branches:
        where = ", ".join(sorted(set(short))) or "no branch"
        raise ValueError(f"tag {tag!r} lies on {where}; release from main or a release branch")
    return branches


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tag", help="<wheel>-vX.Y.Z")
    parser.add_argument("--rehearsal", action="store_true", help="the tag need not exist: nothing is published")
    parser.add_argument("--notes", type=Path, help="write the release notes to this file")
    arguments = parser.parse_args()
    try:
        if arguments.rehearsal:
            name, version = parse_tag(arguments.tag)
            wheel = distributions()[name]
            if wheel.version != version:
                raise ValueError(
                    f"tag {arguments.tag!r} but {name}/pyproject.toml says version {wheel.version}; move the tag or the version"
                )
            notes = next(part.text for part in sections((wheel.folder / "CHANGELOG.md").read_text(encoding="utf-8")))
        else:
            wheel, notes = release_notes(arguments.tag, distributions())
            print(f"release: {arguments.tag} lies on {', '.join(branches_with(arguments.tag))}")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    if arguments.notes:
        arguments.notes.write_text(notes + "\n", encoding="utf-8")
    print(f"release: {wheel.name} {wheel.version}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

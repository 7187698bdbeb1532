# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Which commit holds the last release of a wheel."""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

from tools.checks._api._finding import CheckError
from tools.checks._api._source import git

FIRST_RELEASE = Version("0.1.0")
_HEADING = re.compile(r"^## +\[?v?(?P<version>\d[\w.]*)\]?", re.MULTILINE)
_UNRELEASED = re.compile(r"^## +\[?Unreleased\]?[^\n]*\n(?P<body>.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """The last release and the commit that holds it; ``label`` says how it was found."""

    version: Version
    commit: str
    label: str


def find_baseline(wheel: str, version: Version, repository: Path) -> Baseline | None:
    """The last release before the tree under check.

    Tags of ancestors come first, the commit written down in ``api/baselines.toml`` second.

    Args:
        wheel: name of the wheel.
        version: version of the tree under check.
        repository: its root.

    Returns:
        The release; None if this is the first one.

    Raises:
        CheckError: there was a release and its files cannot be found.
    """
    tags = _tags(wheel, version, repository)
    recorded = _recorded(wheel, repository)
    known = {Baseline(version=v, commit=c, label=f"api/baselines.toml ({c[:12]})") for v, c in recorded.items() if v not in tags}
    known |= {Baseline(version=v, commit=t, label=f"tag {t}") for v, t in tags.items()}
    last = max(known, key=lambda baseline: baseline.version, default=None)
    released = [*_changelog_releases(wheel, version, repository), *recorded]
    newest = max(released, default=None)
    if newest is not None and (last is None or newest > last.version):
        raise CheckError(
            f"{wheel} {newest} was released, says its changelog, and neither a tag {wheel}-v{newest} among the ancestors nor an entry in "
            f"api/baselines.toml leads to it; fetch history and tags, or record the commit"
        )
    if last is None:
        if Version(version.base_version) > FIRST_RELEASE:
            raise CheckError(
                f"{wheel} {version} is later than {FIRST_RELEASE}, and no earlier release is known: no tag {wheel}-v*, no entry in "
                f"api/baselines.toml, no release in the changelog; fetch history and tags, or record the commit"
            )
        return None
    return last


def _tags(wheel: str, version: Version, repository: Path) -> dict[Version, str]:
    found = {}
    head = git(repository, "rev-parse", "HEAD")
    edited = bool(git(repository, "status", "--porcelain", "--", f"packages/{wheel}"))
    lines = git(repository, "tag", "--merged", "HEAD", "--list", f"{wheel}-v*", "--format=%(refname:short) %(objectname) %(*objectname)")
    for line in lines.splitlines():
        tag, *commits = line.split()
        try:
            tagged = Version(tag.rpartition("-v")[2])
        except InvalidVersion:
            continue
        # The tag of the very release under check is no earlier release, unless the tree was edited since.
        if edited or not (tagged == version and commits[-1] == head):
            found[tagged] = tag
    return found


def _recorded(wheel: str, repository: Path) -> dict[Version, str]:
    file = repository / "api" / "baselines.toml"
    if not file.is_file():
        return {}
    try:
        entries = tomllib.loads(file.read_text()).get(wheel, {})
        recorded = {Version(text): commit for text, commit in entries.items()}
    except (tomllib.TOMLDecodeError, InvalidVersion, AttributeError) as error:
        raise CheckError(f"api/baselines.toml cannot be read: {error}") from error
    for version, commit in recorded.items():
        if not isinstance(commit, str) or not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", commit):
            raise CheckError(f"api/baselines.toml: {wheel} {version} = {commit!r} is no full commit name")
    return recorded


def _changelog_releases(wheel: str, version: Version, repository: Path) -> list[Version]:
    """Versions with a heading. The tree's own is being prepared, not released, until something stands under Unreleased again."""
    file = repository / "packages" / wheel / "CHANGELOG.md"
    text = file.read_text() if file.is_file() else ""
    unreleased = _UNRELEASED.search(text)
    after_release = unreleased is not None and bool(unreleased["body"].strip())
    releases = []
    for match in _HEADING.finditer(text):
        try:
            heading = Version(match["version"])
        except InvalidVersion:
            continue
        if heading < version or (heading == version and after_release):
            releases.append(heading)
    return releases

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Which commit holds the last release of a wheel."""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

from tools.checks._api._finding import CheckError
from tools.checks._api._source import archive, git

FIRST_RELEASE = Version("0.1.0")
_HEADING = re.compile(r"^## +\[?v?(?P<version>\d[\w.]*)\]?", re.MULTILINE)
_UNRELEASED = re.compile(r"^## +\[?Unreleased\]?[^\n]*\n(?P<body>.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """The last release and where git holds it.

    Args:
        version: of the release.
        commit: commit that holds it, or name of a tag.
        label: how it was found, for reports.
        tree: git's hash of the wheel's folder, for a clone in which the commit is missing.
    """

    version: Version
    commit: str
    label: str
    tree: str = ""

    def unpack(self, wheel: str, repository: Path, folder: Path) -> Path:
        """The wheel's folder as it was released.

        Raises:
            CheckError: git knows neither the commit nor the tree.
        """
        place = f"packages/{wheel}"
        try:
            return archive(repository, self.commit, folder, place)
        except CheckError:
            if not self.tree:
                raise
            return archive(repository, self.tree, folder / place)


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
    known = {
        Baseline(version=v, commit=commit, tree=tree, label=f"api/baselines.toml ({commit[:12]})")
        for v, (commit, tree) in recorded.items()
        if v not in tags
    }
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


def _recorded(wheel: str, repository: Path) -> dict[Version, tuple[str, str]]:
    """(commit, tree or nothing) of each recorded release."""
    file = repository / "api" / "baselines.toml"
    if not file.is_file():
        return {}
    try:
        entries = tomllib.loads(file.read_text()).get(wheel, {})
        recorded = {
            Version(text): (entry["commit"], entry["tree"]) if isinstance(entry, dict) else (entry, "") for text, entry in entries.items()
        }
    except KeyError as error:
        raise CheckError(f"api/baselines.toml: an entry of {wheel} lacks {error}; write commit and tree") from error
    except (tomllib.TOMLDecodeError, InvalidVersion, AttributeError) as error:
        raise CheckError(f"api/baselines.toml cannot be read: {error}") from error
    for version, names in recorded.items():
        for name in names:
            if name and not (isinstance(name, str) and re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", name)):
                raise CheckError(f"api/baselines.toml: {wheel} {version} = {name!r} is no full commit name")
    return recorded


def record_baseline(wheel: str, version: Version, repository: Path) -> bool:
    """Write the committed state of a wheel down as its release; False if it stands there already.

    Raises:
        CheckError: the wheel's files are not as committed, or the version is recorded with other files.
    """
    if git(repository, "status", "--porcelain", "--", f"packages/{wheel}"):
        raise CheckError(f"{wheel} has uncommitted changes; a baseline is a commit")
    commit, tree = git(repository, "rev-parse", "HEAD"), git(repository, "rev-parse", f"HEAD:packages/{wheel}")
    known = _recorded(wheel, repository).get(version)
    if known is not None:
        recorded_tree = known[1] or git(repository, "rev-parse", f"{known[0]}:packages/{wheel}")
        if recorded_tree != tree:
            raise CheckError(f"{wheel} {version} is recorded with other files; raise the version, a release does not change")
        return False
    file = repository / "api" / "baselines.toml"
    file.parent.mkdir(exist_ok=True)
    text = file.read_text() if file.is_file() else ""
    entry = f'"{version}" = {{ commit = "{commit}", tree = "{tree}" }}\n'
    head = f"[{wheel}]\n"
    if re.search(rf"^\[{re.escape(wheel)}\]$", text, re.MULTILINE):
        text = re.sub(rf"^\[{re.escape(wheel)}\]\n", head + entry, text, flags=re.MULTILINE)
    else:
        text = f"{text.rstrip()}\n\n{head}{entry}".lstrip()
    file.write_text(text)
    return True


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

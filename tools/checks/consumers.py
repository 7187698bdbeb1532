# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The last two releases of every wheel that depends on a changed one pass their own tests with the wheels of this tree.

A signature can stay and its meaning change: the API gate cannot see that, the released tests of a dependent can.
"""

import argparse
import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from tools.checks._tree import ROOT, Wheel, wheels
from tools.checks.release import parse_tag

# Extras that no session installs, as in the noxfile.
GPU_EXTRAS = {"flashinfer", "modelopt", "ray", "te", "trackio", "wandb"}
# Of one test of a release, on a machine that runs two releases at a time.
TEST_LIMIT_S = 900


@dataclass(frozen=True, kw_only=True)
class Release:
    """A released wheel: its tag and what its metadata said."""

    wheel: str
    version: Version
    tag: str
    dependencies: tuple[Requirement, ...]
    extras: tuple[str, ...] = ()

    def admits(self, sibling: str, version: Version) -> bool:
        """Whether its declared range takes that version of a sibling; True for one that it does not need."""
        ranges = [requirement.specifier for requirement in self.dependencies if requirement.name == sibling]
        return all(one.contains(version, prereleases=True) for one in ranges)


def newest_tags(wheel: str, tags: list[str], count: int) -> list[str]:
    """Tags of a wheel's highest versions, highest first."""
    versions = {}
    for tag in tags:
        try:
            name, version = parse_tag(tag)
        except ValueError:
            continue
        if name == wheel:
            versions[version] = tag
    return [versions[version] for version in sorted(versions, reverse=True)[:count]]


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=True).stdout


def releases(tree: dict[str, Wheel], *, count: int = 2) -> list[Release]:
    """The last releases of each wheel whose tags are ancestors of this commit."""
    tags = _git("tag", "--merged", "HEAD").decode().split()
    published = []
    for name in tree:
        for tag in newest_tags(name, tags, count):
            project = tomllib.loads(_git("show", f"{tag}:packages/{name}/pyproject.toml").decode())["project"]
            dependencies = tuple(Requirement(text) for text in project.get("dependencies", []))
            extras = tuple(sorted(set(project.get("optional-dependencies", {})) - GPU_EXTRAS))
            published.append(Release(wheel=name, version=Version(project["version"]), tag=tag, dependencies=dependencies, extras=extras))
    return published


def changed_wheels(tree: dict[str, Wheel], last: Mapping[str, str]) -> set[str]:
    """Wheels whose files differ from their last release; those without one count as changed.

    Args:
        tree: the wheels here.
        last: tag of the last release by wheel.
    """
    changed = set()
    for name in tree:
        folder = f"packages/{name}"
        if name not in last or _git("diff", "--name-only", last[name], "--", f"{folder}/src", f"{folder}/pyproject.toml"):
            changed.add(name)
    return changed


def concerned(published: Sequence[Release], changed: set[str], only: Sequence[str] = ()) -> list[Release]:
    """Releases that a change can reach: they depend on a changed wheel, directly or through another release's wheel.

    Args:
        published: the releases.
        changed: names of changed wheels.
        only: wheels that are wanted; all of them if empty.
    """
    reached = set(changed)
    for _ in published:
        reached |= {release.wheel for release in published if any(requirement.name in reached for requirement in release.dependencies)}
    return [
        release
        for release in published
        if any(requirement.name in reached for requirement in release.dependencies) and (not only or release.wheel in only)
    ]


def _unpack(tag: str, folder: Path) -> None:
    """The whole tree of a release: tests lean on the harness and on files around their wheel."""
    with tarfile.open(fileobj=io.BytesIO(_git("archive", tag))) as archive:
        archive.extractall(folder, filter="data")


def build_wheels(tree: dict[str, Wheel], folder: Path, *, uv: str) -> dict[str, Path]:
    """The wheels of this tree, built anew: installing a folder could take an older build from uv's cache."""
    for wheel in tree.values():
        subprocess.run([uv, "build", "-q", "--wheel", "--out-dir", str(folder), str(wheel.folder)], cwd=ROOT, check=True)
    return {wheel.name: next(folder.glob(f"{wheel.module}-{wheel.version}-*.whl")) for wheel in tree.values()}


def run_released_tests(release: Release, built: dict[str, Path], *, uv: str, constraints: Path) -> tuple[bool, str]:
    """(passed, output) of a release's tests: its own wheel and tests, everything else from this tree."""
    environment = {key: value for key, value in os.environ.items() if key not in {"VIRTUAL_ENV", "PYTHONPATH"}}

    def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    with tempfile.TemporaryDirectory() as name:
        old, venv = Path(name) / "old", Path(name) / "venv"
        _unpack(release.tag, old)
        python = str(venv / "bin" / "python")
        siblings = Path(name) / "siblings.txt"
        siblings.write_text("".join(f"{sibling} @ {path.as_uri()}\n" for sibling, path in built.items() if sibling != release.wheel))
        # The wheel of the release is built from its tag, without the workspace that stood around it.
        released = f"{old / 'packages' / release.wheel}[{','.join(release.extras)}]"
        install = [uv, "pip", "install", "-q", "--python", python, "-c", str(constraints), "--override", str(siblings), "--no-sources"]
        for command in (
            [uv, "venv", "-q", "--no-python-downloads", "--python", sys.executable, str(venv)],
            [*install, released, "--group", f"{old / 'pyproject.toml'}:test"],
        ):
            done = run(*command, cwd=Path(name))
            if done.returncode:
                return False, done.stdout
        # Options of the release's own pytest configuration hold; the tree is on no path, so the installed wheels are tested. A limit of
        # time measures the machine and not the change, so it is wide; whatever fails is run again alone before it is believed.
        # Its journeys are run too.
        command = [python, "-m", "pytest", "-q", "-rfE", "-m", "not gpu and not slow", "-o", f"timeout={TEST_LIMIT_S}"]
        done = run(*command, f"packages/{release.wheel}/tests", cwd=old)
        if done.returncode == 1 and (failed := failures(done.stdout)):
            again = run(*command, "-p", "no:xdist", "-p", "no:randomly", *failed, cwd=old)
            return again.returncode == 0, done.stdout + again.stdout
        return done.returncode == 0, done.stdout


def failures(output: str) -> list[str]:
    """Tests that pytest's short summary lists as failed."""
    return re.findall(r"^(?:FAILED|ERROR) (\S+::.+?)(?: - .*)?$", output, re.MULTILINE)


def compare(release: Release, *, tree: dict[str, Wheel], built: dict[str, Path], uv: str, constraints: Path) -> bool:
    """Print the verdict on one release; False when it is broken although its range admits this tree."""
    start = time.perf_counter()
    admitted = all(release.admits(name, wheel.version) for name, wheel in tree.items())
    passed, output = run_released_tests(release, built, uv=uv, constraints=constraints)
    verdict = "ok" if passed else "BROKEN" if admitted else "broken, but its range excludes this tree"
    print(f"{release.tag}: {verdict}, {time.perf_counter() - start:.1f} s", flush=True)
    if not passed and admitted:
        print(output[-6000:], flush=True)
    return passed or not admitted


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--uv", required=True, help="the uv program")
    parser.add_argument("--constraints", type=Path, required=True)
    parser.add_argument("--wheel", action="append", default=[], help="dependent whose releases are run; may be repeated; all if left out")
    parser.add_argument(
        "--changed", action="append", help="wheel that counts as changed; by default those that differ from their last release"
    )
    parser.add_argument("--releases", type=int, default=2, help="how many releases of each dependent")
    parser.add_argument("--jobs", type=int, default=2, help="releases at a time")
    arguments = parser.parse_args()
    tree = wheels()
    if unknown := {*arguments.wheel, *(arguments.changed or ())} - set(tree):
        parser.error(f"no wheel {', '.join(sorted(unknown))}; the wheels are {', '.join(tree)}")
    published = releases(tree, count=arguments.releases)
    if not published:
        print("consumers: notice: no wheel has been released yet, so nobody's tests can be run against this tree")
        return 0
    last = {release.wheel: release.tag for release in reversed(published)}
    changed = set(arguments.changed) if arguments.changed else changed_wheels(tree, last)
    chosen = concerned(published, changed, arguments.wheel)
    print(
        f"consumers: changed: {', '.join(sorted(changed)) or 'nothing'}; run: {', '.join(release.tag for release in chosen) or 'nothing'}"
    )
    if not chosen:
        return 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        built = build_wheels(tree, Path(folder), uv=arguments.uv)
        judge = partial(compare, tree=tree, built=built, uv=arguments.uv, constraints=arguments.constraints.resolve())
        return 0 if all(list(pool.map(judge, chosen))) else 1


if __name__ == "__main__":
    sys.exit(main())

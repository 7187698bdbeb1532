# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Whether a version grew as much as the changes ask."""

from collections.abc import Sequence
from dataclasses import dataclass

from packaging.version import Version

from tools.checks._api._finding import Bump, Finding


def given_bump(old: Version, new: Version) -> Bump:
    """What a step between two versions announces. In 0.y.z the y announces a break and the z an addition."""
    if new.release[:3] <= old.release[:3]:
        return Bump.NONE
    if new.major != old.major:
        return Bump.BREAK
    if new.minor != old.minor:
        return Bump.BREAK if new.major == 0 else Bump.ADDITION
    return Bump.ADDITION if new.major == 0 else Bump.NONE


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was found for one wheel.

    Args:
        name: the wheel.
        old_version: the last release; None if this is the first.
        new_version: version of the tree under check.
        baseline: where the last release was read.
        findings: everything, exempt or not.
        prefix: folder of the new tree, put in front of the findings' files.
        seconds: how long it took.
        names: how many public paths the old and the new surface have.
        notice: for people, for instance that this is the first release.
        strict: a stable name breaks after a deprecation only, whatever the version.
    """

    name: str
    old_version: Version | None
    new_version: Version
    baseline: str
    findings: Sequence[Finding]
    prefix: str = ""
    seconds: float = 0.0
    names: tuple[int, int] = (0, 0)
    notice: str = ""
    strict: bool = False

    @property
    def demanded(self) -> Bump:
        return max((finding.bump for finding in self.findings if finding.counts), default=Bump.NONE)

    @property
    def given(self) -> Bump:
        return Bump.NONE if self.old_version is None else given_bump(self.old_version, self.new_version)

    @property
    def passed(self) -> bool:
        if self.old_version is None:
            return self.demanded < Bump.NEVER
        return self.demanded <= self.given and not self._breaks_a_promise

    @property
    def _breaks_a_promise(self) -> bool:
        return self.strict and self.demanded >= Bump.BREAK

    @property
    def smallest_version(self) -> str:
        """The smallest version that would pass, as text; empty if there is none."""
        if self.old_version is None or self.demanded is Bump.NEVER or self._breaks_a_promise:
            return ""
        major, minor, patch = (*self.old_version.release, 0, 0)[:3]
        breaking = f"0.{minor + 1}.0" if major == 0 else f"{major + 1}.0.0"
        adding = f"0.{minor}.{patch + 1}" if major == 0 else f"{major}.{minor + 1}.0"
        return {Bump.BREAK: breaking, Bump.ADDITION: adding, Bump.NONE: str(self.old_version)}[self.demanded]

    @property
    def headline(self) -> str:
        verdict = "OK" if self.passed else "FAILED"
        if self.old_version is None:
            return f"{self.name} {self.new_version}: {verdict}; {self.notice}"
        words = {Bump.NONE: "no new version", Bump.ADDITION: "an adding version", Bump.BREAK: "a breaking version", Bump.NEVER: "a repair"}
        step = {Bump.NONE: "no step", Bump.ADDITION: "an adding step", Bump.BREAK: "a breaking step"}[self.given]
        remedy = "" if self.passed or not self.smallest_version else f"; the smallest version that fits is {self.smallest_version}"
        if self._breaks_a_promise and self.demanded is Bump.BREAK:
            remedy = f"; stable names break after a deprecation only: deprecate, or accept each break in api/{self.name}.accept.toml"
        return (
            f"{self.name} {self.old_version} -> {self.new_version}: {verdict}; "
            f"the changes ask for {words[self.demanded]}, the version is {step}{remedy}"
        )

    def file_of(self, finding: Finding) -> str:
        """File of a finding as the repository names it."""
        if not finding.file or finding.file.startswith("api/"):
            return finding.file
        return f"{self.prefix}/{finding.file}" if self.prefix else finding.file

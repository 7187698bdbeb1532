# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Every area that a pull request touches is approved by one of its owners; areas stand in .github/CODEOWNERS."""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Area:
    """One line of CODEOWNERS."""

    pattern: str
    owners: tuple[str, ...]

    def covers(self, path: str) -> bool:
        return _matcher(self.pattern).match(path) is not None


def _matcher(pattern: str) -> re.Pattern[str]:
    """CODEOWNERS patterns: anchored when a slash stands before the end, `**` spans folders, a folder covers all below it."""
    anchored = "/" in pattern.rstrip("/")
    parts = []
    for token in re.findall(r"/\*\*/|\*\*/|/\*\*|\*|\?|[^*?/]+|/", pattern.removeprefix("/").rstrip("/")):
        special = {"/**/": "/(?:.*/)?", "**/": "(?:.*/)?", "/**": "/.*", "*": "[^/]*", "?": "[^/]"}
        parts.append(special.get(token, re.escape(token)))
    start = "" if anchored else "(?:.*/)?"
    # docs/* owns the files of docs, not those of its folders; docs/ and docs own everything below.
    end = "" if pattern.endswith("/*") else "/.*" if pattern.endswith("/") else "(?:/.*)?"
    return re.compile(f"{start}{''.join(parts)}{end}\\Z")


def parse(codeowners: str) -> list[Area]:
    """The areas in the order of the file.

    Raises:
        ValueError: an owner that is neither @user, @org/team nor an address.
    """
    areas = []
    for number, line in enumerate(codeowners.splitlines(), 1):
        pattern, *owners = line.partition("#")[0].split() or [""]
        if not pattern:
            continue
        for owner in owners:
            if "@" not in owner:
                raise ValueError(f"CODEOWNERS line {number}: {owner!r} is no owner; write @user or @organisation/team")
        areas.append(Area(pattern=pattern, owners=tuple(owners)))
    return areas


def area_of(path: str, areas: Iterable[Area]) -> Area | None:
    """The area that decides about a path: the last that covers it, as on GitHub."""
    last = None
    for area in areas:
        if area.covers(path):
            last = area
    return last


def missing(
    changed: Iterable[str], areas: Iterable[Area], *, approvers: set[str], author: str, teams: Mapping[str, Iterable[str]]
) -> dict[str, list[str]]:
    """Areas without an approval: pattern -> the owners of whom one is needed.

    A team is approved by any of its members. The author's own approval counts nowhere, and neither does an unknown team.
    """
    areas = list(areas)
    needed: dict[str, list[str]] = {}
    valid = {name.lower().removeprefix("@") for name in approvers} - {author.lower().removeprefix("@")}
    for path in changed:
        area = area_of(path, areas)
        if area is None or not area.owners:
            continue
        people = {
            person.lower().removeprefix("@")
            for owner in area.owners
            for person in (teams.get(owner.removeprefix("@"), []) if "/" in owner else [owner])
        }
        if not people & valid:
            needed[area.pattern] = sorted(area.owners)
    return needed


def approving(reviews: Iterable[Mapping], head: str | None = None) -> set[str]:
    """Those whose last verdict is an approval; with `head`, one of that commit only. Comments change no verdict."""
    verdict: dict[str, bool] = {}
    for review in reviews:
        state = review["state"].upper()
        if state in {"APPROVED", "CHANGES_REQUESTED", "DISMISSED"} and review.get("user"):
            verdict[review["user"]["login"]] = state == "APPROVED" and (head is None or review.get("commit_id") == head)
    return {login for login, approved in verdict.items() if approved}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--codeowners", type=Path, default=Path(".github/CODEOWNERS"))
    parser.add_argument("--changed", type=Path, required=True, help="file with one changed path a line")
    parser.add_argument("--reviews", type=Path, required=True, help="JSON list of reviews, oldest first, as GitHub gives them")
    parser.add_argument("--teams", type=Path, help="JSON object: organisation/team -> list of logins")
    parser.add_argument("--author", required=True)
    parser.add_argument("--head", help="count approvals of this commit only")
    arguments = parser.parse_args()
    teams = json.loads(arguments.teams.read_text()) if arguments.teams else {}
    needed = missing(
        arguments.changed.read_text().splitlines(),
        parse(arguments.codeowners.read_text()),
        approvers=approving(json.loads(arguments.reviews.read_text()), arguments.head),
        author=arguments.author,
        teams=teams,
    )
    for pattern, owners in needed.items():
        print(f"{pattern} waits for an approval by {' or '.join(owners)}")
    print(f"approvals: {len(needed)} areas wait" if needed else "approvals: every area that is touched has one")
    return 1 if needed else 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Carry a merged pull request to release branches: one branch with the picked commit for each label `cherry-pick release/X.Y`.

Prints `branch target title` for each branch that it made; the workflow opens a pull request from it, so the target keeps its own gates.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_LABEL = re.compile(r"cherry-pick (?P<branch>release/[0-9A-Za-z._-]+)")


def targets(event: Mapping[str, Any]) -> list[str]:
    """Branches that the labels of a merged pull request name; none for one that was not merged."""
    pull = event["pull_request"]
    if not pull.get("merged"):
        return []
    names = [label["name"] for label in pull.get("labels", ())]
    if event.get("action") == "labeled":
        names = [event["label"]["name"]]
    return sorted({match["branch"] for name in names if (match := _LABEL.fullmatch(name))})


def pick(event: Mapping[str, Any], repository: Path, *, remote: str = "origin", push: bool = False) -> list[tuple[str, str, str]]:
    """(branch, target, title) of each branch made.

    Raises:
        ValueError: the commit does not apply to a target; nothing is pushed for that one and the rest is named too.
    """
    pull = event["pull_request"]
    commit, number = pull["merge_commit_sha"], int(pull["number"])
    made, failed = [], []
    for target in targets(event):
        branch = f"cherry-pick/{number}-to-{target.replace('/', '-')}"
        try:
            _git(repository, "checkout", "-q", "-B", branch, f"{remote}/{target}")
            parents = _git(repository, "rev-list", "--parents", "-n", "1", commit).split()[1:]
            _git(repository, "cherry-pick", "-x", *(["-m", "1"] if len(parents) > 1 else []), commit)
        except subprocess.CalledProcessError as error:
            subprocess.run(["git", "cherry-pick", "--abort"], cwd=repository, capture_output=True, check=False)
            failed.append(f"{target}: {(error.stderr or error.stdout).strip().splitlines()[0]}")
            continue
        if push:
            _git(repository, "push", "-q", "--force", remote, branch)
        made.append((branch, target, f"[{target}] {' '.join(pull['title'].split())}"))
    if failed:
        raise ValueError(f"pull request {number} does not apply to {'; '.join(failed)}; pick it by hand")
    return made


def _git(repository: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=repository, capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--event", type=Path, required=True, help="JSON of the event, as GitHub writes it")
    parser.add_argument("--repository", type=Path, default=Path())
    parser.add_argument("--push", action="store_true")
    options = parser.parse_args()
    try:
        for branch, target, title in pick(json.loads(options.event.read_text()), options.repository, push=options.push):
            print(branch, target, title)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Which wheels CI tests: those that a change touches and their dependents, or all of them.

Everything is run when the change touches what every wheel stands on, when the pull request carries the label "Run tests", and on main.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.checks._tree import ROOT, Wheel, wheels
from tools.checks.publish import dependents

LABEL = "Run tests"
PYTHONS = ("3.11", "3.12", "3.13")
# What every wheel's tests read. Pages and workflows are not among it.
COMMON = ("constraints/", "noxfile.py", "pyproject.toml", "conftest.py", "tests/support/")


def affected(changed: Iterable[str], tree: dict[str, Wheel]) -> list[str]:
    """Wheels whose tests a change may turn red."""
    touched: set[str] = set()
    for path in changed:
        if path.startswith(COMMON):
            return list(tree)
        parts = path.split("/")
        if parts[0] == "packages" and len(parts) > 1 and parts[1] in tree:
            touched |= {parts[1], *dependents(parts[1], tree)}
    return [name for name in tree if name in touched]


def is_whole_run(event: Mapping[str, Any]) -> bool:
    """Whether an event asks for everything: a push, or a pull request with the label."""
    pull = event.get("pull_request")
    return pull is None or any(label["name"] == LABEL for label in pull.get("labels", ()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True, help="commit to compare with")
    parser.add_argument("--event", type=Path, required=True, help="JSON of the event, as GitHub writes it")
    options = parser.parse_args()
    tree = wheels()
    whole = is_whole_run(json.loads(options.event.read_text()))
    if whole:
        chosen = list(tree)
    else:
        command = ["git", "diff", "--name-only", f"{options.base}...HEAD"]
        chosen = affected(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines(), tree)
    print(f"wheels={json.dumps(chosen)}")
    print(f"pythons={json.dumps(PYTHONS if whole else PYTHONS[:1])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

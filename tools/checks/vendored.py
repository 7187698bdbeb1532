# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Files that wheels carry so that each can stand alone are the same everywhere."""

import sys
from pathlib import Path

from tools.checks._tree import ROOT, Wheel, distributions, report, wheels

_IN_ALL = ("_stability.py", "py.typed")
# Distribution -> file of the trunk and where its copy lies.
_IN_SOME = {
    "mcore-ckpt": {"_quiet_pipe.py": "cli/_quiet_pipe.py"},
    "mcore-tools": {"_quiet_pipe.py": "_quiet_pipe.py"},
}


def copies(wheel: Wheel, root: Path = ROOT) -> list[tuple[Path, Path]]:
    """(original, copy) of every vendored file of a wheel, or of the application."""
    trunk = root / "packages" / "mcore-parallel" / "src" / "mcore_parallel"
    pairs = [(trunk / original, wheel.source / copy) for original, copy in _IN_SOME.get(wheel.name, {}).items()]
    if wheel.folder == root / "tools":
        # The application's terms are those at the root.
        return pairs
    pairs += [(trunk / name, wheel.source / name) for name in _IN_ALL]
    return [(root / "LICENSE", wheel.folder / "LICENSE"), *pairs]


def findings_in(tree: dict[str, Wheel], root: Path = ROOT) -> list[str]:
    """Copies that are missing or differ from their original."""
    findings = []
    for wheel in tree.values():
        for original, copy in copies(wheel, root):
            if not copy.is_file():
                findings.append(f"{copy.relative_to(root)} is missing; copy {original.relative_to(root)}")
            elif copy.read_bytes() != original.read_bytes():
                findings.append(f"{copy.relative_to(root)} differs from {original.relative_to(root)}")
    return findings


def main() -> int:
    return report(findings_in(distributions()), f"vendored: the same in {len(wheels())} wheels and the application")


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Files that each wheel carries so that it can stand alone are the same everywhere."""

import sys
from pathlib import Path

from tools.checks._tree import ROOT, Wheel, report, wheels


def copies(wheel: Wheel, root: Path = ROOT) -> list[tuple[Path, Path]]:
    """(original, copy) of every vendored file of a wheel."""
    trunk = root / "packages" / "mcore-parallel" / "src" / "mcore_parallel"
    return [
        (root / "LICENSE", wheel.folder / "LICENSE"),
        (trunk / "_stability.py", wheel.source / "_stability.py"),
        (trunk / "py.typed", wheel.source / "py.typed"),
    ]


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
    tree = wheels()
    return report(findings_in(tree), f"vendored: the same in {len(tree)} wheels")


if __name__ == "__main__":
    sys.exit(main())

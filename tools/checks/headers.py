# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Every source file begins with the licence lines; a Python file goes on with a docstring and stays ASCII."""

import ast
import sys
from pathlib import Path

from tools.checks._tree import ROOT, report, tracked_files

LICENCE = ["# SPDX-License-Identifier: Apache-2.0", "# Copyright (c) 2026 the mcore authors"]
SUFFIXES = {".py", ".sh", ".yml", ".yaml"}
NAMES = {"Dockerfile", "run"}


def findings_in(text: str, *, python: bool) -> list[str]:
    """What is missing at the top of one source text; an empty file needs nothing."""
    if not text:
        return []
    lines = text.splitlines()
    if lines and lines[0].startswith("#!"):
        lines = lines[1:]
    findings = []
    if lines[:2] != LICENCE:
        findings.append("the first two lines must be the SPDX line and the copyright line")
    if not python:
        return findings
    if ast.get_docstring(ast.parse(text)) is None:
        findings.append("the module has no docstring")
    if not text.isascii():
        number = next(number for number, line in enumerate(text.splitlines(), 1) if not line.isascii())
        findings.append(f"line {number} is not ASCII; write an escape")
    return findings


def is_source(path: Path) -> bool:
    return path.suffix in SUFFIXES or path.name in NAMES


def main() -> int:
    paths = [path for path in tracked_files() if is_source(path)]
    findings = []
    for path in paths:
        problems = findings_in(path.read_text(encoding="utf-8"), python=path.suffix == ".py")
        findings += [f"{path.relative_to(ROOT)}: {problem}" for problem in problems]
    return report(findings, f"headers: {len(paths)} source files")


if __name__ == "__main__":
    sys.exit(main())

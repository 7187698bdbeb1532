# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The table "Where is what" of a README: behaviour, and the symbol that defines it with the link to its file."""

import ast
import re
from dataclasses import dataclass
from pathlib import Path

HEADING = "## Where is what"
_ROW = re.compile(r"^\| (?P<behaviour>.+) \| \[`(?P<symbol>[\w.]+)`\]\((?P<path>[^)]+)\) \|$")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the table."""

    behaviour: str
    symbol: str
    file: Path

    def problem(self) -> str | None:
        """Why the row leads nowhere; None if its file defines its symbol."""
        if not self.file.is_file():
            return f"{self.file} does not exist"
        return None if defines(self.file.read_text(), self.symbol) else f"{self.file} does not define {self.symbol}"


def read_table(readme: Path) -> list[Row]:
    """The rows of a README.

    Raises:
        ValueError: no such section, or a row of another form.
    """
    _, heading, text = readme.read_text().partition(HEADING)
    if not heading:
        raise ValueError(f"{readme} has no section {HEADING!r}")
    lines = [line for line in text.split("\n## ", 1)[0].splitlines() if line.startswith("|")][2:]
    return [_row(line, readme) for line in lines]


def defines(source: str, symbol: str) -> bool:
    """Whether a module defines a dotted name: a class, a function, a method, or a name that is assigned."""
    scope: list[ast.stmt] = ast.parse(source).body
    for name in symbol.split("."):
        node = next((node for node in scope if name in _names(node)), None)
        if node is None:
            return False
        scope = getattr(node, "body", [])
    return True


def _row(line: str, readme: Path) -> Row:
    match = _ROW.match(line)
    if match is None:
        raise ValueError(f"{readme}: {line!r} is not of the form | what | [`symbol`](path) |")
    return Row(behaviour=match["behaviour"], symbol=match["symbol"], file=readme.parent / match["path"])


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]

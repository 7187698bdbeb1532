# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The table "Where is what" of a wheel's README: each row links one file, which defines the symbol that the row names."""

import ast
import re
from pathlib import Path

import pytest

HEADING = "## Where is what"
_ROOT = Path(__file__).parents[2]
_ROW = re.compile(r"^\| .+ \| \[`(?P<symbol>[\w.]+)`\]\((?P<path>[^)]+)\) \|$")

READMES = [path for path in sorted(_ROOT.glob("packages/*/README.md")) if HEADING in path.read_text()]


def rows(readme: str) -> list[str]:
    """Lines of the table, without its head."""
    section = readme.split(HEADING, 1)[1].split("\n## ", 1)[0]
    return [line for line in section.splitlines() if line.startswith("|")][2:]


def defines(source: str, symbol: str) -> bool:
    """Whether a module defines a dotted name: a class, a function, a method, or a name that is assigned."""
    scope: list[ast.stmt] = ast.parse(source).body
    for name in symbol.split("."):
        node = next((node for node in scope if name in _names(node)), None)
        if node is None:
            return False
        scope = getattr(node, "body", [])
    return True


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)
def test_each_row_links_the_file_that_defines_its_symbol(readme: Path) -> None:
    lines = rows(readme.read_text())
    assert len(lines) >= 8, "the table is there to be looked up in"
    for line in lines:
        link = _ROW.match(line)
        assert link, f"{line!r} is not of the form | what | [`symbol`](path) |"
        file = readme.parent / link["path"]
        assert file.is_file(), f"{link['path']} does not exist"
        assert defines(file.read_text(), link["symbol"]), f"{link['path']} does not define {link['symbol']}"


def test_the_wheels_that_serve_mix_and_learn_have_a_table() -> None:
    assert {"mcore-inference", "mcore-moe", "mcore-rl"} <= {path.parent.name for path in READMES}


def test_a_symbol_that_is_only_imported_or_nested_elsewhere_is_not_defined() -> None:
    source = "from other import Engine\nLIMIT: int = 3\nclass Server:\n    size = 1\n    def close(self): ...\n"
    assert defines(source, "Server.close") and defines(source, "Server.size") and defines(source, "LIMIT")
    assert not defines(source, "Engine") and not defines(source, "close") and not defines(source, "Server.open")

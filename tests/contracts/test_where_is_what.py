# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The table "Where is what" of a README: each row links one file, which defines the symbol that the row names."""

from pathlib import Path

import pytest

from tests.contracts.readme_table import defines, read_table

_ROOT = Path(__file__).parents[2]
READMES = [*sorted(_ROOT.glob("packages/*/README.md")), _ROOT / "tools" / "README.md"]


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)
def test_each_row_links_the_file_that_defines_its_symbol(readme: Path) -> None:
    rows = read_table(readme)
    assert len(rows) >= 8, "the table is there to be looked up in"
    assert [problem for row in rows if (problem := row.problem())] == []


def test_a_symbol_that_is_only_imported_or_nested_elsewhere_is_not_defined() -> None:
    source = "from other import Engine\nLIMIT: int = 3\nclass Server:\n    size = 1\n    def close(self): ...\n"
    assert defines(source, "Server.close") and defines(source, "Server.size") and defines(source, "LIMIT")
    assert not defines(source, "Engine") and not defines(source, "close") and not defines(source, "Server.open")


def test_a_readme_without_the_table_or_with_a_row_of_another_form_is_refused(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("# wheel\n")
    with pytest.raises(ValueError, match="has no section"):
        read_table(readme)
    readme.write_text("## Where is what\n\n| behaviour | defined by |\n|---|---|\n| loss | `loss` in _loss.py |\n")
    with pytest.raises(ValueError, match="is not of the form"):
        read_table(readme)
    readme.write_text("## Where is what\n\n| behaviour | defined by |\n|---|---|\n| loss | [`loss`](_loss.py) |\n")
    (row,) = read_table(readme)
    assert "does not exist" in str(row.problem())
    (tmp_path / "_loss.py").write_text("from other import loss\n")
    assert "does not define loss" in str(row.problem())

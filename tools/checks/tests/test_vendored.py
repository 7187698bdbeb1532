# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Copies that differ or are missing are named."""

from pathlib import Path

import pytest

from tools.checks._tree import Wheel, distributions
from tools.checks.vendored import copies, findings_in


@pytest.fixture
def tree(tmp_path: Path) -> dict[str, Wheel]:
    by_name = {}
    (tmp_path / "LICENSE").write_text("terms")
    for name in ("mcore-parallel", "mcore-moe"):
        wheel = Wheel(folder=tmp_path / "packages" / name, project={"name": name})
        by_name[name] = wheel
        wheel.source.mkdir(parents=True)
        (wheel.folder / "LICENSE").write_text("terms")
        (wheel.source / "_stability.py").write_text("mark = 1")
        (wheel.source / "py.typed").touch()
    return by_name


def test_equal_copies_pass(tree, tmp_path):
    assert findings_in(tree, tmp_path) == []


def test_an_edited_copy_is_found(tree, tmp_path):
    (tree["mcore-moe"].source / "_stability.py").write_text("mark = 2")
    (finding,) = findings_in(tree, tmp_path)
    assert "mcore_moe/_stability.py differs" in finding


def test_every_missing_copy_is_found(tree, tmp_path):
    for _, copy in copies(tree["mcore-moe"], tmp_path):
        copy.unlink()
    assert len(findings_in(tree, tmp_path)) == 3


def test_what_some_carry_is_compared_where_it_lies(tree: dict[str, Wheel], tmp_path: Path) -> None:
    (tree["mcore-parallel"].source / "_quiet_pipe.py").write_text("end = 141")
    application = Wheel(folder=tmp_path / "tools", project={"name": "mcore-tools"}, sources="")
    application.source.mkdir(parents=True)
    copy = application.source / "_quiet_pipe.py"
    copy.write_text("end = 141")
    assert findings_in({"mcore-tools": application}, tmp_path) == []
    copy.write_text("end = 0")
    assert findings_in({"mcore-tools": application}, tmp_path) == [
        "tools/mcore_tools/_quiet_pipe.py differs from packages/mcore-parallel/src/mcore_parallel/_quiet_pipe.py"
    ]


def test_the_commands_of_this_tree_end_alike() -> None:
    tree = distributions()
    assert sorted(name for name, wheel in tree.items() if any(copy.name == "_quiet_pipe.py" for _, copy in copies(wheel))) == [
        "mcore-ckpt",
        "mcore-tools",
    ]
    assert findings_in(tree) == []

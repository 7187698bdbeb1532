# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Copies that differ or are missing are named."""

from pathlib import Path

import pytest

from tools.checks._tree import Wheel
from tools.checks.vendored import copies, findings_in


@pytest.fixture
def tree(tmp_path: Path) -> dict[str, Wheel]:
    found = {}
    (tmp_path / "LICENSE").write_text("terms")
    for name in ("mcore-parallel", "mcore-moe"):
        wheel = Wheel(folder=tmp_path / "packages" / name, project={"name": name})
        found[name] = wheel
        wheel.source.mkdir(parents=True)
        (wheel.folder / "LICENSE").write_text("terms")
        (wheel.source / "_stability.py").write_text("mark = 1")
        (wheel.source / "py.typed").touch()
    return found


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

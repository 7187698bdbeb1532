# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Declared against imported, on small wheels with one fault each."""

from pathlib import Path

import pytest

from tools.checks.closure import FROM_SOURCE, imported, installed_closure, source_findings

PROJECT = """
[project]
name = "mcore-leaf"
version = "0.1.0"
dependencies = ["torch>=2.11"]
[project.optional-dependencies]
coordinator = ["pyzmq>=26"]
"""


@pytest.fixture
def leaf(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "src" / "mcore_leaf").mkdir(parents=True)
    return tmp_path


def check(leaf: Path, text: str) -> tuple[list[str], list[str]]:
    (leaf / "src" / "mcore_leaf" / "__init__.py").write_text(text)
    return source_findings(leaf)


def test_declared_imports_pass(leaf):
    assert check(leaf, "import json\nimport torch.nn\nfrom mcore_leaf import x\ndef serve():\n    import zmq\n") == ([], [])


def test_an_undeclared_import_is_found_even_inside_a_function(leaf):
    errors, _ = check(leaf, "import torch\ndef f():\n    import numpy\n")
    assert len(errors) == 1 and "__init__.py:3 imports numpy" in errors[0]


def test_what_type_checkers_bring_is_declared_only_where_it_runs(leaf):
    block = "import torch\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from typing_extensions import deprecated\n"
    assert check(leaf, block)[0] == []
    assert "imports typing_extensions" in check(leaf, block + "from typing_extensions import deprecated\n")[0][0]
    assert "imports numpy" in check(leaf, block + "    import numpy\n")[0][0]


def test_a_declared_dependency_that_nothing_imports_is_found(leaf):
    errors, _ = check(leaf, "import json\n")
    assert errors == ["mcore-leaf: torch is declared and never imported"]


@pytest.mark.parametrize("text", ["import zmq", "try:\n    import zmq\nexcept ImportError:\n    zmq = None", "class A:\n    import zmq"])
def test_an_extra_imported_with_the_module_is_found(leaf, text):
    errors, _ = check(leaf, f"import torch\n{text}\n")
    assert len(errors) == 1 and "of an extra" in errors[0]


def test_a_library_that_no_index_has_is_imported_in_functions_of_its_wheel_only(leaf, monkeypatch):
    later = "import torch\ndef f():\n    import deep_ep\n"
    assert "which pyproject.toml does not declare" in check(leaf, later)[0][0]
    monkeypatch.setitem(FROM_SOURCE, "mcore-leaf", {"deep_ep"})
    assert check(leaf, later)[0] == []
    assert "imports deep_ep from source at the top" in check(leaf, "import torch\nimport deep_ep\n")[0][0]


def test_a_folder_named_like_the_extra_may_import_it_when_nothing_else_imports_the_folder(leaf):
    server = leaf / "src" / "mcore_leaf" / "coordinator"
    server.mkdir()
    (server / "__init__.py").write_text("from ._inner import serve\n")
    (server / "_inner.py").write_text("import zmq\n")
    assert check(leaf, "import torch\ndef serve():\n    from mcore_leaf import coordinator\n") == ([], [])
    for text in ("from mcore_leaf import coordinator", "from .coordinator import serve", "import mcore_leaf.coordinator"):
        errors, _ = check(leaf, f"import torch\n{text}\n")
        assert len(errors) == 1 and "_inner.py:1 imports zmq of an extra" in errors[0]


def test_an_extra_imported_for_types_only_passes(leaf):
    text = "import torch\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import zmq\n"
    assert check(leaf, text) == ([], [])


def test_an_extra_without_user_is_a_note(leaf):
    errors, notes = check(leaf, "import torch\n")
    assert errors == [] and len(notes) == 1


def test_relative_imports_and_the_future_name_no_distribution(tmp_path):
    file = tmp_path / "a.py"
    file.write_text("from __future__ import annotations\nfrom . import b\nfrom .c import d\n")
    assert set(imported([file])[0]) == {"__future__"}


def test_what_an_extra_brings_is_declared_where_the_extra_is(tmp_path, monkeypatch):
    requires = {
        "application": ["leaf[server]>=1"],
        "leaf": ["core", 'http ; extra == "server"', 'queue ; extra == "coordinator"'],
        **{name: [] for name in ("core", "http", "queue")},
    }
    for name, needs in requires.items():
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0", *(f"Requires-Dist: {one}" for one in needs)]
        (folder / "METADATA").write_text("\n".join(lines) + "\n")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert installed_closure("application") == ({"application", "leaf", "core", "http"}, set(requires))

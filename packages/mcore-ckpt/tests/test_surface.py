# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The public names: sorted, there, in one place each."""

import ast
import importlib
from pathlib import Path

import pytest

import mcore_ckpt

ROOT = Path(mcore_ckpt.__file__).parent
MODULES = [
    "mcore_ckpt",
    "mcore_ckpt.assets",
    "mcore_ckpt.chunks",
    "mcore_ckpt.cli",
    "mcore_ckpt.foreign",
    "mcore_ckpt.hf",
    "mcore_ckpt.inspect",
    "mcore_ckpt.manifest",
    "mcore_ckpt.restack",
    "mcore_ckpt.rewrite",
]


@pytest.mark.parametrize("name", MODULES)
def test_listed_names_are_sorted_and_exist(name):
    module = importlib.import_module(name)
    assert list(module.__all__) == sorted(module.__all__)
    assert all(getattr(module, one) is not None for one in module.__all__)


def test_no_object_has_two_public_places():
    places = {}
    for name in MODULES:
        module = importlib.import_module(name)
        for one in module.__all__:
            value = getattr(module, one)
            if not isinstance(value, int | str):
                assert places.setdefault(id(value), (name, one)) == (name, one)


def imports_of(path):
    """Modules of this wheel that a file imports from, one for each name that is itself a module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "mcore_ckpt")
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "mcore_ckpt":
            folder = ROOT.joinpath(*node.module.split(".")[1:])
            yield from (f"{node.module}.{alias.name}" if (folder / f"{alias.name}.py").is_file() else node.module for alias in node.names)


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_import_reaches_a_private_file_of_another_room(path):
    own = ("mcore_ckpt", *path.parent.relative_to(ROOT).parts)
    for module in imports_of(path):
        *room, last = module.split(".")
        assert not last.startswith("_") or tuple(room) == own[: len(room)], f"{module} is private to {'.'.join(room)}"


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_files_are_nouns_of_at_most_500_lines(path):
    assert len(path.read_text().splitlines()) <= 500

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Reaching into a sibling is found; its public names are free."""

from pathlib import Path

import pytest

from tools.checks.imports_public import circle_in, exported, problems_in, room_problems_in


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, Path]:
    trunk = tmp_path / "trunk"
    (trunk / "comm").mkdir(parents=True)
    (trunk / "__init__.py").write_text('__all__ = ["Plan"]\n')
    (trunk / "_plan.py").write_text('__all__ = ["Plan"]\n')
    (trunk / "comm" / "__init__.py").write_text('__all__: list[str] = ["gather"]\n')
    (trunk / "bare.py").write_text("x = 1\n")
    return {"trunk": trunk, "leaf": tmp_path / "leaf"}


@pytest.mark.parametrize(
    "text",
    [
        "from trunk import Plan",
        "from trunk import comm",
        "from trunk.comm import gather",
        "import trunk\ntrunk.Plan()",
        "import trunk.comm\ntrunk.comm",
        "import trunk.comm as c\nc.gather",
        "from leaf._inner import x",
        "from ._inner import x",
        "import torch\ntorch._C",
    ],
)
def test_public_names_pass(sources, text):
    assert list(problems_in(text, sources, "leaf")) == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("from trunk._plan import Plan", "private module"),
        ("import trunk._plan", "private module"),
        ("from trunk import _plan", "not in __all__"),
        ("from trunk import secret", "not in __all__"),
        ("from trunk import *", "wildcard"),
        ("from trunk.comm import scatter", "not in __all__"),
        ("from trunk.gone import x", "no module"),
        ("from trunk.bare import x", "no __all__"),
        ("import trunk\ntrunk._plan.Plan", "not in __all__"),
        ("def f():\n    from trunk._plan import Plan", "private module"),
    ],
)
def test_reaching_inside_is_found(sources, text, reason):
    ((_, found),) = problems_in(text, sources, "leaf")
    assert reason in found


def test_a_module_may_use_its_own_inside(sources):
    assert list(problems_in("from trunk._plan import Plan", sources, "trunk")) == []


@pytest.mark.parametrize(
    "text",
    [
        "from trunk.comm import gather",
        "from trunk.layers._norm import Norm",
        "from trunk._stability import internal_api",
        "from leaf._inner import x",
        "import torch._C",
    ],
)
def test_a_room_uses_its_own_files_those_above_and_public_names(text):
    assert list(room_problems_in(text, "trunk.layers.fused")) == []


@pytest.mark.parametrize(
    "text",
    [
        "from trunk.comm._collectives import gather",
        "from trunk.comm import _collectives",
        "import trunk.comm._collectives",
        "from trunk.layers.fused._kernel import run",
        "def f():\n    from trunk.comm._collectives import gather",
    ],
)
def test_a_private_file_of_another_room_is_reported(text):
    ((_, reason),) = room_problems_in(text, "trunk.layers")
    assert "is private to trunk." in reason


def test_exported_reads_lists_and_annotated_lists(sources):
    assert exported(sources["trunk"] / "comm" / "__init__.py") == {"gather"}
    assert exported(sources["trunk"] / "bare.py") is None


def test_modules_that_import_each_other_are_reported():
    texts = {
        "trunk": "from trunk._rows import rows\n",
        "trunk._rows": "def rows():\n    from trunk import _kernels\n",
        "trunk._kernels": "from trunk._rows import Spec\n",
    }
    assert sorted(circle_in(texts)[1:]) == ["trunk._kernels", "trunk._rows"]
    texts["trunk._kernels"] = "from trunk._spec import Spec\n"
    assert circle_in({**texts, "trunk._spec": ""}) == []

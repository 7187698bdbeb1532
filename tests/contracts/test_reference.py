# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The site has every package's README and every public room, each on a page of its own that its navigation names."""

import pkgutil
from importlib import import_module

import pytest

from tools.checks._tree import ROOT

DOCS = ROOT / "docs"
WHEELS = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
NAVIGATION = (ROOT / "mkdocs.yml").read_text()


@pytest.mark.parametrize("wheel", WHEELS)
def test_each_public_room_has_a_page(wheel: str) -> None:
    package = import_module(wheel.replace("-", "_"))
    rooms = {room.name for room in pkgutil.iter_modules(package.__path__) if not room.name.startswith("_")} - {"cli"}
    pages = {path.stem.replace("-", "_"): path for path in DOCS.glob(f"reference/{wheel}/*.md")}
    assert pages.keys() == rooms
    for name, page in pages.items():
        assert f"\n::: {package.__name__}.{name}\n" in page.read_text()
        assert f"- reference/{wheel}/{page.name}\n" in NAVIGATION
        assert f"({wheel}/{page.name})" in (DOCS / f"reference/{wheel}.md").read_text()


@pytest.mark.parametrize("wheel", [*WHEELS, "mcore-tools"])
def test_each_readme_is_a_page(wheel: str) -> None:
    readme = "tools/README.md" if wheel == "mcore-tools" else f"packages/{wheel}/README.md"
    assert f'--8<-- "{readme}:page"' in (DOCS / f"packages/{wheel}.md").read_text()
    assert f"- packages/{wheel}.md\n" in NAVIGATION
    body = (ROOT / readme).read_text().partition("<!-- --8<-- [start:page] -->")[2].partition("<!-- --8<-- [end:page] -->")[0]
    assert "```python" in body and "](" not in body, "relative links lead nowhere on the site; name the path as code"

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A page of the site on a phone: what is wide scrolls by itself, the page never sideways, in light and in dark."""

import functools
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import Page

ROOT = Path(__file__).resolve().parents[3]
WIDTH = 390
ROW = "|".join(f" a_column_of_a_wide_table_{number} " for number in range(12))
TABLE = f"|{ROW}|\n|{'---|' * 12}\n|{ROW}|\n"
LINE = " + ".join(f"a_term_of_a_long_line_{number}" for number in range(40))
PAGE = f"""# A page with what is wide

{TABLE}
```python
total = {LINE}
```

A word in a sentence, `{"data_parallel.fully_sharded." * 8}`, and one without a break: {"unbroken" * 30}.

!!! note

    {TABLE.replace(chr(10), chr(10) + "    ")}

1. In a list:

    ```console
    {"torchrun --nproc-per-node 8 " * 8}
    ```
"""
# Boxes that are wider than the screen and are in no box that scrolls.
CLIPPED = """[...document.querySelectorAll('.md-content table, .md-content code')].filter(element => {
  if (element.getBoundingClientRect().right <= innerWidth) return false;
  for (let box = element; box !== document.body; box = box.parentElement)
    if (box.scrollWidth > box.clientWidth && ['auto', 'scroll'].includes(getComputedStyle(box).overflowX)) return false;
  return true;
}).length"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *values: Any) -> None:
        """Say nothing of requests."""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a site with that page, built with the settings of ours."""
    program = shutil.which("zensical", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))
    if program is None:
        pytest.skip("needs zensical, of the dependency group docs; `nox -s docs` runs this test beside it")
    folder = tmp_path_factory.mktemp("site")
    (folder / "docs").mkdir()
    (folder / "docs" / "index.md").write_text(PAGE, encoding="utf-8")
    ours = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    # Without the reference of the packages and the other pages.
    kept, _, _ = ours.partition("\nplugins:")
    assert kept != ours and "palette:" in kept
    (folder / "mkdocs.yml").write_text(re.sub(r"(?m)^repo_url:.*\n", "", kept) + "\nnav:\n  - index.md\n", encoding="utf-8")
    built = subprocess.run([program, "build"], cwd=folder, capture_output=True, text=True, timeout=60)
    assert built.returncode == 0, built.stdout + built.stderr
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder / "site"))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def test_a_page_with_wide_tables_and_code_does_not_scroll_sideways_on_a_phone(address: str) -> None:
    backgrounds = set()
    with Page(WIDTH, 844) as page:
        for scheme in ("light", "dark"):
            page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            page.call("Page.navigate", url=address)
            page.until(f"location.href === {address!r} && document.readyState === 'complete'")
            assert page.run("document.querySelectorAll('.md-content table').length") == 2
            assert page.run("Math.max(...[...document.querySelectorAll('.md-content table')].map(table => table.scrollWidth))") > WIDTH
            assert page.run("document.scrollingElement.scrollWidth") <= WIDTH and page.run("innerWidth") == WIDTH
            assert page.run(CLIPPED) == 0
            backgrounds.add(page.run("getComputedStyle(document.body).backgroundColor"))
        # What the test looks at is what a table without its box would spoil.
        page.run("document.head.insertAdjacentHTML('beforeend', '<style>.md-content * {overflow: visible !important}</style>')")
        assert page.run("document.scrollingElement.scrollWidth") > WIDTH
    assert len(backgrounds) == 2, "the site has a light and a dark scheme"

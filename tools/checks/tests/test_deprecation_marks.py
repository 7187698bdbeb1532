# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Type checkers report a deprecated name where a consumer uses it."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.checks._tree import ROOT

STABILITY = ROOT / "packages" / "mcore-parallel" / "src" / "mcore_parallel" / "_stability.py"
LIBRARY = """
from functools import cached_property
from library._stability import deprecated, pep702_deprecated

@deprecated(version="0.2.0", removal_version="0.4.0", alternative="library.fresh")
@pep702_deprecated("use library.fresh")
def stale(x: int) -> int: return x

@deprecated(version="0.2.0", removal_version="0.4.0", alternative="library.fresh")
@pep702_deprecated("use library.fresh")
async def stale_async(x: int) -> int: return x

@deprecated(version="0.2.0", removal_version="0.4.0", alternative="library.Fresh")
@pep702_deprecated("use library.Fresh")
class Stale:
    x: int = 0

class Box:
    @deprecated(version="0.2.0", removal_version="0.4.0")
    @pep702_deprecated("use length")
    def method(self) -> int: return 1

    @property
    @deprecated(version="0.2.0", removal_version="0.4.0")
    @pep702_deprecated("use length")
    def size(self) -> int: return 1

    @classmethod
    @deprecated(version="0.2.0", removal_version="0.4.0")
    @pep702_deprecated("use Box")
    def make(cls) -> "Box": return cls()
"""
# Each line uses one deprecated name.
CONSUMER = """
import library
a = library.stale(1)
b = library.stale_async(1)
c = library.Stale()
d = library.Box().method()
e = library.Box().size
f = library.Box.make()
class Child(library.Stale): ...
"""
USES = set(range(3, 10))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    package = tmp_path / "library"
    package.mkdir()
    (package / "__init__.py").write_text(LIBRARY)
    (package / "py.typed").write_text("")
    shutil.copy(STABILITY, package / "_stability.py")
    (tmp_path / "consumer.py").write_text(CONSUMER)
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"typeCheckingMode": "basic", "reportDeprecated": "warning"}))
    return tmp_path


def program(name: str) -> str:
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.is_file() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def lines(output: str, pattern: str) -> set[int]:
    return {int(match) for match in re.findall(pattern, output)}


def run(project: Path, *command: str) -> str:
    return subprocess.run(command, cwd=project, capture_output=True, text=True, check=False, timeout=100).stdout


def test_ty_reports_every_use(project):
    output = run(project, program("ty"), "check", "--project", ".", "--output-format", "concise", "--color", "never", ".")
    assert lines(output, r"consumer\.py:(\d+):\d+: warning\[deprecated\]") == USES
    assert "error[" not in output


@pytest.mark.parametrize("name", [pytest.param("basedpyright", marks=pytest.mark.journey), "pyright"])
def test_pyright_reports_every_use(project, name):
    output = run(project, program(name), "--pythonpath", sys.executable, "consumer.py", "library")
    assert lines(output, r"consumer\.py:(\d+):\d+ - warning: .*deprecated") == USES
    assert "0 errors" in output and "use library.fresh" in output


def test_mypy_reports_every_use(project):
    output = run(project, program("mypy"), "--enable-error-code", "deprecated", "--python-executable", sys.executable, "consumer.py")
    assert lines(output, r"consumer\.py:(\d+): error: .* is deprecated: use") == USES
    assert all("[deprecated]" in line for line in output.splitlines() if line.startswith("consumer.py") and "error:" in line)


def test_the_library_itself_warns_at_run_time(project):
    done = subprocess.run(
        [sys.executable, "-W", "always", "consumer.py"], cwd=project, capture_output=True, text=True, check=False, timeout=100
    )
    assert lines(done.stderr, r"consumer\.py:(\d+): DeprecationWarning") >= USES - {4}

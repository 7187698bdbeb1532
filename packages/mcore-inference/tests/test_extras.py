# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Packages whose libraries an extra brings, without these."""

import subprocess
import sys

import pytest

BLOCKED = """
import sys


class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {library!r}:
            raise ModuleNotFoundError("No module named " + repr(name), name=name)


sys.meta_path.insert(0, Missing())
try:
    import {package}
except ModuleNotFoundError as error:
    print(error.name.partition(".")[0], "|", error)
"""


@pytest.mark.parametrize(
    ("package", "library", "extra"),
    [("server", "uvicorn", "server"), ("server", "fastapi", "server"), ("coordinator", "zmq", "coordinator"), ("server", "torch", None)],
)
def test_a_missing_library_is_named_with_its_extra(package: str, library: str, extra: str | None) -> None:
    program = BLOCKED.format(library=library, package=f"mcore_inference.{package}")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    name, _, message = done.stdout.strip().partition(" | ")
    assert name == library, done.stderr
    if extra is None:
        # It belongs to no extra.
        assert "pip install" not in message
    else:
        assert message.endswith(f'is not installed: pip install "mcore-inference[{extra}]"')

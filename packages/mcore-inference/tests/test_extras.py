# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Packages whose libraries an extra brings, without these."""

import json
import subprocess
import sys

import pytest

CASES = [("server", "uvicorn", "server"), ("server", "fastapi", "server"), ("coordinator", "zmq", "coordinator"), ("server", "torch", None)]
# A process for each case, which are forked where torch is loaded already, but for that without it.
BLOCKED = """
import json
import os
import sys


class Missing:
    def __init__(self, library):
        self.library = library

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == self.library:
            raise ModuleNotFoundError("No module named " + repr(name), name=name)


for package, library in sorted(json.loads(sys.argv[1]), key=lambda case: case[1] != "torch"):
    if library != "torch":
        import torch
    if not (pid := os.fork()):
        sys.meta_path.insert(0, Missing(library))
        try:
            __import__(f"mcore_inference.{package}")
        except ModuleNotFoundError as error:
            print(library, package, error.name.partition(".")[0], error, sep="|", flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
"""


@pytest.fixture(scope="module")
def messages() -> dict[tuple[str, str], list[str]]:
    """By package and library, the name that the error gives and what it says."""
    cases = json.dumps([case[:2] for case in CASES])
    done = subprocess.run([sys.executable, "-c", BLOCKED, cases], capture_output=True, text=True, timeout=100)
    lines = [line.split("|", 3) for line in done.stdout.splitlines()]
    assert len(lines) == len(CASES), done.stdout + done.stderr
    return {(package, library): said for library, package, *said in lines}


@pytest.mark.parametrize(("package", "library", "extra"), CASES)
def test_a_missing_library_is_named_with_its_extra(
    package: str, library: str, extra: str | None, messages: dict[tuple[str, str], list[str]]
) -> None:
    name, message = messages[package, library]
    assert name == library
    if extra is None:
        # It belongs to no extra.
        assert "pip install" not in message
    else:
        assert message.endswith(f'is not installed: pip install "mcore-inference[{extra}]"')

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Figures of commands that measure something else."""

import contextlib
import json
import os
import shlex
import signal
import subprocess
from collections.abc import Iterator
from typing import Any


def peers(commands: list[str], timeout_s: float) -> Iterator[dict[str, Any]]:
    """The JSON lines of each peer, and one line that says why of a peer that does not run, or does not end."""
    for text in commands:
        name, _, command = text.partition("=")
        failure: list[dict[str, Any]] = []
        try:
            printed, errors, code = _run(shlex.split(command), timeout_s)
        except OSError as error:
            printed, errors, code = "", str(error), 1
        if code is None:
            failure = [{"error": f"{name} did not end within {timeout_s:g} s: {errors[-600:]}"}]
        elif code or not any(line.startswith("{") for line in printed.splitlines()):
            failure = [{"error": f"{name} ended with exit code {code}: {(errors or printed)[-600:]}"}]
        lines: list[dict[str, Any]] = []
        for line in printed.splitlines():
            # A peer's log may have lines that only begin like figures.
            with contextlib.suppress(json.JSONDecodeError):
                lines += [json.loads(line)] if line.startswith("{") else []
        for line in lines + failure:
            yield {"part": "peer", "by": name, **line}


def _run(words: list[str], timeout_s: float) -> tuple[str, str, int | None]:
    """What a command prints, its errors, and its exit code; None for one that is killed, with all that it started, at its limit."""
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            return *process.communicate(timeout=timeout_s), process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return *process.communicate(), None

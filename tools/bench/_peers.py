# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Figures of commands that measure something else."""

import contextlib
import json
import shlex
import subprocess
from collections.abc import Iterator
from typing import Any


def peers(commands: list[str], timeout_s: float) -> Iterator[dict[str, Any]]:
    """The JSON lines of each peer, and one line that says why of a peer that does not run, or does not end."""
    for text in commands:
        name, _, command = text.partition("=")
        failure: list[dict[str, Any]] = []
        try:
            done = subprocess.run(shlex.split(command), capture_output=True, text=True, timeout=timeout_s, check=False)
            printed = done.stdout
            none = [{"error": (done.stderr or done.stdout)[-600:]}]
        except (OSError, subprocess.TimeoutExpired) as error:
            # What it had printed until then is bytes.
            until_then = error.stdout if isinstance(error, subprocess.TimeoutExpired) else None
            printed = until_then.decode(errors="replace") if isinstance(until_then, bytes) else until_then or ""
            failure, none = [{"error": f"{name} did not end: {error}"}], []
        lines: list[dict[str, Any]] = []
        for line in printed.splitlines():
            # A peer's log may have lines that only begin like figures.
            with contextlib.suppress(json.JSONDecodeError):
                lines += [json.loads(line)] if line.startswith("{") else []
        for line in (lines or none) + failure:
            yield {"part": "peer", "by": name, **line}

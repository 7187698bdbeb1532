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
    """The JSON lines of each peer; one line that says why for a peer that does not run, or does not end."""
    for text in commands:
        name, _, command = text.partition("=")
        try:
            done = subprocess.run(shlex.split(command), capture_output=True, text=True, timeout=timeout_s, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            yield {"part": "peer", "by": name, "error": f"{name} gave no figures: {error}"}
            continue
        lines = []
        for line in done.stdout.splitlines():
            # A peer's log may have lines that only begin like figures.
            with contextlib.suppress(json.JSONDecodeError):
                lines += [json.loads(line)] if line.startswith("{") else []
        for line in lines or [{"error": (done.stderr or done.stdout)[-600:]}]:
            yield {"part": "peer", "by": name, **line}

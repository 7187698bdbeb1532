# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A process as others on its machine can recognise it."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class ProcessMark:
    """A process that no later one is taken for."""

    host: str
    """Machine, boot and space of process numbers; empty where the system does not tell."""
    pid: int
    started: str
    """When, in the system's ticks since the boot."""

    @classmethod
    def own(cls) -> "ProcessMark":
        """Of this process."""
        pid = os.getpid()
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
            host = f"{boot}-{os.readlink('/proc/self/ns/pid').strip('pid:[]')}"
        except OSError:
            host = ""
        _, started = _state(pid)
        return cls(host=host if started else "", pid=pid, started=started)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "ProcessMark":
        return cls(**json.loads(text))

    def state(self) -> str:
        """``running``, ``stopped`` or ``gone``; to be asked on its own host only."""
        letter, started = _state(self.pid)
        if started != self.started or letter in "ZX":
            return "gone"
        return "stopped" if letter in "Tt" else "running"


def _state(pid: int) -> tuple[str, str]:
    """The system's letter for the state of a process, and when it started; empty when there is none."""
    try:
        # The name of the program, in parentheses, may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Two hosts with a cable between them, as namespaces of this machine."""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tests.support.programs import lacking

# Neither host sees a process of the other.
_APART = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
# Reserved for documentation: nothing outside of the namespaces has them.
ADDRESSES = ("192.0.2.1", "192.0.2.2")
INTERFACE = "cable"


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """The namespaces, by number."""

    names: tuple[str, str]

    def start(
        self, host: int, command: list[str], output: IO[bytes], folder: Path, environment: dict[str, str]
    ) -> "subprocess.Popen[bytes]":
        """A program on a host; it ends with the host, if not before."""
        line = ["ip", "netns", "exec", self.names[host], *_APART, *command]
        return subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=folder, env=environment)

    def processes(self, host: int) -> dict[int, list[str]]:
        """Number, as this machine counts, and command line of each process of a host."""
        found = {}
        for pid in _pids(self.names[host]):
            with contextlib.suppress(OSError):
                found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        return found

    def cut(self) -> None:
        """Neither host hears of the other any more; no connection is told."""
        for name in self.names:
            _ip("-n", name, "link", "set", INTERFACE, "down")


@contextlib.contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Make them, and remove them; skips where namespaces cannot be made (``lacking``)."""
    if missing := [command for command in ("ip", "unshare") if shutil.which(command) is None]:
        lacking(f"needs {' and '.join(missing)}; install iproute2 and util-linux")
    token = secrets.token_hex(4)
    hosts = Hosts(names=(f"mcore-{token}-a", f"mcore-{token}-b"))
    try:
        try:
            for name in hosts.names:
                _ip("netns", "add", name)
                _ip("netns", "exec", name, *_APART, "true")
            ends = [("name", INTERFACE, "netns", name) for name in hosts.names]
            _ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        except subprocess.CalledProcessError as error:
            lacking(f"namespaces cannot be made here: {error.stderr.decode(errors='replace').strip()}")
        for name, address in zip(hosts.names, ADDRESSES, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", INTERFACE)
            for link in ("lo", INTERFACE):
                _ip("-n", name, "link", "set", link, "up")
        yield hosts
    finally:
        for name in hosts.names:
            _end(name)
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False, timeout=20)


def _end(name: str) -> None:
    """Kill what still runs in a namespace."""
    for pid in _pids(name):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _pids(name: str) -> list[int]:
    listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False, timeout=20)
    return [int(pid) for pid in listed.stdout.split()]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], capture_output=True, check=True, timeout=20)

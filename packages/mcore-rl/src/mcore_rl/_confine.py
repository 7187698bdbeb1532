# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What a process gives up before it runs something untrusted: memory beyond a limit, and the network.

Nothing but the standard library is imported: the file is also run as a program, ``python -I _confine.py PARENT MEMORY_BYTES PROGRAM``,
which confines a child of its own that becomes the program, and ends with the code of that. Linux only.
"""

import contextlib
import ctypes
import os
import signal
import sys

_NEW_PIDS, _NEW_USER, _NEW_NETWORK = 0x20000000, 0x10000000, 0x40000000
_DIES_WITH_PARENT, _IS_DUMPABLE = 1, 4
_MOST_FILE_BYTES = 16 << 20
_NOBODY = 65534
REFUSED_SIGNAL = signal.SIGUSR1
"""By which this file's program ends where the machine refuses; no program that it runs can reach it."""


class ConfinementError(RuntimeError):
    """This machine does not let a process do without the network."""


def limit_memory(num_bytes: int) -> None:
    """Let the process take so many bytes of address space beyond what it has."""
    import resource

    now = address_space_bytes()
    resource.setrlimit(resource.RLIMIT_AS, (now + num_bytes, now + num_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def address_space_bytes() -> int:
    """Of this process, whether or not it is in memory."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def leave_network(*, processes: bool = False) -> None:
    """Go into a network of this process's own, without any device; call before there are threads.

    Args:
        processes: children, too, are of their own: they end with the first one.

    Raises:
        ConfinementError: neither a superuser nor user namespaces.
    """
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        unshare = libc.unshare
    except (OSError, AttributeError):
        raise ConfinementError("a process without network needs Linux") from None
    own, user, group = _NEW_NETWORK | (_NEW_PIDS if processes else 0), os.geteuid(), os.getegid()
    if not unshare(own):
        return
    if unshare(own | _NEW_USER):
        reason = os.strerror(ctypes.get_errno())
        raise ConfinementError(f"a process without network needs user namespaces, which this machine refuses: {reason}")
    # A user without a name may make no namespaces in this one; a superuser of it would keep its rights in a program.
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user or _NOBODY} {user} 1"), ("gid_map", f"{group or _NOBODY} {group} 1")):
        with contextlib.suppress(OSError), open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def die_with_parent(by: int = signal.SIGKILL) -> None:
    """Let the kernel send this process a signal when the thread that made it ends, however that happens."""
    ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, int(by))


def _confine(parent: int, memory_bytes: int, program: str) -> None:
    """Run a program among processes that all end with the first of them, which ends with this one; SIGTERM ends them."""
    die_with_parent(signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)
    leave_network(processes=True)
    first = os.fork()
    if not first:
        _watch(memory_bytes, program)
    # Reaped here: where nobody adopts orphans, each would stay.
    signal.signal(signal.SIGTERM, lambda *_: os.kill(first, signal.SIGKILL))
    _, status = os.waitpid(first, 0)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _watch(memory_bytes: int, program: str) -> None:
    """The first process: no program, which could ask to outlive its parent."""
    die_with_parent()
    ctypes.CDLL(None).prctl(_IS_DUMPABLE, 0)
    child = os.fork()
    if not child:
        _become(memory_bytes, program)
    while True:
        process, status = os.waitpid(-1, 0)
        if process == child:
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _become(memory_bytes: int, program: str) -> None:
    import resource

    # Signals to its group reach none of those above.
    os.setsid()
    resource.setrlimit(resource.RLIMIT_FSIZE, (_MOST_FILE_BYTES, _MOST_FILE_BYTES))
    limit_memory(memory_bytes)
    os.execv(sys.executable, [sys.executable, "-I", program])


if __name__ == "__main__":
    try:
        _confine(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    except ConfinementError as failure:
        print(failure, file=sys.stderr, flush=True)
        os.kill(os.getpid(), REFUSED_SIGNAL)

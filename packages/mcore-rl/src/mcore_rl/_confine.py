# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What a process gives up before it runs something untrusted: memory beyond a limit, and the network.

Nothing but the standard library is imported: the file is also run as a program, ``python -I _confine.py MEMORY_BYTES PROGRAM``, which
confines itself and becomes the program. Linux only.
"""

import ctypes
import os
import signal
import sys

_NEW_PIDS, _NEW_USER, _NEW_NETWORK = 0x20000000, 0x10000000, 0x40000000
_DIES_WITH_PARENT = 1
_MOST_FILE_BYTES = 16 << 20


class ConfinementError(RuntimeError):
    """This machine does not let a process do without the network."""


def limit_memory(num_bytes: int) -> None:
    """Let the process take so many bytes of address space beyond what it has."""
    import resource

    with open("/proc/self/statm", "rb") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + num_bytes, now + num_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


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
    own = _NEW_NETWORK | (_NEW_PIDS if processes else 0)
    if unshare(own) and unshare(own | _NEW_USER):
        reason = os.strerror(ctypes.get_errno())
        raise ConfinementError(f"a process without network needs user namespaces, which this machine refuses: {reason}")


def die_with_parent() -> None:
    """Let the kernel end this process when the one that made it ends, however that happens."""
    ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)


def _become(program: str, memory_bytes: int) -> None:
    """Run a program as the first process of its own, which takes all others with it."""
    import resource

    leave_network(processes=True)
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_FSIZE, (_MOST_FILE_BYTES, _MOST_FILE_BYTES))
    limit_memory(memory_bytes)
    os.execv(sys.executable, [sys.executable, "-I", program])


if __name__ == "__main__":
    try:
        _become(sys.argv[2], int(sys.argv[1]))
    except ConfinementError as failure:
        print(failure, file=sys.stderr)
        os._exit(125)

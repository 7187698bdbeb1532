# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A server of this machine that does with each connection what a test says."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def tcp_server(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """The address, as of HTTP, of a server that calls ``answer`` with each connection, in a thread of its own, and closes it."""

    def one(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            answer(connection)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=one, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)

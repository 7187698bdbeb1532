# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A connection that can be cut without a word to either end."""

import contextlib
import socket
import threading


class Cable:
    """Forwards what comes to ``port`` to another port of this machine, as long as it is not cut; ``mend`` lets everything held through.

    Args:
        port: where the connections lead.
    """

    def __init__(self, port: int) -> None:
        self._target, self._whole = port, threading.Event()
        self._whole.set()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self._ends: list[socket.socket] = [self._server]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._whole.clear()

    def mend(self) -> None:
        self._whole.set()

    def close(self) -> None:
        self.mend()
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                self._ends += [near, far]
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self._whole.wait()
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

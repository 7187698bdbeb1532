# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The requests of an environment's server, over HTTP."""

import io
import json
import logging
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol

from mcore_rl.agent._environment_messages import MOST_BYTES

_log = logging.getLogger(__name__)
POLL_S = 0.05
_REQUEST_S = 60.0
"""From the connection to the last byte of a request; and of a reply, between two of its parts."""


class Owner(Protocol):
    """Who answers."""

    def is_allowed(self, authorization: str) -> bool:
        """Whether a request bears the key."""
        ...

    def answer(self, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        """Status and reply to a request; in a thread of its own."""
        ...


class HttpServer(ThreadingHTTPServer):
    """Hands each request to its owner in a thread of its own, at most ``max_requests`` at a time."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, address: tuple[str, int], owner: Owner, max_requests: int) -> None:
        self.owner, self._room, self.is_closing = owner, threading.BoundedSemaphore(max_requests), threading.Event()
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        while not self._room.acquire(timeout=POLL_S):
            if self.is_closing.is_set():
                self.shutdown_request(request)
                return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("a client of %s was lost", self.server_address, exc_info=True)


class _Request(io.RawIOBase):
    """What a client sends, all of it in time: one that trickles has no request's place for long."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._end = connection, time.monotonic() + _REQUEST_S

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if (left := self._end - time.monotonic()) <= 0:
            raise TimeoutError("the request did not come in time")
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)


class _Handler(BaseHTTPRequestHandler):
    server: HttpServer

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(_Request(self.connection))

    def do_GET(self) -> None:
        if self.path == "/health":
            self._reply(200, {"status": "ok"})
        else:
            self._reply(404, {"error": f"no {self.path[:60]} here"})

    def do_POST(self) -> None:
        if not self.server.owner.is_allowed(self.headers.get("Authorization", "")):
            self._reply(401, {"error": "the api_key is missing or another one"})
            return
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            self._reply(411, {"error": "a Content-Length is needed"})
        elif len(length) > len(str(MOST_BYTES)) or int(length) > MOST_BYTES:
            self._reply(413, {"error": f"a body of {length[:20]} bytes is larger than {MOST_BYTES}"})
        else:
            self._reply(*self.server.owner.answer(self.path, self.rfile.read(int(length))))

    def _reply(self, status: int, message: dict[str, Any]) -> None:
        content = json.dumps(message).encode()
        self.connection.settimeout(_REQUEST_S)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        _log.debug(format, *args)

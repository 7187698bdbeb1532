# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A running server: the socket, the web thread and the engine's thread."""

import errno
import ipaddress
import socket
import threading
import time

import uvicorn

from mcore_inference.engine import DynamicInferenceEngine
from mcore_inference.errors import PortInUseError
from mcore_inference.runner import EngineRunner
from mcore_inference.server._app import Routes
from mcore_inference.text import Tokenizer


class InferenceServer:
    """A server that runs until ``close``; also a context manager.

    Made by ``serve``.
    """

    def __init__(self, runner: EngineRunner, server: uvicorn.Server, listener: socket.socket, host: str) -> None:
        self.runner = runner
        self.host = host
        self.port: int = listener.getsockname()[1]
        self._server = server
        self._listener = listener
        self._thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="mcore-http", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Base address, for instance ``http://127.0.0.1:8000``; OpenAI clients want ``/v1`` behind it."""
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"

    def wait_until_ready(self, timeout_s: float = 30.0) -> None:
        """Return when requests are accepted.

        Raises:
            TimeoutError: the server did not come up in time.
            RuntimeError: it ended instead.
        """
        deadline = time.monotonic() + timeout_s
        while not self._server.started:
            if not self._thread.is_alive():
                raise RuntimeError(f"the server on {self.url} ended while it started")
            if time.monotonic() > deadline:
                raise TimeoutError(f"the server on {self.url} did not start within {timeout_s} s")
            time.sleep(0.002)

    def wait(self) -> None:
        """Block until the server ends, or until Ctrl-C, which closes it."""
        try:
            while self._thread.is_alive():
                self._thread.join(timeout=1.0)
        except KeyboardInterrupt:
            self.close()

    def close(self) -> None:
        """Abort open requests, end both threads and free the port; may be called again.

        Raises:
            TimeoutError: the engine hangs in a step; the port is free all the same.
        """
        try:
            self.runner.close()
        finally:
            self._server.should_exit = True
            self._thread.join()
            self._listener.close()

    def __enter__(self) -> "InferenceServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(
    engine: DynamicInferenceEngine,
    tokenizer: Tokenizer | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    model_name: str = "mcore",
    max_body_bytes: int = 4 * 2**20,
    stall_timeout_s: float = 60.0,
) -> InferenceServer:
    """Serve ``/v1/completions``, ``/v1/chat/completions``, ``/v1/models``, ``/health`` and ``/metrics`` in the background.

    Args:
        engine: of one rank; nothing else may use it until the server is closed.
        tokenizer: None for the engine's.
        host: address to bind; other than loopback it needs a token.
        port: 0 for a free one, see ``InferenceServer.port``.
        token: bearer token that clients must send (``api_key`` of OpenAI's client); ``/health`` stays open.
        model_name: name in answers and ``/v1/models``.
        max_body_bytes: longer bodies are refused.
        stall_timeout_s: age of the last step at which ``/health`` says dead.

    Returns:
        The server, accepting requests.

    Raises:
        ValueError: no tokenizer; an address beyond loopback without token; an empty token; a port out of range; tp above 1.
        PortInUseError: names the port.
        OSError: the address is not one of this machine; names it.
    """
    tokenizer = tokenizer or engine.tokenizer
    if tokenizer is None or engine.tokenizer is None:
        raise ValueError("serving text needs a tokenizer; give it to DynamicInferenceEngine(model, context, tokenizer)")
    if token is not None and not token:
        raise ValueError("token='' is empty; give a secret, or None on a loopback address")
    if token is None and not _is_loopback(host):
        raise ValueError(f"host={host!r} is reachable from other machines; give a token, or bind to 127.0.0.1")
    if not 0 <= port < 2**16:
        raise ValueError(f"port={port} must lie in 0..65535; 0 takes a free one")
    listener = _bind(host, port)
    try:
        runner = EngineRunner(engine, stall_timeout_s=stall_timeout_s)
    except BaseException:
        listener.close()
        raise
    hosts = ["127.0.0.1", "localhost", "[::1]", host] if token is None else ["*"]
    app = Routes(runner, tokenizer, model_name=model_name, token=token, max_body_bytes=max_body_bytes).app(hosts)
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", ws="none", http="h11", loop="asyncio", timeout_graceful_shutdown=5
    )
    server = InferenceServer(runner, uvicorn.Server(config), listener, host)
    try:
        server.wait_until_ready()
    except BaseException:
        server.close()
        raise
    return server


def _bind(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=512)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUseError(host, port) from error
        raise


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

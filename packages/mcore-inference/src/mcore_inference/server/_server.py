# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A running server: the socket, the web thread and the engine's thread."""

import asyncio
import contextlib
import secrets
import threading
import time
from collections.abc import Callable

import uvicorn

from mcore_inference._fields import is_loopback
from mcore_inference._stability import experimental_api
from mcore_inference.engine import DynamicInferenceEngine, EngineRunner
from mcore_inference.requests import EngineDeadError
from mcore_inference.server._app import Routes
from mcore_inference.server._bodies import BodyReader
from mcore_inference.server._connection import ConnectionGuard
from mcore_inference.server._folders import check_guard
from mcore_inference.server._group import GroupMember, ServerGroup
from mcore_inference.server._limits import ServerLimits
from mcore_inference.server._loras import LoraFolders, LoraLoader, LoraRoutes
from mcore_inference.server._metrics import ServerMetrics
from mcore_inference.server._models import ServedModels
from mcore_inference.server._prompts import PromptEncoder, check_tool_template
from mcore_inference.server._runner import Runner
from mcore_inference.server._signals import StopSignals
from mcore_inference.server._weights import WeightFolders, WeightLoader, WeightRoute
from mcore_inference.text import Tokenizer
from mcore_inference.tool_calls import tool_format

_POLL_S = 0.1
_BEAT_S = 0.5
_LAST_ANSWERS_S = 2.0
"""That clients get to take the errors of requests that were cut off."""


@experimental_api
class InferenceServer:
    """A server that runs until ``close``; also a context manager.

    Made by ``serve``.
    """

    def __init__(
        self,
        runner: Runner,
        server: uvicorn.Server,
        group: ServerGroup,
        index: int,
        *,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.runner = runner
        self._counts, self._on_end = group.counts(index), on_end
        self.host, self.port = group.host, group.port
        self.url = group.url
        """Base address, for instance ``http://127.0.0.1:8000``; OpenAI clients want ``/v1`` behind it."""
        self._server = server
        self._listener = group.listener(index)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="mcore-http", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        async def main() -> None:
            self._loop = asyncio.get_running_loop()
            beating = asyncio.ensure_future(self._beat())
            await self._server.serve(sockets=[self._listener])
            beating.cancel()
            self._on_end()
            # What was aborted is closed in the next turn.
            await asyncio.sleep(0)

        asyncio.run(main())

    async def _beat(self) -> None:
        """For whoever started this process, to see that its loop runs."""
        while True:
            self._counts.beat()
            await asyncio.sleep(_BEAT_S)

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

    def wait(self, signals: StopSignals | None = None, *, drain_s: float = 30.0) -> None:
        """Block until SIGTERM or SIGINT, then close in order; or until ``close`` of another thread, or the end of the engine.

        Args:
            signals: those that are listened to already; None to listen from here on (in the main thread).
            drain_s: as of ``close``; a second signal ends it.

        Raises:
            EngineDeadError: the engine failed for good; the server is closed.
            TimeoutError: as of ``close``.
        """
        with contextlib.ExitStack() as stack:
            signals = signals or stack.enter_context(StopSignals())
            while self._thread.is_alive() and not signals.count and self.runner.failure is None:
                self._thread.join(timeout=_POLL_S)
            failure = self.runner.failure
            self.close(0.0 if failure is not None else drain_s, hurry=lambda: signals.count > 1)
        if failure is not None:
            raise EngineDeadError(f"the engine failed: {type(failure).__name__}: {failure}") from failure

    def close(self, drain_s: float = 0.0, *, hurry: Callable[[], bool] = lambda: False) -> None:
        """Refuse new requests, let open ones end, abort the rest, end both threads and free the port; may be called again.

        Args:
            drain_s: seconds that open requests get to end.
            hurry: asked meanwhile; True gives the rest of the time up.

        Raises:
            TimeoutError: the engine hangs in a step; the port is free all the same.
        """
        # uvicorn closes the port and idle connections, and ends once the last answer is written.
        self._server.should_exit = True
        deadline = time.monotonic() + drain_s
        while self._thread.is_alive() and time.monotonic() < deadline and self.runner.failure is None and not hurry():
            self._thread.join(_POLL_S)
        try:
            self.runner.close()
        finally:
            self._thread.join(_LAST_ANSWERS_S)
            if self._thread.is_alive() and self._loop is not None:
                # Clients that neither send nor read: nothing is left to wait for.
                self._loop.call_soon_threadsafe(self._cut_connections)
            self._thread.join()
            self._listener.close()

    def _cut_connections(self) -> None:
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()

    def __enter__(self) -> "InferenceServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@experimental_api
def serve(
    engine: DynamicInferenceEngine,
    tokenizer: Tokenizer | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    model_name: str = "mcore",
    limits: ServerLimits | None = None,
    tool_call_parser: str | None = None,
    weights: WeightFolders | None = None,
    loras: LoraFolders | None = None,
) -> InferenceServer:
    """Serve ``/v1/completions``, ``/v1/chat/completions``, ``/v1/models``, ``/health``, ``/metrics`` and a playground in the background.

    Args:
        engine: whole, or the first rank of a split one, whose other ranks call ``follow_runner``; nothing else may use it until the server
            is closed.
        tokenizer: None for the engine's.
        host: address to bind; other than loopback it needs a token.
        port: 0 for a free one, see ``InferenceServer.port``.
        token: bearer token that clients must send (``api_key`` of OpenAI's client); ``/health`` says to others no more than its status.
        model_name: name in answers and ``/v1/models``.
        limits: on bodies, the queue, the engine and connections; None for the defaults.
        tool_call_parser: how the model writes calls of tools: ``hermes`` (Hermes, Qwen), ``llama3_json`` or ``mistral``; None to refuse
            ``tools``. The tokenizer's chat template has to write tools.
        weights: folders whose weights a client may have loaded by ``/update_weights_from_disk``, which needs a token: one of its own, or
            on loopback the server's; None for no such route.
        loras: folders whose adapters a client may have loaded by ``/v1/load_lora_adapter``, and unloaded by ``/v1/unload_lora_adapter``,
            with a token as ``weights``; None for no such routes. Adapters that the engine has, from wherever, are served in either case.

    Returns:
        The server, accepting requests.

    Raises:
        ValueError: no tokenizer; an address beyond loopback, ``weights`` or ``loras`` without token, or the latter there without one of
            their own; an empty token; a port or limit out of range; another rank than the first; an unknown parser, or a chat template
            that leaves tools out; an adapter of the engine has the name of the model.
        PortInUseError: names the port.
        OSError: the address is not one of this machine; names it.
    """
    tokenizer = tokenizer or engine.tokenizer
    if tokenizer is None or engine.tokenizer is None:
        raise ValueError("serving text needs a tokenizer; give it to DynamicInferenceEngine(model, context, tokenizer)")
    limits = ServerLimits() if limits is None else limits

    def run() -> EngineRunner:
        return EngineRunner(
            engine,
            stall_timeout_s=limits.stall_timeout_s,
            max_failed_steps=limits.max_failed_steps,
            max_waiting_requests=limits.max_waiting_requests,
        )

    return serve_runner(
        run, tokenizer, host=host, port=port, token=token, model_name=model_name, limits=limits, tool_call_parser=tool_call_parser,
        weights=weights, loras=loras,
    )  # fmt: skip


@experimental_api
def serve_runner(
    run: Callable[[], Runner],
    tokenizer: Tokenizer,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    model_name: str = "mcore",
    limits: ServerLimits | None = None,
    tool_call_parser: str | None = None,
    weights: WeightFolders | None = None,
    loras: LoraFolders | None = None,
    member: GroupMember | None = None,
) -> InferenceServer:
    """``serve`` over what generates elsewhere, such as ``mcore_inference.coordinator.CoordinatedRunner``.

    Args:
        run: makes the runner, once the address is taken; the server closes it.
        tokenizer: the engines' own.
        host: as of ``serve``, and so are the others.
        port: 0 for a free one.
        token: bearer token.
        model_name: name in answers.
        limits: those on bodies and connections count here; those on the queue and the engine are the engines' own.
        tool_call_parser: as of ``serve``.
        weights: as of ``serve``; the runner needs ``load_weights``.
        loras: as of ``serve``; the runner needs ``load_lora`` and ``unload_lora``.
        member: one of several servers at one address, which takes the place of ``host`` and ``port``; None for a server alone. The limit on
            connections and the answers that ``/metrics`` counts are those of all of them.

    Returns:
        The server, accepting requests.

    Raises:
        ValueError: as of ``serve``.
        PortInUseError: names the port.
        OSError: the address is not one of this machine; names it.
    """
    host = host if member is None else member.group.host
    if token is not None and not token:
        raise ValueError("token='' is empty; give a secret, or None on a loopback address")
    if token is None and not is_loopback(host):
        raise ValueError(f"host={host!r} is reachable from other machines; give a token, or bind to 127.0.0.1")
    for field, folders in (("weights", weights), ("loras", loras)):
        if folders is not None:
            check_guard(field, folders, token, host)
    limits = ServerLimits() if limits is None else limits
    form = None if tool_call_parser is None else tool_format(tool_call_parser)
    if form is not None:
        check_tool_template(tokenizer)
    group, index = (ServerGroup(host, port, 1), 0) if member is None else (member.group, member.index)
    try:
        group.listen()
        runner = run()
    except BaseException:
        group.close()
        raise
    hosts = ["127.0.0.1", "localhost", "[::1]", host] if token is None else None
    models = ServedModels(model_name, runner)
    reader = BodyReader(models, limits.max_body_bytes, lambda: runner.max_sequence_length)
    try:
        route, lora_routes = _routes_of_folders(runner, reader, models, weights, loras)
    except ValueError:
        runner.close()
        group.close()
        raise
    counts = group.counts(index)
    encoder = PromptEncoder(tokenizer, lambda: runner.max_sequence_length, limits.max_characters_per_token)
    routes = Routes(
        runner, reader=reader, models=models, encoder=encoder, token=token, metrics=ServerMetrics(runner, counts), counts=counts,
        created=group.created,
        # Another one at each start, which would repeat the answers of the last one.
        seed=secrets.randbits(63), tool_format=form, weights=route, loras=lora_routes,
    )  # fmt: skip
    protocol = ConnectionGuard(limits.connections, counts)
    config = uvicorn.Config(
        routes.app(hosts),
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        http=protocol,  # type: ignore[arg-type]
        loop="asyncio",
        backlog=group.accepts,
        timeout_keep_alive=limits.connections.idle_timeout_s,  # type: ignore[arg-type]
    )
    server = InferenceServer(runner, uvicorn.Server(config), group, index, on_end=protocol.abort_held)
    try:
        server.wait_until_ready()
    except BaseException:
        server.close()
        raise
    return server


def _routes_of_folders(
    runner: Runner, reader: BodyReader, models: ServedModels, weights: WeightFolders | None, loras: LoraFolders | None
) -> tuple[WeightRoute | None, LoraRoutes | None]:
    """Routes by which clients have weights and adapters loaded.

    Raises:
        ValueError: the runner takes none, or an adapter has the name of the model.
    """
    models.check_names()
    route, lora_routes = None, None
    if weights is not None:
        if not isinstance(runner, WeightLoader):
            raise ValueError(f"weights={weights.root}: a {type(runner).__name__} has no load_weights; leave it out")
        route = WeightRoute(reader, models, runner, weights)
    if loras is not None:
        if not isinstance(runner, LoraLoader):
            raise ValueError(f"loras={loras.root}: a {type(runner).__name__} has no load_lora; leave it out")
        lora_routes = LoraRoutes(reader, models, runner, loras)
    return route, lora_routes

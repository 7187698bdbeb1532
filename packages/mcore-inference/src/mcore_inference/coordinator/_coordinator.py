# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The coordinator's socket and thread."""

import asyncio
import contextlib
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable

import zmq
import zmq.asyncio

from mcore_inference._stability import experimental_api
from mcore_inference.coordinator._config import CoordinatorConfig
from mcore_inference.coordinator._core import CoordinatorCore
from mcore_inference.coordinator._group import Outbox
from mcore_inference.coordinator._messages import (
    NUMBER_BYTES,
    UNKNOWN,
    UNREADABLE,
    Partials,
    Refusal,
    decode_incoming,
    encode,
    is_greeting,
    is_too_long,
)
from mcore_inference.coordinator._states import GroupState
from mcore_inference.requests import PortInUseError

_LOG = logging.getLogger("mcore_inference.coordinator")
_MAX_QUEUED = 10_000
"""Messages that wait for one peer; a peer that reads none of so many is gone."""
_TURN_S = 0.005
"""That messages are taken for, before the loop does something else."""
_LOOK_S = 0.1
"""Between two looks at whether the coordinator lives, of one who waits for it."""
_STRANGER_REPLIES_PER_S = 100.0
"""Answers to peers that are not known: enough for engines and clients that meet a new coordinator, and little to draw by a flood."""


@experimental_api
class DataParallelInferenceCoordinator:
    """Spreads requests of many clients over many engines, and pauses, suspends and stops all engines together.

    It runs in a thread of its own from ``start`` to ``close``; also a context manager. Engines join by ``EngineWorker`` and may come and
    go at any time, each with a name of its own; clients use ``InferenceClient``. A request goes to an engine that had the beginning of its
    prompt, unless another one is that much less busy; one whose queue is full leaves it to the others. When an engine is lost its requests
    go to others; those whose tokens were sent already fail with ``EngineLostError``. One that leaves in order
    (``EngineWorker.close(drain_s=...)``) ends the requests that it has before.

    Args:
        config: address, time-outs, limits, security.

    Example:
        >>> with DataParallelInferenceCoordinator() as coordinator:
        ...     coordinator.address.startswith("tcp://127.0.0.1:")
        True
    """

    def __init__(self, config: CoordinatorConfig | None = None) -> None:
        self.config = CoordinatorConfig() if config is None else config
        # Another one at each start, which would repeat the answers of the last one.
        self._core = CoordinatorCore(self.config, seed=secrets.randbits(63))
        # An engine that sends signs of life has time for another one behind a shorter pause.
        self._clock = _AwakeClock(self.config.engine_timeout_s / 2)
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._closing: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended_engines: asyncio.Queue[tuple[str, str, threading.Event]] = asyncio.Queue()
        """Names and reasons, from ``lose_engine``, and what to set behind it."""
        self._strangers = _Budget(_STRANGER_REPLIES_PER_S)
        self._address = ""
        self._thread = threading.Thread(target=self._run, name="mcore-coordinator", daemon=True)

    def __enter__(self) -> "DataParallelInferenceCoordinator":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def address(self) -> str:
        """Where engines and clients connect to, ``tcp://host:port``."""
        return self._address

    @property
    def failure(self) -> BaseException | None:
        """What ended the thread, but for ``close``; engines and clients hear nothing any more then."""
        return self._failure

    @property
    def state(self) -> GroupState:
        """What the engines are in."""
        return self._core.state

    @property
    def engine_names(self) -> frozenset[str]:
        """Names of the engines that are here, of those that drain, too."""
        return self._core.engine_names

    @property
    def num_engines(self) -> int:
        """Engines that take requests."""
        return self._core.num_engines

    @property
    def num_open_requests(self) -> int:
        """Requests that have no answer yet."""
        return self._core.num_open_requests

    def start(self) -> "DataParallelInferenceCoordinator":
        """Bind the address and begin.

        Raises:
            PortInUseError: names the port.
            OSError: the address is not one of this machine.
        """
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            raise self._failure
        return self

    def wait_for_engines(self, count: int, timeout_s: float = 60.0) -> None:
        """Return when so many engines have joined.

        Raises:
            TimeoutError: fewer came in time; names how many.
            RuntimeError: the coordinator ended.
        """
        deadline = time.monotonic() + timeout_s
        while self.num_engines < count:
            if not self._thread.is_alive():
                raise RuntimeError(f"the coordinator ended: {self._failure!r}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.num_engines} of {count} engines joined within timeout_s={timeout_s}")
            time.sleep(0.005)

    def lose_engine(self, name: str, reason: str) -> None:
        """Give the requests of an engine to others now, for one who knows that it ended; its silence shows only ``engine_timeout_s`` later.

        When it returns the engine gets no more requests. Nothing happens when no engine has the name, or the coordinator has ended.

        Args:
            name: of its ``EngineWorker``; one that lives registers again.
            reason: for messages, ``its process was killed``.
        """
        loop, done = self._loop, threading.Event()
        if loop is not None and self._thread.is_alive():
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._ended_engines.put_nowait, (name, reason, done))
                while not done.wait(_LOOK_S) and self._thread.is_alive():
                    pass

    def close(self) -> None:
        """End the thread and free the port; engines go on without, clients get errors. May be called again."""
        if self._loop is not None and self._closing is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._closing.set)
        if self._thread.ident is not None:
            self._thread.join()

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._failure = error
            if self._ready.is_set():
                _LOG.exception("the coordinator ended")
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop, self._closing = asyncio.get_running_loop(), asyncio.Event()
        with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as router:
            router.linger = 0
            router.router_mandatory = True
            router.maxmsgsize = self.config.max_message_bytes
            router.sndhwm = router.rcvhwm = _MAX_QUEUED
            keys = self.config.security
            if keys.secret_key is not None and keys.public_key is not None:
                router.curve_secretkey, router.curve_publickey = keys.secret_key.encode(), keys.public_key.encode()
                router.curve_server = True
            self._address = _bind(router, self.config.host, self.config.port)
            self._ready.set()
            parts = (self._receive(router), self._tick(router), self._lose_engines(router), self._closing.wait())
            tasks = [asyncio.ensure_future(each) for each in parts]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _receive(self, router: zmq.asyncio.Socket) -> None:
        """What comes, for a bounded time a turn of the loop: time-outs and lost engines wait for no flood."""
        # A future for each message costs more than everything else about a stranger's.
        socket = zmq.Socket.shadow(router)
        while True:
            frames = await router.recv_multipart()
            end = time.monotonic() + _TURN_S
            self._take(socket, frames)
            with contextlib.suppress(zmq.Again):
                while time.monotonic() < end:
                    self._take(socket, socket.recv_multipart(zmq.DONTWAIT))
            await asyncio.sleep(0)

    def _take(self, socket: zmq.Socket[bytes], frames: list[bytes]) -> None:
        """One message, and what follows from it."""
        # A message of ours has one frame; everything else is somebody else's.
        if len(frames) != 2:
            self._core.num_refused_messages += 1
            return
        peer, frame = frames
        now = self._clock.now()
        is_stranger = not self._core.knows(peer)
        if is_stranger and not is_greeting(frame):
            # Nothing of it is read.
            self._core.num_refused_messages += 1
            outbox: Outbox = [(peer, UNKNOWN)]
        elif is_too_long(frame):
            self._core.num_refused_messages += 1
            outbox = [(peer, Refusal(call=-1, message=f"a message of {len(frame)} bytes is longer than its kind may be"))]
        else:
            try:
                outbox = self._core.receive(peer, decode_incoming(frame), now)
            except UNREADABLE as error:
                self._core.num_refused_messages += 1
                outbox = [(peer, Refusal(call=-1, message=f"a message was not understood: {str(error)[:200]}"))]
        if is_stranger and not self._core.knows(peer) and not self._strangers.allows(now):
            return
        self._deliver(socket, outbox)

    async def _tick(self, router: zmq.asyncio.Socket) -> None:
        while True:
            await asyncio.sleep(self.config.heartbeat_s / 4)
            self._deliver_beside(router, self._core.tick(self._clock.now()))

    async def _lose_engines(self, router: zmq.asyncio.Socket) -> None:
        while True:
            name, reason, done = await self._ended_engines.get()
            self._deliver_beside(router, self._core.lose(name, reason, self._clock.now()))
            done.set()

    def _deliver_beside(self, router: zmq.asyncio.Socket, outbox: Outbox) -> None:
        """What does not follow from a message, while the loop waits for one."""
        self._deliver(zmq.Socket.shadow(router), outbox)
        # Sending may have taken the sign that a message came; looking for it wakes the one who waits.
        router.get(zmq.EVENTS)

    def _deliver(self, socket: zmq.Socket[bytes], outbox: Outbox) -> None:
        """Messages, and what follows from those that cannot be sent."""
        left = deque(outbox)
        while left:
            peer, message = left.popleft()
            try:
                frame = encode(message)
            except (OverflowError, RecursionError) as error:
                _LOG.error("a %s cannot be sent: %s", type(message).__name__, error)
                left.extend(self._core.unsendable(peer, message))
                continue
            if len(frame) > self.config.max_message_bytes + NUMBER_BYTES and isinstance(message, Partials) and message.num_parts > 1:
                # Each of its requests may have got a longer number, and its reader would cut the connection.
                left.extendleft((peer, half) for half in reversed(message.halves()))
                continue
            try:
                socket.send_multipart([peer, frame], flags=zmq.DONTWAIT)
            except zmq.ZMQError as error:
                if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                    raise
                left.extend(self._core.unreachable(peer, self._clock.now()))


class _AwakeClock:
    """Seconds without those in which nobody looked: of a process that was frozen, peers were not silent, only not heard.

    Args:
        pause_s: between two looks, from which on they count as a pause; whoever is awake looks more often.
        read: seconds of a clock that never goes back.
    """

    def __init__(self, pause_s: float, read: Callable[[], float] = time.monotonic) -> None:
        self._pause_s, self._read = pause_s, read
        self._last, self._paused_s = read(), 0.0

    def now(self) -> float:
        before, self._last = self._last, self._read()
        if self._last - before > self._pause_s:
            self._paused_s += self._last - before
        return self._last - self._paused_s


class _Budget:
    """So many a second, and as many at once.

    Args:
        per_s: that are allowed.
    """

    def __init__(self, per_s: float) -> None:
        self._per_s = self._left = per_s
        self._then = time.monotonic()

    def allows(self, now: float) -> bool:
        """Whether one more is allowed, which counts."""
        self._left = min(self._per_s, self._left + (now - self._then) * self._per_s)
        self._then = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


def _bind(router: zmq.asyncio.Socket, host: str, port: int) -> str:
    shown = f"[{host}]" if ":" in host else host
    if ":" in host:
        router.ipv6 = True
    try:
        router.bind(f"tcp://{shown}:{port or '*'}")
    except zmq.ZMQError as error:
        if error.errno == zmq.EADDRINUSE:
            raise PortInUseError(host, port) from error
        raise OSError(f"host={host!r} cannot be bound: {error}; give an address of this machine") from error
    bound = router.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1]
    return f"tcp://{shown}:{bound}"

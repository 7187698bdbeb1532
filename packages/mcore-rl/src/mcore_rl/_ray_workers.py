# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Objects in actors of a Ray cluster, which places and restarts them; the one file that imports Ray."""

import asyncio
import inspect
import logging
import math
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mcore_rl._stability import experimental_api

_log = logging.getLogger(__name__)
_PATIENCE_S = 1.0
"""For which a worker, when a call to it was given up, counts as one that answers until it is seen whether it does."""
_ABOUT = "about"
"""Concurrency group of the question whether a worker answers: it does not queue behind calls."""


@experimental_api
class RayWorkerError(RuntimeError):
    """A worker died, did not answer in time or did not start. The message names it and its node."""


class RayWorkerLostError(RayWorkerError):
    """A worker died more often than it is restarted, or than a call is repeated."""


@experimental_api
@dataclass(frozen=True, kw_only=True)
class RayOptions:
    """How many workers there are, what each needs, and how long it may take.

    Raises:
        ValueError: a number that is out of its range; names it.
    """

    num_workers: int = 1
    num_cpus: float = 1.0
    """Of each."""
    num_gpus: float = 0.0
    """Of each."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """Of each, by the names that the nodes were started with."""
    max_restarts: int = 3
    """Times that Ray starts a worker again that died; -1 for no limit."""
    max_task_retries: int = 1
    """Times that a call is repeated whose worker died."""
    max_concurrency: int = 64
    """Calls that a worker has at a time."""
    start_timeout_s: float = 300.0
    """Limit of all workers' start."""
    call_timeout_s: float = 600.0
    """Limit of one call, with the restart of its worker."""

    def __post_init__(self) -> None:
        for name, least in (("num_workers", 1), ("max_concurrency", 1), ("max_restarts", -1), ("max_task_retries", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        for name in ("num_cpus", "num_gpus"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        for name in ("start_timeout_s", "call_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")


class _Worker:
    """What runs in an actor."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._own = make()
        self._birth = uuid.uuid4().hex
        self._loop: asyncio.AbstractEventLoop | None = None
        """Of the calls; each concurrency group has one, in a thread of its own."""

    async def call(self, method: str, arguments: Sequence[Any]) -> tuple[str, Any]:
        """Which start of the worker answers, and what."""
        self._loop = asyncio.get_running_loop()
        result = getattr(self._own, method)(*arguments)
        return self._birth, (await result if inspect.isawaitable(result) else result)

    async def about(self) -> tuple[str, str]:
        """Which start this is, and on which node; said when no call holds the event loop up."""
        if self._loop is not None:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop))
        return self._birth, _ray().get_runtime_context().get_node_id()


@dataclass
class _Probe:
    """A worker is asked whether it answers."""

    reference: Any
    patience_end: float
    """Until when it counts as one that does, by ``time.monotonic()``."""


@experimental_api
class RayWorkers:
    """Objects of one kind in actors, spread over the nodes; a call goes to the one with the fewest open calls.

    Event loops in several threads may call at a time.

    The program connects to the cluster itself (``ray.init(address=...)``); nothing is started here but the actors. A worker that was
    lost gets no call that another one can take until it has answered again, and so does one whose event loop is held up for a second after
    a call to it was given up. One that has died more often than it is restarted gets none.

    Args:
        make: makes an object in its worker, where it must be importable.
        options: number, needs and limits.
        name: of the kind, for messages.

    Raises:
        ModuleNotFoundError: Ray is not installed; names the extra.
        ValueError: the program is not connected to a cluster.
        RayWorkerError: workers did not start in time, or their object could not be made.
    """

    def __init__(self, make: Callable[[], Any], options: RayOptions | None = None, *, name: str = "workers") -> None:
        self.options, self.name = options or RayOptions(), name
        ray = _ray()
        if not ray.is_initialized():
            raise ValueError(f"{name}: there is no connection to a Ray cluster; call ray.init(address=...) first")
        own = self.options
        actor = ray.remote(concurrency_groups={_ABOUT: 1})(_Worker).options(
            num_cpus=own.num_cpus,
            num_gpus=own.num_gpus,
            resources=dict(own.resources),
            max_restarts=own.max_restarts,
            # Calls wait for a worker that is started again; each says itself how often it is repeated.
            max_task_retries=-1,
            max_concurrency=own.max_concurrency,
            scheduling_strategy="SPREAD",
        )
        self._handles = [actor.remote(make) for _ in range(own.num_workers)]
        self._lock = threading.RLock()
        """Of what is known of the workers."""
        self._num_open = [0] * own.num_workers
        self._num_calls = 0
        self._last_calls = [0] * own.num_workers
        """Of each worker, which of all calls was its last."""
        self._births: list[set[str]] = [set() for _ in self._handles]
        self._probes: dict[int, _Probe] = {}
        """Of workers that did not answer."""
        self._dead: set[int] = set()
        self._is_closed = False
        self.nodes: list[str] = []
        """Of each worker, the node that it was started on."""
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        ray, limit = _ray(), self.options.start_timeout_s
        references = [self._about(number) for number in range(len(self._handles))]
        _, late = ray.wait(references, num_returns=len(references), timeout=limit)
        if late:
            numbers = [number for number, reference in enumerate(references) if reference in late]
            needs = {"CPU": self.options.num_cpus, "GPU": self.options.num_gpus, **self.options.resources}
            raise RayWorkerError(
                f"workers {numbers} of {self.name!r} did not start within start_timeout_s={limit:g}, each needs {needs}; the cluster has "
                f"{ray.available_resources()}"
            )
        for number, reference in enumerate(references):
            try:
                birth, node = ray.get(reference)
            except ray.exceptions.RayError as error:
                raise RayWorkerError(f"worker {number} of {self.name!r} did not start: {error}") from error
            self._births[number].add(birth)
            self.nodes.append(node)

    @property
    def num_restarts(self) -> list[int]:
        """Of each worker, how often it was seen to have been started again."""
        return [len(births) - 1 for births in self._births]

    @property
    def num_open(self) -> int:
        """Calls that are under way."""
        return sum(self._num_open)

    @property
    def loads(self) -> Sequence[float]:
        """Calls that are under way at each worker; infinite for one that is to get none, as of ``least_busy``.

        Raises:
            RayWorkerError: all have died more often than they are restarted.
        """
        with self._lock:
            left = self._left()
            return tuple(num_open if number in left else math.inf for number, num_open in enumerate(self._num_open))

    def least_busy(self) -> int:
        """The worker with the fewest open calls, and of these the one that was called least recently, of those that answer; of those that
        are left where none does.

        Raises:
            RayWorkerError: all have died more often than they are restarted.
        """
        with self._lock:
            return min(self._left(), key=lambda number: (self._num_open[number], self._last_calls[number]))

    def _left(self) -> list[int]:
        """Of whom ``least_busy`` chooses."""
        return [number for number in range(len(self._handles)) if self.is_responsive(number)] or self._alive()

    def _alive(self) -> list[int]:
        """Numbers of the workers that have not died more often than they are restarted, as far as is known.

        Raises:
            RayWorkerError: there is none, or the workers have been closed.
        """
        self._check_open()
        with self._lock:
            for number in self._probes.copy():
                self.is_responsive(number)
            alive = [number for number in range(len(self._handles)) if number not in self._dead]
        if not alive:
            raise RayWorkerError(f"no worker of {self.name!r} is left: each died more than max_restarts={self.options.max_restarts} times")
        return alive

    def is_responsive(self, number: int) -> bool:
        """Whether a worker has answered since it was last lost. One to which a call was given up has a second for it, in which it counts as
        one that does."""
        ray = _ray()
        with self._lock:
            probe = self._probes.get(number)
            if probe is not None and ray.wait([probe.reference], timeout=0)[0]:
                del self._probes[number]
                try:
                    birth, _ = ray.get(probe.reference)
                    self._births[number].add(birth)
                except ray.exceptions.ActorDiedError:
                    self._dead.add(number)
                    self._say_dead(number)
                except ray.exceptions.RayError:
                    self._probe(number)
            probe = self._probes.get(number)
            return number not in self._dead and (probe is None or time.monotonic() < probe.patience_end)

    async def call(self, method: str, *arguments: Any, worker: int | None = None, max_task_retries: int | None = None) -> Any:
        """What a method of an object gives.

        Args:
            method: of the object, plain or a coroutine.
            arguments: of it; they travel to the worker.
            worker: which; None for ``least_busy``.
            max_task_retries: in place of that of the options.

        Raises:
            RayWorkerError: the worker died more often than it is restarted or the call is repeated, did not answer within
                ``call_timeout_s``, or has been closed.
            Exception: what the method raised.
        """
        ray = _ray()
        self._check_open()
        num_retries = self.options.max_task_retries if max_task_retries is None else max_task_retries
        with self._lock:
            number = self.least_busy() if worker is None else worker
            self._num_open[number] += 1
            self._num_calls += 1
            self._last_calls[number] = self._num_calls
        # What cannot be sent says nothing of the worker.
        is_over, reference = True, None
        try:
            reference = self._sent(number, method, arguments, num_retries)
            is_over = False
            birth, result = await asyncio.wait_for(reference, self.options.call_timeout_s)
            is_over = True
        # A TimeoutError that the method raised is one of both.
        except ray.exceptions.RayError as error:
            is_over = True
            if not isinstance(error, ray.exceptions.RayTaskError):
                self._probe(number)
            raise self._failure(number, method, error, num_retries) from error
        except TimeoutError as error:
            raise self._late(number, method) from error
        finally:
            with self._lock:
                self._num_open[number] -= 1
            if not is_over:
                ray.cancel(reference)
                self._probe(number, _PATIENCE_S)
        self._births[number].add(birth)
        return result

    def _check_open(self) -> None:
        if self._is_closed:
            raise RayWorkerError(f"the workers of {self.name!r} are closed")

    def _probe(self, number: int, patience_s: float = 0.0) -> None:
        """Ask a worker that was lost, or to which a call was given up, whether it answers, unless it is being asked."""
        with self._lock:
            end = time.monotonic() + patience_s
            # An answer that came before says nothing of now.
            self.is_responsive(number)
            if number in self._probes:
                self._probes[number].patience_end = min(self._probes[number].patience_end, end)
            elif number not in self._dead and not self._is_closed:
                self._probes[number] = _Probe(self._about(number), end)

    def _say_dead(self, number: int) -> None:
        if not self._is_closed:
            text = "%s died more than max_restarts=%d times and gets no calls any more; %d of %d workers are left"
            num_workers = len(self._handles)
            _log.warning(text, self.describe(number), self.options.max_restarts, num_workers - len(self._dead), num_workers)

    def _about(self, number: int) -> Any:
        return self._handles[number].about.options(concurrency_group=_ABOUT).remote()

    def _sent(self, number: int, method: str, arguments: Sequence[Any], num_retries: int) -> Any:
        return self._handles[number].call.options(max_task_retries=num_retries).remote(method, arguments)

    def call_all(self, method: str, *arguments: Any) -> dict[int, Exception]:
        """Call a method of all objects but those of workers that are known to be dead for good, and block until all are done; what was
        raised, by the number of the worker.

        Raises:
            RayWorkerError: the workers have been closed, or none is left.
        """
        return self._call_these(self._alive(), method, *arguments)

    def _call_these(self, numbers: Sequence[int], method: str, *arguments: Any) -> dict[int, Exception]:
        ray = _ray()
        num_retries = self.options.max_task_retries
        references = {number: self._sent(number, method, arguments, num_retries) for number in numbers}
        done, _ = ray.wait(list(references.values()), num_returns=len(references), timeout=self.options.call_timeout_s)
        failed: dict[int, Exception] = {}
        for number, reference in references.items():
            if reference not in done:
                ray.cancel(reference)
                self._probe(number, _PATIENCE_S)
                failed[number] = self._late(number, method)
                continue
            try:
                birth, _ = ray.get(reference)
                self._births[number].add(birth)
            except ray.exceptions.RayError as error:
                if not isinstance(error, ray.exceptions.RayTaskError):
                    self._probe(number)
                failed[number] = self._failure(number, method, error, num_retries)
        return failed

    def close(self, drain_s: float = 0.0) -> None:
        """End all workers; may be called again. Calls that come later are refused.

        Args:
            drain_s: that calls get to end first, from event loops in other threads.
        """
        if self._is_closed:
            return
        self._is_closed = True
        end = time.monotonic() + drain_s
        while self.num_open and time.monotonic() < end:
            time.sleep(0.01)
        for handle in self._handles:
            _ray().kill(handle)

    def __enter__(self) -> "RayWorkers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def describe(self, number: int) -> str:
        """A worker in words."""
        return f"worker {number} of {self.name!r} (first on node {self.nodes[number][:8]})"

    def _late(self, number: int, method: str) -> RayWorkerError:
        return RayWorkerError(f"{self.describe(number)} did not answer {method} within call_timeout_s={self.options.call_timeout_s:g}")

    def _failure(self, number: int, method: str, error: Exception, num_retries: int) -> Exception:
        """What a caller gets: the method's own exception, the loss of the worker, or what else Ray could not do."""
        exceptions = _ray().exceptions
        if isinstance(error, exceptions.RayTaskError):
            cause = getattr(error, "cause", None)
            return cause if isinstance(cause, Exception) else error
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        # What a worker answered is lost with its node.
        if not isinstance(error, (exceptions.ActorDiedError, exceptions.ActorUnavailableError, exceptions.ObjectLostError)):
            return RayWorkerError(f"{self.describe(number)} could not be called for {method}: {type(error).__name__}: {reason}")
        return RayWorkerLostError(
            f"{self.describe(number)} was lost in {method}, with max_restarts={self.options.max_restarts} and "
            f"max_task_retries={num_retries}: {reason}"
        )


def put(value: Any) -> Any:
    """A reference to a value in the object store."""
    return _ray().put(value)


def fetch(references: Sequence[Any]) -> Iterator[Any]:
    """The items of lists in the object store, one list at a time; blocks."""
    for reference in references:
        yield from _ray().get(reference)


def _ray() -> Any:
    try:
        import ray  # pyright: ignore[reportMissingImports]
        import ray.exceptions  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ModuleNotFoundError('ray is not installed: pip install "mcore-rl[ray]"', name="ray") from None
    return ray

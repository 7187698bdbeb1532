# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""An engine in a thread of its own, used from event loops."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mcore_inference._fields import as_integer, as_number
from mcore_inference._stability import experimental_api
from mcore_inference.adapters import LoraWeights
from mcore_inference.engine._engine import DynamicInferenceEngine
from mcore_inference.engine._lockstep import LockstepLeader, rank_name, ranks_of
from mcore_inference.engine._lockstep_config import LockstepConfig
from mcore_inference.engine._shared_loads import SharedLoad, SharedLoads
from mcore_inference.engine._stream import EndTurns, Growth, News, RequestStream, Result, call_in, deliver, settle, settle_all
from mcore_inference.engine._weights import WeightChunk, WeightPolicy, check_policy
from mcore_inference.requests import DynamicInferenceRequestRecord, EngineDeadError, QueueFullError, RankFailedError
from mcore_inference.sampling import SamplingParams

__all__ = ["EngineHealth", "EngineRunner"]

_WEIGHTS_S = 60.0
"""That the next weights of a load may take: they are read from disks and gathered from trainers, which have limits of their own."""
_WARM_STALL_S = 3.5
"""That a step may take on a GPU that has nothing to compile: with the ways to a server's ``/health`` it is red within 5 s."""
_COLD_STALL_S = 60.0
"""That a step may take which compiles, or is of a CPU."""
_LONG_CALL_S = 120.0
"""That a function run between two steps may take: to free or take a cache, copy weights, or what others ask for."""
_LAST_STEP_S = 5.0
"""That the step of an engine that is given up gets to end; it may never do so."""
_LOG = logging.getLogger("mcore_inference.engine")


@experimental_api
@dataclass(frozen=True, kw_only=True)
class EngineHealth:
    """Whether the engine makes progress."""

    alive: bool
    """The thread runs, did not fail, and is idle or stepped lately."""
    last_step_age_s: float | None
    """Seconds since the last step ended, or since work arrived; None when idle."""
    unfinished_requests: int
    failure: str | None
    """What ended the thread."""


@dataclass(frozen=True)
class _Command:
    """Something to do in the engine's thread between two steps."""

    run: Callable[[], None]
    refuse: Callable[[], None]
    """Instead of ``run``, when the engine ended before."""
    may_take_long: bool = False
    """More than a step."""


@experimental_api
class EngineRunner:
    """Steps an engine while it has requests, in one thread that nothing else may touch the engine beside.

    A request that fails ends alone. An exception of a step ends the runner: every open request gets ``EngineDeadError``, and so does
    every later one.

    An engine of several ranks (tp, pp) is run on the first; each other rank calls ``follow_runner``. Where a rank is lost, the runner ends
    with ``RankFailedError``, also while a step hangs. ``close`` leaves the engines of all ranks alike: another runner may follow.

    Engines that share experts (``ep`` of dp ranks) have a runner each, with requests of its own; they live and end together, and while one
    is paused or suspended none steps.

    Args:
        engine: of the first rank; it must not be used elsewhere until ``close``, and of several ranks only be read in ``call``.
        stall_timeout_s: age of the last step at which a busy engine counts as dead in ``health``; None for 3.5 on a GPU while the engine
            ``is_warm``, and for 60 where a step may compile or is of a CPU.
        max_failed_steps: steps that fail one after the other before the engine is given up. A step that fails before that ends its own
            requests only.
        max_waiting_requests: length of the engine's queue at which ``submit`` refuses; None for the engine's own limit only.
        lockstep: patience with the other ranks; None for the defaults.

    Raises:
        ValueError: this is another rank than the first; a limit out of its range.
        TimeoutError: the other ranks did not come.
    """

    def __init__(
        self,
        engine: DynamicInferenceEngine,
        *,
        stall_timeout_s: float | None = None,
        max_failed_steps: int = 3,
        max_waiting_requests: int | None = None,
        lockstep: LockstepConfig | None = None,
    ) -> None:
        ranks = ranks_of(engine)
        if ranks.rank > 0:
            raise ValueError(
                f"this is {rank_name(engine, ranks.rank)} of {ranks.size}, and rank 0 runs the engine; call follow_runner(engine) here"
            )
        self.engine = engine
        self._stall_timeout_s = None if stall_timeout_s is None else as_number("stall_timeout_s", stall_timeout_s, 0, 1e9)
        self._max_failed_steps = as_integer("max_failed_steps", max_failed_steps, 1, 2**31)
        self._max_waiting = 2**31 if max_waiting_requests is None else as_integer("max_waiting_requests", max_waiting_requests, 1, 2**31)
        self.num_failed_steps = 0
        """Steps that raised."""
        self._failed_in_a_row = 0
        self._wake = threading.Condition()
        self._commands: list[_Command] = []
        self._begun: list[_Command] = []
        """Taken from ``_commands`` to be run."""
        self._running: _Command | None = None
        """Of these."""
        self._results: list[Result] = []
        """Of those that were run since results were last given out."""
        self._waiting: list[tuple[Callable[[], bool], _Command]] = []
        """Run once something holds between two steps."""
        self._num_holds = 0
        self._streams: dict[int, RequestStream] = {}
        self._turns = EndTurns()
        self._closing = False
        self._paused = False
        self._awaits_weights = False
        self._failure: BaseException | None = None
        self._progress = time.monotonic()
        self._leader = None if ranks.size == 1 else LockstepLeader(engine, lockstep or LockstepConfig(), self.fail)
        # Whoever changes the engine does it through this.
        self._calls: DynamicInferenceEngine | LockstepLeader = engine if self._leader is None else self._leader
        self._peers, self._loads = engine.peers, None
        if self._peers is not None:
            config = lockstep or LockstepConfig()
            self._peers.open(config, self.fail, self._wake_up)
            self._peers.spans_steps = True
            self._loads = SharedLoads(self._peers, self._calls, config.step_timeout_s)
        self._thread = threading.Thread(target=self._run, name="mcore-engine", daemon=True)
        self._thread.start()

    def __enter__(self) -> "EngineRunner":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, timeout_s: float = 60.0) -> None:
        """Abort what is open and end the thread; may be called again.

        Raises:
            TimeoutError: the step in progress did not end in time.
        """
        with self._wake:
            self._closing = True
            self._wake.notify()
        is_given_up = isinstance(self._failure, EngineDeadError)
        self._thread.join(min(timeout_s, _LAST_STEP_S) if is_given_up else timeout_s)
        if self._thread.is_alive() and not is_given_up:
            raise TimeoutError(f"the engine's step of {time.monotonic() - self._progress:.0f} s did not end within timeout_s={timeout_s}")

    async def submit(
        self,
        prompt: str | Sequence[int] | Tensor,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        stream: bool = True,
        lora: str | None = None,
    ) -> RequestStream:
        """Queue a request and get its stream.

        Args:
            prompt: as of ``DynamicInferenceEngine.add_request``.
            sampling_params: as there.
            priority: lower ones are served first.
            stream: False for one increment at the end, which costs nothing a token.
            lora: as there.

        Raises:
            RequestError: (a subclass) as ``DynamicInferenceEngine.add_request``; ``QueueFullError`` at ``max_waiting_requests``.
            ValueError: as there.
            EngineDeadError: the engine failed or was closed.
        """
        loop = asyncio.get_running_loop()
        increments = RequestStream(self.abort, loop, whole=not stream)

        def add() -> None:
            if self.engine.num_waiting >= self._max_waiting:
                raise QueueFullError(
                    None, f"{self.engine.num_waiting} requests wait and max_waiting_requests={self._max_waiting}; try again later"
                )
            number = increments.request_id = self._calls.add_request(prompt, sampling_params, priority=priority, lora=lora)
            self._streams[number] = increments
            if stream:
                increments.text = self.engine.watch(number, lambda error: self._end(number, error))

        added = self._queue(add)
        try:
            await asyncio.shield(added)
        except asyncio.CancelledError:
            # The caller is gone, but the engine may already hold the request: abort once its number is known.
            added.add_done_callback(lambda result: None if result.cancelled() or result.exception() else increments.abort())
            raise
        return increments

    async def call(self, function: Callable[[], Any]) -> Any:
        """Run a function between two steps, in the engine's thread, and return its result (for instance a weight load).

        Raises:
            EngineDeadError: the engine failed or was closed.
        """
        return await self._queue(function, may_take_long=True)

    def _queue(self, function: Callable[[], Any], *, may_take_long: bool = False) -> "asyncio.Future[Any]":
        """The result of a function that is run between two steps."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Any] = loop.create_future()

        def command() -> None:
            try:
                value = function()
            except Exception as error:
                self._results.append((result, None, error))
            else:
                self._results.append((result, value, None))

        def refuse() -> None:
            call_in(loop, settle, result, None, self._dead())

        self._send(_Command(command, refuse, may_take_long))
        return result

    async def load_weights(
        self, chunks: Iterable[WeightChunk], version: int | None = None, *, in_flight: WeightPolicy = "recompute"
    ) -> None:
        """``DynamicInferenceEngine.load_weights`` between two steps; with ``drain`` after the steps that end the requests in flight.

        Requests that arrive meanwhile are computed with the new weights. After a load that failed half-way no step runs until one
        succeeds; requests wait for it. Ranks that share experts all call it, with one version and policy, each with the whole weights or
        its own part; they load between the same two steps, and it returns when all have.

        Args:
            chunks: read in the engine's thread.
            version: as there.
            in_flight: as there.

        Raises:
            WeightLoadError: as there.
            ValueError: as there.
            RuntimeError: ``drain`` while the runner is paused or suspended, or after a load that failed half-way. Where ranks share
                experts that is a ``WeightLoadError`` on all of them, as are ranks that do not come within ``step_timeout_s``.
            EngineDeadError: the engine failed or was closed.
        """
        check_policy(in_flight)
        chunks = self._watched(chunks)
        if self._loads is not None:
            await self._load_together(self._loads, chunks, version, in_flight)
            return

        def load() -> None:
            # It may take long, and what gives the chunks may wait for what was run before.
            self._give_results()
            self._calls.load_weights(chunks, version, in_flight="recompute" if in_flight == "drain" else in_flight)

        if in_flight != "drain":
            await self.call(load)
            return
        await self.call(self._hold_queue)
        try:
            await self._until(lambda: not self.engine.num_in_flight)
            await self.call(load)
        finally:
            self._send(_Command(lambda: self._change_holds(-1), lambda: None))

    async def _load_together(self, loads: SharedLoads, chunks: Iterable[WeightChunk], version: int | None, in_flight: WeightPolicy) -> None:
        """With the other ranks that share the experts; what they do not do in time is given up."""
        version = None if version is None else as_integer("version", version, 0, 2**63 - 1)
        loop = asyncio.get_running_loop()
        load = SharedLoad(chunks, version, in_flight, loop, loop.create_future())
        drains = in_flight == "drain"
        await self.call(lambda: (self._change_holds(drains), loads.add(load, self.engine.next_weight_version)))
        try:
            while not (await asyncio.wait([load.done], timeout=loads.patience_s))[0]:
                await self.call(lambda: loads.check_late(load))
            await load.done
        finally:
            # Where the caller is gone it may still wait.
            self._send(_Command(lambda: loads.withdraw(load), lambda: None))
            self._send(_Command(lambda: self._change_holds(-drains), lambda: None))

    async def load_lora(self, name: str, weights: LoraWeights) -> None:
        """``DynamicInferenceEngine.load_lora`` between two steps, on all ranks of the model.

        Raises:
            LoraLoadError: as there; or another rank refused it, and then it is loaded on none.
            EngineDeadError: the engine failed or was closed.
        """
        await self.call(lambda: self._calls.load_lora(name, weights))

    async def unload_lora(self, name: str) -> None:
        """``DynamicInferenceEngine.unload_lora`` between two steps, on all ranks of the model.

        Raises:
            UnknownLoraError, LoraInUseError: as there.
            EngineDeadError: the engine failed or was closed.
        """
        await self.call(lambda: self._calls.unload_lora(name))

    @property
    def loras(self) -> tuple[str, ...]:
        """Names of the loaded adapters, in the order of their loads."""
        return self.engine.loras

    def _watched(self, chunks: Iterable[WeightChunk]) -> Iterator[WeightChunk]:
        """Each chunk is progress, and to wait for one is no step that hangs."""
        following = iter(chunks)
        while True:
            self._awaits_weights = True
            try:
                chunk = next(following, None)
            finally:
                self._awaits_weights = False
                self._progress = time.monotonic()
            if chunk is None:
                return
            yield chunk

    def _hold_queue(self) -> None:
        if self.engine.num_in_flight and (self._paused or not self.engine.can_step):
            raise RuntimeError("in_flight='drain' needs steps, and none runs; unpause() and resume(), or choose recompute or keep")
        self._change_holds(1)

    def _change_holds(self, by: int) -> None:
        """Of the queue, by loads that drain it."""
        if by:
            self._num_holds += by
            self._calls.hold_queue(self._num_holds > 0)

    async def _until(self, holds: Callable[[], bool]) -> None:
        """Wait for something that is asked in the engine's thread between two steps."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()
        waiter = _Command(lambda: call_in(loop, settle, done, None, None), lambda: call_in(loop, settle, done, None, self._dead()))
        await self.call(lambda: self._waiting.append((holds, waiter)))
        await done

    async def pause(self) -> None:
        """Stop stepping, at the end of the step in progress. Requests keep their place, new ones queue; returns when no step runs.

        Raises:
            EngineDeadError: the engine failed or was closed.
        """
        await self.call(lambda: self._set_paused(True))
        await self._until_decided_steps_end()

    async def unpause(self) -> None:
        """Step again; as ``pause``."""
        await self.call(lambda: self._set_paused(False))

    async def suspend(self) -> None:
        """Pause, and free the memory of the cache (``DynamicInferenceEngine.suspend``); as ``pause``."""
        await self.call(lambda: (self._set_paused(True), self._calls.suspend()))
        await self._until_decided_steps_end()

    async def resume(self) -> None:
        """Take the memory again; the engine stays paused.

        Raises:
            torch.OutOfMemoryError: others use it; the engine stays suspended.
            EngineDeadError: the engine failed or was closed.
        """
        await self.call(self._calls.resume)

    async def _until_decided_steps_end(self) -> None:
        """Those that share the experts may be in steps that were decided before."""
        peers = self._peers
        if peers is not None:
            await self._until(lambda: not peers.num_left)

    def _set_paused(self, paused: bool) -> None:
        self._paused = paused
        self._calls.hold_steps("is paused" if paused else None)
        self._progress = time.monotonic()

    @property
    def others_have_work(self) -> bool:
        """Whether ranks that share the experts step for requests of their own, which the end of this runner would end."""
        return self._peers is not None and self._peers.are_stepping

    def abort(self, request_id: int) -> None:
        """End a request at the next step, from any thread; its stream gets the record."""
        self._end(request_id)

    def _end(self, request_id: int, error: Exception | None = None) -> None:
        """As ``abort``, by an error where there is one."""

        def command() -> None:
            record = self._calls.abort(request_id, error)
            if record is not None:
                deliver(self._ended([record]), turns=self._turns)

        self._send(_Command(command, lambda: None))

    def _send(self, command: _Command) -> None:
        with self._wake:
            if not self._closing:
                self._commands.append(command)
                self._wake.notify()
                return
        command.refuse()

    def fail(self, error: EngineDeadError) -> None:
        """Give the engine up, from any thread, also while a step hangs: no request comes in any more, open ones get the error.

        Nothing happens while the runner closes.

        Args:
            error: why; another rank that was lost, or a step without end.
        """
        with self._wake:
            if self._closing:
                return
            self._failure = error
        _LOG.critical("the engine is given up: %s", error)
        self._refuse_all()

    @property
    def failure(self) -> BaseException | None:
        """What ended the thread; None while it runs, and after ``close``."""
        return self._failure

    @property
    def max_sequence_length(self) -> int:
        """Tokens of a prompt and its output together, of which the cache may hold fewer than the context's ``max_sequence_length``."""
        return self.room(0)

    def room(self, num_prompt_tokens: int) -> int:
        """New tokens that a prompt of this length can get at most; below 1 when there is no room."""
        return self.engine.context.room(num_prompt_tokens)

    def stats(self) -> dict[str, float]:
        """``DynamicInferenceEngine.stats`` and ``latency_stats``, and the steps that failed."""
        return {**self.engine.stats(), **self.engine.latency_stats(), "failed_steps": self.num_failed_steps}

    @property
    def stall_timeout_s(self) -> float:
        """Age of the last step, in seconds, at which a busy engine counts as dead now."""
        if self._stall_timeout_s is not None:
            return self._stall_timeout_s
        return _WARM_STALL_S if self.engine.is_warm and self.engine.context.device.type == "cuda" else _COLD_STALL_S

    def health(self) -> EngineHealth:
        """Liveness by progress: a thread that hangs in a step, or with one request that comes or goes, is dead after ``stall_timeout_s``.

        One that waits for weights is after a minute at least, and one that runs what ``call``, ``suspend``, ``resume`` or ``load_weights``
        gave it after two.
        """
        waits = self._paused or (self._peers is not None and self._peers.last.hold is not None)
        busy = bool(self._commands or self._begun or (self._streams and not waits))
        age = time.monotonic() - self._progress if busy else None
        command, patience_s = self._running, self.stall_timeout_s
        if command is not None and command.may_take_long:
            patience_s = max(patience_s, _LONG_CALL_S)
        elif self._awaits_weights:
            patience_s = max(patience_s, _WEIGHTS_S)
        alive = self._thread.is_alive() and not self._closing and (age is None or age < patience_s)
        failure = None if self._failure is None else f"{type(self._failure).__name__}: {self._failure}"
        return EngineHealth(alive=alive, last_step_age_s=age, unfinished_requests=len(self._streams), failure=failure)

    # -- the engine's thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            device = self.engine.context.device
            if device.type == "cuda" and device.index is not None:
                # Which GPU is current, each thread says for itself.
                torch.cuda.set_device(device)
            while self._next_commands():
                if self._has_work():
                    self._step()
                    if self._loads is not None:
                        self._loads.follow()
                if self._waiting:
                    fulfilled = [command for holds, command in self._waiting if holds()]
                    self._waiting = [(holds, command) for holds, command in self._waiting if command not in fulfilled]
                    for command in fulfilled:
                        command.run()
        except BaseException as error:
            self._failure = self._failure or error
            _LOG.critical("the engine is given up after %d failed steps in a row: %r", self._failed_in_a_row, error)
        finally:
            self._shut_down()

    def _step(self) -> None:
        """One step, and what it brought to the streams; a step that fails ends its requests, too many in a row end the runner."""
        failure: Exception | None = None
        try:
            finished = self._calls.step()
        except Exception as error:
            failure, finished = error, self.engine.take_finished()
            self.num_failed_steps += 1
            _LOG.exception("a step failed and ended %d requests", len(finished))
        self._failed_in_a_row = 0 if failure is None else self._failed_in_a_row + 1
        self._progress = time.monotonic()
        # A request that waits, or whose stream is whole, costs nothing here.
        deliver(self._ended(finished), self._grown(self.engine.take_grown()), self._turns)
        if failure is not None and (self._failed_in_a_row >= self._max_failed_steps or isinstance(failure, RankFailedError)):
            raise failure

    def _next_commands(self) -> bool:
        """Wait for work and run the commands; False when the runner closes."""
        with self._wake:
            while not (self._commands or self._closing or self._has_work()):
                self._wake.wait()
                self._progress = time.monotonic()
            if self._closing:
                return False
            self._begun, self._commands = self._commands, []
        for command in self._begun:
            self._running = command
            command.run()
            # Many short ones are no long one.
            self._progress = time.monotonic()
        self._running = None
        self._give_results()
        self._begun = []
        return True

    def _give_results(self) -> None:
        """One call into each loop: it wakes another thread, which takes the interpreter from the step."""
        results, self._results = self._results, []
        settle_all(results)

    def _has_work(self) -> bool:
        # One that is paused tells so those that share its experts.
        return (self._peers is not None or not self._paused) and self.engine.has_work

    def _wake_up(self) -> None:
        """From another thread: those that share the experts wait for this rank."""
        with self._wake:
            self._wake.notify()

    def _grown(self, records: Iterable[DynamicInferenceRequestRecord]) -> list[Growth]:
        """What requests that go on have and their streams have not."""
        streams = self._streams
        growths: list[Growth] = []
        # A step meets this for each of its streams.
        for record in records:
            segments = record.requests
            number = segments[0].request_id
            if (stream := streams.get(number)) is None:
                continue
            first, end = stream.num_tokens, len(segments[0].generated_tokens) if len(segments) == 1 else record.num_generated
            if (text := stream.text) is None:
                text = record.generated_text[stream.num_characters :]
                stream.num_characters += len(text)
            stream.num_tokens = end
            growths.append((stream, record, first, end, text))
        return growths

    def _ended(self, records: Iterable[DynamicInferenceRequestRecord]) -> list[News]:
        """The ends of streams."""
        ends = ((self._streams.pop(record.request_id, None), record) for record in records)
        return [(stream, record) for stream, record in ends if stream is not None]

    def _shut_down(self) -> None:
        streams = self._refuse_all()
        try:
            # Late, since a failed engine may fail again here.
            for request_id in streams:
                self._calls.abort(request_id)
        finally:
            self._finish_steps()
            if self._leader is not None:
                self._leader.close(None if self._failure is None else str(self._dead()))
            if self._peers is not None:
                self._peers.close()

    def _finish_steps(self) -> None:
        """Others wait in the steps that were decided with this rank, until it has made them too."""
        peers = self._peers
        if peers is None or isinstance(self._failure, EngineDeadError):
            return
        try:
            self._calls.hold_steps("is closed")
            while peers.num_left:
                self._calls.step()
        except Exception:
            _LOG.exception("the last steps of a closed engine failed")

    def _refuse_all(self) -> dict[int, RequestStream]:
        """Take no more requests, and end the open ones, which are returned, with an error."""
        with self._wake:
            self._closing = True
            self._wake.notify()
            commands, self._commands = self._commands, []
            streams, self._streams = self._streams, {}
            waiting, self._waiting = self._waiting, []
        # One that is answered already stays so.
        for command in [*self._begun, *commands, *(command for _, command in waiting)]:
            command.refuse()
        if self._loads is not None:
            self._loads.refuse_all(self._dead())
        deliver([(stream, self._dead()) for stream in streams.values()])
        return streams

    def _dead(self) -> EngineDeadError:
        if isinstance(self._failure, EngineDeadError):
            return self._failure
        if self._failure is not None:
            return EngineDeadError(f"the engine failed: {type(self._failure).__name__}: {self._failure}")
        return EngineDeadError("the engine was closed")

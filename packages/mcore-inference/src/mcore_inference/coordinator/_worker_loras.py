# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Adapters of a coordinator in the engine of one worker."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from mcore_inference.coordinator._messages import LoadLora, Message, SignalAck, UnloadLora, WeightAck, WeightBucket
from mcore_inference.coordinator._weights import LoraReceiver
from mcore_inference.engine import EngineRunner, LoraInUseError
from mcore_inference.requests import EngineDeadError, UnknownLoraError

_LEAVE_S = 5.0
"""That requests which were aborted get to leave the engine, of an adapter that is to be forgotten."""
_LOOK_S = 0.02

Send = Callable[[Message], Awaitable[None]]


class WorkerLoras:
    """Does what the coordinator says of adapters, in its order. What is so already is not done again: a worker that was given up for a
    while may be told twice.

    Args:
        runner: of the engine; adapters that it got from others are left alone.
    """

    def __init__(self, runner: EngineRunner) -> None:
        self._runner = runner
        self._coming: LoraReceiver | None = None
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loads: dict[str, str] = {}

    @property
    def loads(self) -> dict[str, str]:
        """The names of the loads by those of the adapters."""
        return dict(self._loads)

    @property
    def is_changing(self) -> bool:
        """Whether something is in progress, so that ``loads`` may change."""
        return bool(self._tasks)

    def give_up(self) -> None:
        """No more buckets come."""
        self._coming = None

    async def begin(self, message: LoadLora, send: Send) -> None:
        """Buckets of an adapter follow; one whose buckets had not ended is forgotten."""
        self._coming = LoraReceiver(message)
        await send(WeightAck(call=message.call, index=0))

    async def take(self, bucket: WeightBucket, send: Send) -> bool:
        """Whether a bucket is of the adapter that comes."""
        coming = self._coming
        if coming is None or coming.message.call != bucket.call:
            return False
        if coming.put(bucket):
            self._coming = None
            self._begin(self._load(coming, bucket.index, send))
        else:
            await send(WeightAck(call=bucket.call, index=bucket.index))
        return True

    def unload(self, message: UnloadLora, send: Send) -> None:
        """Forget an adapter, behind what was begun before."""
        self._begin(self._unload(message, send))

    def _begin(self, work: "Awaitable[None]") -> None:
        # Messages are read meanwhile: weights that the engine waits for come by them.
        task: asyncio.Task[None] = asyncio.ensure_future(work)  # type: ignore[assignment]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load(self, coming: LoraReceiver, index: int, send: Send) -> None:
        message, error = coming.message, ""
        async with self._turn:
            try:
                if self._loads.get(message.name) != message.load:
                    weights = await asyncio.to_thread(coming.weights)
                    await self._forget(message.name)
                    await self._runner.load_lora(message.name, weights)
                    self._loads[message.name] = message.load
            except EngineDeadError:
                # The worker ends by itself.
                return
            except Exception as failure:
                error = f"{type(failure).__name__}: {failure}"
        await send(WeightAck(call=message.call, index=index, error=error))

    async def _unload(self, message: UnloadLora, send: Send) -> None:
        error = ""
        async with self._turn:
            try:
                if self._loads.get(message.name) == message.load:
                    await self._forget(message.name)
            except EngineDeadError:
                return
            except Exception as failure:
                error = f"{type(failure).__name__}: {failure}"
        await send(SignalAck(call=message.call, error=error))

    async def _forget(self, name: str) -> None:
        """Unload what the coordinator had loaded under a name, if anything."""
        deadline = time.monotonic() + _LEAVE_S
        while name in self._loads:
            try:
                await self._runner.unload_lora(name)
            except UnknownLoraError:
                # Others of this process had it unloaded.
                del self._loads[name]
            except LoraInUseError:
                # A request that was aborted on its way into the engine is there for a moment.
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(_LOOK_S)
            else:
                del self._loads[name]

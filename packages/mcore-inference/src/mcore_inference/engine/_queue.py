# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A queue of an event loop that can be shut down, on every Python: the standard library has it from 3.13 on."""

import asyncio
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

__all__ = ["asyncio_Queue", "asyncio_QueueShutDown"]

if sys.version_info >= (3, 13):
    asyncio_Queue, asyncio_QueueShutDown = asyncio.Queue, asyncio.QueueShutDown
else:
    if TYPE_CHECKING:
        from collections import deque

    _Item = TypeVar("_Item")

    class asyncio_QueueShutDown(Exception):
        """The queue was shut down: nothing goes in, and what may be taken out of it is gone."""

    class asyncio_Queue(asyncio.Queue[_Item]):
        """``asyncio.Queue`` with the ``shutdown`` of Python 3.13, whose own class this is from there on."""

        if TYPE_CHECKING:
            _getters: deque[asyncio.Future[None]]
            _putters: deque[asyncio.Future[None]]
            _unfinished_tasks: int
            _finished: asyncio.Event

            def _get(self) -> _Item: ...
            def _wakeup_next(self, waiters: deque[asyncio.Future[None]]) -> None: ...

        _is_shut_down = False

        def shutdown(self, immediate: bool = False) -> None:
            """Refuse what is put from now on; ``get`` takes what is there, and raises then.

            Args:
                immediate: drop what is there, as if it were done, so that ``get`` raises at once; also after a shutdown that was not.
            """
            self._is_shut_down = True
            while immediate and not self.empty():
                self._get()
                self._unfinished_tasks = max(0, self._unfinished_tasks - 1)
            if immediate and not self._unfinished_tasks:
                self._finished.set()
            for waiters in (self._getters, self._putters):
                while waiters:
                    self._wakeup_next(waiters)

        async def put(self, item: _Item) -> None:
            """Put an item in, once there is room.

            Raises:
                asyncio_QueueShutDown: the queue is shut down, be it while there was no room.
            """
            await self._wait_while(self.full, self._putters)
            self.put_nowait(item)

        def put_nowait(self, item: _Item) -> None:
            """Put an item in.

            Raises:
                asyncio_QueueShutDown: the queue is shut down, full or not.
                asyncio.QueueFull: there is no room.
            """
            if self._is_shut_down:
                raise asyncio_QueueShutDown
            super().put_nowait(item)

        async def get(self) -> _Item:
            """Take an item out, once there is one.

            Raises:
                asyncio_QueueShutDown: the queue is shut down, and empty.
            """
            await self._wait_while(self.empty, self._getters)
            return self.get_nowait()

        def get_nowait(self) -> _Item:
            """Take an item out.

            Raises:
                asyncio_QueueShutDown: the queue is shut down, and empty.
                asyncio.QueueEmpty: it is empty.
            """
            if self._is_shut_down and self.empty():
                raise asyncio_QueueShutDown
            return super().get_nowait()

        async def _wait_while(self, is_blocked: Callable[[], bool], waiters: "deque[asyncio.Future[None]]") -> None:
            """Until it is not, or the queue is shut down."""
            while is_blocked() and not self._is_shut_down:
                waiter = asyncio.get_running_loop().create_future()
                waiters.append(waiter)
                try:
                    await waiter
                except BaseException:
                    if waiter in waiters:
                        waiters.remove(waiter)
                    # It was woken, and cancelled before it could go on: the next in line goes in its place.
                    elif not is_blocked() and not waiter.cancelled():
                        self._wakeup_next(waiters)
                    raise

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The queue that can be shut down: the same on a Python whose library has it and on one whose library has not."""

import asyncio
import sys
from collections.abc import Coroutine
from typing import Any

import pytest

from mcore_inference import asyncio_Queue, asyncio_QueueShutDown

if sys.version_info >= (3, 13):
    Last, Least = asyncio.LifoQueue, asyncio.PriorityQueue
else:

    class Last(asyncio_Queue, asyncio.LifoQueue):
        """The last item comes first."""

    class Least(asyncio_Queue, asyncio.PriorityQueue):
        """The least item comes first."""


def run(check: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(check, 10))


async def begun(*waiting: Coroutine[Any, Any, Any]) -> list["asyncio.Task[Any]"]:
    """Tasks that have run as far as they can."""
    tasks = [asyncio.create_task(one) for one in waiting]
    for _ in range(5):
        await asyncio.sleep(0)
    return tasks


@pytest.mark.parametrize(("make", "order"), [(asyncio_Queue, [2, 3, 1]), (Last, [1, 3, 2]), (Least, [1, 2, 3])])
def test_what_is_there_is_taken_and_nothing_goes_in(make: type[asyncio_Queue[int]], order: list[int]) -> None:
    async def check() -> None:
        queue = make()
        for item in (2, 3, 1):
            queue.put_nowait(item)
        queue.shutdown()
        queue.shutdown()
        with pytest.raises(asyncio_QueueShutDown):
            await queue.put(4)
        with pytest.raises(asyncio_QueueShutDown):
            queue.put_nowait(4)
        joined = (await begun(queue.join()))[0]
        assert [await queue.get(), queue.get_nowait(), await queue.get()] == order
        with pytest.raises(asyncio_QueueShutDown):
            await queue.get()
        with pytest.raises(asyncio_QueueShutDown):
            queue.get_nowait()
        assert not joined.done()
        for _ in order:
            queue.task_done()
        await joined

    run(check())


def test_shut_down_at_once_drops_what_is_there_as_done() -> None:
    async def check() -> None:
        queue: asyncio_Queue[int] = asyncio_Queue()
        for item in range(3):
            queue.put_nowait(item)
        await queue.get()
        (joined,) = await begun(queue.join())
        queue.shutdown(immediate=True)
        with pytest.raises(asyncio_QueueShutDown):
            queue.get_nowait()
        await asyncio.sleep(0)
        # What was taken is still worked on.
        assert queue.empty() and not joined.done()
        queue.task_done()
        await joined

    run(check())


def test_a_shutdown_can_become_an_immediate_one() -> None:
    async def check() -> None:
        queue: asyncio_Queue[int] = asyncio_Queue()
        queue.put_nowait(1)
        queue.shutdown()
        (joined,) = await begun(queue.join())
        queue.shutdown(immediate=True)
        await joined
        with pytest.raises(asyncio_QueueShutDown):
            await queue.get()

    run(check())


@pytest.mark.parametrize("immediate", [False, True])
def test_all_who_wait_are_woken_and_told(immediate: bool) -> None:
    async def check() -> None:
        full: asyncio_Queue[int] = asyncio_Queue(maxsize=1)
        full.put_nowait(0)
        empty: asyncio_Queue[int] = asyncio_Queue()
        waiting = await begun(*(full.put(item) for item in (1, 2, 3)), *(empty.get() for _ in range(3)))
        assert not any(task.done() for task in waiting)
        for queue in (full, empty):
            queue.shutdown(immediate)
        ends = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(end) for end in ends] == [asyncio_QueueShutDown] * 6
        # Full, but shut down before all.
        with pytest.raises(asyncio_QueueShutDown):
            full.put_nowait(4)
        assert full.qsize() == (0 if immediate else 1)

    run(check())


def test_one_that_is_cancelled_as_it_wakes_lets_the_next_go() -> None:
    async def check() -> None:
        queue: asyncio_Queue[int] = asyncio_Queue(maxsize=1)
        first, second, gone = await begun(*(queue.get() for _ in range(3)))
        gone.cancel()
        queue.put_nowait(7)
        first.cancel()
        assert await second == 7
        queue.put_nowait(8)
        first, second = await begun(queue.put(9), queue.put(10))
        assert queue.get_nowait() == 8
        first.cancel()
        await second
        assert queue.get_nowait() == 10
        queue.put_nowait(11)
        with pytest.raises(asyncio.QueueFull):
            queue.put_nowait(12)
        assert queue.get_nowait() == 11
        with pytest.raises(asyncio.QueueEmpty):
            queue.get_nowait()

    run(check())


def test_items_of_many_hands_arrive_once() -> None:
    async def check() -> None:
        queue: asyncio_Queue[int] = asyncio_Queue(maxsize=2)
        taken: list[int] = []

        async def give(first: int) -> None:
            for item in range(first, first + 50):
                await queue.put(item)

        async def take() -> None:
            while True:
                try:
                    taken.append(await queue.get())
                except asyncio_QueueShutDown:
                    return
                queue.task_done()

        takers = await begun(*(take() for _ in range(3)))
        await asyncio.gather(*(give(100 * number) for number in range(4)))
        await queue.join()
        queue.shutdown()
        await asyncio.gather(*takers)
        assert sorted(taken) == [100 * number + item for number in range(4) for item in range(50)]

    run(check())

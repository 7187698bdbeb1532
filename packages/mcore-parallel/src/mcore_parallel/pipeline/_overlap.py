# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A forward and a backward that take turns, so that the communication of one hides behind the computation of the other."""

import contextvars
import threading
from collections.abc import Callable
from typing import TypeVar

import torch

F = TypeVar("F")
B = TypeVar("B")


class Overlap:
    """Interleaves the two parts of a ``Combined`` action at the places where they communicate.

    A layer that starts a collective calls ``pause`` between the start and the wait: the other part goes on there, up to its own
    next pause. Only one part runs at a time, and the turns depend on nothing but the pauses, so all ranks start their
    collectives in the same order. Outside of a pair ``pause`` does nothing.

    One object serves one stage: hand it to ``run_schedule`` and to the layers.

    Example:
        >>> overlap, events = Overlap(), []
        >>> def part(name):
        ...     events.append(name + " starts")
        ...     overlap.pause()
        ...     events.append(name + " ends")
        >>> _ = overlap.run(lambda: part("forward"), lambda: part("backward"))
        >>> events
        ['forward starts', 'backward starts', 'forward ends', 'backward ends']
    """

    def __init__(self) -> None:
        self._pair: _Pair | None = None

    def pause(self) -> None:
        """Let the other part go on; returns when that pauses or ends. Any thread that works for a part may call it."""
        if self._pair is not None:
            self._pair.hand_over()

    def run(self, forward: Callable[[], F], backward: Callable[[], B]) -> tuple[F, B]:
        """Both parts, beginning with the forward, which runs in this thread; returns their results.

        Raises:
            RuntimeError: a pair is running already.
        """
        if self._pair is not None:
            raise RuntimeError("a pair is running already; a part of a pair cannot run a pair")
        pair = self._pair = _Pair()
        results: list[B] = []
        failures: list[BaseException] = []
        context, stream = contextvars.copy_context(), _current_stream()

        def helper() -> None:
            pair.wake[1].acquire()
            try:
                # A thread begins on the default stream of the default device.
                with torch.cuda.stream(stream):  # does nothing for None
                    results.append(context.run(backward))
            except BaseException as failure:  # raised again below, in the caller's thread
                failures.append(failure)
            finally:
                pair.end(1)

        thread = threading.Thread(target=helper, name="pipeline-backward", daemon=True)
        thread.start()
        try:
            result = forward()
        finally:
            pair.end(0)
            thread.join()
            self._pair = None
        if failures:
            raise failures[0]
        return result, results[0]


class _Pair:
    """Whose turn it is."""

    def __init__(self) -> None:
        self.turn = 0
        self.ended = [False, False]
        self.wake = (threading.Semaphore(0), threading.Semaphore(0))

    def hand_over(self) -> None:
        here, there = self.turn, 1 - self.turn
        if self.ended[there]:
            return
        self.turn = there
        self.wake[there].release()
        self.wake[here].acquire()

    def end(self, here: int) -> None:
        self.ended[here] = True
        if not self.ended[1 - here]:
            self.turn = 1 - here
            self.wake[1 - here].release()


def _current_stream() -> torch.cuda.Stream | None:
    return torch.cuda.current_stream() if torch.cuda.is_available() and torch.cuda.is_initialized() else None

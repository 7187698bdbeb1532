# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""One event loop a thread, for callers that are not asynchronous themselves."""

import asyncio
import threading

__all__ = ["get_asyncio_loop"]

# A thread's loop has to outlive the calls that use it; asyncio's own per-thread default is deprecated.
_cached = threading.local()


def get_asyncio_loop(loop: asyncio.AbstractEventLoop | None = None) -> asyncio.AbstractEventLoop:
    """A loop to run coroutines on: the one given, else the running one, else this thread's own.

    The thread's own loop is made at the first call and again after it was closed; who made it closes it.
    """
    if loop is not None:
        return loop
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        pass
    own: asyncio.AbstractEventLoop | None = getattr(_cached, "loop", None)
    if own is None or own.is_closed():
        own = _cached.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(own)
    return own

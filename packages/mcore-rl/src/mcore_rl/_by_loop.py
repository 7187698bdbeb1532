# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What belongs to one of several event loops."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def of_this_loop(by_loop: dict[asyncio.AbstractEventLoop, T], make: Callable[[], T]) -> T:
    """What belongs to the event loop that runs here. A closed one is dropped; what it had may refer to it, so weak keys would keep both."""
    for ended in [loop for loop in list(by_loop) if loop.is_closed()]:
        by_loop.pop(ended, None)
    return by_loop.setdefault(asyncio.get_running_loop(), make())

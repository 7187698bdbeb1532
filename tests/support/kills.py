# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A process that dies at one of its operations on files."""

import os
import signal
from collections.abc import Callable, Iterable
from typing import Any


def die_at(operation: int, names: Iterable[str]) -> None:
    """From now on this process is killed instead of its ``operation``-th call, from 0, of the functions ``names`` of ``os``.

    A write of more than one byte is half done by then.
    """
    count, write = 0, os.write

    def deadly(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            if count == operation:
                if real is write and len(args[1]) > 1:
                    real(args[0], args[1][: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1
            return real(*args, **kwargs)

        return call

    for name in names:
        setattr(os, name, deadly(getattr(os, name)))

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Recordings by a tape, in place of a GPU."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Tape(TorchDispatchMode):
    """Writes operations down with the very tensors they touch, so that running them again fills the same memory, as a CUDA graph does."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []
        self.undo: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            written = [args[0]] if isinstance(args[0], Tensor) else list(args[0])
            written += [kwargs["out"]] if "out" in kwargs else []
            self.undo += [(tensor, tensor.clone()) for tensor in written]
        found = func(*args, **kwargs)
        self.operations.append((func, args, kwargs, found))
        return found

    def replay(self) -> None:
        with torch.no_grad():
            for func, args, kwargs, before in self.operations:
                _refill(before, func(*args, **kwargs))


def _refill(before: Any, now: Any) -> None:
    if isinstance(before, Tensor) and before.data_ptr() != now.data_ptr():
        # A collective returns before its result is there, and what was recorded behind it waits for the tensor of the recording. Something
        # that was recorded since may have squeezed that.
        torch.ops._c10d_functional.wait_tensor(now)
        before.copy_(now.view_as(before))
    elif isinstance(before, tuple | list):
        for old, new in zip(before, now, strict=True):
            _refill(old, new)


class TapeCapture:
    """Recording without a device; conforms to ``Capture``."""

    def __init__(self) -> None:
        self.recorded = 0
        self.pools: list[object] = []
        """Of each recording."""

    def pool(self) -> Any:
        return object()

    def warm(self, work: Callable[[], Any]) -> Any:
        return work()

    def record(self, work: Callable[[], Any], pool: Any) -> tuple[Any, Callable[[], None]]:
        self.recorded += 1
        self.pools.append(pool)
        with Tape() as tape:
            found = work()
        # A recording changes nothing: only its replays do.
        with torch.no_grad():
            for tensor, before in reversed(tape.undo):
                tensor.copy_(before.view_as(tensor))
        return found, tape.replay

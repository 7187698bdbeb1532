# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Where the tensors of a cache lie."""

import contextlib
import logging
import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from mcore_inference._stability import experimental_api
from mcore_inference.memory._driver import has_driver
from mcore_inference.memory._reserved import ReservedRange
from mcore_inference.memory._unified import ManagedRegion, UnifiedMemoryUnsupportedError, release_one
from mcore_parallel.comm import all_reduce
from mcore_parallel.groups import Group

_LOG = logging.getLogger("mcore_inference.memory")


@experimental_api
class CacheMemory(Protocol):
    """Tensors whose memory is given up and taken again together."""

    keeps_addresses: bool
    """Whether tensors lie where they lay after ``free`` and ``allocate_again``, so that recorded graphs hold."""
    keeps_contents: bool
    """Whether ``free`` moves contents to the host instead of dropping them."""

    @property
    def is_allocated(self) -> bool:
        """Whether there is memory on the device behind the tensors."""
        ...

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """One more tensor.

        Raises:
            torch.OutOfMemoryError: there is too little memory.
        """
        ...

    def release(self, tensor: Tensor) -> None:
        """Free one of ``zeros`` for good, which nobody reads any more; nothing happens to another one."""
        ...

    def step_tensors(self) -> contextlib.AbstractContextManager[object]:
        """A block in which the tensors of steps are made."""
        ...

    def free(self) -> None:
        """Give the memory up; nothing happens when it is given up already."""
        ...

    def allocate_again(self) -> None:
        """Take it again. Zeros, unless contents are kept.

        Raises:
            torch.OutOfMemoryError: there is too little memory; none is held then.
        """
        ...


@experimental_api
def cache_memory(device: torch.device, unified_memory_level: int = 0, ranks: Group | None = None) -> CacheMemory:
    """Memory of a device.

    Args:
        device: where tensors lie.
        unified_memory_level: as of ``InferenceConfig``.
        ranks: that share the model, and call this together; None for this process alone. Where some of them have no managed memory, all
            go on without, with a warning.

    Raises:
        UnifiedMemoryUnsupportedError: managed memory is asked for where no rank has it.
    """
    managed = _managed_memory(device, unified_memory_level, ranks) if unified_memory_level else None
    if managed is not None:
        return managed
    return ReservedMemory(device) if device.type == "cuda" and has_driver() else PlainMemory(device)


def _managed_memory(device: torch.device, level: int, ranks: Group | None) -> "ManagedMemory | None":
    """Managed memory; None where some of the ranks have none."""
    memory, refusal = None, None
    try:
        memory = ManagedMemory(device, level)
    except UnifiedMemoryUnsupportedError as error:
        refusal = error
    num_ranks = 1 if ranks is None else ranks.size
    has_it = torch.tensor(int(memory is not None), device=device)
    num_able = int(has_it if ranks is None else all_reduce(has_it, ranks, op="sum"))
    if refusal is not None and not num_able:
        raise refusal
    if num_able == num_ranks:
        return memory
    lacking = f"{num_ranks - num_able} of the {num_ranks} ranks of the model have no managed memory"
    here = "" if refusal is None else f", this one too: {refusal}"
    _LOG.warning("unified_memory_level=%d is 0 on all of them: %s%s", level, lacking, here)
    return None


class PlainMemory:
    """Torch's own memory; tensors come back at another address as a rule."""

    keeps_addresses = keeps_contents = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensors: list[Tensor] = []

    @property
    def is_allocated(self) -> bool:
        return all(tensor.untyped_storage().size() == tensor.nbytes for tensor in self._tensors)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        self._tensors.append(torch.zeros(tuple(shape), dtype=dtype, device=self._device))
        return self._tensors[-1]

    def release(self, tensor: Tensor) -> None:
        release_one(self._tensors, tensor)

    def step_tensors(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def free(self) -> None:
        for tensor in self._tensors:
            tensor.untyped_storage().resize_(0)

    def allocate_again(self) -> None:
        try:
            for tensor in self._tensors:
                tensor.untyped_storage().resize_(tensor.nbytes)
        except RuntimeError:
            self.free()
            raise
        for tensor in self._tensors:
            tensor.zero_()


class ReservedMemory:
    """Addresses that stay reserved; the memory behind them comes and goes."""

    keeps_addresses, keeps_contents = True, False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ranges: list[tuple[ReservedRange, Tensor]] = []

    @property
    def is_allocated(self) -> bool:
        return all(reserved.is_mapped for reserved, _ in self._ranges)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        if not num_bytes:
            return torch.zeros(tuple(shape), dtype=dtype, device=self._device)
        reserved = ReservedRange(num_bytes, self._device)
        tensor = reserved.take()[:num_bytes].view(dtype).view(tuple(shape)).zero_()
        self._ranges.append((reserved, tensor))
        return tensor

    def release(self, tensor: Tensor) -> None:
        for place, (reserved, each) in enumerate(self._ranges):
            if each is tensor:
                del self._ranges[place]
                torch.cuda.synchronize(self._device)
                # The addresses go with the last tensor on them.
                reserved.unmap()
                return

    def step_tensors(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def free(self) -> None:
        torch.cuda.synchronize(self._device)
        for reserved, _ in self._ranges:
            reserved.unmap()

    def allocate_again(self) -> None:
        free, total = torch.cuda.mem_get_info(self._device)
        if free - sum(reserved.num_bytes for reserved, _ in self._ranges) < total // 20:
            # Torch holds memory that nobody uses, or that copies to the host still read. It gives all of it up, which waits for them; a
            # twentieth of the device is left to libraries that take theirs without torch.
            torch.cuda.empty_cache()
        try:
            for reserved, _ in self._ranges:
                reserved.map()
        except RuntimeError:
            self.free()
            raise
        for _, tensor in self._ranges:
            tensor.zero_()


class ManagedMemory:
    """Managed memory: on the device while the engine runs, in host memory, contents and all, while it is suspended.

    Args:
        device: a GPU.
        level: 1 for the cache, 2 for the tensors of steps too.

    Raises:
        UnifiedMemoryUnsupportedError: the machine has no managed memory that device and host both reach.
    """

    keeps_addresses = keeps_contents = True

    def __init__(self, device: torch.device, level: int) -> None:
        self._region, self._level = ManagedRegion(device), level
        self.is_allocated = True

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self._region.zeros(shape, dtype)

    def release(self, tensor: Tensor) -> None:
        self._region.release(tensor)

    def step_tensors(self) -> contextlib.AbstractContextManager[object]:
        return self._region.allocations() if self._level > 1 else contextlib.nullcontext()

    def free(self) -> None:
        self._region.move(on_device=False)
        self.is_allocated = False

    def allocate_again(self) -> None:
        self._region.move(on_device=True)
        self.is_allocated = True

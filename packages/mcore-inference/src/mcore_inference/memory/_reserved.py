# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Addresses of a GPU, and the memory that lies behind them for a while.

CUDA driver API, virtual memory management: addresses are reserved once, memory is created and mapped there as often as needed.
"""

import contextlib
import weakref
from typing import Any

import torch
from torch import Tensor

from mcore_inference.memory._driver import call, driver


class ReservedRange:
    """A range of addresses, mapped at first.

    Args:
        num_bytes: at least; above 0.
        device: a GPU.

    Raises:
        torch.OutOfMemoryError: the device has too little memory.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        torch.cuda.init()
        self._device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        # The driver works in the context of the current device.
        with torch.cuda.device(self._device):
            self._kind = _memory_of(self._device.index)
            recommended = driver().CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
            unit = int(call("cuMemGetAllocationGranularity", self._kind, recommended))
            self.num_bytes = -(-num_bytes // unit) * unit
            self._address = int(call("cuMemAddressReserve", self.num_bytes, unit, 0, 0))
        self.is_mapped = False
        try:
            self.map()
        except RuntimeError:
            call("cuMemAddressFree", self._address, self.num_bytes)
            raise

    def take(self) -> Tensor:
        """uint8 [num_bytes] at these addresses, to be read and written while there is memory. The range goes back to the driver with the
        last tensor on it: it is taken once."""
        array = _Array(self._address, self.num_bytes)
        weakref.finalize(array, self._release).atexit = False
        return torch.as_tensor(array, device=self._device)

    def map(self) -> None:
        """Put memory there; nothing happens when it is there already.

        Raises:
            torch.OutOfMemoryError: the device has too little; none is held then.
        """
        if self.is_mapped:
            return
        module = driver()
        access = module.CUmemAccessDesc()
        access.location = self._kind.location
        access.flags = module.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        with torch.cuda.device(self._device):
            handle = call("cuMemCreate", self.num_bytes, self._kind, 0)
            try:
                call("cuMemMap", self._address, self.num_bytes, 0, handle, 0)
            finally:
                # The mapping holds the memory from here on.
                call("cuMemRelease", handle)
            self.is_mapped = True
            call("cuMemSetAccess", self._address, self.num_bytes, [access], 1)

    def unmap(self) -> None:
        """Give the memory back, which the device must have done with; nothing happens when none is there."""
        if self.is_mapped:
            with torch.cuda.device(self._device):
                call("cuMemUnmap", self._address, self.num_bytes)
            self.is_mapped = False

    def _release(self) -> None:
        # The device may be gone by then, and its memory with it.
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize(self._device)
            self.unmap()
            call("cuMemAddressFree", self._address, self.num_bytes)


class _Array:
    """Bytes at an address, as libraries hand arrays of a GPU to one another."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


def _memory_of(ordinal: int) -> Any:
    """What the driver is asked for: memory of one GPU."""
    module = driver()
    kind = module.CUmemAllocationProp()
    kind.type = module.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    kind.location.type = module.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    kind.location.id = ordinal
    return kind

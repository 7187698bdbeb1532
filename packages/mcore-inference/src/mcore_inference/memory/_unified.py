# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Managed memory: one address for host and device, whose pages lie where they were asked to or were touched last.

CUDA runtime API, unified memory programming; from CUDA 13 on a place is a structure instead of a number.
"""

import contextlib
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mcore_inference._stability import experimental_api
from mcore_inference.memory._driver import call, driver, has_driver

_COMPILE_TIMEOUT_S = 30
# Signatures of torch.cuda.memory.CUDAPluggableAllocator; 1 is cudaMemAttachGlobal.
_ALLOCATOR = """
#include <stddef.h>
extern int cudaMallocManaged(void **, size_t, unsigned);
extern int cudaFree(void *);
void *managed_malloc(ptrdiff_t size, int device, void *stream) {
    void *address = NULL;
    return cudaMallocManaged(&address, (size_t)size, 1) == 0 ? address : NULL;
}
void managed_free(void *address, ptrdiff_t size, int device, void *stream) { cudaFree(address); }
"""
_HOST = -1


@experimental_api
class UnifiedMemoryUnsupportedError(RuntimeError):
    """This machine has no managed memory that the engine can use; says what is missing."""


@experimental_api
class UnifiedMemoryCompileTimeoutError(UnifiedMemoryUnsupportedError):
    """The C compiler took too long for the allocator of managed memory."""


@experimental_api
def create_unified_mempool() -> torch.cuda.MemPool:
    """A pool whose tensors lie in managed memory; give it to ``torch.cuda.use_mem_pool``.

    The allocator is compiled by the machine's C compiler when it is first asked for, and found again by later processes.

    Raises:
        UnifiedMemoryCompileTimeoutError: the C compiler takes more than 30 s.
        UnifiedMemoryUnsupportedError: no CUDA, no C compiler, or it fails; or no folder for what it makes.
    """
    _check_cuda()
    return torch.cuda.MemPool(_allocator().allocator())


@experimental_api
def prefetch_managed_tensor(tensor: Tensor, *, device: int, stream: torch.cuda.Stream | None = None) -> None:
    """Begin to move a tensor in managed memory.

    Args:
        tensor: contiguous; nothing happens for one without elements.
        device: number of a GPU, or -1 for host memory.
        stream: in which the move takes its turn; None for the current one.

    Raises:
        ValueError: the tensor is not contiguous.
        DriverError: it does not lie in managed memory.
    """
    if span := _span(tensor):
        stream = torch.cuda.current_stream() if stream is None else stream
        new = _places_are_structures()
        call("cuMemPrefetchAsync", *span, _place(device), *((0,) if new else ()), stream.cuda_stream)


@experimental_api
def advise_managed_tensor_preferred_location(tensor: Tensor, *, device: int) -> None:
    """Say where pages of a tensor in managed memory should stay unless others need the room.

    Args:
        tensor: contiguous; nothing happens for one without elements.
        device: number of a GPU, or -1 for host memory.

    Raises:
        ValueError: the tensor is not contiguous.
        DriverError: it does not lie in managed memory.
    """
    _advise(tensor, "CU_MEM_ADVISE_SET_PREFERRED_LOCATION", device)


@experimental_api
def advise_managed_tensor_accessed_by(tensor: Tensor, *, device: int) -> None:
    """Say who reads and writes a tensor in managed memory: its pages are mapped there, wherever they lie.

    Args:
        tensor: contiguous; nothing happens for one without elements.
        device: number of a GPU, or -1 for the host.

    Raises:
        ValueError: the tensor is not contiguous.
        DriverError: it does not lie in managed memory.
    """
    _advise(tensor, "CU_MEM_ADVISE_SET_ACCESSED_BY", device)


@experimental_api
def prefetch_managed_module_parameters(module: nn.Module, *, device: int, include_buffers: bool = False) -> int:
    """Begin to move the parameters of a module, and its buffers on wish; the bytes that move.

    Raises:
        ValueError, DriverError: as of ``prefetch_managed_tensor``.
    """
    tensors = [*module.parameters(), *(module.buffers() if include_buffers else ())]
    for tensor in tensors:
        prefetch_managed_tensor(tensor.detach(), device=device)
    return sum(tensor.nbytes for tensor in tensors)


def release_one(tensors: list[Tensor], tensor: Tensor) -> None:
    """Take a tensor out of a list and free its storage; nothing happens to one that is not there."""
    for place, each in enumerate(tensors):
        # Equal ones are other ones.
        if each is tensor:
            del tensors[place]
            tensor.untyped_storage().resize_(0)
            return


class ManagedRegion:
    """Tensors in managed memory that move together.

    Raises:
        UnifiedMemoryUnsupportedError: no pool can be made, or host and device cannot both use managed memory at once.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise UnifiedMemoryUnsupportedError(f"unified memory needs a GPU, and the model is on {device}; set unified_memory_level=0")
        self._pool = create_unified_mempool()
        self._device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        name = driver().CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS
        if not call("cuDeviceGetAttribute", name, self._device.index):
            raise UnifiedMemoryUnsupportedError(f"{self._device} shares no managed memory with a busy host; set unified_memory_level=0")
        self._tensors: list[Tensor] = []

    @contextlib.contextmanager
    def allocations(self) -> Iterator[None]:
        """A block whose tensors on the device lie in managed memory."""
        with torch.cuda.use_mem_pool(self._pool, device=self._device):
            yield

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """One more tensor of the region, on the device."""
        with self.allocations():
            tensor = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        if tensor.nbytes:
            advise_managed_tensor_preferred_location(tensor, device=self._device.index)
            advise_managed_tensor_accessed_by(tensor, device=self._device.index)
        self._tensors.append(tensor.zero_())
        return tensor

    def release(self, tensor: Tensor) -> None:
        """Give one up; nothing happens to another one."""
        release_one(self._tensors, tensor)

    def move(self, *, on_device: bool) -> None:
        """Move all tensors to the device or to host memory, and wait for it."""
        with torch.cuda.device(self._device):
            for tensor in self._tensors:
                place = self._device.index if on_device else _HOST
                if tensor.nbytes:
                    advise_managed_tensor_preferred_location(tensor, device=place)
                prefetch_managed_tensor(tensor, device=place)
            torch.cuda.synchronize()


def _advise(tensor: Tensor, advice: str, device: int) -> None:
    if span := _span(tensor):
        call("cuMemAdvise", *span, getattr(driver().CUmem_advise, advice), _place(device))


def _span(tensor: Tensor) -> tuple[int, int] | None:
    """Address and bytes; None for no bytes."""
    if not tensor.is_contiguous():
        raise ValueError(f"the tensor of shape {tuple(tensor.shape)} is not contiguous; give its .contiguous() base")
    _check_cuda()
    return (tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else None


@functools.cache
def _places_are_structures() -> bool:
    return int(driver().CUDA_VERSION) >= 13000


def _place(device: int) -> Any:
    """A place as the driver's library of this version takes it."""
    module = driver()
    if not _places_are_structures():
        return module.CU_DEVICE_CPU if device == _HOST else device
    place = module.CUmemLocation()
    kinds = module.CUmemLocationType
    place.type = kinds.CU_MEM_LOCATION_TYPE_HOST if device == _HOST else kinds.CU_MEM_LOCATION_TYPE_DEVICE
    place.id = 0 if device == _HOST else device
    return place


def _check_cuda() -> None:
    if not has_driver() or not torch.cuda.is_available():
        raise UnifiedMemoryUnsupportedError(
            "unified memory needs a GPU, a CUDA build of torch and cuda-bindings; set unified_memory_level=0"
        )


@functools.cache
def _allocator() -> torch.cuda.memory.CUDAPluggableAllocator:
    try:
        return torch.cuda.memory.CUDAPluggableAllocator(str(_compiled()), "managed_malloc", "managed_free")
    except OSError as error:
        raise UnifiedMemoryUnsupportedError(
            f"the allocator of managed memory cannot be kept or loaded: {error}; set XDG_CACHE_HOME to a folder that this user can write "
            "to and run libraries from, or unified_memory_level=0"
        ) from error


def _compiled() -> Path:
    """The allocator's library, in a folder that is this user's alone."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise UnifiedMemoryUnsupportedError("unified memory needs a C compiler (cc, gcc, clang, or the one that CC names); install one")
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mcore_inference"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    library = folder / f"managed_{hashlib.sha256(_ALLOCATOR.encode()).hexdigest()[:16]}.so"
    if library.exists():
        return library
    with tempfile.TemporaryDirectory(dir=folder) as work:
        source, result = Path(work) / "managed.c", Path(work) / "managed.so"
        source.write_text(_ALLOCATOR)
        command = [compiler, "-shared", "-fPIC", "-O2", str(source), "-o", str(result)]
        try:
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=_COMPILE_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise UnifiedMemoryCompileTimeoutError(
                f"{compiler} took more than {_COMPILE_TIMEOUT_S} s for the allocator of managed memory; set unified_memory_level=0, or try "
                "again on a host with less to do"
            ) from error
        except (OSError, subprocess.SubprocessError) as error:
            detail = getattr(error, "stderr", None) or error
            raise UnifiedMemoryUnsupportedError(f"{compiler} could not compile the allocator of managed memory: {detail}") from error
        # Processes that compile at once leave equal files.
        result.replace(library)
    return library

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Calls of NVIDIA's driver, through the library that torch's CUDA wheels bring."""

import importlib.util
from typing import Any

import torch


class DriverError(RuntimeError):
    """A call of the driver failed; names the call and the driver's word for it."""


def has_driver() -> bool:
    """Whether the driver can be called: a CUDA build of torch with ``cuda-bindings`` beside it."""
    return (
        torch.version.cuda is not None
        and importlib.util.find_spec("cuda") is not None
        and importlib.util.find_spec("cuda.bindings") is not None
    )


def driver() -> Any:
    """The module of the driver's calls.

    Raises:
        ModuleNotFoundError: ``cuda-bindings`` is not installed.
    """
    from cuda.bindings import driver as module  # pyright: ignore[reportMissingImports]

    return module


def call(name: str, *arguments: Any) -> Any:
    """What a call of the driver gives beside its status: nothing, one value, or a tuple.

    Raises:
        torch.OutOfMemoryError: the device has too little memory.
        DriverError: any other failure.
    """
    module = driver()
    status, *values = getattr(module, name)(*arguments)
    if status == module.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        raise torch.OutOfMemoryError(f"{name}: the device has too little memory; lower buffer_size_gb, or free what others hold")
    if status != module.CUresult.CUDA_SUCCESS:
        raise DriverError(f"{name} failed: {status.name}")
    return values[0] if len(values) == 1 else tuple(values)

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Whether the Triton kernels of this wheel can run."""

import functools
import importlib.util
from typing import Any

import torch

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether tensors of this dtype and place have kernels: on a GPU, with Triton installed."""
    return device.type == "cuda" and dtype in _DTYPES and _has_triton()


def dependent_launch(device: torch.device) -> dict[str, Any]:
    """Options of a kernel that starts while the one before it drains; it waits for that one's results itself.

    Such kernels take ``DEPENDENT`` and, in every program, call ``gdc_wait`` before the first read of another kernel's result and the
    first write.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        return {"DEPENDENT": True, "launch_pdl": True}
    return {"DEPENDENT": False}


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None

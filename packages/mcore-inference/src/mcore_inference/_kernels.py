# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Whether the Triton kernels of this wheel can run."""

import functools
import importlib.util

import torch

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether tensors of this dtype and place have kernels: on a GPU, with Triton installed."""
    return device.type == "cuda" and dtype in _DTYPES and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Telling DTensors from plain tensors without the import that makes them, which is slow."""

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def as_dtensor(tensor: torch.Tensor) -> "DTensor | None":
    """The tensor if it is a DTensor; a plain one is told without the slow import."""
    if type(tensor) in (torch.Tensor, nn.Parameter):
        return None
    from torch.distributed.tensor import DTensor

    return tensor if isinstance(tensor, DTensor) else None


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; a plain tensor is its own."""
    dtensor = as_dtensor(tensor)
    return tensor if dtensor is None else dtensor.to_local()

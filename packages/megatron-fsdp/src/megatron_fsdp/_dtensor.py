# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Telling DTensors from plain tensors without the import that makes them, which is slow."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement
    from torch.distributed.tensor._dtensor_spec import DTensorSpec


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


def spec_of(mesh: "DeviceMesh", placements: "Sequence[Placement]", shape: torch.Size, dtype: torch.dtype) -> "DTensorSpec":
    """What a contiguous DTensor is, whatever its local part."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    return DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(shape, torch.empty(shape, device="meta").stride(), dtype))


def dtensor_of(local: torch.Tensor, spec: "DTensorSpec", cls: "type[DTensor] | None" = None) -> "DTensor":
    """A DTensor around this rank's part, which stays where it is: on the device of the mesh or on the host; ``cls`` is its type."""
    from torch.distributed.tensor import DTensor

    # `from_local` would move it to the device of the mesh, and takes ten times as long. The outside of a tensor that is built on an offset
    # has an address, and is then taken for one with memory by whoever copies it.
    tensor = (cls or DTensor)(local.as_strided(local.size(), local.stride(), 0), spec, requires_grad=False)
    tensor._local_tensor = local
    return tensor

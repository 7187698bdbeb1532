# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What all parameter groups of one model share."""

from dataclasses import dataclass

import torch

from megatron_fsdp._call_plan import CallPlan
from megatron_fsdp._lane import Lanes
from megatron_fsdp._policy import MixedPrecisionPolicy


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Dtypes, devices and what runs beside the computation."""

    policy: MixedPrecisionPolicy
    divisor: int
    """Of summed gradients."""
    device: torch.device
    """Where the module computes."""
    lanes: Lanes
    calls: CallPlan
    cpu_offload: bool = False
    """Whether main parameters and reduced gradients lie in the memory of the host."""

    @property
    def home(self) -> torch.device:
        """Where main parameters and reduced gradients lie."""
        return torch.device("cpu") if self.cpu_offload else self.device

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """[numel] at home; page-locked where a device copies to it and from it while the host goes on."""
        return torch.zeros(numel, dtype=dtype, device=self.home, pin_memory=self.cpu_offload and self.device.type == "cuda")

    def on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor from home where the module computes, copied in the order of the current stream; itself if it is there."""
        return tensor.to(self.device, non_blocking=True)

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""On how many ranks a bench runs, and on what."""

import time
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Scale:
    """What is run: on GPUs, or small."""

    gpus: int
    small: bool
    memory_bandwidth: float = 4e12
    """Bytes a second of a GPU's memory, for the planner."""

    @property
    def kind(self) -> str:
        return "cpu" if self.small else "cuda"

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.small else torch.bfloat16

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.small else torch.device("cuda", torch.cuda.current_device())

    def finish(self) -> float:
        """The host's clock, when the device is done."""
        if not self.small:
            torch.cuda.synchronize()
        return time.perf_counter()

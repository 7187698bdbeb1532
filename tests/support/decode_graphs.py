# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Decode steps as graphs compute them, where there is no device to record them on."""

import bisect
from collections import Counter
from collections.abc import Callable

from torch import Tensor

from mcore_inference.context import HostStep, StepBuilder, StepInputs


class StepsOfGraphs:
    """In place of ``DecodeGraphs``: computes from the tensors that a recording reads, padding included."""

    def __init__(self, compute: Callable[[StepInputs], Tensor], builder: StepBuilder, sizes: list[int]) -> None:
        self._compute, self._builder, self._sizes = compute, builder, sizes
        self.request_counts: Counter[int] = Counter()

    def run(self, host: HostStep) -> Tensor:
        size = self._sizes[bisect.bisect_left(self._sizes, len(host.lengths_R))]
        self._builder.send_decode(host, size)
        self.request_counts[size] += 1
        return self._compute(self._builder.decode_inputs(size))[: len(host.lengths_R)]

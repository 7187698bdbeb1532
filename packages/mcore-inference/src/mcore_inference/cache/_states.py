# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The memory of recurrent states: one slot for each request, and others for snapshots."""

from torch import Tensor

from mcore_inference._stability import experimental_api
from mcore_inference.cache._state_config import MambaInferenceStateConfig
from mcore_inference.memory import CacheMemory
from mcore_parallel.nn import RecurrentState


# L recurrent layers, M slots of requests, N of snapshots.
@experimental_api
class RecurrentStateCache:
    """States of the recurrent layers of one stage. A request has one slot in all of them from its admission to its end.

    Args:
        config: layers and shapes.
        max_requests: M.
        memory: where they lie.
        num_snapshots: N, slots behind those of requests.
    """

    def __init__(self, config: MambaInferenceStateConfig, max_requests: int, memory: CacheMemory, num_snapshots: int = 0) -> None:
        self.config = config
        rows = len(config.recurrent_layers), max_requests + num_snapshots
        self._conv = memory.zeros((*rows, *config.mamba_conv_states_shape), config.mamba_conv_states_dtype)
        self._memory = memory.zeros((*rows, *config.mamba_ssm_states_shape), config.mamba_ssm_states_dtype)
        self.layers = {
            layer: RecurrentState(conv=self._conv[place], memory=self._memory[place]) for place, layer in enumerate(config.recurrent_layers)
        }
        """By number of the layer, the states of all M + N slots."""

    @property
    def num_bytes(self) -> int:
        return self._conv.nbytes + self._memory.nbytes

    def clear(self, slots: Tensor) -> None:
        """Zeros in these slots [N], for requests that begin."""
        self._conv.index_fill_(1, slots, 0)
        self._memory.index_fill_(1, slots, 0)

    def copy(self, source: int, target: int) -> None:
        """The states of one slot into another, in all layers; nobody waits."""
        for states in (self._conv, self._memory):
            states[:, target].copy_(states[:, source])

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Which experts the tokens of each request went to."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mcore_inference.context import HostStep
from mcore_inference.engine._active_request import ActiveRequest
from mcore_parallel.models import GPTModel, TransformerLayer
from mcore_parallel.nn import MLP

# T tokens of a step, L layers, K experts a token.


@dataclass(frozen=True, kw_only=True)
class StepRouting:
    """Experts of one step, on their way to the host."""

    entries: Sequence[ActiveRequest]
    firsts: np.ndarray
    """Position of the first token of each of these."""
    lengths: np.ndarray
    """Tokens of each."""
    experts_TLK: Tensor
    copied: "torch.cuda.Event | None"

    def hand_out(self) -> None:
        """Give each request its rows."""
        if self.copied is not None:
            self.copied.synchronize()
        begin = 0
        for entry, first, length in zip(self.entries, self.firsts.tolist(), self.lengths.tolist(), strict=True):
            if not entry.ended:
                entry.routing.append((first, self.experts_TLK[begin : begin + length]))
            begin += length


class RoutingRecorder:
    """Experts [T, L, K] int16 of the tokens of a step, in memory whose address stays, so that graphs write it too.

    Args:
        model: with experts.
        max_tokens: T of the largest step.
        device: of the model.

    Raises:
        ValueError: the model has no experts, or other ranks have some of its layers.
    """

    def __init__(self, model: GPTModel, max_tokens: int, device: torch.device) -> None:
        if (stages := model.groups.pp.size) > 1:
            raise ValueError(f"record_routing=True needs all layers on a rank, found pp={stages}; serve with pp=1, or leave it at False")
        mixtures = [
            int(number)
            for number, layer in model.layers.items()
            if isinstance(layer, TransformerLayer) and layer.mlp is not None and type(layer.mlp) is not MLP
        ]
        if not mixtures:
            raise ValueError("record_routing=True, and no layer of the model has experts; leave it at False")
        self._shape, self._device = (max_tokens, max(mixtures) + 1), device
        self._experts_TLK: Tensor | None = None

    def __call__(self, layer: int, experts_TK: Tensor, probs_TK: Tensor) -> None:
        """What routers call in a step, the first time outside of any graph."""
        if self._experts_TLK is None:
            # Layers without experts keep zeros, which nobody reads.
            self._experts_TLK = torch.zeros(*self._shape, experts_TK.shape[1], dtype=torch.int16, device=self._device)
        self._experts_TLK[: len(experts_TK), layer].copy_(experts_TK)

    def take(self, entries: Sequence[ActiveRequest], host: HostStep) -> StepRouting:
        """What the step that was launched last records, in the order of its requests."""
        assert self._experts_TLK is not None, "a step ran before"
        on_gpu = self._device.type == "cuda"
        rows = self._experts_TLK[: len(host.tokens_T)]
        copied = torch.cuda.Event() if on_gpu else None
        experts_TLK = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True).copy_(rows, non_blocking=True) if on_gpu else rows.clone()
        if copied is not None:
            copied.record(torch.cuda.current_stream(self._device))
        return StepRouting(entries=entries, firsts=host.cached_R, lengths=host.lengths_R, experts_TLK=experts_TLK, copied=copied)

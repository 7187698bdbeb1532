# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""One number a token: the head of critics and reward models."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mcore_parallel.comm import gather_from_sequence_parallel_region
from mcore_parallel.groups import ProcessGroups, ShardSpec
from mcore_parallel.pipeline import ModelChunks

# T tokens, D model.


class ValueHead(nn.Module):
    """``x . weight + bias`` of each token's last hidden states, whole on every tp rank; it begins with zeros, so that every value is 0.

    Args:
        hidden_size: D.
        groups: tp is used.
        dtype: of the parameters.
        device: of the parameters.

    Example:
        >>> ValueHead(8, ProcessGroups.single())(torch.ones(3, 8))
        tensor([0., 0., 0.], grad_fn=<AddBackward0>)
    """

    def __init__(
        self,
        hidden_size: int,
        groups: ProcessGroups,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.groups = groups
        self.weight = nn.Parameter(torch.zeros(1, hidden_size, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.zeros(1, dtype=dtype, device=device))

    def shard_specs(self) -> Mapping[str, ShardSpec]:
        return {name: ShardSpec(shape=tuple(parameter.shape)) for name, parameter in self.named_parameters()}

    def forward(self, hidden: Tensor) -> Tensor:
        """``ModelOutput.hidden`` [T or T / tp, D] -> [T], float32 or wider, the same on every tp rank."""
        if self.groups.sequence_parallel:
            # Every rank goes on alike, so that the gradient of each is that of the whole.
            hidden = gather_from_sequence_parallel_region(hidden, self.groups.tp, tensor_parallel_output_grad=False)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        return hidden.to(wide) @ self.weight[0].to(wide) + self.bias.to(wide)


def add_value_head(model: nn.Module) -> ValueHead | None:
    """Give a model a child ``value_head``, on the chunk with the output; on other stages there is none.

    An output weight of its own is frozen: no value depends on it. Call it before gradient buffers are made; the head is then trained and
    saved with the model.

    Args:
        model: this rank's stage of a ``GPTModel``, or its ``ModelChunks``.

    Raises:
        ValueError: the model has a head already.
    """
    last: Any = model[-1] if isinstance(model, ModelChunks) else model
    if not last.is_last:
        return None
    if hasattr(last, "value_head"):
        raise ValueError("the model has a value_head already; build another model")
    place = next(last.parameters())
    head = ValueHead(last.config.hidden_size, last.groups, dtype=place.dtype, device=place.device)
    last.add_module("value_head", head)
    if last.output is not None and last.output.weight is not None:
        last.output.weight.requires_grad_(False)
    return head

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""From the last hidden states to logits, losses and log-probabilities."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcore_parallel._groups import ProcessGroups
from mcore_parallel._shards import ShardSpec
from mcore_parallel.comm import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from mcore_parallel.tensor_parallel import vocab_parallel_cross_entropy, vocab_parallel_log_probs


# T tokens, D model, V vocabulary.
class OutputLayer(nn.Module):
    """Projection onto the vocabulary, rows of [V, D] cut over tp.

    Args:
        vocab_size: V.
        hidden_size: D.
        groups: tp is used.
        tied: hold no weight; each call brings the one of the embedding.
        dtype: of the weight.
        device: of the weight.

    Raises:
        ValueError: tp does not divide V.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        groups: ProcessGroups,
        *,
        tied: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if vocab_size % groups.tp.size:
            raise ValueError(f"tp={groups.tp.size} must divide vocab_size={vocab_size}; pad it with pad_vocab_size")
        self.groups = groups
        self._spec = ShardSpec(shape=(vocab_size, hidden_size), shards={"tp": 0})
        local = self._spec.local_shape(groups)
        self.weight = None if tied else nn.Parameter(torch.empty(local, dtype=dtype, device=device))

    def shard_specs(self) -> Mapping[str, ShardSpec]:
        return {} if self.weight is None else {"weight": self._spec}

    def forward(self, hidden: Tensor, weight: Tensor | None = None, rows: Tensor | None = None) -> Tensor:
        """[T or T / tp, D] -> logits [T, V / tp]; ``rows`` (integers, numbers among the T) keeps only those tokens."""
        weight = self.weight if weight is None else weight
        assert weight is not None, "a tied output layer is called with the weight of the embedding"
        tp = self.groups.tp
        if self.groups.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tp)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden, tp)
        return F.linear(hidden if rows is None else hidden[rows], weight)


@dataclass(frozen=True)
class ModelOutput:
    """What the last stage returns; nothing of size V exists before a method asks for it."""

    hidden: Tensor
    """[T or T / tp, D], after the final norm."""
    layer: OutputLayer
    weight: Tensor | None = None
    """[V / tp, D] of the embedding when it is shared with the output."""

    def logits(self, rows: Tensor | None = None) -> Tensor:
        """[T, V / tp] in the model's dtype, or [R, V / tp] of R chosen tokens."""
        return self.layer(self.hidden, self.weight, rows)

    def token_losses(self, labels: Tensor) -> Tensor:
        """Cross entropy of each token against labels [T]; [T], float32 or wider. A negative label has loss 0."""
        return vocab_parallel_cross_entropy(self.logits(), labels, group=self.layer.groups.tp)

    def log_probs(self, labels: Tensor, temperature: float = 1.0) -> Tensor:
        """Log-probability of labels [T] under logits / temperature; [T], float32 or wider, differentiable."""
        logits = self.logits()
        return vocab_parallel_log_probs(logits if temperature == 1.0 else logits / temperature, labels, self.layer.groups.tp)

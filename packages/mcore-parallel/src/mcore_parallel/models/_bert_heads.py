# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What stands behind the layers of BERT: the masked-token head and the sentence-pair head."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcore_parallel.comm import gather_from_sequence_parallel_region
from mcore_parallel.groups import ShardSpec
from mcore_parallel.models._layer import build_norm
from mcore_parallel.models._output import OutputLayer
from mcore_parallel.models._slots import Site
from mcore_parallel.nn import Activation, Step
from mcore_parallel.tensor_parallel import vocab_parallel_cross_entropy

# T tokens, D model, V vocabulary, B sequences.


class ReplicatedAffine(nn.Module):
    """y = x W^T + b, whole on every tp rank.

    Args:
        in_features: of x.
        out_features: of y.
        site: dtype, device and layout.
        partial: each tp rank sees its share of the tokens.
    """

    def __init__(self, in_features: int, out_features: int, site: Site, *, partial: bool) -> None:
        super().__init__()
        self._axes = ("tp",) if partial else ()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=site.dtype, device=site.device))
        self.bias = nn.Parameter(torch.empty(out_features, dtype=site.dtype, device=site.device))

    def shard_specs(self) -> Mapping[str, ShardSpec]:
        own = {"weight": self.weight, "bias": self.bias}
        return {name: ShardSpec(shape=tuple(parameter.shape), partial=self._axes) for name, parameter in own.items()}

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class MaskedTokenHead(nn.Module):
    """``norm(activation(dense(x)))``, whose product with the table and ``bias`` [V] are the logits.

    Args:
        site: of the end of the model.
    """

    def __init__(self, site: Site) -> None:
        super().__init__()
        config = site.config
        self.dense = ReplicatedAffine(config.hidden_size, config.hidden_size, site, partial=site.groups.sequence_parallel)
        self.norm = build_norm(site)
        activation = Activation(name=config.activation)
        self._activation = Activation(name=activation.curve) if activation.gated else activation
        self._spec = ShardSpec(shape=(config.vocab_size,), shards={"tp": 0})
        self.bias = nn.Parameter(torch.empty(self._spec.local_shape(site.groups), dtype=site.dtype, device=site.device))

    def shard_specs(self) -> Mapping[str, ShardSpec]:
        return {"bias": self._spec}

    def forward(self, x: Tensor) -> Tensor:
        """[T or T / tp, D] -> the same."""
        return self.norm(self._activation(self.dense(x)))


class Pooler(nn.Module):
    """``tanh(dense(x))`` of the first token of each sequence.

    Args:
        site: of the end of the model.
    """

    def __init__(self, site: Site) -> None:
        super().__init__()
        size = site.config.hidden_size
        self.groups = site.groups
        self.dense = ReplicatedAffine(size, size, site, partial=False)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """[T or T / tp, D] -> [B, D], the same on every tp rank."""
        if self.groups.sequence_parallel:
            # Every rank goes on alike, so that the gradient of each is that of the whole.
            x = gather_from_sequence_parallel_region(x, self.groups.tp, tensor_parallel_output_grad=False)
        return torch.tanh(self.dense(x[:: step.seq_len]))


@dataclass(frozen=True)
class BertOutput:
    """What the last stage of a ``BertModel`` returns."""

    hidden: Tensor
    """[T or T / tp, D], behind the masked-token head."""
    layer: OutputLayer
    weight: Tensor | None
    """[V / tp, D] of the embedding when it is shared with the output."""
    bias: Tensor
    """[V / tp]."""
    sequence: Tensor
    """[T or T / tp, D], behind the last layer."""
    pooled: Tensor | None = None
    """[B, D] of the pooler; None without the sentence-pair head."""
    binary_logits: Tensor | None = None
    """[B, 2]: the second sentence follows the first one, or does not."""

    def logits(self, rows: Tensor | None = None) -> Tensor:
        """[T, V / tp] in the model's dtype, or [R, V / tp] of R chosen tokens."""
        return self.layer(self.hidden, self.weight, rows) + self.bias

    def token_losses(self, labels: Tensor) -> Tensor:
        """Cross entropy of each token against labels [T]; [T], float32 or wider. A negative label has loss 0."""
        layer = self.layer
        return vocab_parallel_cross_entropy(self.logits(), labels, group=layer.groups.tp, vocab_size=layer.unpadded_vocab_size)

    def loss_sum(self, labels: Tensor, weights: Tensor) -> Tensor:
        """Sum over the tokens of weight [T] times cross entropy, a scalar."""
        return (self.token_losses(labels) * weights).sum()

    def sentence_losses(self, labels: Tensor) -> Tensor:
        """Cross entropy of each pair against labels [B] (0: it follows, 1: it does not); [B], float32 or wider.

        Raises:
            ValueError: a model without the sentence-pair head.
        """
        if self.binary_logits is None:
            raise ValueError("add_binary_head=False leaves no sentence-pair logits; build the model with add_binary_head=True")
        wide = self.binary_logits if self.binary_logits.dtype == torch.float64 else self.binary_logits.float()
        return F.cross_entropy(wide, labels, reduction="none")

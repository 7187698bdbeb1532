# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""From the last hidden states to logits, losses and log-probabilities."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcore_parallel.comm import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from mcore_parallel.groups import ProcessGroups, ShardSpec
from mcore_parallel.nn import soft_cap
from mcore_parallel.tensor_parallel import (
    BatchInvariantProducts,
    InvariantProducts,
    LossProducts,
    MainGradient,
    ProductLayer,
    WeightGradientQueue,
    batch_invariant_losses,
    column_product,
    fused_linear_cross_entropy,
    vocab_parallel_cross_entropy,
)

_FUSED_FROM = 1 << 26
"""Logits of this rank from which on their memory weighs more than the extra product of computing them again."""


# T tokens, D model, V vocabulary.
class OutputLayer(ProductLayer):
    """Projection onto the vocabulary, rows of [V, D] cut over tp.

    Args:
        vocab_size: V.
        hidden_size: D.
        groups: tp is used.
        tied: hold no weight; each call brings the one of the embedding.
        unpadded_vocab_size: rows that are real; losses and log-probabilities leave the padding after them out. None for all.
        partial: as in ``ShardSpec``.
        loss: computes ``ModelOutput.loss_sum``; None for ``fused_linear_cross_entropy``.
        softcap: of the logits, as of ``soft_cap``; losses hold all logits then. None for none.
        dtype: of the weight.
        device: of the weight.

    Raises:
        ValueError: tp does not divide V, the unpadded size is no number of its rows, or ``loss`` beside a soft cap.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        groups: ProcessGroups,
        *,
        tied: bool = False,
        unpadded_vocab_size: int | None = None,
        partial: tuple[str, ...] = (),
        loss: LossProducts | None = None,
        softcap: float | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if vocab_size % groups.tp.size:
            raise ValueError(f"tp={groups.tp.size} must divide vocab_size={vocab_size}; pad it with pad_vocab_size")
        if unpadded_vocab_size is not None and not 1 <= unpadded_vocab_size <= vocab_size:
            raise ValueError(f"unpadded_vocab_size={unpadded_vocab_size} must lie between 1 and vocab_size={vocab_size}")
        if softcap is not None and loss is not None:
            raise ValueError(
                f"final_logit_softcapping={softcap} and the backend's own loss, {type(loss).__name__}, exclude each other: that caps no "
                "logits; build the backend without it, or leave the field at None"
            )
        self.groups, self.vocab_size, self.loss, self.softcap = groups, vocab_size, loss, softcap
        self.unpadded_vocab_size = vocab_size if unpadded_vocab_size is None else unpadded_vocab_size
        self.weight_spec = ShardSpec(shape=(vocab_size, hidden_size), shards={"tp": 0}, partial=partial)
        local = self.weight_spec.local_shape(groups)
        self.weight = None if tied else nn.Parameter(torch.empty(local, dtype=dtype, device=device))

    def parameters_changed(self) -> None:
        super().parameters_changed()
        if self.loss is not None:
            self.loss.weight_changed()

    def shard_specs(self) -> Mapping[str, ShardSpec]:
        return {} if self.weight is None else {"weight": self.weight_spec}

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor | None = None,
        rows: Tensor | None = None,
        *,
        function: Callable[[Tensor, Tensor], Any] | None = None,
    ) -> Any:
        """[T or T / tp, D] -> logits [T, V / tp].

        Args:
            hidden: after the final norm.
            weight: of the embedding when it is shared; None for the layer's own.
            rows: integers, numbers among the T; only those tokens are kept.
            function: is called with ``hidden`` and the weight in place of the product, and its result returned: hooks on the
                layer (of wrappers that bring the weight in) thus run for a loss without logits too.
        """
        own = weight is None
        weight = self.weight if weight is None else weight
        assert weight is not None, "a tied output layer is called with the weight of the embedding"
        if function is not None:
            return function(hidden, weight)
        logits = self._product(hidden, weight, rows, own=own)
        return logits if self.softcap is None else soft_cap(logits, self.softcap)

    def _product(self, hidden: Tensor, weight: Tensor, rows: Tensor | None, *, own: bool) -> Tensor:
        tp = self.groups.tp
        if self.products is not None:
            if rows is not None and isinstance(self.products, BatchInvariantProducts) and not self.groups.sequence_parallel:
                # The same bits, without those that nobody reads.
                hidden, rows = hidden[rows], None
            logits = self.products.column(hidden, weight, self.route(self.groups))
            return logits if rows is None else logits[rows]
        if own and rows is None and (route := self.route(self.groups)).main_grad is not None:
            return column_product(hidden, weight, route)
        if self.groups.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tp)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden, tp)
        return F.linear(hidden if rows is None else hidden[rows], weight)


@dataclass(frozen=True)
class ModelOutput:
    """What the last stage returns; nothing of size V exists before a method asks for it."""

    hidden: Tensor
    """[T or T / tp, D], after the final norm, times the config's ``output_multiplier``."""
    layer: OutputLayer
    weight: Tensor | None = None
    """[V / tp, D] of the embedding when it is shared with the output."""
    depths: tuple["ModelOutput", ...] = ()
    """Of the heads that predict further tokens, in training: depth k (from 1) predicts the label k tokens later."""
    detached: bool = False
    """Losses give the output weight no gradient."""

    def logits(self, rows: Tensor | None = None) -> Tensor:
        """[T, V / tp] in the model's dtype, or [R, V / tp] of R chosen tokens."""
        weight = self.weight
        if self.detached:
            weight = (self.layer.weight if weight is None else weight).detach()  # pyright: ignore[reportOptionalMemberAccess]
        return self.layer(self.hidden, weight, rows)

    def token_losses(self, labels: Tensor, *, fused: bool | None = None) -> Tensor:
        """Cross entropy of each token against labels [T]; [T], float32 or wider. A negative label has loss 0.

        Args:
            labels: [T] int64.
            fused: True to compute logits a few tokens at a time, and again in the backward (``fused_linear_cross_entropy``);
                False to hold all of them, as capped logits always are; None for the former when there are many.

        Raises:
            ValueError: ``fused=True`` of capped logits.
        """
        return self._fused(labels) if self._fuse(labels, fused) else self._losses_of_logits(labels, 1.0)

    def loss_sum(self, labels: Tensor, weights: Tensor) -> Tensor:
        """Sum over the tokens of weight times cross entropy, a scalar; few logits exist at a time, and each is computed once, unless they
        are capped.

        The gradients are computed in the forward, so the scalar should go on into sums and products by numbers only.

        Args:
            labels: [T] int64; a negative one has loss 0.
            weights: [T] float, for instance the loss mask.
        """
        if self.layer.products is not None or self.layer.softcap is not None:
            return (self._losses_of_logits(labels, 1.0) * weights).sum()
        if self.layer.loss is not None:
            return self._narrow(self.layer.loss, labels, weights).sum()
        if self._sink()[1] is not None:
            return (self._fused(labels) * weights).sum()
        return self._fused(labels, token_weights=weights).sum()

    def log_probs(self, labels: Tensor, temperature: float = 1.0, *, fused: bool | None = None) -> Tensor:
        """Log-probability of labels [T] under logits / temperature; [T], float32 or wider, differentiable.

        Args:
            labels: [T] int64.
            temperature: logits are divided by it.
            fused: as in ``token_losses``.
        """
        fuse = self._fuse(labels, fused)
        return -(self._fused(labels, temperature=temperature) if fuse else self._losses_of_logits(labels, temperature))

    def log_probs_and_entropy(self, labels: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """``log_probs`` and the entropy [T] of every token's distribution, both differentiable; few logits exist at a time, unless
        they are capped."""
        if isinstance(self.layer.products, BatchInvariantProducts) or self.layer.softcap is not None:
            losses, entropy = self._invariant(labels, temperature)
            return -losses, entropy
        losses, entropy = self._fused(labels, with_entropy=True, temperature=temperature)
        return -losses, entropy

    def _fused(self, labels: Tensor, **options: Any) -> Any:
        layer = self.layer
        main_grad, queue = self._sink()

        def losses(hidden: Tensor, weight: Tensor) -> Any:
            return fused_linear_cross_entropy(
                hidden,
                weight.detach() if self.detached else weight,
                labels,
                layer.groups.tp,
                vocab_size=layer.unpadded_vocab_size,
                sequence_parallel=layer.groups.sequence_parallel,
                main_grad=main_grad,
                queue=queue,
                **options,
            )

        return layer(self.hidden, self.weight, function=losses)

    def _narrow(self, loss: LossProducts, labels: Tensor, weights: Tensor) -> Tensor:
        layer = self.layer
        main_grad, queue = self._sink()
        route = dataclasses.replace(layer.route(layer.groups), main_grad=main_grad, queue=queue)

        def losses(hidden: Tensor, weight: Tensor) -> Tensor:
            weight = weight.detach() if self.detached else weight
            return loss.losses(hidden, weight, labels, weights, route, layer.unpadded_vocab_size)

        return layer(self.hidden, self.weight, function=losses)

    def _losses_of_logits(self, labels: Tensor, temperature: float) -> Tensor:
        if isinstance(self.layer.products, BatchInvariantProducts):
            return self._invariant(labels, temperature)[0]
        logits, layer = self.logits(), self.layer
        logits = logits if temperature == 1.0 else logits / temperature
        if isinstance(layer.products, InvariantProducts):
            return layer.products.cross_entropy(logits, labels, layer.unpadded_vocab_size)
        return vocab_parallel_cross_entropy(logits, labels, group=layer.groups.tp, vocab_size=layer.unpadded_vocab_size)

    def _invariant(self, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        layer = self.layer
        return batch_invariant_losses(self.logits(), labels, layer.groups.tp, layer.unpadded_vocab_size, temperature=temperature)

    def _sink(self) -> tuple[MainGradient | None, WeightGradientQueue | None]:
        """Where the weight gradient goes instead of autograd; one shared with the embedding stays with autograd."""
        route = self.layer.route(self.layer.groups)
        return (None, None) if self.weight is not None or self.detached or route.main_grad is None else (route.main_grad, route.queue)

    def _fuse(self, labels: Tensor, fused: bool | None) -> bool:
        cap = self.layer.softcap
        if fused and cap is not None:
            raise ValueError(f"fused=True computes logits without final_logit_softcapping={cap}; leave it at None")
        if fused is not None:
            return fused
        if self.layer.products is not None or cap is not None:
            return False
        width = self.layer.vocab_size // self.layer.groups.tp.size
        return labels.numel() * width >= _FUSED_FROM

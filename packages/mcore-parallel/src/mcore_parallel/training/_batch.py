# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""One micro-batch."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mcore_parallel.context_parallel import SequenceSplitError, sequence_lengths, sequence_prefixes, to_device, tokens_ahead, zigzag_indices
from mcore_parallel.groups import Group
from mcore_parallel.nn import Step

_BY_TOKEN = ("token_types", "routed_experts", "routed_weights")
"""Extras of the step that are [B, S, ...]."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """B sequences of S tokens with what is to be learnt from them; the same on all tp, cp and pp ranks of a replica.

    Raises:
        ValueError: tensors whose shapes differ.

    Example:
        >>> row = torch.arange(5)[None]
        >>> Batch(tokens=row[:, :-1], labels=row[:, 1:], loss_mask=torch.ones(1, 4)).step().seq_len
        4
    """

    tokens: Tensor
    """[B, S] int64."""
    labels: Tensor
    """[B, S] int64, the token that follows each token."""
    loss_mask: Tensor
    """[B, S] float, weight of each label; 0 leaves it out."""
    positions: Tensor | None = None
    """[B, S] int64; None for 0 upwards in every sequence."""
    cu_seqlens: Tensor | None = None
    """[N + 1] integers on the host: bounds of N packed sequences among the B * S tokens, row by row; None when each row is one."""
    max_seqlen: int | None = None
    """As of ``Step``; ``with_device_bounds`` sets it."""
    prefixes: Tensor | None = None
    """[N] integers on the host: for each packed sequence the number of an earlier one in front of it, -1 for none. It sees the tokens of
    that one beside its own, and its positions go on behind them. None where no sequence has one."""
    valid: Tensor | None = None
    """[B, S] bool, False at padding, which mixtures of experts do not route; None where every token is real."""
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    """What an objective needs beside (advantages, teacher logits); ``token_types`` [B, S], ``attention_mask``,
    ``encoder_tokens`` [B, S'], ``encoder_mask``, ``routed_experts`` and ``routed_weights`` [B, S, L, K] go into the step."""
    context_size: int = 1
    """Ranks that hold a share of each sequence, S tokens of it; ``context_share`` sets it."""

    def __post_init__(self) -> None:
        if self.tokens.dim() != 2:
            raise ValueError(f"tokens of shape {tuple(self.tokens.shape)} must be [B, S]")
        for name in ("labels", "loss_mask", "positions", "valid"):
            value = getattr(self, name)
            if value is not None and value.shape != self.tokens.shape:
                raise ValueError(f"{name} of shape {tuple(value.shape)} must have the shape of tokens, {tuple(self.tokens.shape)}")
        if self.prefixes is not None:
            if self.cu_seqlens is None:
                raise ValueError("prefixes are numbers of packed sequences; give their cu_seqlens, too")
            sequence_prefixes(self.prefixes, len(self.cu_seqlens) - 1)
        if self.max_seqlen is not None and (self.cu_seqlens is None or self.prefixes is not None):
            raise ValueError(
                f"max_seqlen={self.max_seqlen} is of packed sequences without prefixes; give cu_seqlens on the device, or leave it"
            )

    def step(self) -> Step:
        """The forward pass over this batch."""
        B, S = self.tokens.shape
        flat = {name: self.extras[name].flatten(0, 1) for name in _BY_TOKEN if name in self.extras}
        more: dict[str, Any] = {
            "tokens": self.tokens.flatten(),
            "prefixes": self.prefixes,
            "valid": None if self.valid is None else self.valid.flatten(),
            **flat,
            "attention": self.extras.get("attention_mask"),
            "encoder_tokens": self.extras.get("encoder_tokens"),
            "encoder_mask": self.extras.get("encoder_mask"),
        }
        if self.positions is None and self.cu_seqlens is None:
            return dataclasses.replace(Step.causal(B, S, self.tokens.device), **more)
        positions = self._positions() if self.positions is None else self.positions
        return Step(batch_size=B, seq_len=S, positions=positions.flatten(), cu_seqlens=self.cu_seqlens, max_seqlen=self.max_seqlen, **more)

    def with_device_bounds(self, num_sequences: int) -> "Batch":
        """The same packed sequences with bounds on the device, always of ``num_sequences``, the last of which may be empty: layers whose
        attention core takes them run from one CUDA graph, however the tokens are packed (``mcore_parallel.graphs``).

        Args:
            num_sequences: at least those that there are, what is left of a row among them.

        Raises:
            ValueError: more sequences, none packed, prefixes, or a share of context-parallel ranks.
        """
        if self.cu_seqlens is None or self.prefixes is not None or self.context_size > 1:
            raise ValueError("bounds on the device are of packed sequences (cu_seqlens) without prefixes, over cp=1")
        lengths = self.sequence_lengths()
        if len(lengths) > num_sequences:
            raise ValueError(f"{len(lengths)} sequences are packed, more than num_sequences={num_sequences}; raise it, or pack fewer")
        if max(lengths) > self.tokens.shape[1]:
            raise ValueError(f"a sequence of {max(lengths)} tokens goes over the end of a row of {self.tokens.shape[1]}; end it there")
        bounds = self.cu_seqlens.int()
        bounds = torch.cat((bounds, bounds[-1:].expand(num_sequences - len(lengths))))
        return dataclasses.replace(
            self,
            positions=self._positions() if self.positions is None else self.positions,
            cu_seqlens=to_device(bounds, self.tokens.device),
            max_seqlen=self.tokens.shape[1],
        )

    def ahead(self, by: int, group: Group) -> "Batch":
        """The same tokens with the labels and weights of those ``by`` places later in their sequences, 0 behind the ends.

        Args:
            by: how many places.
            group: the context-parallel ranks that share the sequences.
        """
        B, S = self.tokens.shape
        lengths = (S * group.size,) * B if self.cu_seqlens is None else sequence_lengths(self.cu_seqlens)
        labels, mask = (tokens_ahead(x.flatten(), lengths, group, by=by).view(B, S) for x in (self.labels, self.loss_mask))
        return dataclasses.replace(self, labels=labels, loss_mask=mask)

    def context_share(self, group: Group) -> "Batch":
        """The tokens of a context-parallel rank: of every sequence its two chunks, with their positions.

        Extras of shape [B, S, ...] are cut too, all others are kept whole. ``cu_seqlens`` stay the bounds of the whole sequences.

        Args:
            group: the context-parallel ranks (``ProcessGroups.cp``), which all hold this batch.

        Returns:
            A batch of shape [B, S / cp]; this one, if it is such a share.

        Raises:
            SequenceSplitError: a sequence whose length is not a multiple of 2 cp, sequences behind a prefix, a share of other ranks.
        """
        if group.size == self.context_size:
            return self
        if self.max_seqlen is not None:
            raise SequenceSplitError(f"sequences with bounds on the device cannot be split over cp={group.size} ranks; give host bounds")
        if self.prefixes is not None:
            raise SequenceSplitError(f"sequences behind a prefix cannot be split over cp={group.size} ranks; pack without, or set cp=1")
        if self.context_size > 1:
            raise SequenceSplitError(f"a share of context_size={self.context_size} ranks does not fit cp={group.size}; cut the whole batch")
        B, S = self.tokens.shape
        index = zigzag_indices(self.sequence_lengths(), group.size, group.rank).to(self.tokens.device)

        def cut(x: Tensor) -> Tensor:
            return x.flatten(0, 1).index_select(0, index).unflatten(0, (B, -1))

        return dataclasses.replace(
            self,
            tokens=cut(self.tokens),
            labels=cut(self.labels),
            loss_mask=cut(self.loss_mask),
            valid=None if self.valid is None else cut(self.valid),
            positions=cut(self._positions() if self.positions is None else self.positions),
            context_size=group.size,
            extras={name: cut(x) if x.shape[:2] == (B, S) else x for name, x in self.extras.items()},
        )

    def weight(self) -> Tensor:
        """Scalar float64: sum of the mask, the number of labels that count."""
        return self.loss_mask.sum(dtype=torch.float64)

    def sequence_lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence, packed or one a row.

        Raises:
            SequenceSplitError: ``cu_seqlens`` that do not end with the tokens.
        """
        B, S = self.tokens.shape
        lengths = (S,) * B if self.cu_seqlens is None else sequence_lengths(self.cu_seqlens)
        if sum(lengths) != B * S:
            raise SequenceSplitError(f"cu_seqlens end at {sum(lengths)}, but tokens hold B * S = {B * S}; end them there")
        return lengths

    def _positions(self) -> Tensor:
        lengths = self.sequence_lengths()
        prefixes = (-1,) * len(lengths) if self.prefixes is None else sequence_prefixes(self.prefixes, len(lengths))
        starts = [0 if prefix < 0 else lengths[prefix] for prefix in prefixes]
        parts = [torch.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
        return torch.cat(parts).view(self.tokens.shape).to(self.tokens.device)


def real_tokens(loss_mask: Tensor) -> Tensor | None:
    """``Batch.valid`` of rows whose ends no loss depends on: False behind the last label of a row that counts, None when there are none.

    For causal models. It reads the mask, so give it on the host.

    Args:
        loss_mask: [B, S].

    Example:
        >>> real_tokens(torch.tensor([[0.0, 1.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0]])).tolist()
        [[True, True, True, True], [True, False, False, False]]
    """
    valid = (loss_mask != 0).flip(-1).cumsum(-1).flip(-1) > 0
    return None if bool(valid.all()) else valid

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What every layer of one forward pass is told beside the hidden states."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


# T tokens of this rank's sequences (its context-parallel part), B sequences, S tokens a sequence.
@dataclass(frozen=True, kw_only=True)
class Step:
    """One forward pass over T = B * S tokens, flattened sequence by sequence.

    Hidden states travel as [T, D]; under sequence parallelism a layer holds a contiguous [T / tp, D] of them between
    its tensor-parallel parts. ``positions`` and ``attention`` always speak of all T tokens.
    """

    batch_size: int
    """B."""
    seq_len: int
    """S."""
    positions: Tensor
    """[T] int64, position of each token in its sequence; [C, T] where positions have C components (``mrope_section``)."""
    tokens: Tensor | None = None
    """[T] int64, the token ids, for what reads them on a later stage (heads that predict further tokens)."""
    token_types: Tensor | None = None
    """[T] int64, which part of its sequence a token belongs to, for models that tell them apart."""
    cu_seqlens: Tensor | None = None
    """[N + 1] integers on the host: bounds of N packed sequences among the tokens of all context-parallel ranks; they attend to
    themselves only. On the device where ``max_seqlen`` is given. None for B sequences."""
    max_seqlen: int | None = None
    """No packed sequence is longer; ``cu_seqlens`` lie on the device of the tokens then, the last ones of which may be empty, and nobody
    reads them on the host: graphs can hold such a step. None for bounds on the host."""
    prefixes: Tensor | None = None
    """[N] integers on the host: for each packed sequence the number of an earlier one in front of it, whose tokens it sees beside its own,
    -1 for none; ``positions`` go on behind it. None where no sequence has one."""
    attention: Any = None
    """Data for the attention core that was chosen (page tables, sequence bounds); other layers ignore it."""
    states: Any = None
    """``RecurrentRows`` (``mcore_parallel.nn.mixers``), from whose states linear mixers go on and where they leave the new ones; other
    layers ignore it. None for sequences that begin here."""
    encoder_tokens: Tensor | None = None
    """[B, S'] int64, what the encoder of an encoder-decoder reads."""
    encoder_mask: Tensor | None = None
    """[B, 1, 1, S'] bool, True at its padding."""
    memory: Tensor | None = None
    """[B S', D] hidden states that ``CrossAttention`` attends to, this rank's share of them under sequence parallelism."""
    memory_mask: Tensor | None = None
    """[B, 1, 1, S'] or [B, 1, S, S'] bool, True where a query does not see them."""
    rotary: tuple[Tensor, Tensor] | None = None
    """cos and sin of the rotary embedding, each [T, channels of a head that turn]; the model fills them in once for all its layers."""
    rotary_window: tuple[Tensor, Tensor] | None = None
    """The same for layers with a window, where these have a base of their own; None where they share ``rotary``."""
    valid: Tensor | None = None
    """[T] bool, False at padding, which feed-forwards may skip; None where every token is real."""
    equal_lengths: bool = False
    """Whether the ranks that exchange tokens all have T of them, padding included; then none has to ask."""
    counts: Mapping[int, Tensor] = field(default_factory=dict)
    """By layer, what it counted on this rank in the micro-batches of the global batch before this one (``mcore_parallel.models.Aux``);
    empty unless a layer reads it."""
    routed_experts: Tensor | None = None
    """[T, L, K] integers, the experts that each token goes to in each layer, of a routing that was recorded; a row with a negative number
    is routed afresh. None for fresh routing."""
    routed_weights: Tensor | None = None
    """[T, L, K], their weights; None for those of the router's present scores."""
    routing_recorder: Callable[[int, Tensor, Tensor], None] | None = None
    """Called by each router with its layer, the experts [T or T / tp, K] and their weights."""
    slot: int | None = None
    """Number of this pass among those whose backward a pipeline stage has still to run, from 0; None outside a schedule."""

    @classmethod
    def causal(cls, batch_size: int, seq_len: int, device: torch.device | str = "cpu") -> "Step":
        """B sequences of S tokens, each from position 0."""
        positions = torch.arange(seq_len, device=device).repeat(batch_size)
        return cls(batch_size=batch_size, seq_len=seq_len, positions=positions)

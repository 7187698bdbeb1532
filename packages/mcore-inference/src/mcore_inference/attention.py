# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Attention over keys and values that lie in the blocks of a paged cache."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcore_inference.cache import PagedKVCache
from mcore_parallel.nn import Step

__all__ = ["DecodeRows", "PagedAttention", "PagedStep", "PrefillRows"]


# T tokens of a step, A heads, K key-value heads (of this tp rank), d width of a head; R decode rows and P prefill rows with
# up to Q new tokens each; L longest context of the rows.
@dataclass(frozen=True, kw_only=True)
class DecodeRows:
    """Requests with one new token; they are the first R tokens of the step."""

    context_RL: Tensor
    """[R, L] int64, slot of each token of the context, the new one included. Padding repeats the row's first slot, so that
    a row never reads what another one wrote."""
    visible_RL: Tensor
    """[R, L] bool, False for padding."""


@dataclass(frozen=True, kw_only=True)
class PrefillRows:
    """Requests with several new tokens (a prompt or a part of one); their tokens follow those of the decode rows."""

    first_token: int
    """Number of the first prefill token in the step."""
    tokens_PQ: Tensor
    """[P, Q] int64, each row's tokens counted from ``first_token``; padding repeats the row's last token."""
    rows_T: Tensor
    """[T - first_token] int64, where in the flattened [P, Q] each token's result lies."""
    context_PL: Tensor
    """[P, L] int64, as in ``DecodeRows``."""
    visible_PQL: Tensor | None
    """[P, Q, L] bool, causal and without padding; None when every row starts at position 0: a causal kernel needs no
    mask then, since padding comes last."""


@dataclass(frozen=True, kw_only=True)
class PagedStep:
    """What ``Step.attention`` carries for ``PagedAttention``; made once a step, read by every layer."""

    cache: PagedKVCache
    slots_T: Tensor
    """[T] int64, where the keys and values of the step's tokens are written."""
    decode: DecodeRows | None
    prefill: PrefillRows | None


class PagedAttention(nn.Module):
    """The attention core of a model that an engine drives: writes the new keys and values into their slots, then attends.

    It holds no state; the cache travels in ``step.attention``. Without one (``None``) it is plain causal attention over the
    step's sequences, so the same model can be scored or trained.

    This is the torch path: it gathers each row's context by its block table and runs torch's fused attention under a mask, decode
    rows (one query a row) apart from prefill rows.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: int, step: Step) -> Tensor:
        """[T, A, d], [T, K, d], [T, K, d] -> [T, A, d].

        Raises:
            TypeError: ``step.attention`` is data for another core.
        """
        paged: Any = step.attention
        if paged is None:
            return _causal(q, k, v, step)
        if not isinstance(paged, PagedStep):
            raise TypeError(f"step.attention is a {type(paged).__name__}; PagedAttention reads a PagedStep or None")
        keys, values = paged.cache.slots(layer)
        keys.index_copy_(0, paged.slots_T, k)
        values.index_copy_(0, paged.slots_T, v)
        parts = []
        if paged.decode is not None:
            parts.append(_attend_decode(q[: paged.decode.context_RL.shape[0]], keys, values, paged.decode))
        if paged.prefill is not None:
            parts.append(_attend_prefill(q[paged.prefill.first_token :], keys, values, paged.prefill))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend_decode(q: Tensor, keys: Tensor, values: Tensor, rows: DecodeRows) -> Tensor:
    """[R, A, d] -> [R, A, d]. The heads that share a key-value head act as its queries, so nothing is repeated."""
    k, v = keys[rows.context_RL].transpose(1, 2), values[rows.context_RL].transpose(1, 2)
    grouped = q.unflatten(1, (k.shape[1], -1))
    return F.scaled_dot_product_attention(grouped, k, v, attn_mask=rows.visible_RL[:, None, None, :]).flatten(1, 2)


def _attend_prefill(q: Tensor, keys: Tensor, values: Tensor, rows: PrefillRows) -> Tensor:
    """[T, A, d] -> [T, A, d], through [P, A, Q, d]."""
    k, v = keys[rows.context_PL].transpose(1, 2), values[rows.context_PL].transpose(1, 2)
    padded = q[rows.tokens_PQ].transpose(1, 2)
    mask = None if rows.visible_PQL is None else rows.visible_PQL[:, None]
    out = F.scaled_dot_product_attention(padded, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=padded.shape[1] != k.shape[1])
    return out.transpose(1, 2).flatten(0, 1)[rows.rows_T]


def _causal(q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
    q, k, v = (x.unflatten(0, (step.batch_size, step.seq_len)).transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2).flatten(0, 1)

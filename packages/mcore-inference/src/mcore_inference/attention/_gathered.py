# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The torch path of attention over a paged cache: it gathers each row's context by its block table.

It is the reference of the kernels, and what runs on a CPU and in float64.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_inference.attention._decode_contexts import ContinuedRows, attend_continued
from mcore_inference.attention._step import DecodeRows, GatheredRows, PrefillRows
from mcore_inference.cache import LayerSlots
from mcore_parallel.nn import soft_cap


@dataclass(frozen=True, kw_only=True)
class _Options:
    """What a layer asks for."""

    scale: float | None
    window: int
    sink: Tensor | None
    softcap: float | None

    @property
    def is_plain(self) -> bool:
        return self.sink is None and self.softcap is None


# T tokens of a step, A heads, K key-value heads, d width of a head; R decode rows, P prefill rows with up to Q new tokens each; L longest
# context of the rows.
def attend_gathered(
    q: Tensor,
    cached: LayerSlots,
    rows: GatheredRows,
    *,
    layer: int,
    scale: float | None,
    window: int,
    sink: Tensor | None,
    softcap: float | None = None,
) -> Tensor:
    """[T, A, d] -> [T, A, d]; ``cached`` holds the layer's keys and values, ``window`` is -1 for none."""
    if isinstance(rows.decode, ContinuedRows):
        return attend_continued(q, cached, rows.decode, layer=layer, scale=scale, window=window, sink=sink, softcap=softcap)
    options = _Options(scale=scale, window=window, sink=sink, softcap=softcap)
    parts = []
    if rows.decode is not None:
        parts.append(_decode(q[: rows.decode.context_RL.shape[0]], cached, rows.decode, options))
    if rows.prefill is not None:
        parts.append(_prefill(q[rows.prefill.first_token :], cached, rows.prefill, options))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _decode(q: Tensor, cached: LayerSlots, rows: DecodeRows, options: _Options) -> Tensor:
    """[R, A, d] -> [R, A, d]. The heads that share a key-value head act as its queries, so nothing is repeated."""
    k, v = (x.transpose(1, 2) for x in cached.read(rows.context_RL, q.dtype))
    visible_RL = rows.visible_RL
    if options.window >= 0:
        visible_RL = visible_RL & (_columns(visible_RL) >= rows.positions_R[:, None] - options.window)
    grouped = q.unflatten(1, (k.shape[1], -1))
    mask = visible_RL[:, None, None, :]
    if not options.is_plain:
        return _by_scores(grouped, k, v, mask, options, (1, k.shape[1], -1)).flatten(1, 2)
    return F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=options.scale).flatten(1, 2)


def _prefill(q: Tensor, cached: LayerSlots, rows: PrefillRows, options: _Options) -> Tensor:
    """[T, A, d] -> [T, A, d], through [P, A, Q, d]."""
    k, v = (x.transpose(1, 2) for x in cached.read(rows.context_PL, q.dtype))
    padded = q[rows.tokens_PQ].transpose(1, 2)
    visible = rows.visible_PQL
    if options.window >= 0 or not options.is_plain:
        column_L = _columns(rows.context_PL)
        visible = column_L <= rows.positions_PQ[..., None] if visible is None else visible
        if options.window >= 0:
            visible = visible & (column_L >= rows.positions_PQ[..., None] - options.window)
    mask = None if visible is None else visible[:, None]
    if not options.is_plain and mask is not None:
        k, v = (x.repeat_interleave(padded.shape[1] // x.shape[1], dim=1) for x in (k, v))
        out = _by_scores(padded, k, v, mask, options, (1, -1, 1))
    else:
        gqa = padded.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(padded, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=gqa, scale=options.scale)
    return out.transpose(1, 2).flatten(0, 1)[rows.rows_T]


def _columns(table: Tensor) -> Tensor:
    return torch.arange(table.shape[-1], device=table.device)


def _by_scores(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, options: _Options, heads: tuple[int, ...]) -> Tensor:
    """What torch's kernels do not compute: scores that are capped, and one more logit a head, whose share goes to no value.

    The logits [A] of the sinks have the shape ``heads`` beside the scores [..., heads, queries, keys].
    """
    scores = (q @ k.transpose(-1, -2)) * (q.shape[-1] ** -0.5 if options.scale is None else options.scale)
    scores = scores if options.softcap is None else soft_cap(scores, options.softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if options.sink is None:
        return scores.softmax(dim=-1) @ v
    extra = options.sink.view(heads).to(scores.dtype).expand(scores.shape[:-1])[..., None]
    return torch.cat((scores, extra), dim=-1).softmax(dim=-1)[..., :-1] @ v

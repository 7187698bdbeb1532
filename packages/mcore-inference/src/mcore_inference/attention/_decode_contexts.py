# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Contexts of rows that decode together, side by side in the order that matmuls read."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mcore_inference._stability import experimental_api
from mcore_inference.cache import LayerSlots
from mcore_parallel.nn import soft_cap

_MOST_BYTES = 256 * 2**20
_SPARE = 96
"""Tokens of each row that are added before all are copied again."""


# R rows, K key-value heads, G query heads of each, d width of a head; L longest context of the rows, C tokens that there is room for.
@experimental_api
class DecodeContexts:
    """A copy of the keys and values of rows that decode, step after step, so that a step copies its own tokens only.

    It holds while the rows are the same and the cache keeps what it has of them.

    Args:
        num_rows: R.
        bytes_per_token: of keys and values of all layers.
    """

    def __init__(self, num_rows: int, bytes_per_token: int) -> None:
        self.num_rows, self._room = num_rows, _MOST_BYTES // (num_rows * bytes_per_token)
        self._capacity = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def takes(self, length: int) -> bool:
        """Whether there is memory for a step whose longest context has so many tokens; it makes room."""
        if length > self._room:
            return False
        if length > self._capacity:
            # No power of two: rows of a matrix must not meet in few lines of a processor's cache.
            self._capacity = min(-(-(length + _SPARE) // 32) * 32 + 16, self._room)
            self._layers.clear()
        return True

    @property
    def is_empty(self) -> bool:
        """Whether the next step has to bring the slots of all tokens."""
        return not self._layers

    def of_layer(self, layer: int, cached: LayerSlots, rows: "ContinuedRows", dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys [R K, d, C] and values [R K, C, d] of a layer, those of the step included."""
        held = self._layers.get(layer)
        if held is None:
            assert rows.context_RL is not None, "the first step brings all slots"
            k, v = cached.read(rows.context_RL, dtype)
            R, L, K, d = k.shape
            keys, values = k.new_zeros((R, K, d, self._capacity)), k.new_zeros((R, K, self._capacity, d))
            keys[..., :L], values[:, :, :L] = k.permute(0, 2, 3, 1), v.transpose(1, 2)
            held = self._layers[layer] = keys.flatten(0, 1), values.flatten(0, 1)
            return held
        keys, values = held
        k, v = cached.read(rows.slots_R, dtype)
        place_N, place_M = rows.places(k.shape[1], k.shape[2], self._capacity)
        keys.view(-1).index_copy_(0, place_M, k.view(-1))
        values.view(-1, k.shape[2]).index_copy_(0, place_N, v.view(-1, k.shape[2]))
        return held


@experimental_api
@dataclass(frozen=True, kw_only=True, eq=False)
class ContinuedRows:
    """Rows of one token whose contexts are in ``contexts`` up to the last token; they are the first R rows of the step."""

    contexts: DecodeContexts
    positions_R: Tensor
    """[R] int64, of the new token."""
    slots_R: Tensor
    """[R] int64, where it is in the cache."""
    context_RL: Tensor | None
    """[R, L] int64, as in ``DecodeRows``, where ``contexts`` is empty."""
    length: int
    """L."""
    is_even: bool
    """Whether all contexts are equally long."""
    _made: dict[object, tuple[Tensor, ...]] = field(default_factory=dict, repr=False)

    def places(self, kv_heads: int, head_dim: int, capacity: int) -> tuple[Tensor, Tensor]:
        """Where the heads of the new tokens stand among the rows [R K C] of values, [R K], and their channels among those of keys
        [R K d C], [R K d]."""

        def make() -> tuple[Tensor, Tensor]:
            heads = torch.arange(len(self.positions_R) * kv_heads).view(-1, kv_heads)
            channels = torch.arange(heads.numel() * head_dim).view(*heads.shape, head_dim)
            at_R1 = self.positions_R[:, None]
            return (heads * capacity + at_R1).flatten(), (channels * capacity + at_R1[..., None]).flatten()

        first, second = self._once((kv_heads, head_dim), make)
        return first, second

    def mask(self, window: int, kv_heads: int, dtype: torch.dtype) -> Tensor | None:
        """[R K, 1, L] of zeros and -inf, which is added to scores; None where each row sees all L tokens. ``window`` is -1 for none."""
        if self.is_even and (window < 0 or self.length <= window + 1):
            return None

        def make() -> tuple[Tensor]:
            column_L, at_R1 = torch.arange(self.length), self.positions_R[:, None]
            hidden_RL = column_L > at_R1
            if window >= 0:
                hidden_RL |= column_L < at_R1 - window
            mask_RL = torch.zeros(hidden_RL.shape, dtype=dtype).masked_fill_(hidden_RL, -torch.inf)
            return (mask_RL.repeat_interleave(kv_heads, dim=0)[:, None],)

        return self._once((window, kv_heads, dtype), make)[0]

    def _once(self, key: object, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """What all layers of a step share."""
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = make()
        return made


def attend_continued(
    q: Tensor,
    cached: LayerSlots,
    rows: ContinuedRows,
    *,
    layer: int,
    scale: float | None,
    window: int,
    sink: Tensor | None,
    softcap: float | None,
) -> Tensor:
    """[R, A, d] -> [R, A, d]. The heads that share a key-value head act as its queries, so nothing is repeated."""
    keys, values = rows.contexts.of_layer(layer, cached, rows, q.dtype)
    kv_heads, width = keys.shape[0] // len(q), q.shape[-1]
    grouped = q.reshape(len(keys), -1, width)
    mask = rows.mask(window, kv_heads, q.dtype)
    added = None if softcap is not None else mask
    scores = torch.baddbmm(
        grouped.new_empty(()) if added is None else added,
        grouped,
        keys[:, :, : rows.length],
        beta=0 if added is None else 1,
        alpha=width**-0.5 if scale is None else scale,
    )
    if softcap is not None:
        scores = soft_cap(scores, softcap)
        scores = scores if mask is None else scores + mask
    if sink is None:
        shares = scores.softmax(dim=-1)
    else:
        extra = sink.to(q.dtype).expand(len(q), -1).reshape(*scores.shape[:-1], 1)
        shares = torch.cat((scores, extra), dim=-1).softmax(dim=-1)[..., :-1]
    return torch.bmm(shares, values[:, : rows.length]).view(q.shape)

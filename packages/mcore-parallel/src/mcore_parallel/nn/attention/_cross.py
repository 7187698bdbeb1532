# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Attention from a decoder to what an encoder made, over tensor-parallel heads."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcore_parallel.groups import ProcessGroups
from mcore_parallel.nn._factory import LayerFactory, TorchLayers
from mcore_parallel.nn._step import Step


# T tokens of the decoder, M of the encoder, B sequences, D model, A heads and K key-value heads (global), d width of a head.
class CrossAttention(nn.Module):
    """Queries of the hidden states, keys and values of ``Step.memory``; ``Step.memory_mask`` hides padding.

    ``q.weight`` is [A d, D] and ``kv.weight`` [K, 2 d, D], of each key-value head its key, then its value; both are cut over tp by heads.

    Args:
        hidden_size: D.
        num_heads: A.
        num_kv_heads: K.
        head_dim: d.
        groups: tp is used.
        qkv_bias: biases of queries, keys and values.
        out_bias: bias of the projection back.
        softmax_scale: factor of the scores; None for 1 / sqrt(d).
        layers: builds the projections.
        dtype: of the weights.
        device: of the weights.
        init: as in the linear layers.

    Raises:
        ValueError: tp does not divide the heads.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        groups: ProcessGroups,
        *,
        qkv_bias: bool = False,
        out_bias: bool = False,
        softmax_scale: float | None = None,
        layers: LayerFactory | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        init: bool = True,
    ) -> None:
        super().__init__()
        if num_heads % num_kv_heads or num_kv_heads % groups.tp.size:
            raise ValueError(
                f"tp={groups.tp.size} must divide num_query_groups={num_kv_heads}, and that num_attention_heads={num_heads}; lower tp"
            )
        layers = TorchLayers() if layers is None else layers
        self.head_dim, self.scale = head_dim, softmax_scale
        width = num_heads * head_dim
        place = {"init": init, "dtype": dtype, "device": device}
        self.q = layers.column_linear(hidden_size, width, groups, bias=qkv_bias, **place)
        self.kv = layers.column_linear(hidden_size, (num_kv_heads, 2 * head_dim), groups, shard_dim=0, bias=qkv_bias, **place)
        self.out = layers.row_linear(width, hidden_size, groups, bias=out_bias, **place)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """[T or T / tp, D] -> the same."""
        if step.memory is None:
            raise ValueError("the step has no memory to attend to; set Step.memory to the hidden states of an encoder")
        B = step.batch_size
        q = self.q(x).view(B, step.seq_len, -1, self.head_dim).transpose(1, 2)
        k, v = self.kv(step.memory).unflatten(0, (B, -1)).unflatten(-1, (-1, 2, self.head_dim)).unbind(-2)
        k, v = k.flatten(2, -2).transpose(1, 2), v.flatten(2, -2).transpose(1, 2)
        mask = None if step.memory_mask is None else ~step.memory_mask
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1])
        return self.out(y.transpose(1, 2).flatten(0, 1).flatten(1))

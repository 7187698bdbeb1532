# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The gated delta net mixer."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_parallel.groups import ProcessGroups
from mcore_parallel.nn._factory import LayerFactory
from mcore_parallel.nn.kernels import ChunkPlan, SlotSpans, SlotStates, fixed_delta, fused_delta_decode
from mcore_parallel.nn.mixers._gated_norm import GatedRMSNorm
from mcore_parallel.nn.mixers._heads import GroupRows
from mcore_parallel.nn.mixers._linear_mixer import LinearMixer, LinearMixerConfig, check_sizes
from mcore_parallel.nn.mixers._recurrences import EPSILON, delta_chunked, delta_step, step_sizes


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNetConfig:
    """Of a gated delta net mixer (Yang et al., 2024).

    Raises:
        ValueError: a size below 1, key heads that do not divide the value heads.
    """

    num_key_heads: int
    """Heads of queries and keys."""
    num_value_heads: int
    """Heads of values; a multiple of the key heads."""
    key_head_dim: int = 128
    """Channels of a query or key head."""
    value_head_dim: int = 128
    """Channels of a value head."""
    conv_kernel: int = 4
    """Tokens that the convolution sees."""
    chunk_size: int = 64
    """Tokens of a block of the recurrence."""

    def __post_init__(self) -> None:
        check_sizes(self, "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel", "chunk_size")
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(f"num_key_heads={self.num_key_heads} must divide num_value_heads={self.num_value_heads}; lower num_key_heads")


# T tokens, D model, G key heads, h value heads of each, H value heads, K width of keys, V width of values.
class GatedDeltaNet(LinearMixer):
    """Gated delta net (Yang et al., 2024) over tensor-parallel key heads, with the value heads that read each.

    ``in_proj.weight`` is [G, 2 h V + 2 K + 2 h, D]: of each key head the gates z and the values of its value heads, the key, the query,
    and of each value head a (decay) and b (strength of writing). ``conv.weight`` [G, h V + 2 K, taps] acts on values, key and query;
    ``A_log`` and ``dt_bias`` are [H]. All these are cut over tp along G or H. ``norm.weight`` [V] serves all heads;
    ``out_proj.weight`` is [D, H V]. Under context parallelism the ranks exchange tokens for heads around convolution and scan.

    Args:
        hidden_size: D.
        config: sizes.
        groups: tp and cp are used.
        norm_epsilon: of the gated norm.
        layer: number among the layers of this stage, by which ``Step.states`` keeps its states.
        layers: builds the projections; None for those of ``mcore_parallel.tensor_parallel``.
        batch_invariant: compute convolution, recurrence and norm of a sequence token after token, so that a token's bits depend on its own
            sequence only; the backward is that of chunks. ``layers`` see to the projections.
        dtype: of the weights; ``A_log`` and ``dt_bias`` are kept in float32 at least.
        device: of the weights.
        init: draw the weights; False leaves them to a caller.

    Raises:
        HeadSplitError: tp does not divide the key heads, cp not the value heads of a tp rank.
        ValueError: ``batch_invariant`` with cp above 1.

    Example:
        >>> from mcore_parallel.nn import Step
        >>> sizes = GatedDeltaNetConfig(num_key_heads=2, num_value_heads=4, key_head_dim=8, value_head_dim=8)
        >>> GatedDeltaNet(32, sizes, ProcessGroups.single())(torch.randn(6, 32), Step.causal(2, 3)).shape
        torch.Size([6, 32])
    """

    def __init__(
        self,
        hidden_size: int,
        config: GatedDeltaNetConfig,
        groups: ProcessGroups,
        *,
        norm_epsilon: float = 1e-5,
        layer: int = 0,
        layers: LayerFactory | None = None,
        batch_invariant: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        init: bool = True,
    ) -> None:
        self.config = config
        heads = config.num_value_heads // config.num_key_heads
        sizes = LinearMixerConfig(
            hidden_size=hidden_size,
            num_groups=config.num_key_heads,
            groups_field="num_key_heads",
            rows=GroupRows(heads=heads, head_dim=config.value_head_dim, shared=2 * config.key_head_dim, numbers=2),
            conv_kernel=config.conv_kernel,
            conv_bias=False,
            chunk_size=config.chunk_size,
        )
        super().__init__(
            sizes,
            groups,
            norm=GatedRMSNorm(
                config.value_head_dim, groups, epsilon=norm_epsilon, batch_invariant=batch_invariant, dtype=dtype, device=device
            ),
            layer=layer,
            layers=layers,
            batch_invariant=batch_invariant,
            dtype=dtype,
            device=device,
            init=init,
        )

    def _head_parameters(self) -> tuple[str, ...]:
        return ("A_log", "dt_bias")

    def _memory_shape(self) -> tuple[int, ...]:
        return (self.local_groups * self.rows.heads, self.config.key_head_dim, self.config.value_head_dim)

    def _scan(
        self, mixed: Tensor, numbers: Tensor, heads: Mapping[str, Tensor], plan: ChunkPlan, initial: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return delta_chunked(*self._parts(mixed), *_decay_and_strength(numbers, heads["A_log"], heads["dt_bias"]), plan, initial)

    def _decode_in_slots(self, channels: Tensor, numbers: Tensor, states: SlotStates) -> Tensor:
        heads = self.get_parameter("A_log"), self.get_parameter("dt_bias")
        return fused_delta_decode(channels, numbers, self.conv.weight, heads, states, EPSILON)

    def _scan_step(self, mixed: Tensor, numbers: Tensor, heads: Mapping[str, Tensor], memory: Tensor) -> tuple[Tensor, Tensor]:
        return delta_step(*self._parts(mixed), *_decay_and_strength(numbers, heads["A_log"], heads["dt_bias"]), memory)

    def _scan_alone(self, mixed: Tensor, numbers: Tensor, heads: Mapping[str, Tensor], memory: Tensor, spans: SlotSpans) -> Tensor:
        return fixed_delta(mixed, numbers, (heads["A_log"], heads["dt_bias"]), memory, spans, EPSILON)

    def _parts(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys [T, G, K], values [T, H, V]."""
        width = self.config.key_head_dim
        v, k, q = mixed.split((mixed.shape[-1] - 2 * width, width, width), dim=-1)
        return q, k, v.unflatten(-1, (-1, self.config.value_head_dim)).flatten(1, 2)


def _decay_and_strength(numbers_TGn: Tensor, a_log_H: Tensor, bias_H: Tensor) -> tuple[Tensor, Tensor]:
    """g and beta [T, H] of the columns [T, G, 2 h]."""
    a, b = numbers_TGn.unflatten(-1, (2, -1)).unbind(-2)
    sizes = step_sizes(a.flatten(1), bias_H, (0.0, float("inf")))
    return -torch.exp(a_log_H.to(sizes.dtype)) * sizes, torch.sigmoid(b.flatten(1).to(sizes.dtype))

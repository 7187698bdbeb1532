# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""One transformer layer with its two slots."""

from torch import Tensor, nn

from mcore_parallel.models._slots import FeedForwardBuilder, MixerBuilder, Site
from mcore_parallel.nn import AttentionCore, GatedMLP, LayerMemory, RMSNorm, SelfAttention, SinkAttentionCore, Step, default_attention


class TransformerLayer(nn.Module):
    """``x + mixer(norm(x))``, then ``x + feed_forward(norm(x))``.

    Args:
        site: where the layer stands, and in which dtype and on which device its parameters are made.
        mixer: fills the slot ``attention``.
        feed_forward: fills the slot ``mlp``.
        memory: what is recomputed or offloaded; None to keep everything.
    """

    def __init__(self, site: Site, mixer: MixerBuilder, feed_forward: FeedForwardBuilder, memory: LayerMemory | None = None) -> None:
        super().__init__()
        self.memory = LayerMemory() if memory is None else memory
        self.input_norm = build_norm(site)
        self.attention = mixer(site)
        self.ffn_norm = build_norm(site)
        self.mlp = feed_forward(site)

    def forward(self, x: Tensor, step: Step) -> tuple[Tensor, Tensor | None]:
        """[T or T / tp, D] -> (the same, auxiliary loss of the feed-forward or None)."""
        with self.memory.offloading("layer", self):
            x = x + self.memory.branch("attention", self.input_norm, self.attention, x, step)
            y, aux = self.memory.branch("mlp", self.ffn_norm, self.mlp, x, step)
            return x + y, aux


def build_norm(site: Site) -> RMSNorm:
    """A norm over hidden states; under sequence parallelism it sees a share of the tokens."""
    partial = ("tp",) if site.groups.sequence_parallel else ()
    config = site.config
    return RMSNorm(config.hidden_size, epsilon=config.norm_epsilon, partial=partial, dtype=site.dtype, device=site.device)


def dense_feed_forward(site: Site) -> nn.Module:
    """The gated feed-forward layer of the config's ``ffn_size``."""
    return GatedMLP(site.config.hidden_size, site.config.ffn_size, site.groups, dtype=site.dtype, device=site.device, init=False)


def self_attention(core: AttentionCore | SinkAttentionCore | None = None, *, softmax_type: str = "vanilla") -> MixerBuilder:
    """A builder of self-attention of the config's sizes around a core; None for causal attention of the layout.

    Args:
        core: as of ``SelfAttention``.
        softmax_type: as of ``SelfAttention``; "learnable" needs a ``core`` that takes sinks.
    """

    def build(site: Site) -> nn.Module:
        config = site.config
        return SelfAttention(
            config.hidden_size,
            config.num_attention_heads,
            config.kv_heads,
            config.head_dim,
            site.groups,
            layer=site.local_layer,
            core=default_attention(site.groups) if core is None else core,
            softmax_type=softmax_type,
            dtype=site.dtype,
            device=site.device,
            init=False,
        )

    return build

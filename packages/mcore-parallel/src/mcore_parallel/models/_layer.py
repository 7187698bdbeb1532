# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""One transformer layer with its two slots, either of which may stay empty."""

import dataclasses
from collections.abc import Callable

from torch import Tensor, nn

from mcore_parallel.models._aux import Aux
from mcore_parallel.models._cores import CoreChooser, attention_spec, layer_rotary
from mcore_parallel.models._slots import FeedForwardBuilder, MixerBuilder, Site
from mcore_parallel.nn import (
    MLP,
    Activation,
    AttentionConfig,
    AttentionCore,
    AttentionCoreBuilder,
    LayerMemory,
    SelfAttention,
    SinkAttentionCore,
    Step,
)


class TransformerLayer(nn.Module):
    """``x + mixer(norm(x))``, then ``x + feed_forward(norm(x))``; a slot that is None is left out with its norms.

    With ``sandwich_norm`` each branch is ``x + norm(mixer(norm(x)))``, with ``post_norm`` it is ``norm(x + mixer(x))``.

    Args:
        site: where the layer stands, and in which dtype and on which device its parameters are made.
        mixer: fills the slot ``mixer_name``; None for a layer without one.
        feed_forward: fills the slot ``mlp``; None for a layer without one.
        memory: what is recomputed or offloaded; None to keep everything.
        mixer_name: what the mixer is called among the parameters: "attention", "mamba" or "delta_net".

    Raises:
        ValueError: both slots empty, recomputed or offloaded norms that ``post_norm`` leaves no place for.
    """

    def __init__(
        self,
        site: Site,
        mixer: MixerBuilder | None,
        feed_forward: FeedForwardBuilder | None,
        memory: LayerMemory | None = None,
        *,
        mixer_name: str = "attention",
    ) -> None:
        super().__init__()
        config = site.config
        if mixer is None and feed_forward is None:
            raise ValueError(f"layer {site.layer} has mixer=None and feed_forward=None; fill one of the slots")
        self.memory = LayerMemory() if memory is None else memory
        if config.post_norm and "norm" in self.memory.recomputed | self.memory.offloaded:
            raise ValueError("modules holds 'norm', but with post_norm=True no norm stands before a projection; leave it out")
        before, behind = not config.post_norm, config.post_norm or config.sandwich_norm
        self.post_norm, self.mixer_name = config.post_norm, mixer_name
        self.input_norm = build_norm(site) if mixer is not None and before else None
        self.add_module(mixer_name, None if mixer is None else mixer(site))
        self.attention_post_norm = build_norm(site) if mixer is not None and behind else None
        self.ffn_norm = build_norm(site) if feed_forward is not None and before else None
        self.mlp = None if feed_forward is None else feed_forward(dataclasses.replace(site, memory=self.memory))
        self.mlp_post_norm = build_norm(site) if feed_forward is not None and behind else None

    @property
    def mixer(self) -> nn.Module | None:
        """What fills the mixer slot."""
        return self._modules[self.mixer_name]

    def forward(self, x: Tensor, step: Step) -> tuple[Tensor, Aux | None]:
        """[T or T / tp, D] -> (the same, what the feed-forward returns beside or None)."""
        mixer, aux = self.mixer, None
        with self.memory.offloading("layer", self):
            if mixer is not None:
                y, x = self.memory.branch(self.mixer_name, self.input_norm, mixer, x, step)
                x = self._add(x, y, self.attention_post_norm)
            if self.mlp is not None:
                (y, aux), x = self.memory.branch("mlp", self.ffn_norm, self.mlp, x, step)
                x = self._add(x, y, self.mlp_post_norm)
        return x, aux

    def _add(self, x: Tensor, y: Tensor, norm: nn.Module | None) -> Tensor:
        """A branch's result into the residual stream."""
        if norm is None:
            return x + y
        return norm(x + y) if self.post_norm else x + norm(y)


def build_norm(site: Site) -> nn.Module:
    """A norm over hidden states; under sequence parallelism it sees a share of the tokens."""
    partial = ("tp",) if site.groups.sequence_parallel else ()
    config = site.config
    return site.layers.norm(
        config.hidden_size,
        normalization=config.normalization,
        zero_centered=config.layernorm_zero_centered_gamma,
        epsilon=config.norm_epsilon,
        partial=partial,
        dtype=site.dtype,
        device=site.device,
    )


def dense_feed_forward(site: Site, *, fp8_input_store: bool = False) -> nn.Module:
    """The feed-forward layer of the config's ``ffn_size`` and activation.

    Args:
        site: where it stands.
        fp8_input_store: keep the activation's input for the backward in fp8; ``functools.partial`` chooses it for a model.
    """
    config = site.config
    activation = Activation(
        name=config.activation,
        offset=config.glu_linear_offset,
        clamp=config.activation_func_clamp_value,
        fp8_input_store=fp8_input_store,
        batch_invariant=site.batch_invariant,
    )
    return MLP(
        config.hidden_size,
        config.ffn_size,
        site.groups,
        activation=activation,
        bias=config.add_bias_linear,
        layers=site.layers,
        dtype=site.dtype,
        device=site.device,
        init=False,
    )


def self_attention(
    core: AttentionCore | SinkAttentionCore | AttentionCoreBuilder | None = None,
    *,
    softmax_type: str | None = None,
    causal: bool = True,
    input_size: int | None = None,
    manage: Callable[[AttentionCore | SinkAttentionCore], AttentionCore | SinkAttentionCore] | None = None,
) -> MixerBuilder:
    """A builder of self-attention as the config describes it: sizes, biases, norms, gate, and each layer's window, sinks and rotary tables.

    Args:
        core: as of ``CoreChooser``.
        softmax_type: None for the config's. "learnable" with a ``core`` of one's own needs one that takes sinks.
        causal: a token sees no later one.
        input_size: as of ``SelfAttention``.
        manage: as of ``CoreChooser``.
    """
    chooser = CoreChooser(core, manage=manage)

    def build(site: Site) -> nn.Module:
        config = site.config
        spec = attention_spec(site, causal=causal, softmax_type=softmax_type)
        own_core = core is None or isinstance(core, AttentionCoreBuilder)
        attention = AttentionConfig(
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            input_size=input_size,
            softmax_type="vanilla" if own_core and spec.softmax_type == "off-by-one" else spec.softmax_type,
            rotary=layer_rotary(config, site.layer),
            rotary_interleaved=config.rotary_interleaved,
            qk_norm=config.qk_layernorm,
            qk_norm_across_heads=config.qk_layernorm_across_heads,
            normalization=config.normalization,
            norm_zero_centered=config.layernorm_zero_centered_gamma,
            norm_epsilon=config.norm_epsilon,
            qkv_bias=config.add_qkv_bias,
            out_bias=config.add_bias_linear,
            output_gate=config.attention_output_gate,
        )
        return SelfAttention(
            attention,
            site.groups,
            layer=site.local_layer,
            core=chooser.core(spec, site),
            spec=spec,
            layers=site.layers,
            dtype=site.dtype,
            device=site.device,
            init=False,
        )

    return build

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""T5: an encoder, and a decoder that attends to it (Raffel et al., 2019)."""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from mcore_parallel.groups import ProcessGroups
from mcore_parallel.models._config import TransformerConfig
from mcore_parallel.models._cores import rotary_config
from mcore_parallel.models._init import fill_parameters
from mcore_parallel.models._layer import TransformerLayer, build_norm, dense_feed_forward, self_attention
from mcore_parallel.models._layout import check_layout
from mcore_parallel.models._output import ModelOutput, OutputLayer
from mcore_parallel.models._slots import Site
from mcore_parallel.nn import CrossAttention, LearnedPositions, MaskedAttention, Step
from mcore_parallel.tensor_parallel import VocabParallelEmbedding


# T tokens of the decoder, M of the encoder, D model, B sequences.
class T5Model(nn.Module):
    """Encoder layers that see both sides, then decoder layers: causal self-attention, attention to the encoder, feed-forward.

    Both share the embedding and, if learned, the positions. As in Megatron, positions are absolute or rotary, without T5's biases of
    relative ones, and the output layer has no bias. The encoder reads ``Step.encoder_tokens`` [B, S']; its padding is hidden from encoder
    and decoder by ``Step.encoder_mask`` [B, 1, 1, S'], that of the decoder by ``Step.attention``. ``Batch.extras`` named so fill them.

    Args:
        config: of the layers of both; ``num_layers`` counts those of the decoder.
        groups: the layout; pp and cp must be 1.
        encoder_layers: layers of the encoder; None for as many as the decoder has.
        unpadded_vocab_size: as of ``GPTModel``.
        dtype: of the parameters and the hidden states.
        device: of the parameters.
        seed: of the initial values; None leaves them uninitialised.

    Raises:
        ValueError: pp or cp above 1, a choice of the config that the model has no place for, and what ``GPTModel`` raises.
    """

    def __init__(
        self,
        config: TransformerConfig,
        groups: ProcessGroups,
        *,
        encoder_layers: int | None = None,
        unpadded_vocab_size: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        seed: int | None = 0,
    ) -> None:
        super().__init__()
        count = config.num_layers if encoder_layers is None else encoder_layers
        _check(config, groups, count)
        check_layout(config, groups.plan, ends=True)
        self.config, self.groups, self.dtype = config, groups, dtype
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        sizes = (config.vocab_size, config.hidden_size, groups)

        def site(layer: int) -> Site:
            return Site(layer=layer, local_layer=layer, config=config, groups=groups, **place)

        core = MaskedAttention(config.attention_backend)
        both, causal = self_attention(core, causal=False), self_attention(core)
        self.embedding = VocabParallelEmbedding(*sizes, init=False, **place)
        rows = config.max_position_embeddings if config.position_embedding_type == "learned_absolute" else None
        self.position_embedding = LearnedPositions(rows, config.hidden_size, groups, **place) if rows else None
        self.encoder = nn.ModuleDict({str(layer): TransformerLayer(site(layer), both, dense_feed_forward) for layer in range(count)})
        self.encoder_norm = build_norm(site(0))
        self.decoder = nn.ModuleDict({str(layer): DecoderLayer(site(layer), causal) for layer in range(config.num_layers)})
        self.final_norm = build_norm(site(0))
        tied = config.share_embeddings_and_output_weights
        self.output = OutputLayer(
            *sizes, tied=tied, unpadded_vocab_size=unpadded_vocab_size, softcap=config.final_logit_softcapping, **place
        )
        if seed is not None and torch.device(device).type != "meta":
            fill_parameters(self, config, groups, seed)

    def forward(self, x: Tensor, step: Step) -> tuple[ModelOutput, None]:
        """One pass.

        Args:
            x: tokens of the decoder [T] int64.
            step: positions and masks of the decoder, tokens and mask of the encoder.

        Raises:
            ValueError: a step without tokens of the encoder; under sequence parallelism, tp does not divide T or M.
        """
        if step.encoder_tokens is None:
            raise ValueError('the step has no encoder_tokens; give them as Batch.extras["encoder_tokens"] [B, S]')
        for name, tokens in (("decoder", x), ("encoder", step.encoder_tokens)):
            if self.groups.sequence_parallel and tokens.numel() % self.groups.tp.size:
                raise ValueError(
                    f"tp={self.groups.tp.size} must divide the {tokens.numel()} tokens of the {name}; pad the batch or set "
                    "sequence_parallel=False"
                )
        step = dataclasses.replace(step, memory=self.encode(step), memory_mask=step.encoder_mask, rotary=self._rotary(step))
        x = self._embed(x, step)
        for layer in self.decoder.values():
            x = layer(x, step)
        weight = self.embedding.weight if self.config.share_embeddings_and_output_weights else None
        factor = self.config.output_multiplier
        x = self.final_norm(x)
        return ModelOutput(x if factor == 1.0 else x * factor, self.output, weight), None

    def encode(self, step: Step) -> Tensor:
        """Hidden states [M or M / tp, D] of the tokens of the encoder."""
        tokens = step.encoder_tokens
        assert tokens is not None, "forward asks for them"
        here = Step.causal(tokens.shape[0], tokens.shape[1], tokens.device)
        here = dataclasses.replace(here, attention=step.encoder_mask, rotary=self._rotary(here))
        x = self._embed(tokens.flatten(), here)
        for layer in self.encoder.values():
            x, _ = layer(x, here)
        return self.encoder_norm(x)

    def _embed(self, tokens: Tensor, step: Step) -> Tensor:
        x, factor = self.embedding(tokens), self.config.embedding_multiplier
        x = x if factor == 1.0 else x * factor
        return x if self.position_embedding is None else x + self.position_embedding(step.positions)

    def _rotary(self, step: Step) -> tuple[Tensor, Tensor] | None:
        turns = rotary_config(self.config)
        return None if turns is None else turns.tables(step.positions)


class DecoderLayer(nn.Module):
    """Self-attention, then attention to ``Step.memory`` and the feed-forward layer, each behind its norm.

    Args:
        site: where it stands.
        attention: builds the self-attention.
    """

    def __init__(self, site: Site, attention: Any) -> None:
        super().__init__()
        self.own = TransformerLayer(site, attention, None)
        self.cross = TransformerLayer(site, _cross_attention, dense_feed_forward, mixer_name="cross_attention")

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """[T or T / tp, D] -> the same."""
        x, _ = self.own(x, step)
        return self.cross(x, step)[0]


def _cross_attention(site: Site) -> nn.Module:
    config = site.config
    return CrossAttention(
        config.hidden_size,
        config.num_attention_heads,
        config.kv_heads,
        config.head_dim,
        site.groups,
        qkv_bias=config.add_qkv_bias,
        out_bias=config.add_bias_linear,
        softmax_scale=config.softmax_scale,
        layers=site.layers,
        dtype=site.dtype,
        device=site.device,
        init=False,
    )


def _check(config: TransformerConfig, groups: ProcessGroups, encoder_layers: int) -> None:
    for name in ("pp", "cp"):
        if groups.axis("dense", name).size > 1:
            raise ValueError(f"{name}={groups.axis('dense', name).size} is not for T5Model, whose layers stay together; set {name}=1")
    for name in ("hybrid_layer_pattern", "latent_attention", "window_size", "mrope_section"):
        if getattr(config, name) is not None:
            raise ValueError(f"{name}={getattr(config, name)!r} is not for T5Model; leave it out")
    for name in ("post_norm", "attention_output_gate", "mtp_num_layers"):
        if getattr(config, name):
            raise ValueError(f"{name}={getattr(config, name)!r} is not for T5Model; leave it out")
    if encoder_layers < 1:
        raise ValueError(f"encoder_layers={encoder_layers} must be at least 1")

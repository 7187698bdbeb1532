# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Which layers a stack is made of, and who fills their slots."""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass

from mcore_parallel.groups import Group
from mcore_parallel.models._aux import AuxSpec, DeclaresAux
from mcore_parallel.models._config import TransformerConfig
from mcore_parallel.models._layer import TransformerLayer, dense_feed_forward
from mcore_parallel.models._layout import is_dense
from mcore_parallel.models._pattern import SYMBOLS, LayerPattern, LayerPatternError, read_pattern
from mcore_parallel.models._slots import FeedForwardBuilder, MixerBuilder, Site
from mcore_parallel.nn import LayerMemory
from mcore_parallel.pipeline import PipelineConfig, PipelineLayout, StageLayout, partition_layers

_SHARED_FIELDS = (
    "num_layers", "hidden_size", "vocab_size", "hybrid_layer_pattern", "mtp_num_layers", "position_embedding_type", "head_dim",
    "rotary_base", "rotary_base_window", "rotary_percent", "rotary_interleaved", "seq_len_interpolation_factor", "rope_scaling", "yarn",
    "mrope_section", "post_norm", "share_embeddings_and_output_weights", "embedding_multiplier", "output_multiplier",
    "final_logit_softcapping",
)  # fmt: skip
"""What all layers of a model have in common: the residual stream, its ends, and the position tables made once for all."""


@dataclass(frozen=True, kw_only=True)
class LayerStack:
    """Builds any layer of a model.

    Raises:
        ValueError: a feed-forward for a pattern that has no place for it, or none for one that has; layer configs that do not fit.
    """

    config: TransformerConfig
    mixers: Mapping[str, MixerBuilder]
    """By symbol of the pattern; "*" is also what a model without a pattern has."""
    feed_forward: FeedForwardBuilder
    """Of layers without a pattern, and of E."""
    layer_configs: Mapping[int, TransformerConfig]
    """Of layers that differ from the others, by global number."""

    def __post_init__(self) -> None:
        config, pattern = self.config, self.pattern
        text, has_experts = config.hybrid_layer_pattern or "", not is_dense(self.feed_forward)
        if pattern is not None and has_experts and "E" not in text:
            raise LayerPatternError(
                f"hybrid_layer_pattern={text!r} has no E for the feed_forward that was given; write E, or leave feed_forward out"
            )
        if pattern is not None and not has_experts and "E" in text:
            raise LayerPatternError(f"hybrid_layer_pattern={text!r} has E, whose feed_forward was not given; pass feed_forward, or write -")
        for layer, other in self.layer_configs.items():
            if not 0 <= layer < config.num_layers:
                raise ValueError(f"layer_configs names layer {layer}; the layers are 0 to num_layers - 1 = {config.num_layers - 1}")
            for name in _SHARED_FIELDS:
                own, shared = getattr(other, name), getattr(config, name)
                if own != shared:
                    raise ValueError(f"layer_configs[{layer}] has {name}={own!r}, the model {shared!r}; all layers share it")

    @functools.cached_property
    def pattern(self) -> LayerPattern | None:
        return read_pattern(self.config.hybrid_layer_pattern)

    def layer(self, site: Site, memory: LayerMemory) -> TransformerLayer:
        """Layer ``site.layer`` of the trunk."""
        other, pattern = self.layer_configs.get(site.layer), self.pattern
        site = site if other is None else dataclasses.replace(site, config=other)
        return self._build(site, memory, None if pattern is None else pattern.layers[site.layer])

    def depth_layer(self, site: Site, memory: LayerMemory, symbol: str | None) -> TransformerLayer:
        """A layer of a multi-token prediction depth."""
        return self._build(site, memory, symbol)

    def aux_specs(self) -> dict[int, AuxSpec]:
        """What each layer of the model reports, multi-token prediction depths included, whichever stage holds it."""
        if not isinstance(self.feed_forward, DeclaresAux):
            return {}
        config, pattern = self.config, self.pattern
        trunk = [None] * config.num_layers if pattern is None else list(pattern.layers)
        symbols = trunk + (depth_symbols(config) * config.mtp_num_layers if config.mtp_num_layers else [])
        specs: dict[int, AuxSpec] = {}
        for layer, symbol in enumerate(symbols):
            spec = self.feed_forward.aux_spec(layer, self.layer_configs.get(layer, config)) if symbol in (None, "E") else None
            if spec is not None:
                specs[layer] = spec
        return specs

    def _build(self, site: Site, memory: LayerMemory, symbol: str | None) -> TransformerLayer:
        if symbol is None:
            return TransformerLayer(site, self.mixers["*"], self.feed_forward, memory)
        if symbol == "-":
            dense = self.feed_forward if is_dense(self.feed_forward) else dense_feed_forward
            return TransformerLayer(site, None, dense, memory)
        if symbol == "E":
            return TransformerLayer(site, None, self.feed_forward, memory)
        name = SYMBOLS[symbol] if symbol in "MG" else "attention"
        return TransformerLayer(site, self.mixers[symbol], None, memory, mixer_name=name)


def depth_symbols(config: TransformerConfig) -> list[str | None]:
    """What a multi-token prediction depth is made of: the pattern's symbols, or None for attention and feed-forward."""
    pattern = read_pattern(config.hybrid_layer_pattern)
    return [None] if pattern is None else list(pattern.mtp[0])


def place_layers(config: TransformerConfig, pipeline: PipelineConfig, *, num_stages: int, num_chunks: int = 1) -> PipelineLayout:
    """Where the layers of a model lie: by the segments of its pattern, or as ``PipelineConfig.place`` says.

    Args:
        config: the architecture.
        pipeline: layout text or counts.
        num_stages: p.
        num_chunks: V.

    Raises:
        ValueError: segments beside a layout of ``pipeline``, a layout without the depths of ``mtp_num_layers``, and what
            ``LayerPattern.layout`` and ``PipelineConfig.place`` raise.
    """
    pattern = read_pattern(config.hybrid_layer_pattern)
    if pattern is not None and len(pattern.segments) > 1:
        if pipeline.layout is not None:
            raise LayerPatternError(
                f"hybrid_layer_pattern={config.hybrid_layer_pattern!r} and pipeline.layout={pipeline.layout!r} both place the layers; "
                "take the '|' out of the pattern, or leave layout out"
            )
        return pattern.layout(num_stages, num_chunks)
    layout = pipeline.place(config.num_layers, num_stages=num_stages, num_chunks=num_chunks, mtp_num_layers=config.mtp_num_layers)
    check_depths(config, layout.stages[-1].mtp_layers)
    return layout


def place_stage(config: TransformerConfig, stages: Group, layers: range | StageLayout | None) -> StageLayout:
    """What a model holds on this pipeline stage.

    Args:
        config: the architecture.
        stages: pp.
        layers: as of ``GPTModel``.

    Raises:
        ValueError: layers that do not exist, depths that are missing or elsewhere than beside the loss.
    """
    pattern = read_pattern(config.hybrid_layer_pattern)
    if layers is None and pattern is not None:
        layers = pattern.layout(stages.size).stage(stages.rank)
    if layers is None:
        layers = partition_layers(config.num_layers, stages.size, stages.rank)
    if isinstance(layers, range):
        depths = range(config.mtp_num_layers if stages.is_last else 0)
        layers = StageLayout(layers=layers, embedding=stages.is_first, loss=stages.is_last, mtp_layers=depths)
    held = layers.layers
    if not 0 <= held.start <= held.stop <= config.num_layers:
        raise ValueError(f"layers={held} must lie in range(0, num_layers={config.num_layers})")
    if layers.loss:
        check_depths(config, layers.mtp_layers)
    elif layers.mtp_layers:
        count = len(layers.mtp_layers)
        raise ValueError(f"the layout puts {count} depths 'm' on a stage without the loss; write them before L in its stage")
    return layers


def shares_table(config: TransformerConfig, stages: Group, here: StageLayout) -> bool:
    """Whether the embedding of one end of the pipeline is needed at the other, on another stage: for tied logits, or by depths.

    Raises:
        ValueError: the ends lie in two chunks, and not on the first and the last stage.
    """
    tied, further = config.share_embeddings_and_output_weights, config.mtp_num_layers
    if not (tied or further) or here.embedding == here.loss:
        return False
    if stages.size == 1 or not (stages.is_first if here.embedding else stages.is_last):
        raise ValueError(
            f"share_embeddings_and_output_weights={tied} and mtp_num_layers={further} need embedding and output in one chunk, or on the "
            f"first and the last of several stages, found one of them on stage {stages.rank} of pp={stages.size}; change the layout, "
            "untie the weights, or set mtp_num_layers=0"
        )
    return True


def check_depths(config: TransformerConfig, placed: range) -> None:
    """Whether the last virtual stage holds all depths.

    Raises:
        ValueError: it does not.
    """
    if placed != range(config.mtp_num_layers) and (placed or config.mtp_num_layers):
        raise ValueError(
            f"the layout puts {len(placed)} depths 'm' beside the loss, but mtp_num_layers={config.mtp_num_layers}; write as many m "
            "before L in its stage"
        )

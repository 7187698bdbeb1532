# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Models whose layers follow a pattern, and the way there from attention and feed-forward in every layer."""

import dataclasses
import re
from typing import Any

from mcore_parallel.groups import ProcessGroups
from mcore_parallel.models._config import TransformerConfig
from mcore_parallel.models._cores import has_window, layer_rotary
from mcore_parallel.models._gpt import GPTModel
from mcore_parallel.models._pattern import LayerPattern, LayerPatternError

_FEED_FORWARD = ("ffn_norm", "mlp", "mlp_post_norm")
_LAYER = re.compile(r"(?P<stack>mtp\.\d+\.layers|layers)\.(?P<layer>\d+)\.(?P<part>\w+)(?P<rest>\..*)?")


class MambaModel(GPTModel):
    """A ``GPTModel`` whose config has a ``hybrid_layer_pattern``; all else is the same.

    Example:
        >>> from mcore_parallel.nn import MambaConfig
        >>> sizes = MambaConfig(head_dim=4, num_groups=2, state_dim=4)
        >>> config = hybrid_config("M*-", hidden_size=8, num_attention_heads=2, vocab_size=16, mamba=sizes)
        >>> [layer.mixer_name for layer in MambaModel(config, ProcessGroups.single()).layers.values()]
        ['mamba', 'attention', 'attention']
    """

    def __init__(self, config: TransformerConfig, groups: ProcessGroups, **options: Any) -> None:
        if config.hybrid_layer_pattern is None:
            raise LayerPatternError("hybrid_layer_pattern=None; give MambaModel a pattern, or use GPTModel")
        super().__init__(config, groups, **options)


def hybrid_config(pattern: str, **sizes: Any) -> TransformerConfig:
    """The config of a pattern: ``num_layers`` and ``mtp_num_layers`` are counted in it, positions are "none" unless given.

    Args:
        pattern: as of ``LayerPattern.parse``.
        **sizes: all other fields.

    Raises:
        ValueError: a pattern that cannot be read, or a rule of the config.
    """
    layers = LayerPattern.parse(pattern)
    counted = {"num_layers": layers.num_layers, "mtp_num_layers": len(layers.mtp), "hybrid_layer_pattern": pattern}
    return TransformerConfig(**{"position_embedding_type": "none", **sizes, **counted})


def as_pattern(config: TransformerConfig, *, feed_forward: str = "-") -> TransformerConfig:
    """The same model with a pattern: layer i becomes an attention layer 2 i and a feed-forward layer 2 i + 1.

    ``pattern_name`` says what its parameters are called.

    Args:
        config: without a pattern.
        feed_forward: "-", or "E" where the model is built with a feed-forward of its own.

    Raises:
        LayerPatternError: a config that has a pattern, another symbol.
    """
    if config.hybrid_layer_pattern is not None:
        raise LayerPatternError(f"hybrid_layer_pattern={config.hybrid_layer_pattern!r} is a pattern already")
    if feed_forward not in ("-", "E"):
        raise LayerPatternError(f"feed_forward={feed_forward!r} must be '-' or 'E'")
    block = ("*" if config.latent_attention is None else "+") + feed_forward
    layers = range(2 * config.num_layers)
    windows = None if config.window_attn_skip_freq is None else tuple(int(has_window(config, layer // 2)) for layer in layers)
    bare = None if config.no_rope_freq is None else tuple(int(layer_rotary(config, layer // 2) is None) for layer in layers)
    pattern = block * config.num_layers + ("/" + block) * config.mtp_num_layers
    return dataclasses.replace(
        config, num_layers=len(layers), hybrid_layer_pattern=pattern, window_attn_skip_freq=windows, no_rope_freq=bare
    )


def pattern_name(name: str) -> str:
    """What a parameter of a ``GPTModel`` is called in the model of ``as_pattern``.

    Example:
        >>> pattern_name("layers.3.attention.qkv.weight"), pattern_name("layers.3.mlp.up.weight"), pattern_name("final_norm.weight")
        ('layers.6.attention.qkv.weight', 'layers.7.mlp.up.weight', 'final_norm.weight')
    """
    match = _LAYER.fullmatch(name)
    if match is None:
        return name
    number = 2 * int(match["layer"]) + (match["part"] in _FEED_FORWARD)
    return f"{match['stack']}.{number}.{match['part']}{match['rest'] or ''}"


def plain_name(name: str) -> str:
    """The other way round.

    Example:
        >>> plain_name("layers.7.mlp.up.weight")
        'layers.3.mlp.up.weight'
    """
    match = _LAYER.fullmatch(name)
    return name if match is None else f"{match['stack']}.{int(match['layer']) // 2}.{match['part']}{match['rest'] or ''}"

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Models: configuration, the transformer layer with its slots, decoders, hybrids, BERT and T5, what they cost."""

from mcore_parallel.models._aux import Aux, AuxLoss, AuxSpec, CountsHook, DeclaresAux, ReportsAux
from mcore_parallel.models._bert import BertModel
from mcore_parallel.models._bert_heads import BertOutput
from mcore_parallel.models._config import CONFIG_RULES, ConfigRule, TransformerConfig
from mcore_parallel.models._cost import feed_forward_share, flops_per_token, num_bert_parameters, num_parameters
from mcore_parallel.models._gpt import GPTModel, init_parameters
from mcore_parallel.models._hybrid import MambaModel, as_pattern, hybrid_config, pattern_name, plain_name
from mcore_parallel.models._init import SelfInitialised
from mcore_parallel.models._layer import TransformerLayer, dense_feed_forward, self_attention
from mcore_parallel.models._layout import BatchInvariantChecked, LayoutChecked, check_layout
from mcore_parallel.models._mixers import latent_attention
from mcore_parallel.models._output import ModelOutput, OutputLayer
from mcore_parallel.models._packed import check_follows_prefixes, check_takes_device_bounds
from mcore_parallel.models._pattern import (
    LayerPattern,
    LayerPatternError,
    allocate_layers,
    get_layer_maps_from_layer_type_list,
    layer_maps_by_symbol,
    read_pattern,
)
from mcore_parallel.models._slots import FeedForwardBuilder, MixerBuilder, Site
from mcore_parallel.models._stack import place_layers
from mcore_parallel.models._t5 import T5Model
from mcore_parallel.models._value import ValueHead, add_value_head

__all__ = [
    "CONFIG_RULES",
    "Aux",
    "AuxLoss",
    "AuxSpec",
    "BatchInvariantChecked",
    "BertModel",
    "BertOutput",
    "ConfigRule",
    "CountsHook",
    "DeclaresAux",
    "FeedForwardBuilder",
    "GPTModel",
    "LayerPattern",
    "LayerPatternError",
    "LayoutChecked",
    "MambaModel",
    "MixerBuilder",
    "ModelOutput",
    "OutputLayer",
    "ReportsAux",
    "SelfInitialised",
    "Site",
    "T5Model",
    "TransformerConfig",
    "TransformerLayer",
    "ValueHead",
    "add_value_head",
    "allocate_layers",
    "as_pattern",
    "check_follows_prefixes",
    "check_layout",
    "check_takes_device_bounds",
    "dense_feed_forward",
    "feed_forward_share",
    "flops_per_token",
    "get_layer_maps_from_layer_type_list",
    "hybrid_config",
    "init_parameters",
    "latent_attention",
    "layer_maps_by_symbol",
    "num_bert_parameters",
    "num_parameters",
    "pattern_name",
    "place_layers",
    "plain_name",
    "read_pattern",
    "self_attention",
]

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Models: configuration, the transformer layer with its slots, the decoder-only transformer, its cost."""

from mcore_parallel.models._config import TransformerConfig
from mcore_parallel.models._cost import flops_per_token, num_parameters
from mcore_parallel.models._gpt import GPTModel, init_parameters
from mcore_parallel.models._init import SelfInitialised
from mcore_parallel.models._layer import TransformerLayer, dense_feed_forward, self_attention
from mcore_parallel.models._output import ModelOutput, OutputLayer
from mcore_parallel.models._slots import FeedForwardBuilder, MixerBuilder, Site

__all__ = [
    "FeedForwardBuilder",
    "GPTModel",
    "MixerBuilder",
    "ModelOutput",
    "OutputLayer",
    "SelfInitialised",
    "Site",
    "TransformerConfig",
    "TransformerLayer",
    "dense_feed_forward",
    "flops_per_token",
    "init_parameters",
    "num_parameters",
    "self_attention",
]

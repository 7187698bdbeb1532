# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""How a request wants its tokens drawn, and the draw itself."""

from mcore_inference.sampling._adjust import AdjustRows
from mcore_inference.sampling._adjuster import ScoreAdjuster
from mcore_inference.sampling._bitmask import keep_allowed
from mcore_inference.sampling._draw import SamplingRows, log_probs, processed_log_probs, sample, token_log_probs
from mcore_inference.sampling._params import SamplingParams
from mcore_inference.sampling._plain import PackedDraws, PartSums, PlainInputs, PlainRows, PlainSums
from mcore_inference.sampling._random import request_seed, uniform
from mcore_inference.sampling._sampler import DrawRows, Draws, Sampler
from mcore_inference.sampling._structured import StructuredOutput

__all__ = [
    "AdjustRows",
    "DrawRows",
    "Draws",
    "PackedDraws",
    "PartSums",
    "PlainInputs",
    "PlainRows",
    "PlainSums",
    "Sampler",
    "SamplingParams",
    "SamplingRows",
    "ScoreAdjuster",
    "StructuredOutput",
    "keep_allowed",
    "log_probs",
    "processed_log_probs",
    "request_seed",
    "sample",
    "token_log_probs",
    "uniform",
]

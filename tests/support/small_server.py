# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The engine behind most tests of the server."""

from collections.abc import Callable
from typing import Any

import torch

from mcore_inference import DynamicInferenceEngine
from mcore_parallel.data import ByteTokenizer

Make = Callable[..., Any]
TOKENIZER = ByteTokenizer()
# Only letters can be drawn, so that text is as long as tokens.
LETTERS = {str(token): 100.0 for token in TOKENIZER.tokenize("abcdefgh")}


def make_small_engine(make_model: Make, make_engine: Make, **sizes: Any) -> DynamicInferenceEngine:
    return make_engine(make_model(vocab_size=272, dtype=torch.float32, layers=1), TOKENIZER, **{"max_sequence_length": 256} | sizes)

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Small models and engines."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from mcore_inference import (
    DynamicInferenceContext,
    DynamicInferenceEngine,
    EngineRunner,
    ExecutionConfig,
    InferenceConfig,
    PagedAttention,
)
from mcore_parallel import ProcessGroups
from mcore_parallel.data import ByteTokenizer
from mcore_parallel.models import GPTModel, TransformerConfig
from tests.support.held_engine import Output


@pytest.fixture(scope="session")
def make_model() -> Callable[..., GPTModel]:
    """Random models whose next token depends on all of the past; the large std makes logits differ widely."""

    def make(
        vocab_size: int = 64, dtype: torch.dtype = torch.float64, seed: int = 0, layers: int = 2, device: str = "cpu", **fields: Any
    ) -> GPTModel:
        sizes = {"num_layers": layers, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "vocab_size": vocab_size}
        config = TransformerConfig(**sizes | {"init_method_std": 0.3} | fields)
        return GPTModel(config, ProcessGroups.single(), attention_core=PagedAttention(), dtype=dtype, device=device, seed=seed)

    return make


@pytest.fixture(scope="session")
def make_engine(make_model: Callable[..., GPTModel]) -> Callable[..., DynamicInferenceEngine]:
    """Engines over the standard model, or over a given one."""

    def make(
        model: GPTModel | None = None,
        tokenizer: Any = None,
        *,
        seed: int = 0,
        max_waiting: int | None = None,
        run_ahead: bool = False,
        **sizes: Any,
    ) -> DynamicInferenceEngine:
        sizes = {"max_sequence_length": 96, "num_blocks": 64, "block_size_tokens": 8, "max_requests": 8, "max_tokens": 64} | sizes
        model = model or make_model()
        context = DynamicInferenceContext.for_model(model, InferenceConfig(**sizes))
        return DynamicInferenceEngine(
            model, context, tokenizer, seed=seed, max_waiting_requests=max_waiting, execution=ExecutionConfig(run_ahead=run_ahead)
        )

    return make


@pytest.fixture
def engine(make_model: Callable[..., GPTModel], make_engine: Callable[..., DynamicInferenceEngine]) -> DynamicInferenceEngine:
    """An engine of bytes."""
    return make_engine(make_model(vocab_size=272, dtype=torch.float32, layers=1), ByteTokenizer(), max_sequence_length=512)


@pytest.fixture
def output(engine: DynamicInferenceEngine) -> Output:
    """The output layer of ``engine``."""
    layer = engine.model.output = Output(engine.model.output)
    return layer


@pytest.fixture
def runners(
    request: pytest.FixtureRequest, make_model: Callable[..., GPTModel], make_engine: Callable[..., DynamicInferenceEngine]
) -> Iterator[list[EngineRunner]]:
    """Two engines of equal weights, which are stuck long after each test, or where a step takes as long as a test says."""
    stall_timeout_s = getattr(request, "param", 100.0)
    with ExitStack() as stack:
        engines = [
            make_engine(make_model(vocab_size=272, dtype=torch.float32, layers=1), ByteTokenizer(), max_sequence_length=512)
            for _ in range(2)
        ]
        yield [stack.enter_context(EngineRunner(engine, stall_timeout_s=stall_timeout_s)) for engine in engines]

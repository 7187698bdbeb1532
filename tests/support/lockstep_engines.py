# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Engines of two tensor-parallel ranks that step together."""

import contextlib
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mcore_inference import (
    DynamicInferenceContext,
    DynamicInferenceEngine,
    InferenceConfig,
    LockstepConfig,
    PagedAttention,
    RankFailedError,
    SamplingParams,
)
from mcore_parallel import ParallelPlan, ProcessGroups, named_shards
from mcore_parallel.data import ByteTokenizer
from mcore_parallel.models import GPTModel, TransformerConfig

__all__ = ["LONG", "PATIENT", "QUICK", "expects_rank_failure", "make_engine", "num_groups", "slow_down", "split_engine", "weights_of"]

CONFIG = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, vocab_size=384, init_method_std=0.3)
PATIENT = LockstepConfig(join_timeout_s=50, silence_timeout_s=20)
QUICK = LockstepConfig(join_timeout_s=50, silence_timeout_s=3, step_timeout_s=20)
LONG = SamplingParams(num_tokens_to_generate=200, ignore_eos=True, seed=3)


def make_engine(groups: ProcessGroups, seed: int = 0, **sizes: int) -> DynamicInferenceEngine:
    model = GPTModel(CONFIG, groups, attention_core=PagedAttention(), dtype=torch.float64, seed=seed).eval()
    config = InferenceConfig(**{"max_sequence_length": 256, "num_blocks": 60, "block_size_tokens": 8, "max_tokens": 64} | sizes)
    return DynamicInferenceEngine(model, DynamicInferenceContext.for_model(model, config), ByteTokenizer())


def split_engine(**sizes: int) -> DynamicInferenceEngine:
    return make_engine(ProcessGroups.build(ParallelPlan(tp=2, sequence_parallel=False)), **sizes)


def weights_of(engine: DynamicInferenceEngine) -> list[tuple[str, Tensor]]:
    return [(shard.name, shard.parameter.detach()) for shard in named_shards(engine.model)]


@contextlib.contextmanager
def expects_rank_failure(rank: int, words: str) -> Iterator[None]:
    with pytest.raises(RankFailedError, match=words) as caught:
        yield
    assert caught.value.rank == rank


def slow_down(engine: DynamicInferenceEngine, seconds: float) -> None:
    engine.model.register_forward_pre_hook(lambda *_: time.sleep(seconds))


def num_groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)

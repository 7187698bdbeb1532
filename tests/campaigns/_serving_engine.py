# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A tiny engine, what its weights should generate, and a process that works for a coordinator with it."""

import contextlib
import multiprocessing
from collections.abc import Iterator

import torch

from mcore_inference import DynamicInferenceContext, DynamicInferenceEngine, EngineRunner, InferenceConfig, PagedAttention
from mcore_inference.coordinator import CoordinatorSecurity, EngineWorker
from mcore_parallel import ProcessGroups
from mcore_parallel.data import ByteTokenizer
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.nn import Step

__all__ = ["HEARTBEAT_S", "engines_apart", "make_engine", "make_model", "most_probable", "work"]

HEARTBEAT_S = 0.25


def make_model(seed: int = 0) -> GPTModel:
    """In float64, so that no tie of two tokens depends on the order of a sum."""
    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, num_query_groups=2, vocab_size=272, init_method_std=0.3)
    return GPTModel(config, ProcessGroups.single(), attention_core=PagedAttention(), dtype=torch.float64, seed=seed)


def make_engine(seed: int = 0) -> DynamicInferenceEngine:
    """An engine of that model with room for sixteen requests at once."""
    model = make_model(seed)
    sizes = InferenceConfig(max_sequence_length=512, num_blocks=512, block_size_tokens=8, max_requests=16, max_tokens=128)
    return DynamicInferenceEngine(model, DynamicInferenceContext.for_model(model, sizes), ByteTokenizer())


def most_probable(model: GPTModel, tokens: list[int]) -> list[int]:
    """What follows each prefix of ``tokens``, computed at once and without a cache."""
    with torch.no_grad():
        output, _ = model(torch.tensor(tokens), Step.causal(1, len(tokens)))
    # The engine draws only what its tokenizer knows.
    return output.logits()[:, : ByteTokenizer().vocab_size].argmax(-1).tolist()


def work(address: str, name: str, secret: str) -> None:
    """Serve a coordinator until it stops the engines or this process is killed."""
    torch.set_num_threads(1)
    security = CoordinatorSecurity(secret=secret)
    with (
        EngineRunner(make_engine()) as runner,
        EngineWorker(runner, address, name=name, security=security, heartbeat_s=HEARTBEAT_S) as worker,
    ):
        worker.join()


@contextlib.contextmanager
def engines_apart(count: int, address: str, secret: str) -> Iterator[None]:
    """Processes of ``work``, which end with the block."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    processes = [context.Process(target=work, args=(address, f"dp-{index}", secret), daemon=True) for index in range(count)]
    try:
        for process in processes:
            process.start()
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The exported model generates, and answers over HTTP."""

import contextlib
import gc
import json
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from mcore_ckpt.hf import import_hf
from mcore_inference import (
    DynamicInferenceContext,
    DynamicInferenceEngine,
    ExecutionConfig,
    InferenceConfig,
    PagedAttention,
    SamplingParams,
    add_redundant_experts,
)
from mcore_inference.adapters import check_slots
from mcore_inference.decoder import quantize_weights
from mcore_parallel import ProcessGroups
from mcore_parallel.data import Tokenizer
from mcore_parallel.models import GPTModel
from mcore_tools.assembly import build_model
from mcore_tools.recipes import RunConfig


@dataclass(frozen=True, kw_only=True)
class Served:
    """What came out."""

    texts: Sequence[tuple[str, str]]
    """Prompt and continuation."""
    tokens_per_s: float
    """Generated tokens of all requests together."""
    http_answer: str
    http_ms: float


def default_requests(*, on_gpu: bool) -> int:
    """Served at a time, where nothing is said."""
    return 256 if on_gpu else 64


def build_engine(
    config: RunConfig,
    tokenizer: Tokenizer,
    device: torch.device | str,
    *,
    seed: int = 0,
    max_length: int = 256,
    max_requests: int | None = None,
    cache_gb: float | None = 0.25,
    kv_cache_dtype: Literal["fp8"] | None = None,
    weight_dtype: Literal["fp8", "fp8_weight_only"] | None = None,
    fill: Callable[[GPTModel], None] | None = None,
    groups: ProcessGroups | None = None,
    execution: ExecutionConfig | None = None,
    sizes: Mapping[str, Any] | None = None,
    attention_backend: str | None = None,
) -> DynamicInferenceEngine:
    """An engine with a model of its own, whole on this rank unless ``groups`` split it; its weights are those of the run's seed until some
    are loaded. ``fill`` writes others into the model before its weights are rounded to ``weight_dtype``. Without ``max_requests`` it serves
    256 at a time on a GPU and 64 on a CPU; without ``cache_gb`` its cache takes what a GPU has left, and 1 GB on a CPU. ``sizes`` are
    further fields of ``InferenceConfig``, ``attention_backend`` is that of ``PagedAttention``."""
    on_gpu = torch.device(device).type == "cuda"
    if cache_gb is None and not on_gpu:
        cache_gb = 1.0
    model = build_model(config, groups or ProcessGroups.single(), device, attention_core=PagedAttention(backend=attention_backend)).eval()
    assert isinstance(model, GPTModel), "a BertModel generates nothing"
    # Kernels take as many keys at a time as a block has; what requests share is cut to whole blocks.
    usual: dict[str, Any] = {"max_tokens": 8192, "block_size_tokens": 64 if on_gpu else 16}
    inference = InferenceConfig(
        max_sequence_length=max_length,
        max_requests=max_requests or default_requests(on_gpu=on_gpu),
        buffer_size_gb=cache_gb,
        kv_cache_dtype=kv_cache_dtype,
        weight_dtype=weight_dtype,
        **usual | dict(sizes or {}),
    )
    # Before weights are read.
    check_slots(model, inference.lora)
    if cache_gb is None and weight_dtype is not None and fill is not None:
        # What the weights leave is seen when they are rounded; else a refusal comes before they are read.
        fill(model)
        quantize_weights(model, weight_dtype)
        fill = None
    balancing = None if execution is None else execution.expert_balancing
    if cache_gb is None and balancing is not None:
        # Likewise: a cache takes what copies of experts leave, which are made of rounded ones.
        if weight_dtype is not None:
            quantize_weights(model, weight_dtype)
        add_redundant_experts(model, balancing.num_redundant_experts)
    context = DynamicInferenceContext.for_model(model, inference)
    if fill is not None:
        fill(model)
    limit = min(tokenizer.vocab_size, config.model.vocab_size)
    return DynamicInferenceEngine(model, context, tokenizer, seed=seed, vocab_size=limit, execution=execution)


@contextlib.contextmanager
def short_turns() -> Iterator[None]:
    """Let threads of this process take turns at the interpreter every 0.2 ms: by default one waits 5 ms for the other, several steps."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(2e-4)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextlib.contextmanager
def frozen_heap() -> Iterator[None]:
    """Leave what is there out of Python's collections meanwhile: one that looks at it all stops every request for 0.1 s."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def serve_exported(config: RunConfig, export: Path, tokenizer: Tokenizer, prompts: Sequence[str], device: torch.device | str) -> Served:
    """Load Hugging Face weights into an engine, continue the prompts, then answer one request over HTTP."""
    # Of all verbs of a run only this one needs a server's libraries.
    from mcore_inference.server import serve

    engine = build_engine(config, tokenizer, device)
    engine.load_weights(import_hf(export).tensors)
    begin = time.perf_counter()
    records = engine.generate(list(prompts), SamplingParams(temperature=0.7, top_p=0.95, num_tokens_to_generate=48, seed=7))
    seconds = time.perf_counter() - begin
    with serve(engine, model_name="quickstart") as server:
        begin = time.perf_counter()
        answer = _post(f"{server.url}/v1/completions", {"model": "quickstart", "prompt": prompts[0], "max_tokens": 24, "temperature": 0})
        http_ms = (time.perf_counter() - begin) * 1e3
    return Served(
        texts=[(prompt, record.generated_text) for prompt, record in zip(prompts, records, strict=True)],
        tokens_per_s=sum(len(record.generated_tokens) for record in records) / seconds,
        http_answer=answer["choices"][0]["text"],
        http_ms=http_ms,
    )


def _post(url: str, body: dict) -> dict:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)

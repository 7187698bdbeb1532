# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What requests with penalties, biases or a least number of tokens cost an engine on a CPU: a step without its forward.

python -m tools.bench.adjusted_rows --output docs/benchmarks/adjusted_rows.json

Requests decode greedily over logits that stay the same, so that a step is host work and draws: 256 plain ones, with one more of each kind,
and 256 of all kinds. A row has the median of processor time of one thread, which other processes do not lengthen, and its spread.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from mcore_inference import (
    DynamicInferenceContext,
    DynamicInferenceEngine,
    ExecutionConfig,
    InferenceConfig,
    PagedAttention,
    SamplingParams,
)
from mcore_parallel import ProcessGroups
from mcore_parallel.models import GPTModel, TransformerConfig
from tools.bench._record import record

_KINDS: dict[str, dict[str, Any]] = {
    "logit_bias": {"logit_bias": {7: 1.0}},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "frequency and presence penalty": {"frequency_penalty": 0.5, "presence_penalty": 0.5},
    "min_tokens": {"min_tokens": 2000, "stop_token_ids": (3, 4)},
}


def step_ms(vocab_size: int, kinds: list[dict[str, Any]], num_steps: int) -> list[float]:
    """Of steps of requests of these kinds."""
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, vocab_size=vocab_size)
    model = GPTModel(config, ProcessGroups.single(), attention_core=PagedAttention()).eval()
    sizes = InferenceConfig(max_sequence_length=2560, max_requests=len(kinds), num_blocks=8 * len(kinds))
    context = DynamicInferenceContext.for_model(model, sizes)
    engine = DynamicInferenceEngine(model, context, execution=ExecutionConfig(run_ahead=True))
    logits = torch.randn(len(kinds), vocab_size, generator=torch.Generator().manual_seed(0))
    executor: Any = engine._executor
    executor._logits = lambda host, rows: logits[: len(rows)].clone()
    for kind in kinds:
        engine.add_request([1, 2, 3], SamplingParams(temperature=0, num_tokens_to_generate=2048, **kind))
    times = []
    for _ in range(num_steps):
        begin = time.thread_time()
        engine.step()
        times.append(1e3 * (time.thread_time() - begin))
    return times[5:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab-sizes", type=int, nargs="+", default=[1024, 32000])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    plain: list[dict[str, Any]] = [{}] * options.requests
    works = {"none": plain, **{name: [*plain, kind] for name, kind in _KINDS.items()}}
    works["all kinds in turn"] = [list(_KINDS.values())[number % len(_KINDS)] for number in range(options.requests)]
    rows: list[dict[str, Any]] = []
    for vocab_size in options.vocab_sizes:
        for name, kinds in works.items():
            times = step_ms(vocab_size, kinds, options.steps)
            rows.append(
                {
                    "vocab_size": vocab_size, "requests": len(kinds), "adjusted": name, "ms": round(statistics.median(times), 2),
                    "min_ms": round(min(times), 2), "max_ms": round(max(times), 2),
                }
            )  # fmt: skip
            print(rows[-1], flush=True)
    if options.output is not None:
        record(options.output, {"work": "steps of decoding requests on a CPU, without the forward", "rows": rows})


if __name__ == "__main__":
    main()

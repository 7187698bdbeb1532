# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Speed of one request by who proposes its tokens, on text that a small model, trained here, predicts well.

python -m tools.bench.speculation --output docs/benchmarks/speculation.json

The text is sentences of a fixed set in random order, letter by letter: a sentence is certain after its first words, the next one is not.
The model learns it with heads for further tokens, then an EAGLE-3 head learns from the model. All generate the same tokens, by turns.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from mcore_inference import (
    DynamicInferenceContext,
    DynamicInferenceEngine,
    EagleSpeculation,
    ExecutionConfig,
    InferenceConfig,
    MtpSpeculation,
    NgramSpeculation,
    PagedAttention,
    SamplingParams,
)
from mcore_parallel import ProcessGroups
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.models.eagle import EagleConfig, EagleHead
from mcore_parallel.nn import Step
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_parallel.training import Batch, train_step
from mcore_parallel.training.distill import Teacher
from mcore_parallel.training.eagle import EagleObjective, TargetEnds
from tools.bench._record import record

VOCABULARY = "abcdefghijklmnopqrstuvwxyz .,\n"
ONE = ProcessGroups.single()


def sentences(rng: random.Random, count: int = 10) -> list[str]:
    """Lines of five to nine words of two to eight letters."""
    words = ["".join(rng.choice(VOCABULARY[:26]) for _ in range(rng.randint(2, 8))) for _ in range(120)]
    return [" ".join(rng.choice(words) for _ in range(rng.randint(5, 9))) + ".\n" for _ in range(count)]


def batches(lines: list[str], rng: random.Random, *, rows: int = 4, length: int = 128) -> Iterator[torch.Tensor]:
    """Tokens [rows, length + 1] without end."""
    while True:
        texts = ["".join(rng.choice(lines) for _ in range(length // 20)) for _ in range(rows)]
        starts = [rng.randrange(20) for _ in range(rows)]
        yield torch.tensor(
            [[VOCABULARY.index(letter) for letter in text[s : s + length + 1]] for text, s in zip(texts, starts, strict=True)]
        )


def train(model: GPTModel, data: Iterator[torch.Tensor], steps: int) -> float:
    """The trunk and its heads, all by cross entropy; the trunk's last loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    own = torch.zeros(())
    for number in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (number + 1) / 20, 2 * (steps - number) / steps)
        tokens = next(data)[:, :-1]
        rows, length = tokens.shape
        output: Any = model(tokens.flatten(), Step.causal(rows, length))[0]
        losses = [
            F.cross_entropy(part.logits().view(rows, length, -1)[:, :-ahead].flatten(0, 1), tokens[:, ahead:].flatten())
            for ahead, part in enumerate((output, *output.depths), start=1)
        ]
        own = losses[0].detach()
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        optimizer.step()
    return float(own)


def train_head(model: GPTModel, data: Iterator[torch.Tensor], steps: int) -> EagleHead:
    """A head for the engine, taught by the model."""
    config = EagleConfig.of_target(model.config)
    learner = EagleHead(config, ONE)
    teacher, ends = Teacher(model, capture=config.aux_modules), TargetEnds(model)
    objective = EagleObjective(target=ends, num_steps=5)
    sync = DistributedDataParallel(DistributedDataParallelConfig(), learner, ONE)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=2e-3), sync, ONE)
    for number in range(steps):
        tokens = next(data)
        batch = Batch(tokens=tokens[:, :-1], labels=tokens[:, 1:], loss_mask=torch.ones(tokens[:, 1:].shape))
        lr = 2e-3 * min(1.0, (number + 1) / 20, 2 * (steps - number) / steps)
        train_step(learner, teacher.label([batch]), objective, sync, optimizer, lr=lr)
    head = EagleHead(config, ONE, attention_core=PagedAttention(), seed=None)
    head.load_state_dict(learner.state_dict())
    return head.eval()


def build(model: GPTModel, speculation: Any) -> DynamicInferenceEngine:
    sizes = InferenceConfig(max_sequence_length=1024, max_requests=1, max_tokens=256, block_size_tokens=16, enable_prefix_caching=False)
    context = DynamicInferenceContext.for_model(model, sizes)
    return DynamicInferenceEngine(model, context, execution=ExecutionConfig(speculation=speculation))


def measure(engines: dict[str, DynamicInferenceEngine], prompts: list[list[int]], params: SamplingParams) -> list[dict[str, Any]]:
    """A row for each engine: prompts one at a time, the engines by turns, so that what else the machine does meets all of them."""
    for engine in engines.values():
        engine.generate(prompts[:1], params)
    before = {name: (engine.step_count, engine.num_accepted, engine.num_drafted) for name, engine in engines.items()}
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for prompt in prompts:
        tokens: list[int] = []
        for name, engine in engines.items():
            begun = time.perf_counter()
            made = engine.generate([prompt], params)[0].generated_tokens
            seconds[name].append(time.perf_counter() - begun)
            tokens = tokens or made
            assert made == tokens, f"{name} changed the tokens"
    rows, first, count = [], seconds[next(iter(engines))], params.num_tokens_to_generate or 0
    for name, engine in engines.items():
        steps, accepted, drafted = before[name]
        drafted = engine.num_drafted - drafted
        row = {
            "by": name,
            "temperature": params.temperature,
            "tokens_per_s": round(count / statistics.median(seconds[name]), 1),
            "tokens_per_step": round(len(prompts) * count / (engine.step_count - steps), 2),
            "accepted_share": round((engine.num_accepted - accepted) / drafted, 3) if drafted else None,
            "speed_up": round(statistics.median(before / after for before, after in zip(first, seconds[name], strict=True)), 2),
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--steps", type=int, default=200, help="of training the model, and of training the head")
    parser.add_argument("--outputs", type=int, default=256, help="new tokens of a request")
    parser.add_argument("--prompts", type=int, default=9)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    rng = random.Random(0)
    lines = sentences(rng)
    data = batches(lines, rng)
    sizes = TransformerConfig(
        num_layers=options.layers, hidden_size=options.hidden_size, num_attention_heads=4, num_query_groups=2, vocab_size=32,
        normalization="RMSNorm", activation="swiglu", mtp_num_layers=2,
    )  # fmt: skip
    model = GPTModel(sizes, ONE, attention_core=PagedAttention())
    loss = train(model, data, options.steps)
    print(json.dumps({"loss": round(loss, 3)}), flush=True)
    model.eval()
    head = train_head(model, data, options.steps)
    prompts = [next(data)[0, :48].tolist() for _ in range(options.prompts)]
    choices = {
        "none": None,
        "ngram, 4": NgramSpeculation(num_tokens=4),
        "mtp, 2 heads, 2": MtpSpeculation(),
        "mtp, 2 heads, 4": MtpSpeculation(num_tokens=4),
        "eagle, 4": EagleSpeculation(head=head, num_tokens=4),
    }
    torch.set_num_threads(1)
    engines = {name: build(model, speculation) for name, speculation in choices.items()}
    rows = []
    for temperature in (0.0, 1.0):
        rows += measure(engines, prompts, SamplingParams(temperature=temperature, seed=5, num_tokens_to_generate=options.outputs))
    if options.output is not None:
        facts = {"work": "one request, letters of learnt sentences", "layers": options.layers, "hidden_size": options.hidden_size}
        record(options.output, {**facts, "loss": round(loss, 3), "threads": 1, "rows": rows})


if __name__ == "__main__":
    main()

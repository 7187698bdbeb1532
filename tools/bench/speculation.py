# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Speed of one request by who proposes its tokens, on text that a small model, trained here, predicts well.

python -m tools.bench.speculation --output docs/benchmarks/speculation.json
python -m tools.bench.speculation --device cuda --hidden-size 1024 --prompts 5 --output docs/benchmarks/speculation_gpu.json

The text is sentences of a fixed set in random order, letter by letter: a sentence is certain after its first words, the next one is not.
The model learns it with heads for further tokens in float32, then an EAGLE-3 head learns from the model. All generate, by turns, the same
tokens; on a GPU they serve in bfloat16, whose rounding may part them, and "same_texts" counts the prompts where it did not.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Place:
    """Where the models are, and in which dtype they serve."""

    device: str
    dtype: torch.dtype


def sentences(rng: random.Random, count: int = 10) -> list[str]:
    """Lines of five to nine words of two to eight letters."""
    words = ["".join(rng.choice(VOCABULARY[:26]) for _ in range(rng.randint(2, 8))) for _ in range(120)]
    return [" ".join(rng.choice(words) for _ in range(rng.randint(5, 9))) + ".\n" for _ in range(count)]


def batches(lines: list[str], rng: random.Random, device: str, *, rows: int, length: int = 128) -> Iterator[torch.Tensor]:
    """Tokens [rows, length + 1] without end."""
    while True:
        texts = ["".join(rng.choice(lines) for _ in range(length // 20)) for _ in range(rows)]
        starts = [rng.randrange(20) for _ in range(rows)]
        yield torch.tensor(
            [[VOCABULARY.index(letter) for letter in text[s : s + length + 1]] for text, s in zip(texts, starts, strict=True)],
            device=device,
        )


def learning_rate(width: int, number: int, steps: int) -> float:
    """Of a step: smaller the wider the model; it rises over 20 steps and falls over the second half."""
    return 0.256 / width * min(1.0, (number + 1) / 20, 2 * (steps - number) / steps)


def train(model: GPTModel, data: Iterator[torch.Tensor], steps: int) -> float:
    """The trunk and its heads, all by cross entropy; the trunk's last loss."""
    optimizer = torch.optim.AdamW(model.parameters())
    own = torch.zeros(())
    for number in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(model.config.hidden_size, number, steps)
        tokens = next(data)[:, :-1]
        rows, length = tokens.shape
        output: Any = model(tokens.flatten(), Step.causal(rows, length, tokens.device))[0]
        losses = [
            F.cross_entropy(part.logits().view(rows, length, -1)[:, :-ahead].flatten(0, 1), tokens[:, ahead:].flatten())
            for ahead, part in enumerate((output, *output.depths), start=1)
        ]
        own = losses[0].detach()
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        optimizer.step()
    return float(own)


def train_head(model: GPTModel, data: Iterator[torch.Tensor], steps: int, place: Place) -> EagleHead:
    """A head for the engine, taught by the model."""
    config = EagleConfig.of_target(model.config)
    learner = EagleHead(config, ONE, device=place.device)
    teacher, ends = Teacher(model, capture=config.aux_modules), TargetEnds(model)
    objective = EagleObjective(target=ends, num_steps=5)
    sync = DistributedDataParallel(DistributedDataParallelConfig(), learner, ONE)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=learning_rate(model.config.hidden_size, min(20, steps // 2), steps)), sync, ONE)
    for number in range(steps):
        tokens = next(data)
        batch = Batch(tokens=tokens[:, :-1], labels=tokens[:, 1:], loss_mask=torch.ones_like(tokens[:, 1:], dtype=torch.float32))
        lr = learning_rate(model.config.hidden_size, number, steps)
        train_step(learner, teacher.label([batch]), objective, sync, optimizer, lr=lr)
    head = EagleHead(config, ONE, attention_core=PagedAttention(), dtype=place.dtype, device=place.device, seed=None)
    head.load_state_dict(learner.state_dict())
    return head.eval()


def build(model: GPTModel, speculation: Any) -> DynamicInferenceEngine:
    sizes = InferenceConfig(max_sequence_length=1024, max_requests=1, max_tokens=256, block_size_tokens=16, enable_prefix_caching=False)
    context = DynamicInferenceContext.for_model(model, sizes)
    engine = DynamicInferenceEngine(model, context, execution=ExecutionConfig(speculation=speculation))
    engine.warm_up()
    return engine


def counters(engine: DynamicInferenceEngine) -> tuple[int, int, int, int]:
    """Steps, those of them that were recorded, and tokens that were accepted, and drafted."""
    return engine.step_count, int(engine.stats()["graph_steps"]), engine.num_accepted, engine.num_drafted


def measure(
    engines: dict[str, DynamicInferenceEngine], prompts: list[list[int]], params: SamplingParams, *, exact: bool
) -> list[dict[str, Any]]:
    """A row for each engine: prompts one at a time, the engines by turns, so that what else the machine does meets all of them.

    Args:
        engines: by name, the one without speculation first.
        prompts: tokens.
        params: of all of them.
        exact: whether all must give the same tokens.
    """
    for engine in engines.values():
        engine.generate(prompts[:1], params)
    before = {name: counters(engine) for name, engine in engines.items()}
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    same = dict.fromkeys(engines, 0)
    for prompt in prompts:
        tokens: list[int] = []
        for name, engine in engines.items():
            begun = time.perf_counter()
            made = engine.generate([prompt], params)[0].generated_tokens
            seconds[name].append(time.perf_counter() - begun)
            tokens = tokens or made
            assert made == tokens or not exact, f"{name} changed the tokens"
            same[name] += made == tokens
    rows, first, count = [], seconds[next(iter(engines))], params.num_tokens_to_generate or 0
    for name, engine in engines.items():
        steps, recorded, accepted, drafted = (now - then for now, then in zip(counters(engine), before[name], strict=True))
        row = {
            "by": name,
            "temperature": params.temperature,
            "tokens_per_s": round(count / statistics.median(seconds[name]), 1),
            "tokens_per_step": round(len(prompts) * count / steps, 2),
            "accepted_share": round(accepted / drafted, 3) if drafted else None,
            "graph_share": round(recorded / steps, 3),
            "same_texts": same[name],
            "speed_up": round(statistics.median(before / after for before, after in zip(first, seconds[name], strict=True)), 2),
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
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
    on_gpu = options.device == "cuda"
    place = Place(options.device, torch.bfloat16 if on_gpu else torch.float32)
    data = batches(lines, rng, options.device, rows=16 if on_gpu else 4)
    sizes = TransformerConfig(
        num_layers=options.layers, hidden_size=options.hidden_size, num_attention_heads=max(4, options.hidden_size // 64),
        num_query_groups=max(2, options.hidden_size // 256), vocab_size=32, normalization="RMSNorm", activation="swiglu", mtp_num_layers=2,
    )  # fmt: skip
    learner = GPTModel(sizes, ONE, attention_core=PagedAttention(), device=options.device)
    if on_gpu:
        torch.set_float32_matmul_precision("high")
    begun = time.perf_counter()
    loss = train(learner, data, options.steps)
    learner.eval()
    head = train_head(learner, data, options.steps, place)
    print(json.dumps({"loss": round(loss, 3), "training_s": round(time.perf_counter() - begun, 1)}), flush=True)
    model = GPTModel(sizes, ONE, attention_core=PagedAttention(), dtype=place.dtype, device=options.device, seed=None).eval()
    model.load_state_dict(learner.state_dict())
    prompts = [next(data)[0, :48].tolist() for _ in range(options.prompts)]
    choices = {
        "none": None,
        "ngram, 4": NgramSpeculation(num_tokens=4),
        "mtp, 2 heads, 2": MtpSpeculation(),
        "mtp, 2 heads, 4": MtpSpeculation(num_tokens=4),
        "eagle, 4": EagleSpeculation(head=head, num_tokens=4),
    }
    if not on_gpu:
        torch.set_num_threads(1)
    engines = {name: build(model, speculation) for name, speculation in choices.items()}
    rows = []
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, seed=5, num_tokens_to_generate=options.outputs)
        rows += measure(engines, prompts, params, exact=not on_gpu)
    if options.output is not None:
        facts = {"work": "one request, letters of learnt sentences", "layers": options.layers, "hidden_size": options.hidden_size}
        threads = {} if on_gpu else {"threads": 1}
        record(options.output, {**facts, "loss": round(loss, 3), **threads, "prompts": options.prompts, "rows": rows})


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Steps of a model whose kernels are short, launched one by one, by CUDA graphs of its layers, and as one graph.

python -m tools.bench.graphs --output docs/benchmarks/graphs.json

A step is one micro-batch forward and backward, the sum of the gradients, and the update. The ways take turns on models of the same
weights; each trains on, and the losses and parameters of all are compared bit by bit behind as many steps. Without a GPU, where nothing
can be captured, a tiny model goes through the same code.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_moe import MoEConfig, moe_feed_forward
from mcore_parallel import ProcessGroups
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.graphs import CudaGraphConfig, IterationGraph, graph_modules
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_parallel.training import Batch, CrossEntropyObjective, NvtxRanges
from tools.bench._record import record

WAYS = ("eager", "layers", "iteration", "eager again", "eager with ranges")
WARMUP = 3


class Trainee:
    """A model, its optimizer, and one way to run its step."""

    def __init__(
        self, way: str, config: TransformerConfig, sequence: int, device: torch.device, micro_batches: int, experts: MoEConfig | None = None
    ) -> None:
        groups = ProcessGroups.single()
        torch.manual_seed(1)
        options: dict[str, Any] = {} if experts is None else {"feed_forward": moe_feed_forward(experts)}
        self.model: Any = GPTModel(config, groups, dtype=torch.bfloat16, device=device, seed=None, **options)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(1.0) if parameter.dim() == 1 else parameter.normal_(std=0.02)
        self.sync = DistributedDataParallel(DistributedDataParallelConfig(), self.model, groups)
        self.optimizer = MegatronOptimizer(OptimizerConfig(lr=1e-4, weight_decay=0.1), self.sync, groups)
        generator = torch.Generator().manual_seed(2)
        rows = torch.randint(config.vocab_size, (micro_batches, 1, sequence + 1), generator=generator).to(device)
        self.tokens, self.labels = rows[..., :-1].contiguous(), rows[..., 1:].contiguous()
        self.lr = torch.tensor(1e-4, dtype=torch.float64, device=device)
        self.mask = torch.ones(1, sequence, device=device)
        self.graphs = graph_modules(self.model, config=CudaGraphConfig(warmup_steps=WARMUP)) if way == "layers" else None
        self.whole = IterationGraph(self.work, warmup_steps=WARMUP) if way == "iteration" else None
        self.ranges = NvtxRanges().annotate(self.model) if way == "eager with ranges" else None

    def work(self, tokens: Tensor, labels: Tensor, lr: Tensor) -> Tensor:
        """One step; the mean loss, on the device."""
        self.sync.zero_grad_buffer()
        total = torch.zeros((), dtype=torch.float64, device=tokens.device)
        for number in range(len(tokens)):
            batch = Batch(tokens=tokens[number], labels=labels[number], loss_mask=self.mask)
            with self.sync.no_sync():
                loss = CrossEntropyObjective()(self.model(batch.tokens.flatten(), batch.step())[0], batch).sum
                loss.backward()
            total += loss.detach()
        self.sync.finish_grad_sync()
        self.optimizer.step(grad_scale=1.0 / tokens.numel(), lr=lr)
        return total / tokens.numel()

    def step(self) -> Tensor:
        """As the way says."""
        return (self.work if self.whole is None else self.whole)(self.tokens, self.labels, self.lr)

    def facts(self) -> dict[str, Any]:
        """What was captured."""
        held = self.graphs or self.whole
        if held is None:
            return {}
        report = held.report()
        return {"graphs": report.graphs, "graph_gib": round(report.memory_bytes / 2**30, 3), "eager_calls": dict(report.eager)}


def timed(work: Callable[[], object], device: torch.device, steps: int) -> float:
    """Milliseconds of one of several steps in a row."""
    finish(device)
    begin = time.perf_counter()
    for _ in range(steps):
        work()
    finish(device)
    return (time.perf_counter() - begin) / steps * 1e3


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(
    config: TransformerConfig, sequence: int, device: torch.device, micro_batches: int, steps: int, rounds: int, experts: MoEConfig | None
) -> dict[str, Any]:
    """A row a way."""
    trainees = {way: Trainee(way, config, sequence, device, micro_batches, experts) for way in WAYS}
    losses = {way: [float(trainee.step()) for _ in range(WARMUP + 2)] for way, trainee in trainees.items()}
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way, trainee in trainees.items():
            times[way].append(timed(trainee.step, device, steps))
    rows = {}
    base = trainees["eager"]
    for way, trainee in trainees.items():
        losses[way].append(float(trainee.step()))
        pairs = zip(trainee.model.parameters(), base.model.parameters(), strict=True)
        rows[way] = {
            "ms": round(statistics.median(times[way]), 3),
            "ratio_to_eager": round(statistics.median(times["eager"]) / statistics.median(times[way]), 3),
            "same_bits_as_eager": losses[way] == losses["eager"] and all(torch.equal(a, b) for a, b in pairs),
            "first_loss": losses[way][0],
            "last_loss": losses[way][-1],
            **trainee.facts(),
        }
        print(json.dumps({"way": way, **rows[way]}), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--micro-batches", type=int, default=1, help="of one sequence, a step (default: %(default)s)")
    parser.add_argument("--attention", default="auto", help='core of attention; "reference" is reproducible on every device')
    parser.add_argument("--experts", type=int, default=0, help="of a layer, half as wide as the model, eight a token; 0 for none")
    parser.add_argument("--steps", type=int, default=20, help="of a round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    sizes = (arguments.layers, arguments.hidden, arguments.sequence, 32768) if cuda else (2, 32, 16, 128)
    steps, rounds = (arguments.steps, arguments.rounds) if cuda else (1, 2)
    layers, hidden, sequence, vocab = sizes
    config = TransformerConfig(
        num_layers=layers, hidden_size=hidden, ffn_hidden_size=4 * hidden, num_attention_heads=max(1, hidden // 64), vocab_size=vocab,
        attention_backend=arguments.attention,
    )  # fmt: skip
    experts = None
    if arguments.experts:
        count = arguments.experts if cuda else 4
        experts = MoEConfig(num_moe_experts=count, moe_router_topk=min(8, count), moe_ffn_hidden_size=hidden // 2, moe_aux_loss_coeff=0.01)
    rows = measure(config, sequence, device, arguments.micro_batches, steps, rounds, experts)
    if arguments.output:
        shape = {"layers": layers, "hidden": hidden, "sequence": sequence, "vocabulary": vocab, "micro_batches": arguments.micro_batches}
        shape["experts"] = arguments.experts
        record(arguments.output, {"work": "a training step of a launch-bound model", "model": shape, "rows": rows})


if __name__ == "__main__":
    main()

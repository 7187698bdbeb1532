# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""CUDA graphs of blocks and of whole steps have the bits of what they replace; events time them; ranges cost little."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.graphs import CudaGraphConfig, IterationGraph, graph_modules
from mcore_parallel.models import GPTModel, MambaModel, TransformerConfig, hybrid_config
from mcore_parallel.nn import MambaConfig, RecomputeConfig, Step
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_parallel.pipeline import ModelChunks, PipelineConfig
from mcore_parallel.training import Batch, CrossEntropyObjective, NvtxRanges, ProfileConfig, Timers, train_step
from tests.support.world import run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # Of torch's compiler, about itself.
    pytest.mark.filterwarnings("default"),
]
B, S, V = 2, 128, 256
# The plain formula of attention: the others add their gradients up in any order.
SIZES: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 4, "vocab_size": V, "init_method_std": 0.1}
CONFIG = TransformerConfig(num_layers=4, ffn_hidden_size=256, attention_backend="reference", **SIZES)
MAMBA = MambaConfig(head_dim=32, num_groups=2, state_dim=32, chunk_size=64)
STEPS, MICRO_BATCHES = 10, 3


def batches(step: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(step)
    found = []
    for _ in range(MICRO_BATCHES):
        tokens = torch.randint(V, (B, S + 1), generator=generator).cuda()
        found.append(
            Batch(tokens=tokens[:, :-1].contiguous(), labels=tokens[:, 1:].contiguous(), loss_mask=torch.ones(B, S, device="cuda"))
        )
    return found


def gpt(backend: str = "reference", **options: Any) -> nn.Module:
    config = dataclasses.replace(CONFIG, attention_backend=backend)
    return GPTModel(config, ProcessGroups.single(), dtype=torch.bfloat16, device="cuda", seed=3, **options)


def hybrid() -> nn.Module:
    config = hybrid_config("M-*-", ffn_hidden_size=256, attention_backend="reference", mamba=MAMBA, **SIZES)
    return MambaModel(config, ProcessGroups.single(), dtype=torch.bfloat16, device="cuda", seed=3)


def trained(
    build: Callable[[], nn.Module],
    graphs: Callable[[nn.Module], Any] | None,
    fusion: bool = True,
    batches: Callable[[int], list[Batch]] = batches,
) -> tuple[list[Any], Any]:
    """Losses and norms of ten steps and the parameters behind them."""
    model, groups = build(), ProcessGroups.single()
    sync = DistributedDataParallel(DistributedDataParallelConfig(gradient_accumulation_fusion=fusion), model, groups)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=1e-3), sync, groups)
    held = None if graphs is None else graphs(model)
    reports = [train_step(model, batches(step), CrossEntropyObjective(), sync, optimizer, lr=1e-3, groups=groups) for step in range(STEPS)]
    parameters = [parameter.detach().clone() for parameter in model.parameters()]
    return [[report.loss for report in reports], [report.grad_norm for report in reports], parameters], held


def same(found: list[Any], wanted: list[Any]) -> None:
    assert found[0] == wanted[0]
    assert found[1] == wanted[1]
    assert all(torch.equal(a, b) for a, b in zip(found[2], wanted[2], strict=True))


KINDS: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...], CudaGraphConfig]] = {
    "layers": (gpt, ("layers.*",), CudaGraphConfig()),
    "parts": (gpt, ("layers.*.attention", "layers.*.mlp"), CudaGraphConfig()),
    "recomputed": (gpt, ("layers.*",), CudaGraphConfig(recompute=True)),
    "recomputed inside": (
        lambda: gpt(recompute=RecomputeConfig(modules=("norm", "mlp"), preserve_rng_state=False)),
        ("layers.*",),
        CudaGraphConfig(),
    ),
    "hybrid": (hybrid, ("layers.*",), CudaGraphConfig()),
}


@pytest.mark.parametrize("fusion", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_ten_steps_of_replayed_blocks_have_the_bits_of_the_eager_ones(kind: str, fusion: bool) -> None:
    build, patterns, config = KINDS[kind]
    wanted, _ = trained(build, None, fusion)
    again, _ = trained(build, None, fusion)
    same(again, wanted)  # else the model itself is not reproducible, and nothing can be said
    found, graphed = trained(build, lambda model: graph_modules(model, patterns, config), fusion)
    same(found, wanted)
    report = graphed.report()
    assert report.graphs == len(graphed.blocks) and report.memory_bytes > 0
    assert report.replays == (STEPS * MICRO_BATCHES - config.warmup_steps) * len(graphed.blocks)
    graphed.remove()


def packed_batches(step: int) -> list[Batch]:
    """One row a micro-batch, of other sequences each time."""
    packed = []
    for number, batch in enumerate(batches(step)):
        draws = torch.Generator().manual_seed(MICRO_BATCHES * step + number)
        ends = torch.randperm(B * S - 1, generator=draws)[: 1 + step % 4].sort().values + 1
        tokens, labels, mask = (x.view(1, B * S) for x in (batch.tokens, batch.labels, batch.loss_mask))
        bounds = torch.cat((torch.tensor([0]), ends, torch.tensor([B * S])))
        packed.append(Batch(tokens=tokens, labels=labels, loss_mask=mask, cu_seqlens=bounds).with_device_bounds(6))
    return packed


@pytest.mark.parametrize("backend", ["reference", "sdpa", "context_parallel"])
def test_ten_steps_of_replayed_layers_over_packed_sequences_are_those_of_eager_ones(backend: str) -> None:
    build = functools.partial(gpt, backend)
    wanted, _ = trained(build, None, batches=packed_batches)
    found, graphed = trained(build, lambda model: graph_modules(model, ("layers.*",), CudaGraphConfig()), batches=packed_batches)
    if backend == "reference":
        same(found, wanted)
    else:
        # The flash kernels add gradients up in any order.
        assert found[0][0] == wanted[0][0] and found[0] == pytest.approx(wanted[0], rel=1e-2)
    report = graphed.report()
    assert report.graphs == len(graphed.blocks)
    assert report.replays == (STEPS * MICRO_BATCHES - CudaGraphConfig().warmup_steps) * len(graphed.blocks)
    graphed.remove()


@pytest.mark.parametrize("fusion", [True, False])
@pytest.mark.parametrize("kind", ["layers", "parts"])
def test_ten_steps_of_blocks_that_transformer_engine_captured_have_the_bits_of_the_eager_ones(kind: str, fusion: bool) -> None:
    pytest.importorskip("transformer_engine.pytorch")
    build, patterns, _ = KINDS[kind]
    config = CudaGraphConfig(external_cuda_graph=True)
    wanted, _ = trained(build, None, fusion)
    found, graphed = trained(build, lambda model: graph_modules(model, patterns, config), fusion)
    same(found, wanted)
    report = graphed.report()
    assert report.graphs == len(graphed.blocks)
    assert report.replays == (STEPS * MICRO_BATCHES - config.warmup_steps) * len(graphed.blocks)
    graphed.remove()


def whole_step(graph: bool) -> tuple[list[Any], Any]:
    model: Any = gpt()
    groups, objective = ProcessGroups.single(), CrossEntropyObjective()
    sync = DistributedDataParallel(DistributedDataParallelConfig(), model, groups)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=1e-3), sync, groups)

    def work(tokens: list[Tensor], labels: list[Tensor], lr: Tensor) -> tuple[Tensor, Tensor]:
        sync.zero_grad_buffer()
        total = torch.zeros((), dtype=torch.float64, device="cuda")
        for inputs, targets in zip(tokens, labels, strict=True):
            batch = Batch(tokens=inputs, labels=targets, loss_mask=torch.ones_like(inputs, dtype=torch.float32))
            with sync.no_sync():
                report = objective(model(inputs.flatten(), batch.step())[0], batch)
                report.sum.backward()
            total += report.sum.detach()
        sync.finish_grad_sync()
        result = optimizer.step(grad_scale=1.0 / (B * S * MICRO_BATCHES), lr=lr)
        return total, result.grad_norm

    step = IterationGraph(work) if graph else work
    losses, norms = [], []
    for number in range(STEPS):
        data = batches(number)
        lr = torch.tensor(1e-3 / (1 + number), dtype=torch.float64, device="cuda")
        loss, norm = step([batch.tokens for batch in data], [batch.labels for batch in data], lr)
        losses.append(float(loss))
        norms.append(float(norm))
    return [losses, norms, [parameter.detach().clone() for parameter in model.parameters()]], step


def test_ten_whole_steps_with_their_updates_have_the_bits_of_the_eager_ones() -> None:
    wanted, _ = whole_step(False)
    found, step = whole_step(True)
    same(found, wanted)
    assert step.report().graphs == 1 and step.report().replays == STEPS - 3


def test_dropout_differs_between_replays() -> None:
    class Drop(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(x, 0.5) * 1.0

    block = nn.ModuleDict({"drop": Drop()})
    x = torch.ones(1024, device="cuda", requires_grad=True)
    with graph_modules(block, ["drop"], CudaGraphConfig(warmup_steps=1)) as graphed:
        found = []
        for _ in range(3):
            y = block["drop"](x)
            found.append(y.detach().clone())
            y.sum().backward()
        assert graphed.report().replays == 2
    assert not torch.equal(found[1], found[2])


def test_memory_does_not_grow_over_replays() -> None:
    model: Any = gpt()
    x = torch.randn(B * S, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with graph_modules(model, config=CudaGraphConfig(warmup_steps=1)):
        sizes = []
        for _ in range(30):
            y = x
            step = Step.causal(B, S, torch.device("cuda"))
            for layer in model.layers.values():
                y, _ = layer(y, step)
            y.sum().backward()
            x.grad = None
            torch.cuda.synchronize()
            sizes.append(torch.cuda.memory_allocated())
    assert max(sizes[5:]) == min(sizes[5:])


def check_pipeline(graph: bool, chunks: int) -> list[Any]:
    torch.cuda.set_device(torch.distributed.get_rank())
    groups = ProcessGroups.build(ParallelPlan(pp=2, vpp=chunks))
    pipeline = PipelineConfig()
    layout = pipeline.place(CONFIG.num_layers, num_stages=2, num_chunks=chunks)
    place: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda", "seed": 3}
    parts = [GPTModel(CONFIG, groups, layers=part, **place) for part in layout.of_rank(groups.pp.rank)]
    model: nn.Module = parts[0] if chunks == 1 else ModelChunks(parts)
    sync = DistributedDataParallel(DistributedDataParallelConfig(), model, groups)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=1e-3), sync, groups)
    graphed = graph_modules(model) if graph else None
    options: dict[str, Any] = {"groups": groups, "pipeline": pipeline.build(chunks)}
    reports = []
    for step in range(STEPS):
        data = batches(2 * step) + batches(2 * step + 1)[: 4 - MICRO_BATCHES]
        reports.append(train_step(model, data, CrossEntropyObjective(), sync, optimizer, lr=1e-3, **options))
    if graphed is not None:
        assert graphed.report().replays > 0
        graphed.remove()
    parameters = [parameter.detach().float().cpu().numpy() for parameter in model.parameters()]
    return [[report.loss for report in reports], [report.grad_norm for report in reports], parameters]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("chunks", [1, 2])
def test_replayed_layers_of_a_pipeline_have_the_bits_of_the_eager_ones(chunks: int) -> None:
    wanted = run(check_pipeline, 2, backend="nccl", graph=False, chunks=chunks)
    found = run(check_pipeline, 2, backend="nccl", graph=True, chunks=chunks)
    for one, other in zip(found, wanted, strict=True):
        assert one[:2] == other[:2]
        assert all((a == b).all() for a, b in zip(one[2], other[2], strict=True))


def test_timers_measure_the_device_and_do_not_wait_for_it() -> None:
    timers = Timers(device=torch.device("cuda", torch.cuda.current_device()))
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        _ = x @ x
    torch.cuda.synchronize()
    begin = time.perf_counter()
    with timers("products"):
        for _ in range(60):
            _ = x @ x
    host = time.perf_counter() - begin
    measured = timers("products").elapsed()
    # 60 products of 1.1e12 operations take more than 20 ms below 3.3e15 operations a second.
    assert measured > 0.02 > host


def test_ranges_cost_under_two_percent_of_a_step_that_the_gpu_bounds() -> None:
    config = TransformerConfig(num_layers=8, hidden_size=2048, num_attention_heads=16, vocab_size=1024)
    model: Any = GPTModel(config, ProcessGroups.single(), dtype=torch.bfloat16, device="cuda", seed=None)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0) if parameter.dim() == 1 else parameter.normal_(std=0.02)
    # So many tokens that the kernels take longer than the Python that starts them, the ranges' included: they must not make it wait.
    tokens, step = torch.randint(1024, (8 * 4096,), device="cuda"), Step.causal(8, 4096, torch.device("cuda"))

    def seconds() -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        output, _ = model(tokens, step)
        output.loss_sum(tokens, torch.ones(len(tokens), device="cuda")).backward()
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    # Clocks of a GPU at its power limit wander by 4 %: single steps in turn, and the median of the pairs' ratios.
    off, on = [], []
    for _ in range(20):
        off.append(seconds())
        with NvtxRanges().annotate(model):
            on.append(seconds())
    ratio = statistics.median(b / a for a, b in zip(off[4:], on[4:], strict=True))
    assert ratio < 1.02, (ratio, on, off)


def test_a_window_traces_kernels(tmp_path: Path) -> None:
    model = nn.Linear(64, 64, device="cuda")
    with ProfileConfig(tool="torch", step_start=1, step_end=2, nvtx_ranges=True, output=str(tmp_path)).build(model=model) as window:
        window.begin_step(1)
        model(torch.ones(8, 64, device="cuda")).sum().backward()
        window.end_step(1)
    assert "CUDA" in window.files[1].read_text()
    with ProfileConfig(tool="nsys", step_start=1, step_end=2, nvtx_ranges=True).build(model=model) as window:
        window.begin_step(1)
        model(torch.ones(8, 64, device="cuda")).sum().backward()
        window.end_step(1)
    assert window.ranges.depth == 0 and not model._forward_hooks


def test_a_step_over_resident_weights_and_a_resident_cache_copies_neither() -> None:
    weight, cache = torch.randn(1024, 1024, device="cuda"), torch.zeros(4096, 1024, device="cuda")

    def work(x: Tensor, *, at: Tensor, cache: Tensor, weight: Tensor) -> Tensor:
        y = torch.tanh(x @ weight)
        cache.index_copy_(0, at, y)
        return cache.index_select(0, at).sum(1)

    graph = IterationGraph(work, warmup_steps=2, resident=("cache", "weight"))
    # The largest first: the pool holds the others.
    for size in (256, 64, 8):
        graph.record(torch.zeros(size, 1024, device="cuda"), at=torch.arange(size, device="cuda"), cache=cache, weight=weight)
    cache.zero_()
    for number, size in enumerate((8, 256, 64, 256, 8)):
        x, at = torch.randn(size, 1024, device="cuda"), torch.randperm(4096, device="cuda")[:size]
        if number == 3:
            weight.mul_(0.5)
        wanted = torch.tanh(x @ weight)
        result = graph(x, at=at, cache=cache, weight=weight).clone()
        torch.testing.assert_close(result, wanted.sum(1), rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(cache[at], wanted, rtol=1e-4, atol=1e-4)
    report = graph.report()
    assert report.graphs == 3 and report.replays == 5 and report.eager == {"warm-up": 6}
    # Inputs of three sizes and their results; the cache alone has 16 MiB.
    assert report.memory_bytes < 6 * 2**20
    with pytest.raises(ValueError, match="input 'cache' is resident"):
        graph(torch.zeros(8, 1024, device="cuda"), at=torch.arange(8, device="cuda"), cache=cache.clone(), weight=weight)


def test_recordings_of_many_sizes_take_the_memory_of_the_largest() -> None:
    def work(x: Tensor) -> Tensor:
        for _ in range(4):
            x = torch.cat((x, x[: len(x) // 2])).sin()[: len(x)]
        return x.sum(0)

    def reserved(sizes: tuple[int, ...]) -> int:
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        graph = IterationGraph(work, warmup_steps=1)
        for size in sizes:
            graph.record(torch.ones(size, 1 << 14, device="cuda"))
        for size in reversed(sizes):
            x = torch.rand(size, 1 << 14, device="cuda")
            torch.testing.assert_close(graph(x), work(x), rtol=1e-4, atol=1e-4)
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved() - before

    largest = reserved((512,))
    # Beside it the inputs of each size stay.
    assert reserved((512, 448, 384, 320)) < 2 * largest + (448 + 384 + 320) * (1 << 16)

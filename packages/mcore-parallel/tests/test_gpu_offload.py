# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Offloaded activations on GPUs: the bits of a plain run, and the memory that the offloaded bytes took."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.nn import OffloadConfig, RecomputeConfig, Step, causal_attention
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_parallel.pipeline import ModelChunks, PipelineLayout
from mcore_parallel.training import Batch, CrossEntropyObjective, train_step
from tests.support.world import run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CONFIG = TransformerConfig(num_layers=8, hidden_size=512, num_attention_heads=8, vocab_size=1024, ffn_hidden_size=2048)
BATCH, LENGTH, STEPS = 8, 512, 4


def tokens_of(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, CONFIG.vocab_size, (BATCH, LENGTH), generator=generator).to("cuda")


def peak_of_one_gpu(offload: OffloadConfig | None, recompute: RecomputeConfig | None) -> tuple[list[Tensor], int, int]:
    """Losses and gradients of four steps, the peak of the last one above what lay there before, and the bytes that were out."""
    model = GPTModel(
        CONFIG, ProcessGroups.single(), attention_core=causal_attention, dtype=torch.bfloat16, device="cuda", seed=1, offload=offload,
        recompute=recompute,
    )  # fmt: skip
    offloader, results, peak, out, allocations = model.memory.offloader, [], 0, 0, []
    # The flash kernel's backward adds atomically.
    with sdpa_kernel(SDPBackend.MATH):
        for number in range(STEPS):
            tokens = tokens_of(number).flatten()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            loss = model(tokens, Step.causal(BATCH, LENGTH, device="cuda"))[0].token_losses(tokens).sum()
            if offloader is not None:
                out = offloader.bytes_out
                allocations.append(offloader.num_allocations)
            loss.backward()
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - before
            results += [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None)]
            # The gradients stay where they are, so that the last step's peak is of activations.
            model.zero_grad(set_to_none=False)
            del loss
            assert offloader is None or offloader.bytes_out == 0
    assert len(set(allocations[1:])) <= 1, "pinned memory is used again"
    return results, peak, out


@pytest.mark.parametrize("recompute", [None, RecomputeConfig(modules=("core_attention",))])
@pytest.mark.parametrize("modules", [("layer",), ("mlp", "norm")])
def test_the_peak_falls_by_what_went_out(modules: tuple[str, ...], recompute: RecomputeConfig | None) -> None:
    expected, plain, _ = peak_of_one_gpu(None, recompute)
    found, less, out = peak_of_one_gpu(OffloadConfig(modules=modules, max_inflight=1), recompute)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    # One group may be on its way out, and one on its way back. Seven layers went out, of parts each one has as many groups.
    two_groups = 2 * out / (CONFIG.num_layers - 1)
    assert plain - less >= 0.95 * (out - two_groups), (plain, less, out)


def small(**options: Any) -> OffloadConfig:
    return OffloadConfig(min_offloaded_tensor_size=1 << 16, **options)


LAYOUTS = {1: "Etttt|ttttL", 2: "Ett|tt|tt|ttL"}
CHOICES: dict[str, tuple[OffloadConfig | None, RecomputeConfig | None]] = {
    "plain": (None, None),
    "layers": (small(keep_last_layers=0, max_inflight=1), None),
    "layers that run again": (small(keep_last_layers=0), RecomputeConfig(granularity="full")),
    "parts beside recomputed ones": (small(modules=("mlp", "norm"), prefetch=2), RecomputeConfig(modules=("core_attention",))),
    "the core of attention": (small(modules=("core_attention",), keep_bytes=1 << 20), RecomputeConfig(modules=("norm", "mlp"))),
}


def trained(
    groups: ProcessGroups, layout: str, offload: OffloadConfig | None, recompute: RecomputeConfig | None
) -> tuple[list[Tensor], int]:
    """Losses, main gradients of the last step and parameters; and the peak of the last step."""
    parts = PipelineLayout.parse(layout, num_stages=groups.pp.size, num_layers=CONFIG.num_layers).of_rank(groups.pp.rank)
    chunks = ModelChunks(
        [
            GPTModel(
                CONFIG, groups, attention_core=causal_attention, layers=part, dtype=torch.bfloat16, device="cuda", seed=1, offload=offload,
                recompute=recompute,
            )
            for part in parts
        ]
    )  # fmt: skip
    sync = DistributedDataParallel(DistributedDataParallelConfig(), chunks, groups)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=1e-3), sync, groups)
    offloaders = [chunk.memory.offloader for chunk in chunks if chunk.memory.offloader is not None]
    results, allocations, peak = [], [], 0
    for number in range(STEPS):
        ones = torch.ones(1, LENGTH, device="cuda")
        batches = [Batch(tokens=row, labels=row.roll(-1, 1), loss_mask=ones.expand(len(row), -1)) for row in tokens_of(number).chunk(4)]
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        report = train_step(chunks, batches, CrossEntropyObjective(), sync, optimizer, lr=1e-3, groups=groups)
        peak = torch.cuda.max_memory_allocated() - before
        results.append(torch.tensor([report.loss, report.grad_norm]))
        assert not any(offloader.bytes_out for offloader in offloaders), "nothing stays on the host after a step"
        allocations.append(sum(offloader.num_allocations for offloader in offloaders))
    assert len(set(allocations[-2:])) == 1, "pinned memory is used again"
    assert bool(allocations[-1]) == (offload is not None)
    return [*results, *(grad.clone() for grad in sync.gradients().values()), *(p.detach() for p in chunks.parameters())], peak


def check_pipeline() -> None:
    groups = ProcessGroups.build(ParallelPlan(pp=2))
    with sdpa_kernel(SDPBackend.MATH):
        for num_chunks, layout in LAYOUTS.items():
            expected, plain = trained(groups, layout, *CHOICES["plain"])
            for name, choice in CHOICES.items():
                found, peak = trained(groups, layout, *choice)
                same = [torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True)]
                assert all(same), (num_chunks, name, same)
                # The first stage holds most micro-batches at once.
                if name.startswith("layers") and groups.pp.rank == 0:
                    assert peak < 0.7 * plain, (num_chunks, name, peak, plain)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_stages_of_one_and_two_chunks_have_the_bits_of_a_plain_run() -> None:
    run(check_pipeline, 2, backend="nccl", timeout_s=100.0)

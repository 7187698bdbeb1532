# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Context parallelism on GPUs: flash kernels, memory, nccl."""

import pytest
import torch
from torch import Tensor

from mcore_parallel import Group, ParallelPlan, ProcessGroups
from mcore_parallel.context_parallel import context_parallel_attention, zigzag_indices
from mcore_parallel.context_parallel._partial import CudnnAttention, FlashAttention, PartialAttention, TorchAttention
from mcore_parallel.context_parallel._ring import Round, plan_ring, ring_attention
from mcore_parallel.context_parallel._tiles import plan_tiles
from mcore_parallel.context_parallel._zigzag import segments
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.nn import Step
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_parallel.training import Batch, CrossEntropyObjective, train_step
from tests.support.world import run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
needs_four = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four CUDA devices")

EQUAL, PACKED = (512, 512), (256, 1024, 64, 512)
# Lengths, key-value heads, window, sink.
CASES = [
    (EQUAL, 8, (-1, 0), False),
    (EQUAL, 2, (-1, 0), True),
    (EQUAL, 8, (100, 0), False),
    (EQUAL, 2, (-1, -1), False),
    (PACKED, 8, (-1, 0), False),
    (PACKED, 2, (70, 0), True),
]
HEADS = 8


def draw(lengths: tuple[int, ...], kv_heads: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, sink, gradient of the output."""
    generator = torch.Generator("cuda").manual_seed(0)
    T = sum(lengths)
    shapes = ((T, HEADS, width), (T, kv_heads, width), (T, kv_heads, width), (HEADS,), (T, HEADS, width))
    q, k, v, sink, grad = (torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    return q, k, v, sink, grad


def results(
    kernel: PartialAttention, dtype: torch.dtype, lengths: tuple[int, ...], kv_heads: int, window: tuple[int, int], sunk: bool, rank: int
) -> list[Tensor]:
    """Output and gradients of one of four ranks, which finds all keys here."""
    q, k, v, sink, grad = (x.to(dtype) for x in draw(lengths, kv_heads, 64))
    index = zigzag_indices(lengths, 4, rank).cuda()
    q, grad = q[index], grad[index]
    leaves = [x.requires_grad_() for x in ((q, k, v, sink) if sunk else (q, k, v))]
    tiles = plan_tiles(segments(lengths, 4, rank), segments(lengths, 1, 0), window)
    out = ring_attention(q, k, v, sink if sunk else None, (Round(0, tuple(tiles)),), Group.single(), kernel, 0.125)
    return [out.detach().double(), *(x.double() for x in torch.autograd.grad(out, leaves, grad))]


@pytest.mark.parametrize("kernel", [FlashAttention(), CudnnAttention()], ids=["flash", "cudnn"])
@pytest.mark.parametrize("rank", [0, 1, 3])
@pytest.mark.parametrize(("lengths", "kv_heads", "window", "sunk"), CASES)
def test_kernels_are_as_close_to_float64_as_bfloat16_allows(lengths, kv_heads, window, sunk, rank, kernel) -> None:
    exact = results(TorchAttention(), torch.float64, lengths, kv_heads, window, sunk, rank)
    ours = results(kernel, torch.bfloat16, lengths, kv_heads, window, sunk, rank)
    for found, wanted in zip(ours, exact, strict=True):
        assert (found - wanted).norm() <= 1e-2 * wanted.norm()


@pytest.mark.parametrize("kernel", [FlashAttention(), CudnnAttention()], ids=["flash", "cudnn"])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(("lengths", "kv_heads", "window", "sunk"), [*CASES, ((2048, 2048), 2, (-1, 0), False)])
def test_every_tile_of_a_ring_is_right(lengths, kv_heads, window, sunk, size, kernel) -> None:
    del sunk
    T = sum(lengths) // size
    q, k, v, _, grad = (x[:T] for x in draw(lengths, kv_heads, 64))
    exact, wide = TorchAttention(), [x.double() for x in (q, k, v, grad)]
    for rank in range(size):
        for round_ in plan_ring(lengths, size, rank, window):
            for tile in round_.tiles:
                out, lse = kernel.forward(q, k, v, tile, 0.125)
                wanted, norms = exact.forward(*wide[:3], tile, 0.125)
                rows = tile.queries.rows(q.device)
                whole = wide[0].new_zeros(T, HEADS, 64).index_copy_(0, rows, wanted)
                sums = wide[0].new_zeros(T, HEADS).index_copy_(0, rows, norms)
                found = kernel.backward(grad, q, k, v, whole.to(q.dtype), sums.float(), tile, 0.125)
                grads = exact.backward(wide[3], *wide[:3], whole, sums, tile, 0.125)
                for name, ours, theirs in zip(["out", "dq", "dk", "dv"], (out, *found), (wanted, *grads), strict=True):
                    assert (ours.double() - theirs).norm() <= 1e-2 * theirs.norm(), (name, rank, round_.distance, tile)
                assert (lse.double() - norms).abs().max() <= 1e-2, (rank, round_.distance, tile)


def test_heads_of_any_width_go_to_the_flash_kernel() -> None:
    q, k, v, _, grad = draw(EQUAL, 2, 52)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    core, step = context_parallel_attention(ProcessGroups.single()), Step.causal(2, 512, device="cuda")
    out, exact = core(*leaves, 0, step), core(*wide, 0, step)
    assert out.shape == q.shape and out.dtype == torch.bfloat16
    pairs = zip((out, *torch.autograd.grad(out, leaves, grad)), (exact, *torch.autograd.grad(exact, wide, grad.double())), strict=True)
    for found, wanted in pairs:
        assert (found - wanted).norm() <= 1e-2 * wanted.norm()


@pytest.mark.parametrize("window", [(-1, 0), (1000, 0)])
def test_flash_holds_no_scores(window) -> None:
    tokens = 32768
    q, k, v, _, grad = draw((tokens,), 2, 64)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    core, step = context_parallel_attention(ProcessGroups.single(), window_size=window), Step.causal(1, tokens, device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(core(*leaves, 0, step), leaves, grad)
    torch.cuda.synchronize()
    # The scores would be a thousand times as large as q.
    assert torch.cuda.max_memory_allocated() - before < 32 * q.nbytes


def check_cores(plan: ParallelPlan, dtype: torch.dtype) -> None:
    """Every way to communicate against one rank in float64."""
    groups = ProcessGroups.build(plan)
    tolerance = {torch.bfloat16: 1e-2, torch.float32: 1e-5}[dtype]
    for lengths, kv_heads, window, sunk in CASES:
        *leaves, grad = (x.double() for x in draw(lengths, kv_heads, 64))
        bounds = torch.tensor([0, *lengths]).cumsum(0)
        options = {"window_size": window, "causal": window[1] == 0}
        leaves = [x.requires_grad_() for x in leaves]
        T = sum(lengths)
        whole = Step(batch_size=1, seq_len=T, positions=torch.arange(T, device="cuda"), cu_seqlens=bounds)
        out = context_parallel_attention(ProcessGroups.single(), **options)(*leaves[:3], 0, whole, sink=leaves[3] if sunk else None)
        used = leaves if sunk else leaves[:3]
        exact = [out.detach(), *torch.autograd.grad(out, used, grad)]
        index = zigzag_indices(lengths, plan.cp, groups.cp.rank).cuda()
        share = Step(batch_size=1, seq_len=len(index), positions=index, cu_seqlens=bounds)
        for name in ("p2p", "all_gather", "a2a", "a2a+p2p"):
            core = context_parallel_attention(groups, name, **options)
            parts = [x.detach()[index].to(dtype).requires_grad_() for x in leaves[:3]]
            sink = leaves[3].detach().to(dtype).requires_grad_()
            out = core(*parts, 0, share, sink=sink if sunk else None)
            found = [out.detach(), *torch.autograd.grad(out, [*parts, sink] if sunk else parts, grad[index].to(dtype))]
            for ours, theirs in zip(found[:4], exact[:4], strict=True):
                error = (ours.double() - theirs[index]).norm() / theirs[index].norm()
                assert error <= tolerance, (lengths, kv_heads, window, sunk, name, float(error))
            if sunk:
                total = found[4].double()
                torch.distributed.all_reduce(total, group=groups.cp.pg)
                assert (total - exact[4]).norm() <= 2 * tolerance * exact[4].norm()


@needs_two
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_ranks_equal_one(dtype) -> None:
    run(check_cores, 2, backend="nccl", timeout_s=100.0, plan=ParallelPlan(cp=2, hierarchical_cp=(2, 1)), dtype=dtype)


@needs_four
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_four_ranks_equal_one(dtype) -> None:
    run(check_cores, 4, backend="nccl", timeout_s=100.0, plan=ParallelPlan(cp=4, hierarchical_cp=(2, 2)), dtype=dtype)


CONFIG = TransformerConfig(
    num_layers=2, hidden_size=256, num_attention_heads=4, num_query_groups=2, vocab_size=1024, ffn_hidden_size=512, init_method_std=0.05
)


def train(groups: ProcessGroups, name: str, dtype: torch.dtype) -> list[float]:
    """Losses and gradient norms of three steps."""
    core = context_parallel_attention(groups, name)
    model = GPTModel(CONFIG, groups, attention_core=core, dtype=dtype, device="cuda", seed=1)
    sync = DistributedDataParallel(DistributedDataParallelConfig(grad_reduce_in_fp32=True), model, groups)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=1.0), sync, groups)
    numbers = []
    for step in range(3):
        generator = torch.Generator("cuda").manual_seed(step)
        tokens = torch.randint(0, 1024, (2, 2, 513), device="cuda", generator=generator)
        batches = [Batch(tokens=x[:, :-1], labels=x[:, 1:], loss_mask=torch.ones(2, 512, device="cuda")) for x in tokens]
        report = train_step(model, batches, CrossEntropyObjective(), sync, optimizer, lr=1e-3)
        numbers += [report.loss, report.grad_norm]
    return numbers


def check_training(plan: ParallelPlan, dtype: torch.dtype) -> None:
    groups = ProcessGroups.build(plan)
    expected = train(ProcessGroups.single(), "p2p", torch.float32)
    tolerance = {torch.bfloat16: 2e-2, torch.float32: 1e-4}[dtype]
    for name in ("p2p", "all_gather", "a2a", "a2a+p2p"):
        torch.testing.assert_close(train(groups, name, dtype), expected, rtol=tolerance, atol=0)


@needs_two
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_ranks_train_as_one(dtype) -> None:
    run(check_training, 2, backend="nccl", timeout_s=100.0, plan=ParallelPlan(cp=2, hierarchical_cp=(1, 2)), dtype=dtype)


@needs_four
@pytest.mark.parametrize("degrees", [{"tp": 2}, {"pp": 2}, {"dp": 2}])
def test_four_ranks_train_as_one(degrees) -> None:
    plan = ParallelPlan(cp=2, hierarchical_cp=(2, 1), **degrees)
    run(check_training, 4, backend="nccl", timeout_s=100.0, plan=plan, dtype=torch.bfloat16)

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Tensor parallelism and activation memory on GPUs: kernels, memory, nccl."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from mcore_parallel import Group, ParallelPlan, ProcessGroups
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.nn import ActivationOffloader, OffloadConfig, RecomputeConfig, Step, causal_attention
from mcore_parallel.tensor_parallel import (
    ColumnParallelLinear,
    MainGradient,
    RowParallelLinear,
    VocabParallelEmbedding,
    fused_linear_cross_entropy,
    vocab_parallel_cross_entropy,
)
from tests.support.world import run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
ONE = Group.single()


def draw(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (scale * torch.randn(shape, generator=generator, device="cuda")).to(dtype)


def peak(work) -> int:
    """Bytes that ``work`` needs above what is allocated when it begins."""
    work()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_picked_rows_get_the_gradient_of_a_dense_table(dtype) -> None:
    layer = VocabParallelEmbedding(50304, 1000, ProcessGroups.single(), dtype=dtype, device="cuda")
    tokens = torch.randint(0, 50304, (4096,), device="cuda")
    tokens[100:3000] = 7
    grad = draw(4096, 1000, dtype=dtype)
    layer(tokens).backward(grad)
    assert layer.weight.grad is not None
    expected, layer.weight.grad = layer.weight.grad.float() + 1.0, None
    totals = []
    for _ in range(2):
        totals.append(torch.ones(50304, 1000, device="cuda"))
        layer.accumulate_weight_gradients_into({"weight": MainGradient(totals[-1])})
        layer(tokens).backward(grad)
    assert layer.weight.grad is None
    assert torch.equal(*totals)
    exact = torch.ones(50304, 1000, device="cuda", dtype=torch.float64).index_add_(0, tokens, grad.double())
    torch.testing.assert_close(totals[0].double(), exact, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(totals[0], expected, rtol=2**-7, atol=0.5 if dtype == torch.bfloat16 else 1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [1000, 50257, 50304])
def test_row_kernels_equal_torch(dtype, vocab) -> None:
    from mcore_parallel.tensor_parallel import _rows, _triton_rows

    for smoothing, entropy, scale in ((0.0, False, 1.0), (0.1, True, 5.0), (0.0, True, 100.0)):
        maths = _rows.RowMaths(vocab_size=vocab, smoothing=smoothing, entropy=entropy, temperature=1.25)
        logits = draw(37, 50304, dtype=dtype, scale=scale)
        column = torch.randint(0, vocab, (37,), device="cuda")
        column[3] = -1
        found = _triton_rows.statistics(logits, column, vocab, maths)
        expected = _rows.row_statistics(logits.cpu(), column.cpu(), vocab, maths).cuda()
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-4 * scale)
        norm, grad = expected[0] + expected[1].log(), draw(37)
        extra = (draw(37).abs(), draw(37, seed=1)) if entropy else (None, None)
        ours, theirs = logits.clone(), logits.cpu()
        _triton_rows.to_gradient_(ours, column, vocab, maths, norm, grad, *extra)
        on_cpu = [None if x is None else x.cpu() for x in extra]
        _rows.to_gradient_(theirs, column.cpu(), vocab, maths, norm.cpu(), grad.cpu(), *on_cpu)
        tolerance = {torch.float32: 1e-5 * (10 + scale), torch.float16: 2**-9, torch.bfloat16: 2**-6}[dtype]
        torch.testing.assert_close(ours, theirs.cuda(), rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("chunk", [128, None])
@pytest.mark.parametrize("weighted", [False, True])
def test_fused_loss_is_as_close_to_float64_as_the_unfused_one(weighted, chunk) -> None:
    tokens, width, vocab = 512, 256, 32000
    hidden, weight = draw(tokens, width, dtype=torch.bfloat16), draw(vocab, width, dtype=torch.bfloat16, scale=0.05, seed=1)
    target = torch.randint(0, vocab, (tokens,), device="cuda")
    weights = torch.rand(tokens, device="cuda")

    def gradients(function, dtype: torch.dtype) -> list[Tensor]:
        x, w = hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
        loss = function(x, w)
        return [loss.detach().double(), *(grad.double() for grad in torch.autograd.grad(loss, (x, w)))]

    def unfused(x: Tensor, w: Tensor) -> Tensor:
        return (vocab_parallel_cross_entropy(x @ w.T, target, group=ONE) * weights).sum()

    def fused(x: Tensor, w: Tensor) -> Tensor:
        if weighted:
            return fused_linear_cross_entropy(x, w, target, ONE, chunk_tokens=chunk, token_weights=weights).sum()
        return (fused_linear_cross_entropy(x, w, target, ONE, chunk_tokens=chunk) * weights).sum()

    exact = gradients(unfused, torch.float64)
    for ours, plain, best in zip(gradients(fused, torch.bfloat16), gradients(unfused, torch.bfloat16), exact, strict=True):
        assert (ours - best).norm() <= 1.1 * (plain - best).norm() + 1e-6 * best.norm()


def test_two_runs_of_the_fused_loss_have_equal_bits() -> None:
    hidden, weight = draw(1024, 256, dtype=torch.bfloat16), draw(32000, 256, dtype=torch.bfloat16, scale=0.05, seed=1)
    target = torch.randint(0, 32000, (1024,), device="cuda")
    runs = []
    for _ in range(2):
        x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        loss = fused_linear_cross_entropy(x, w, target, ONE, chunk_tokens=256, token_weights=torch.ones(1024, device="cuda")).sum()
        runs.append([loss.detach(), *torch.autograd.grad(loss, (x, w))])
    assert all(torch.equal(first, second) for first, second in zip(*runs, strict=True))


@pytest.mark.parametrize("weighted", [False, True])
def test_fused_loss_needs_a_fifth_of_the_memory(weighted) -> None:
    tokens, width, vocab = 8192, 1024, 128256
    hidden = draw(tokens, width, dtype=torch.bfloat16).requires_grad_()
    weight = draw(vocab, width, dtype=torch.bfloat16, scale=0.03, seed=1).requires_grad_()
    target = torch.randint(0, vocab, (tokens,), device="cuda")
    ones = torch.ones(tokens, device="cuda")

    def unfused() -> None:
        torch.autograd.grad(vocab_parallel_cross_entropy(F.linear(hidden, weight), target, group=ONE).sum(), (hidden, weight))

    def fused() -> None:
        losses = fused_linear_cross_entropy(hidden, weight, target, ONE, token_weights=ones if weighted else None)
        torch.autograd.grad(losses.sum(), (hidden, weight))

    less, more = peak(fused), peak(unfused)
    # A chunk of logits, the float32 sum of the weight gradient, its rounded copy (twice when it waits for the backward), what hidden needs.
    assert less <= (1 << 28) * 2 + vocab * width * (4 + 2 + 2 * weighted) + 4 * tokens * width * 2 + (64 << 20)
    assert less <= more / 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weight_gradient_is_added_inside_the_product(dtype) -> None:
    x, grad = draw(2048, 512, dtype=dtype), draw(2048, 1024, dtype=dtype, seed=1)
    main = MainGradient(torch.zeros(1024, 512, device="cuda"))
    for _ in range(4):
        main.add_product(grad, x)
    expected = 4 * (grad.double().T @ x.double())
    assert (main.total - expected).norm() <= 1e-5 * expected.norm()
    layer = ColumnParallelLinear(512, 1024, ProcessGroups.single(), dtype=dtype, device="cuda")
    layer.accumulate_weight_gradients_into({"weight": main})
    # No gradient of the parameter's size is made on the way.
    y = layer(x)
    assert peak(lambda: y.backward(grad, retain_graph=True)) < (1 << 20)
    assert layer.weight.grad is None


CONFIG = TransformerConfig(num_layers=6, hidden_size=512, num_attention_heads=8, vocab_size=1024, ffn_hidden_size=2048)


def forward_backward(**options) -> tuple[int, list[Tensor]]:
    """Bytes held between forward and backward, and the results."""
    model = GPTModel(
        CONFIG, ProcessGroups.single(), attention_core=causal_attention, dtype=torch.bfloat16, device="cuda", seed=1, **options
    )
    tokens = torch.randint(0, 1024, (4096,), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    step = Step.causal(4, 1024, device="cuda")
    results: list[Tensor] = []
    held = 0
    # The flash kernel's backward adds atomically.
    with sdpa_kernel(SDPBackend.MATH):
        for _ in range(3):
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            loss = model(tokens, step)[0].token_losses(tokens).sum()
            torch.cuda.synchronize()
            held = torch.cuda.memory_allocated() - before
            loss.backward()
            results = [loss.detach(), *(parameter.grad for parameter in model.parameters())]
            model.zero_grad()
    return held, results


@pytest.mark.parametrize(
    "options",
    [
        {"recompute": RecomputeConfig(granularity="full")},
        {"recompute": RecomputeConfig(modules=("norm", "mlp"))},
        {"recompute": RecomputeConfig(modules=("norm", "core_attention"))},
        {"offload": OffloadConfig(modules=("layer",))},
        {"offload": OffloadConfig(modules=("mlp", "norm"), prefetch=2)},
        {"offload": OffloadConfig(modules=("layer",)), "recompute": RecomputeConfig(granularity="full")},
    ],
)
def test_activations_that_are_not_kept_free_memory_and_change_no_bit(options) -> None:
    plain, expected = forward_backward()
    held, found = forward_backward(**options)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    assert held < 0.9 * plain


def test_offloaded_bytes_leave_the_device_and_host_memory_is_used_again() -> None:
    offloader = ActivationOffloader(OffloadConfig())
    x = draw(4096, 4096).requires_grad_()
    torch.cuda.synchronize()
    for _ in range(4):
        before = torch.cuda.memory_allocated()
        with offloader.group():
            y = (x * 2).exp()
        z = y.sum()
        del y
        torch.cuda.synchronize()
        assert offloader.bytes_out == x.nbytes
        assert torch.cuda.memory_allocated() - before < 1 << 20
        (grad,) = torch.autograd.grad(z, x)
        torch.testing.assert_close(grad, 2 * (2 * x.detach()).exp())
        del z, grad
    assert offloader.num_allocations == 1


def check_two_ranks(dtype: torch.dtype) -> None:
    """Sequence parallelism with transfers in pieces, fused accumulation and fused loss against one whole model."""
    groups = ProcessGroups.build(ParallelPlan(tp=2, sequence_parallel=True))
    config = TransformerConfig(num_layers=2, hidden_size=256, num_attention_heads=8, vocab_size=4096, ffn_hidden_size=1024)
    tokens = torch.randint(0, 4096, (8192,), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    step = Step.causal(8, 1024, device="cuda")
    gradients = []
    for layout, fused in ((ProcessGroups.single(), False), (groups, False), (groups, True)):
        model = GPTModel(config, layout, dtype=dtype, device="cuda", seed=1)
        for module in model.modules():
            if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                module.overlap = fused
        ddp = DistributedDataParallel(DistributedDataParallelConfig(gradient_accumulation_fusion=fused), model, layout)
        output = ddp(tokens, step)[0]
        loss = output.loss_sum(tokens, torch.ones(8192, device="cuda")) if fused else output.token_losses(tokens, fused=False).sum()
        loss.backward()
        ddp.finish_grad_sync()
        gradients.append([loss.detach(), *ddp.gradients().values()])
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for plain, fused in zip(gradients[1], gradients[2], strict=True):
        assert (plain - fused).norm() <= tolerance * plain.norm()
    assert (gradients[0][0] - gradients[2][0]).abs() <= tolerance * gradients[0][0].abs()


@needs_two
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_ranks_agree_with_and_without_overlap(dtype) -> None:
    run(check_two_ranks, 2, backend="nccl", timeout_s=100.0, dtype=dtype)


def check_fused_loss_on_two_ranks() -> None:
    group = ProcessGroups.build(ParallelPlan(tp=2)).tp
    hidden, weight = draw(256, 64), draw(1024, 64, seed=1)
    target = torch.randint(0, 1024, (256,), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    whole = hidden.double().requires_grad_(), weight.double().requires_grad_()
    expected = F.cross_entropy(whole[0] @ whole[1].T, target, reduction="none")
    theirs = torch.autograd.grad(expected.sum(), whole)
    for options in ({}, {"token_weights": torch.ones(256, device="cuda")}):
        x, w = hidden.clone().requires_grad_(), weight.chunk(2)[group.rank].clone().requires_grad_()
        losses = fused_linear_cross_entropy(x, w, target, group, chunk_tokens=64, **options)
        torch.testing.assert_close(losses, expected.float(), rtol=1e-4, atol=1e-4)
        ours = torch.autograd.grad(losses.sum(), (x, w))
        torch.testing.assert_close(ours[0], theirs[0].float(), rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(ours[1], theirs[1].chunk(2)[group.rank].float(), rtol=1e-3, atol=1e-3)


@needs_two
def test_fused_loss_over_two_ranks_equals_one() -> None:
    run(check_fused_loss_on_two_ranks, 2, backend="nccl", timeout_s=100.0)

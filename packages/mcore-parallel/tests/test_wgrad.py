# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Weight gradients added to main gradients by the layers themselves, at once or later."""

import contextlib
import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.nn import Step
from mcore_parallel.tensor_parallel import (
    BorrowedGradBuffer,
    ColumnParallelLinear,
    MainGradient,
    RowParallelLinear,
    WeightGradientQueue,
    WeightGradientSink,
    fused_linear_cross_entropy,
)

CONFIG = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2, vocab_size=16, ffn_hidden_size=12)
MICROBATCHES = 4


def run(model: GPTModel, seed: int, *, weighted: bool) -> Tensor:
    tokens = torch.randint(0, 16, (12,), generator=torch.Generator().manual_seed(seed))
    output, _ = model(tokens, Step.causal(2, 6))
    loss = output.loss_sum(tokens, torch.linspace(0, 1, 12)) if weighted else output.token_losses(tokens, fused=seed % 2 == 0).sum()
    loss.backward()
    return loss.detach()


def sinks(model: nn.Module) -> list[WeightGradientSink]:
    return [module for module in model.modules() if isinstance(module, WeightGradientSink)]


def lender(total: Tensor) -> BorrowedGradBuffer:
    """Lends ``total``, which holds nothing at first."""
    states = [True]

    @contextlib.contextmanager
    def lend() -> Iterator[tuple[Tensor, bool]]:
        fresh = states.pop() if states else False
        yield total.fill_(torch.nan) if fresh else total, fresh

    return BorrowedGradBuffer(torch.empty_like(total, device="meta"), lend=lend)


def attach(model: nn.Module, make: Callable[[Tensor], MainGradient] = MainGradient) -> dict[str, Tensor]:
    """Give every layer that can take one a main gradient; returns them by parameter name."""
    totals = {
        name: torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))
        for name, parameter in model.named_parameters()
    }
    for prefix, module in model.named_modules():
        if isinstance(module, WeightGradientSink):
            own = {name: make(totals[f"{prefix}.{name}"]) for name, _ in module.named_parameters(recurse=False)}
            module.accumulate_weight_gradients_into(own)
    return totals


def collect(model: nn.Module, totals: dict[str, Tensor]) -> None:
    """What the gradient buffers do for parameters that autograd serves."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            totals[name].add_(parameter.grad)
            parameter.grad = None


def check_layouts(tp: int, dtype: torch.dtype, make: Callable[[Tensor], MainGradient] = MainGradient) -> None:
    for sequence_parallel, tied, weighted in itertools.product((False, True), (False, True), (False, True)):
        config = TransformerConfig(**{**vars(CONFIG), "share_embeddings_and_output_weights": tied})
        groups = (
            ProcessGroups.build(ParallelPlan.for_world(tp, tp=tp, sequence_parallel=sequence_parallel))
            if tp > 1
            else ProcessGroups.single()
        )
        plain, fused = (GPTModel(config, groups, dtype=dtype, seed=1) for _ in range(2))
        expected = {name: torch.zeros_like(p, dtype=torch.promote_types(dtype, torch.float32)) for name, p in plain.named_parameters()}
        totals = attach(fused, make)
        served = 0
        for microbatch in range(MICROBATCHES):
            assert torch.equal(run(plain, microbatch, weighted=weighted), run(fused, microbatch, weighted=weighted))
            served = sum(parameter.grad is None for parameter in fused.parameters())
            collect(plain, expected)
            collect(fused, totals)
        assert served == 2 * 4 + 2 * (not tied)
        for name, total in totals.items():
            # A promised gradient is scaled before it is rounded to the parameter's dtype in one case, after in the other.
            exact = dtype != torch.bfloat16 or name != "output.weight"
            tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 2**-6, "atol": 2**-6}
            if tied and name == "embedding.weight":
                # Two gradients of one parameter, added to the sum one by one or rounded together first.
                error = 2**-6 if dtype == torch.bfloat16 else 1e-5
                tolerance = {"rtol": error, "atol": error}
            torch.testing.assert_close(total, expected[name], **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_accumulation_has_the_bits_of_autograd_on_one_rank(dtype) -> None:
    check_layouts(1, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_lent_is_overwritten_first_and_added_to_after(dtype) -> None:
    check_layouts(1, dtype, lender)


@pytest.mark.parametrize("chunk_tokens", [4, None])
@pytest.mark.parametrize("options", [{}, {"token_weights": torch.ones(12)}], ids=["recomputed", "weighted"])
def test_a_loss_in_chunks_overwrites_once(options: dict[str, Tensor], chunk_tokens: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(12, 8, generator=generator, requires_grad=True),
        torch.randn(16, 8, generator=generator, requires_grad=True),
    )
    target = torch.randint(0, 16, (12,), generator=generator)
    sums = [torch.zeros(16, 8), torch.zeros(16, 8)]
    for main_grad in (MainGradient(sums[0]), lender(sums[1])):
        for _ in range(2):
            group = ProcessGroups.single().tp
            fused_linear_cross_entropy(
                hidden, weight, target, group, chunk_tokens=chunk_tokens, main_grad=main_grad, **options
            ).sum().backward()
    assert weight.grad is None and sums[0].any() and torch.equal(*sums)


@pytest.mark.journey
@pytest.mark.world(2)
def test_fused_accumulation_has_the_bits_of_autograd_on_two_ranks(world) -> None:
    world(check_layouts, tp=2, dtype=torch.float32)


def test_a_second_backward_doubles_the_main_gradient() -> None:
    layer = ColumnParallelLinear(3, 4, ProcessGroups.single(), dtype=torch.float64)
    totals = attach(nn.ModuleDict({"layer": layer}))
    for count in (1, 2):
        layer(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
        assert layer.weight.grad is None and torch.equal(totals["layer.weight"], torch.full((4, 3), 2.0 * count, dtype=torch.float64))
    layer.accumulate_weight_gradients_into({})
    layer(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
    assert layer.weight.grad is not None and totals["layer.weight"][0, 0] == 4


@pytest.mark.parametrize(("narrow", "rtol"), [(torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_sixteen_bit_products_add_up_in_either_main_gradient(narrow, rtol) -> None:
    """Of four micro-batches: exactly like autograd in float32, and to its precision in the parameter's own dtype."""
    layer = ColumnParallelLinear(32, 16, ProcessGroups.single(), dtype=narrow)
    batches = [torch.randn(64, 32, generator=torch.Generator().manual_seed(seed)).to(narrow) for seed in range(MICROBATCHES)]
    expected = torch.zeros(16, 32)
    for x in batches:
        layer(x).float().square().sum().backward()
        expected += layer.weight.grad
        layer.weight.grad = None
    for dtype in (torch.float32, narrow):
        total = torch.zeros(16, 32, dtype=dtype)
        layer.accumulate_weight_gradients_into({"weight": MainGradient(total)})
        for x in batches:
            layer(x).float().square().sum().backward()
        assert layer.weight.grad is None
        if dtype == torch.float32:
            assert torch.equal(total, expected)
        assert (total - expected).norm() <= rtol * expected.norm()


def check_deferred(tp: int) -> None:
    groups = ProcessGroups.build(ParallelPlan.for_world(tp, tp=tp, sequence_parallel=True))
    plain, late = (GPTModel(CONFIG, groups, dtype=torch.float64, seed=1) for _ in range(2))
    queue = WeightGradientQueue()
    totals = attach(late)
    late.output.defer_weight_gradients_to(queue)
    late.layers["0"].mlp.up.defer_weight_gradients_to(queue)
    late.layers["1"].mlp.down.defer_weight_gradients_to(queue)
    for microbatch in range(3):
        for weighted in (False, True):
            run(plain, microbatch, weighted=weighted)
            run(late, microbatch, weighted=weighted)
    assert len(queue) == 18 and not totals["output.weight"].any() and totals["layers.1.mlp.up.weight"].any()
    queue.drain()
    assert not len(queue)
    collect(late, totals)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(totals[name], parameter.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.world(2)
def test_deferred_weight_gradients_arrive_when_the_queue_is_drained(world) -> None:
    world(check_deferred, tp=2)


def test_queue_computes_the_oldest_when_it_is_full() -> None:
    done: list[int] = []
    queue = WeightGradientQueue(limit=2)
    for number in range(4):
        queue.put(lambda number=number: done.append(number))
    assert done == [0, 1] and len(queue) == 2
    queue.drain()
    assert done == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="limit=0"):
        WeightGradientQueue(limit=0)


def check_frozen(tp: int) -> None:
    """A frozen weight keeps no input, an input without gradient keeps no weight."""
    groups = ProcessGroups.build(ParallelPlan.for_world(tp, tp=tp))
    for layer, width in ((ColumnParallelLinear(4, 4, groups), 4), (RowParallelLinear(8, 4, groups), 4)):
        for frozen in (False, True):
            layer.weight.requires_grad_(not frozen).grad = None
            kept: list[int] = []
            x = torch.ones(2, width, requires_grad=frozen)
            with torch.autograd.graph.saved_tensors_hooks(
                lambda t, kept=kept: kept.append(t.untyped_storage().data_ptr()) or t, lambda t: t
            ):
                y = layer(x)
            assert kept == [(layer.weight if frozen else x).untyped_storage().data_ptr()]
            y.sum().backward()
            assert (x.grad is not None) == frozen and (layer.weight.grad is not None) != frozen


@pytest.mark.world(2)
def test_frozen_weight_keeps_no_input(world) -> None:
    world(check_frozen, tp=2)


def test_closed_data_parallelism_gives_weight_gradients_back() -> None:
    groups = ProcessGroups.single()
    model = GPTModel(CONFIG, groups, seed=1)
    ddp = DistributedDataParallel(DistributedDataParallelConfig(), model, groups)
    ddp.close()
    run(model, 1, weighted=False)
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert not any(gradient.any() for gradient in ddp.gradients().values())

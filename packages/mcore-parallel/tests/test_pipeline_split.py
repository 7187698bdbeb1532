# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The backward in two parts against the whole one, and the two parts of a pair taking turns."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F

from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.pipeline import Overlap
from mcore_parallel.pipeline._split import SplitBackward
from mcore_parallel.tensor_parallel import ColumnParallelLinear, MainGradient, RowParallelLinear, WeightGradientQueue, _product

D = 6


def tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


class PythonProduct(torch.autograd.Function):
    """x W^T with a backward that computes both gradients, and counts."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        PythonProduct.calls += 1
        x, weight = ctx.saved_tensors
        return grads[0] @ weight, grads[0].T @ x


# Each takes the hidden states [T, D] and two weights [D, D] and a vector [D], and returns one or two outputs.
Layer = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]]


def plain(x: Tensor, a: Tensor, b: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return (x + F.linear(F.gelu(F.linear(F.layer_norm(x, (D,), v), a)), b, v),)


def tied(x: Tensor, a: Tensor, b: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    shared = a * v
    return (F.linear(torch.tanh(F.linear(F.linear(x, shared), b)), shared) + v,)


def in_python(x: Tensor, a: Tensor, b: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    y: Any = PythonProduct.apply(x.tanh(), a)
    return (F.linear(y, b),)


def two_outputs(x: Tensor, a: Tensor, b: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    left, right = F.linear(x, a).chunk(2, -1)
    y = torch.cat([left * right, right.exp()], -1)
    # One auxiliary loss on the way and one that does not touch the input.
    return F.linear(y, b), (F.linear(y, b) * v).square().sum() + v.sum(), v.square().sum()


def nothing(x: Tensor, a: Tensor, b: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return (x,)


def input_unused(x: Tensor, a: Tensor, b: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return ((a @ b).sum(0) * v,)


def frozen(x: Tensor, a: Tensor, b: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return (F.linear(x, a.detach()).sin(),)


@pytest.mark.parametrize("layer", [plain, tied, in_python, two_outputs, nothing, input_unused, frozen])
@pytest.mark.parametrize("first", [False, True])
def test_both_parts_together_are_the_whole_backward(layer: Layer, first: bool) -> None:
    x, *values = tensors((5, D), (D, D), (D, D), (D,))
    results = []
    for split in (False, True):
        weights = [nn.Parameter(value.clone()) for value in values]
        reached: Counter[int] = Counter()
        for number, parameter in enumerate(weights):
            parameter.register_post_accumulate_grad_hook(lambda _, number=number, reached=reached: reached.update([number]))
        # The first stage of all has no input of its own; its embedding is the deepest leaf.
        table = nn.Parameter(x.clone())
        hidden = F.embedding(torch.arange(5), table) if first else x.clone().requires_grad_()
        outputs = layer(hidden, *weights)
        roots = [(get_gradient_edge(y), torch.full_like(y, 0.5)) for y in outputs if y.requires_grad]
        activation = None if first else hidden
        del outputs
        if split:
            job = SplitBackward(roots, activation)
            input_grad = job.input_grad()
            assert not reached and (first or hidden.grad is None)
            job.weight_grads()
            job.weight_grads()  # nothing is left
        else:
            torch.autograd.backward([edge for edge, _ in roots], [grad for _, grad in roots])
            input_grad = None if first else hidden.grad
        results.append([input_grad, table.grad, *(parameter.grad for parameter in weights)])
        assert all(count == 1 for count in reached.values())
    for whole, parts in zip(*results, strict=True):
        torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-14) if whole is not None else None
        assert whole is not None or parts is None


@pytest.mark.parametrize("first", [False, True])
def test_each_product_is_computed_once(first: bool) -> None:
    """Products of the two parts, counted: one per linear layer and part, less the input gradient of the first stage's lowest."""
    x, a, b, c = tensors((5, D), (D, D), (D, D), (D, D))
    weights = [nn.Parameter(weight) for weight in (a, b, c)]
    hidden = x if first else x.requires_grad_()
    y = hidden
    for weight in weights:
        y = F.linear(y, weight).tanh()
    job = SplitBackward([(get_gradient_edge(y), torch.ones_like(y))], None if first else hidden)
    counts = []
    for part in (job.input_grad, job.weight_grads):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
            part()
        counts.append(sum(event.count for event in profile.key_averages() if event.key == "aten::mm"))
    assert counts == [2 if first else 3, 3]


def test_a_node_written_in_python_runs_once() -> None:
    x, a, b, v = tensors((5, D), (D, D), (D, D), (D,))
    hidden, weights = x.requires_grad_(), [nn.Parameter(value) for value in (a, b, v)]
    (y,) = in_python(hidden, *weights)
    before = PythonProduct.calls
    job = SplitBackward([(get_gradient_edge(y), torch.ones_like(y))], hidden)
    job.input_grad()
    job.weight_grads()
    assert PythonProduct.calls == before + 1


class Talk(torch.autograd.Function):
    """A collective as a layer writes it: starts, lets the other part go on, waits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, overlap: Overlap, said: list[str], name: str) -> Tensor:
        ctx.overlap, ctx.said, ctx.name = overlap, said, name
        said.append(f"start {name}")
        overlap.pause()
        said.append(f"wait {name}")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.said.append(f"start back {ctx.name}")
        ctx.overlap.pause()
        ctx.said.append(f"wait back {ctx.name}")
        return grads[0], None, None, None


def layers(x: Tensor, overlap: Overlap, said: list[str], name: str, count: int) -> Tensor:
    for number in range(count):
        x = Talk.apply(x * 2, overlap, said, f"{name}{number}")  # type: ignore[assignment]
    return x


def test_the_parts_of_a_pair_take_turns_at_their_collectives() -> None:
    overlap, said = Overlap(), []
    x = torch.ones(3, requires_grad=True)
    before = layers(x, overlap, said, "a", 2)
    assert said == ["start a0", "wait a0", "start a1", "wait a1"]  # nobody to hand over to
    said.clear()
    y, _ = overlap.run(lambda: layers(torch.ones(3), overlap, said, "b", 3), lambda: before.sum().backward())
    turns = ["start b0", "start back a1", "wait b0", "start b1", "wait back a1", "start back a0", "wait b1", "start b2"]
    assert said == [*turns, "wait back a0", "wait b2"]
    assert y.tolist() == [8.0] * 3 and x.grad is not None and x.grad.tolist() == [4.0] * 3


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_part_that_fails_does_not_leave_the_other_waiting(where: str) -> None:
    overlap, ended = Overlap(), []

    def part(name: str) -> None:
        overlap.pause()
        if name == where:
            raise ArithmeticError(name)
        overlap.pause()
        ended.append(name)

    with pytest.raises(ArithmeticError, match=where):
        overlap.run(lambda: part("forward"), lambda: part("backward"))
    assert ended == [{"forward": "backward", "backward": "forward"}[where]]
    assert overlap.run(lambda: 1, lambda: 2) == (1, 2)
    with pytest.raises(RuntimeError, match="a pair is running already"):
        overlap.run(lambda: overlap.run(lambda: 1, lambda: 2), lambda: None)


def products(part: Callable[[], object]) -> int:
    """How many matrix products it runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        part()
    return sum(event.count for event in profile.key_averages() if event.key in ("aten::mm", "aten::bmm"))


def test_slices_of_one_weight_wait_for_the_second_part() -> None:
    """Stacked experts: each product reads a slice of the same parameters."""
    x, *values = tensors((6, D), (3, D, D), (3, D, D))
    weights = [nn.Parameter(value) for value in values]
    found = []
    for split in (False, True):
        hidden = x.clone().requires_grad_()
        rows = [F.linear(torch.tanh(F.linear(part, weights[0][n])), weights[1][n]) for n, part in enumerate(hidden.split(2))]
        y = torch.cat(rows)
        roots = [(get_gradient_edge(y), torch.ones_like(y))]
        if split:
            job = SplitBackward(roots, hidden)
            assert [products(job.input_grad), products(job.weight_grads)] == [6, 6]
        else:
            y.sum().backward()
        found.append([weight.grad for weight in weights])
        for weight in weights:
            weight.grad = None
    assert all(torch.equal(whole, parts) for whole, parts in zip(*found, strict=True))


def test_a_weight_read_directly_by_two_nodes_is_computed_in_the_first_part() -> None:
    """Nothing lies between the weight and its two readers on the trunk: running one of them later would run into the other."""
    x, v = tensors((5, D), (D,))
    found = []
    for split in (False, True):
        hidden, weight = x.clone().requires_grad_(), nn.Parameter(v.clone())
        y = (hidden * weight).sin() * weight
        if split:
            job = SplitBackward([(get_gradient_edge(y), torch.ones_like(y))], hidden)
            grad = job.input_grad()
            job.weight_grads()
        else:
            y.sum().backward()
            grad = hidden.grad
        found.append((grad, weight.grad))
    torch.testing.assert_close(found[1], found[0], rtol=1e-13, atol=1e-15)


def test_what_is_recomputed_is_recomputed_once() -> None:
    x, *values = tensors((5, D), (D, D), (D, D))
    found = []
    for again in (False, True):
        hidden, weights, calls = x.clone().requires_grad_(), [nn.Parameter(value.clone()) for value in values], Counter[str]()

        def run(y: Tensor, weights: list[nn.Parameter] = weights, calls: Counter[str] = calls) -> Tensor:
            calls["run"] += 1
            for weight in weights:
                y = F.linear(y, weight).tanh()
            return y

        y = torch.utils.checkpoint.checkpoint(run, hidden, use_reentrant=False) if again else run(hidden)
        assert isinstance(y, Tensor)
        job = SplitBackward([(get_gradient_edge(y), torch.ones_like(y))], hidden)
        grad = job.input_grad()
        assert all(weight.grad is None for weight in weights)
        job.weight_grads()
        assert calls["run"] == 1 + again
        found.append([grad, *(weight.grad for weight in weights)])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def check_parallel_layers(sequence_parallel: bool, overlap: bool | None) -> None:
    """No weight gradient of a tensor-parallel layer is computed in the first part, and none of its input in the second."""
    groups = ProcessGroups.build(ParallelPlan(tp=2, sequence_parallel=sequence_parallel))
    layers = [
        ColumnParallelLinear(D, (2, D), groups, shard_dim=1, bias=True, overlap=overlap, dtype=torch.float64),
        RowParallelLinear(2 * D, D, groups, bias=True, overlap=overlap, dtype=torch.float64),
    ]
    x = torch.randn(8, D, generator=torch.Generator().manual_seed(groups.tp.rank * sequence_parallel), dtype=torch.float64)
    computed: list[int] = []
    product = _product._weight_product

    def count(*arguments: Any) -> Tensor | None:
        computed.append(1)
        return product(*arguments)

    _product._weight_product = count
    queues, found = [None, None, WeightGradientQueue()], []
    for split, queue in zip((False, True, True), queues, strict=True):
        hidden = x.clone().requires_grad_()
        totals = [torch.zeros_like(layer.weight) for layer in layers]
        for layer, total in zip(layers, totals, strict=True):
            layer.zero_grad()
            layer.accumulate_weight_gradients_into({} if queue is None else {"weight": MainGradient(total)})
            layer.defer_weight_gradients_to(queue)
        y = hidden
        for layer in layers:
            y = layer(y).sin()
        roots = [(get_gradient_edge(y), torch.ones_like(y))]
        if split:
            job, before = SplitBackward(roots, hidden), len(computed)
            input_grad = job.input_grad()
            assert len(computed) == before
            assert all(parameter.grad is None for layer in layers for parameter in layer.parameters())
            assert not any(total.any() for total in totals)
            # Nothing but the two weight gradients is left to compute.
            assert products(job.weight_grads) == len(computed) - before == 2
            assert queue is None or len(queue) == 0
        else:
            torch.autograd.backward([edge for edge, _ in roots], [grad for _, grad in roots])
            input_grad = hidden.grad
        weights = [layer.weight.grad if queue is None else total for layer, total in zip(layers, totals, strict=True)]
        found.append([input_grad, *weights, *(layer.bias.grad for layer in layers)])
    for whole, *parts in zip(*found, strict=True):
        assert all(torch.equal(part, whole) for part in parts)


@pytest.mark.world(2, shared=True)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("overlap", [None, True])
def test_weight_gradients_of_parallel_layers_wait_for_the_second_part(world, sequence_parallel: bool, overlap: bool | None) -> None:
    world(check_parallel_layers, sequence_parallel=sequence_parallel, overlap=overlap)

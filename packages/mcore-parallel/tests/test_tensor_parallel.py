# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Parallel layers against dense ones in float64."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mcore_parallel import ParallelPlan, ProcessGroups, ShardSpec, comm, named_shards
from mcore_parallel.tensor_parallel import ColumnParallelLinear, MainGradient, RowParallelLinear, VocabParallelEmbedding, pad_vocab_size

EXACT = {"rtol": 1e-10, "atol": 1e-12}


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def build(tp: int, sequence_parallel: bool) -> ProcessGroups:
    return ProcessGroups.build(ParallelPlan.for_world(tp, tp=tp, sequence_parallel=sequence_parallel))


def fill(parameter: torch.nn.Parameter, spec: ShardSpec, groups: ProcessGroups, seed: int) -> Tensor:
    """Give every layout the same global values; returns them as a leaf of the dense computation."""
    whole = drawn(seed, *spec.shape)
    with torch.no_grad():
        parameter.copy_(whole[spec.slices(groups)])
    return whole.requires_grad_()


def reduced_grad(parameter: torch.nn.Parameter, spec: ShardSpec, groups: ProcessGroups) -> Tensor:
    assert parameter.grad is not None
    return comm.all_reduce(parameter.grad, groups.tp) if spec.partial else parameter.grad


def check_mlp(tp: int) -> None:
    """Column then row, every option, against dense linears: outputs, input gradients, weight and bias gradients."""
    tokens, width, inner, out = 4 * tp, 6, (2, 4 * tp), 5
    for sequence_parallel, bias, shard_dim in itertools.product((False, True), (False, True), (0, 1)):
        groups = build(tp, sequence_parallel)
        sizes = inner if shard_dim else inner[::-1]
        up = ColumnParallelLinear(width, sizes, groups, shard_dim=shard_dim, bias=bias, dtype=torch.float64)
        down = RowParallelLinear(2 * 4 * tp, out, groups, bias=bias, dtype=torch.float64)
        whole = {
            f"{layer}.{name}": fill(getattr(module, name), spec, groups, seed)
            for layer, module in (("up", up), ("down", down))
            for seed, (name, spec) in enumerate(module.shard_specs().items(), start=1)
        }
        x = drawn(9, tokens, width)
        grad_y = drawn(10, tokens, out)

        dense_x = x.clone().requires_grad_()
        up_bias = whole["up.bias"].flatten() if bias else None
        hidden = F.linear(dense_x, whole["up.weight"].flatten(0, 1), up_bias).unflatten(-1, sizes)
        # The rows of the down projection follow the order in which ranks hold the hidden features.
        order = torch.arange(sizes[0] * sizes[1]).view(sizes)
        order = torch.cat([part.flatten() for part in order.chunk(tp, shard_dim)])
        dense_y = F.linear(hidden.flatten(1)[:, order].relu(), whole["down.weight"], whole.get("down.bias"))
        dense_y.backward(grad_y)

        local = slice(groups.tp.rank * tokens // tp, (groups.tp.rank + 1) * tokens // tp) if sequence_parallel else slice(None)
        local_x = x[local].clone().requires_grad_()
        y = down(up(local_x).relu())
        torch.testing.assert_close(y, dense_y[local], **EXACT)
        y.backward(grad_y[local])
        torch.testing.assert_close(local_x.grad, dense_x.grad[local], **EXACT)
        for layer, module in (("up", up), ("down", down)):
            for name, spec in module.shard_specs().items():
                grad = reduced_grad(getattr(module, name), spec, groups)
                torch.testing.assert_close(grad, whole[f"{layer}.{name}"].grad[spec.slices(groups)], **EXACT)
        partial = down.shard_specs()["bias"].partial if bias else None
        assert partial in (None, ("tp",) if sequence_parallel else ())


@pytest.mark.world(2)
def test_column_then_row_equals_dense_on_two_ranks(world) -> None:
    world(check_mlp, tp=2)


@pytest.mark.world(4)
def test_column_then_row_equals_dense_on_four_ranks(world) -> None:
    world(check_mlp, tp=4)


@pytest.mark.parametrize("accumulates", [False, True])
def test_no_tokens_give_gradients_of_zero(accumulates: bool) -> None:
    groups = ProcessGroups.single()
    up = ColumnParallelLinear(6, (2, 4), groups, dtype=torch.float64)
    down = RowParallelLinear(8, 5, groups, dtype=torch.float64)
    totals = [torch.ones_like(layer.weight) for layer in (up, down)]
    if accumulates:
        for layer, total in zip((up, down), totals, strict=True):
            layer.accumulate_weight_gradients_into({"weight": MainGradient(total)})
    x = torch.empty(0, 6, dtype=torch.float64, requires_grad=True)
    hidden = up(x)
    down(hidden.view(0, 8)).sum().backward()
    assert x.grad is not None and x.grad.shape == (0, 6)
    for layer, total in zip((up, down), totals, strict=True):
        assert torch.equal(total, torch.ones_like(total))
        assert layer.weight.grad is None if accumulates else torch.equal(layer.weight.grad, torch.zeros_like(layer.weight))


def check_gather_output(tp: int) -> None:
    for sequence_parallel, shard_dim in itertools.product((False, True), (0, 1)):
        groups = build(tp, sequence_parallel)
        layer = ColumnParallelLinear(3, (2 * tp, tp), groups, shard_dim=shard_dim, gather_output=True, bias=True, dtype=torch.float64)
        whole = {name: fill(getattr(layer, name), spec, groups, 3) for name, spec in layer.shard_specs().items()}
        x, grad = drawn(1, 2 * tp, 3), drawn(2, 2 * tp, 2 * tp * tp)
        dense = F.linear(x, whole["weight"].flatten(0, 1), whole["bias"].flatten())
        dense.backward(grad)
        y = layer(x.chunk(tp)[groups.tp.rank] if sequence_parallel else x)
        torch.testing.assert_close(y, dense, **EXACT)
        y.backward(grad)
        for name, spec in layer.shard_specs().items():
            torch.testing.assert_close(getattr(layer, name).grad, whole[name].grad[spec.slices(groups)], **EXACT)


@pytest.mark.world(4)
def test_gathered_output_is_in_global_order(world) -> None:
    world(check_gather_output, tp=4)


def check_embedding(tp: int) -> None:
    for sequence_parallel in (False, True):
        groups = build(tp, sequence_parallel)
        layer = VocabParallelEmbedding(4 * tp, 3, groups, dtype=torch.float64)
        spec = layer.shard_specs()["weight"]
        whole = fill(layer.weight, spec, groups, 5)
        tokens = torch.randint(0, 4 * tp - 1, (6 * tp,), generator=torch.Generator().manual_seed(0))  # the last row stays untouched
        grad = drawn(6, 6 * tp, 3)
        dense = F.embedding(tokens, whole)
        dense.backward(grad)
        y = layer(tokens)
        local = slice(groups.tp.rank * 6, groups.tp.rank * 6 + 6) if sequence_parallel else slice(None)
        assert torch.equal(y, dense[local])
        y.backward(grad[local])
        torch.testing.assert_close(layer.weight.grad, whole.grad[spec.slices(groups)], **EXACT)
        if groups.tp.is_last:
            assert not layer.weight.grad[-1].any()
        for bad in (-1, 4 * tp):
            with pytest.raises(ValueError, match=f"tokens holds {bad}"):
                layer(torch.full((tp,), bad))


@pytest.mark.world(2)
def test_embedding_equals_dense_on_two_ranks(world) -> None:
    world(check_embedding, tp=2)


@pytest.mark.world(4)
def test_embedding_equals_dense_on_four_ranks(world) -> None:
    world(check_embedding, tp=4)


def test_bad_ids_are_named_on_one_rank_too() -> None:
    layer = VocabParallelEmbedding(8, 3, ProcessGroups.single())
    with pytest.raises(ValueError, match="tokens holds 8"):
        layer(torch.tensor([0, 8]))
    with pytest.raises(ValueError, match="tokens holds -1"):
        layer(torch.tensor([0, -1]))


def check_unknown_ids(tp: int) -> None:
    """Where nobody looks, as on an accelerator, a bad id is the zero vector and moves no row."""
    groups = build(tp, False) if tp > 1 else ProcessGroups.single()
    layer = VocabParallelEmbedding(8, 3, groups, dtype=torch.float64)
    spec = layer.shard_specs()["weight"]
    whole = fill(layer.weight, spec, groups, 5)
    tokens = torch.tensor([3, -1, 8, 7, -100, 10**6])
    good = (tokens >= 0) & (tokens < 8)
    y = torch.compile(layer, backend="aot_eager", fullgraph=True)(tokens)
    dense = F.embedding(tokens.clamp(0, 7), whole) * good.unsqueeze(-1)
    assert torch.equal(y, dense) and not y[~good].any()
    grad = drawn(6, 6, 3)
    dense.backward(grad)
    y.backward(grad)
    assert torch.equal(layer.weight.grad, whole.grad[spec.slices(groups)])


@pytest.mark.journey
def test_unknown_ids_are_the_zero_vector_in_a_graph_on_one_rank() -> None:
    check_unknown_ids(1)


def test_one_rank_has_no_sequence_parallelism_in_either_layer() -> None:
    groups = ProcessGroups.single()
    assert groups.plan.sequence_parallel and not groups.sequence_parallel
    up = ColumnParallelLinear(6, 8, groups, dtype=torch.float64)
    down = RowParallelLinear(8, 6, groups, bias=True, dtype=torch.float64)
    assert down(up(drawn(1, 5, 6)).tanh()).shape == (5, 6) and down.shard_specs()["bias"].partial == ()


def check_sequence_parallelism_bits() -> None:
    """Two ranks add in one order only, so that splitting the tokens changes no bit."""
    results = []
    for sequence_parallel in (False, True):
        groups = build(2, sequence_parallel)
        up = ColumnParallelLinear(6, 8, groups, dtype=torch.float64, seed=1)
        down = RowParallelLinear(8, 6, groups, bias=True, dtype=torch.float64, seed=2)
        rows = slice(groups.tp.rank * 4, groups.tp.rank * 4 + 4) if sequence_parallel else slice(None)
        x = drawn(1, 8, 6)[rows].clone().requires_grad_()
        y = down(up(x).tanh())
        y.backward(drawn(2, 8, 6)[rows])
        parts = [y.detach(), x.grad]
        if sequence_parallel:
            parts = [comm.all_gather(part, groups.tp) for part in parts]
        results.append([*parts, up.weight.grad, down.weight.grad, reduced_grad(down.bias, down.shard_specs()["bias"], groups)])
    *same, bias = zip(*results, strict=True)
    assert all(torch.equal(a, b) for a, b in same)
    torch.testing.assert_close(*bias, **EXACT)  # its sum is over tokens, in another order


@pytest.mark.world(2)
def test_sequence_parallelism_changes_no_bit(world) -> None:
    world(check_sequence_parallelism_bits)


def layers(groups: ProcessGroups, dtype: torch.dtype = torch.float32) -> list[torch.nn.Module]:
    return [
        ColumnParallelLinear(6, (2, 8), groups, shard_dim=1, bias=True, seed=1, dtype=dtype),
        RowParallelLinear(8, 6, groups, bias=True, seed=2, dtype=dtype),
        VocabParallelEmbedding(8, 6, groups, seed=3, dtype=dtype),
    ]


def check_initial_values() -> None:
    for plan in ({"tp": 2, "dp": 2}, {"tp": 4}):
        groups = ProcessGroups.build(ParallelPlan(**plan))
        for dtype in (torch.float32, torch.bfloat16):
            wide = layers(ProcessGroups.single())
            for ours, dense, of_wide in zip(layers(groups, dtype), layers(ProcessGroups.single(), dtype), wide, strict=True):
                for mine, whole, drawn_wide in zip(named_shards(ours), named_shards(dense), named_shards(of_wide), strict=True):
                    assert torch.equal(mine.parameter, whole.parameter[mine.spec.slices(groups)])
                    # Narrow parameters are wide ones that were rounded.
                    assert torch.equal(whole.parameter, drawn_wide.parameter.to(dtype))
                    assert mine.name == "bias" or whole.parameter.std() > 0.01
    assert not torch.equal(layers(ProcessGroups.single())[0].weight[0], layers(groups)[1].weight)


@pytest.mark.world(4)
def test_initial_values_do_not_depend_on_the_layout(world) -> None:
    world(check_initial_values)


def check_frozen() -> None:
    groups = ProcessGroups.build(ParallelPlan(tp=2))
    layer = ColumnParallelLinear(4, 4, groups, dtype=torch.float64)
    layer.weight.requires_grad_(False)
    x = drawn(groups.tp.rank, 2, 4).requires_grad_()
    layer(x).sum().backward()
    assert x.grad is not None and layer.weight.grad is None
    # The first layer of a model has no input gradient to compute.
    layer.weight.requires_grad_(True)
    layer(x.detach()).sum().backward()
    assert layer.weight.grad is not None


@pytest.mark.world(2)
def test_frozen_weight_and_leaf_input_skip_their_gradient(world) -> None:
    world(check_frozen)


def check_compiled() -> None:
    groups = ProcessGroups.build(ParallelPlan(tp=2))
    up = ColumnParallelLinear(4, 8, groups, dtype=torch.float64)
    down = RowParallelLinear(8, 4, groups, dtype=torch.float64)
    table = VocabParallelEmbedding(6, 4, groups, dtype=torch.float64)

    def block(tokens: Tensor) -> Tensor:
        return down(up(table(tokens)).relu()).sum()

    tokens = torch.tensor([0, 5, 2, 3])
    results = []
    for function in (block, torch.compile(block, backend="aot_eager", fullgraph=True)):
        loss = function(tokens)
        loss.backward()
        results.append([loss.detach()] + [layer.weight.grad for layer in (up, down, table)])
        for layer in (up, down, table):
            layer.weight.grad = None
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-13, atol=1e-13)
    check_unknown_ids(tp=2)


@pytest.mark.journey
@pytest.mark.world(2)
def test_layers_compile_without_a_graph_break_and_take_unknown_ids(world) -> None:
    world(check_compiled)


def check_degrees() -> None:
    groups = ProcessGroups.build(ParallelPlan(tp=2))
    with pytest.raises(ValueError, match=r"tp=2 must divide dim 0 of shape \(7, 4\)"):
        ColumnParallelLinear(4, 7, groups)
    with pytest.raises(ValueError, match=r"tp=2 must divide dim 1 of shape \(4, 7\)"):
        RowParallelLinear(7, 4, groups)
    with pytest.raises(ValueError, match="tp=2 must divide vocab_size=7; pad it with pad_vocab_size"):
        VocabParallelEmbedding(7, 4, groups)
    with pytest.raises(ValueError, match=r"shard_dim=1 must index out_features=\(8,\)"):
        ColumnParallelLinear(4, 8, groups, shard_dim=1)
    with pytest.raises(ValueError, match="dim 0 of size 3 must be a multiple of the group size 2"):
        RowParallelLinear(4, 4, groups)(torch.ones(3, 2))


@pytest.mark.world(2)
def test_sizes_that_tp_does_not_divide_are_named(world) -> None:
    world(check_degrees)


def test_padded_vocabulary_is_the_smallest_that_fits() -> None:
    assert pad_vocab_size(50257, 1) == 50304
    for vocab, tp, multiple in itertools.product((1, 127, 128, 129, 50257), (1, 2, 3, 8), (1, 16, 128)):
        padded = pad_vocab_size(vocab, tp, multiple)
        assert padded >= vocab and padded % (tp * multiple) == 0 and padded - tp * multiple < vocab
    with pytest.raises(ValueError, match="tp=0"):
        pad_vocab_size(10, 0)

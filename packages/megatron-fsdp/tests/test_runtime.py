# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""When the runtime communicates, with whom it agrees, and what it holds meanwhile."""

import collections
import functools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy, fully_shard, fully_shard_model
from megatron_fsdp._collectives import Ranks, ShardSum, all_reduce
from megatron_fsdp._context import Stream, WorkHandle
from megatron_fsdp._order import GatherOrder
from tests.support.world import run


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Tower(nn.Module):
    """An entry that is a unit, layers, and an output whose weight the root owns."""

    def __init__(self, width: int = 8, depth: int = 4) -> None:
        super().__init__()
        self.entry = nn.Embedding(16, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.head = nn.Linear(width, 16, bias=False)
        self.order: list[int] = list(range(depth))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.entry(tokens)
        for index in self.order:
            x = self.layers[index](x)
        return self.head(x)


def tower(depth: int = 4, **options: Any) -> MegatronFSDP:
    torch.manual_seed(0)
    return fully_shard_model(Tower(depth=depth).double(), **{"fsdp_unit_modules": [Layer, nn.Embedding], **options})


def tokens(step: int = 0) -> torch.Tensor:
    return torch.randint(16, (3, 5), generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def test_units_are_gathered_ahead_within_a_budget_of_bytes():
    order = GatherOrder(3, ["", "a", "b", "c", "d"], num_bytes=[4, 8, 4, 4, 100], budget=12)
    for unit in range(5):
        order.visit(unit)
    order.freeze()
    assert [order.following(unit) for unit in range(5)] == [[1, 2], [2, 3], [3], [], []]
    # The budget is a cap: a unit beyond it is not gathered ahead at all.
    assert order.preceding(4) == [3, 2] and order.preceding(2) == [1, 0]
    assert GatherOrder(3, [""], num_bytes=[4]).following(0) == []
    order.choose({"": ["c", "b", "a"]}, {"d": []})
    assert order.following(0) == [3, 2] and order.preceding(4) == [] and order.following(1) == [2, 3]
    order.choose({}, {})
    assert order.following(0) == [1, 2]


def test_without_streams_a_ticket_ends_what_it_began_in_order():
    stream, seen = Stream(torch.device("cpu")), []
    first = stream.launch(lambda: seen.append("first begins"), lambda: seen.append("first ends"))
    second = stream.launch(lambda: seen.append("second"), after=first)
    assert seen == ["first begins"]
    second.wait()
    assert seen == ["first begins", "first ends", "second"]
    assert WorkHandle().wait() is None


def check_disagreement() -> str:
    model = tower()
    if dist.get_rank() == 1:
        model.module.order = [0, 2, 1, 3]
    with pytest.raises(RuntimeError) as error:
        model(tokens())
    return str(error.value)


@pytest.mark.world(3)
def test_ranks_that_call_units_in_another_order_are_named_on_every_rank(world):
    messages = world(check_disagreement)
    assert all("forward of 'layers.1' on ranks 0, 2 and 'layers.2' on rank 1" in message for message in messages), messages


def check_missing_unit() -> str:
    model = tower()
    if dist.get_rank() == 0:
        model.module.order = [0, 1, 2]
    with pytest.raises(RuntimeError) as error:
        model(tokens())
    # The model is usable once the cause is gone.
    model.module.order = [0, 1, 2, 3]
    model(tokens()).square().sum().backward()
    return str(error.value)


@pytest.mark.world(2)
def test_a_rank_that_ends_its_forward_early_is_named_on_every_rank(world):
    messages = world(check_missing_unit)
    assert all("'layers.3' on rank 1 and 'the end' on rank 0" in message.replace("the end", "'the end'") for message in messages), messages


def check_backward_disagreement() -> str:
    model = tower()
    if dist.get_rank() == 1:
        # This rank's loss does not depend on what the layers make of their input.
        handle = model.module.layers[1].register_forward_hook(lambda _module, args, _output: args[0] * 1)
    loss = model(tokens()).square().sum()
    with pytest.raises(RuntimeError) as error:
        loss.backward()
    if dist.get_rank() == 1:
        handle.remove()
    return str(error.value)


@pytest.mark.world(2)
def test_ranks_whose_backwards_differ_are_named_on_every_rank(world):
    messages = world(check_backward_disagreement)
    assert all("'layers.1' on rank 0" in message and "rank 1" in message for message in messages), messages


def check_early_root() -> None:
    model = tower()
    root, last = model.runtime.units[0], model.runtime.units[-1]
    seen = []
    model.module.layers[0].register_full_backward_pre_hook(
        lambda *_: seen.append((root.reduced, root.groups[0].buffer.allocated, last.groups[0].gradients.reduced is None))
    )
    gradients = []
    for _ in range(3):
        model.zero_grad_buffer()
        model(tokens()).square().sum().backward()
        gradients.append({name: gradient.full_tensor() for name, gradient in model.gradients().items()})
    # Learnt in the first backward: the output's gradient is complete before any layer's.
    assert seen == [(False, True, False), (True, False, False), (True, False, False)]
    assert all(torch.equal(gradients[0][name], later[name]) for later in gradients[1:] for name in later)


@pytest.mark.world(2)
def test_the_root_is_reduced_and_released_before_other_units_when_its_gradients_come_first(world):
    world(check_early_root)


def check_held_buffers() -> None:
    model = tower(num_prefetch_units=0)
    held, last = [], model.runtime.units[-1]
    for layer in model.module.layers:
        layer.register_full_backward_hook(lambda *_: held.append(sum(unit.num_held_bytes > 0 for unit in model.runtime.units)))
    for _ in range(2):
        model(tokens()).square().sum().backward()
        assert max(held) <= 2
    # The backward begins with the last unit, which therefore stays gathered after a forward that builds a graph.
    with torch.no_grad():
        model(tokens())
    assert not last.gathered
    loss = model(tokens())
    assert last.gathered and sum(unit.gathered for unit in model.runtime.units) == 2
    loss.sum().backward()
    assert not any(unit.gathered for unit in model.runtime.units)


@pytest.mark.world(2)
def test_few_gradient_buffers_wait_for_their_sum_and_the_last_unit_waits_for_its_backward(world):
    world(check_held_buffers)


def check_narrow_sums() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    ranks = Ranks.of(dist.group.WORLD)
    # Few of them are large.
    every = [
        (2 * torch.randn(world * 997, generator=torch.Generator().manual_seed(index))).exp().to(torch.bfloat16) for index in range(world)
    ]
    exact = torch.stack(every).sum(0, dtype=torch.float64)
    total = ShardSum(every[rank].float(), ranks, torch.bfloat16, out=None)
    Stream(torch.device("cpu")).launch(total.begin, total.end).wait()
    assert total.result.dtype == torch.float32
    torch.testing.assert_close(total.result.double(), exact.chunk(world)[rank], rtol=1e-6, atol=0)
    # As a 16-bit result it is rounded once, also where the ranks do not divide it; the native sum is rounded at every rank but the first.
    ours, native = every[rank][:-1].clone(), every[rank][:-1].clone()
    all_reduce(ours, ranks, torch.bfloat16)
    dist.all_reduce(native)
    rounded = [(x == exact[:-1].to(torch.bfloat16)).double().mean().item() for x in (ours, native)]
    assert rounded[0] > 0.999 and (world == 2 or rounded[1] < 0.9)
    errors = [(x - exact[:-1]).norm().item() for x in (ours, native)]
    assert world == 2 or errors[0] < errors[1]
    # A wider sum crosses ranks in the narrower dtype that was asked for.
    wide = torch.full((5,), 1.0 + rank, dtype=torch.float64)
    all_reduce(wide, ranks, torch.float32)
    assert torch.equal(wide, torch.full((5,), world * (world + 1) / 2, dtype=torch.float64))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_sums_that_cross_ranks_in_16_bits_are_added_in_float32(ranks):
    run(check_narrow_sums, ranks)


def check_narrow_training() -> None:
    reference = tower()
    reference(tokens()).square().sum().backward()
    wanted = {name: gradient.full_tensor().float() for name, gradient in reference.gradients().items()}
    for strategy in range(4):
        torch.manual_seed(0)
        policy = MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16)
        model = fully_shard_model(
            Tower().double().float(), fsdp_unit_modules=Layer, zero_dp_strategy=strategy, mixed_precision=policy
        )  # float32 throughout, gradients cross in bfloat16
        model(tokens()).square().sum().backward()
        for name, gradient in model.gradients().items():
            whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            assert whole.dtype == torch.float32
            assert (whole - wanted[name]).norm() <= 2**-8 * wanted[name].norm() + 1e-6, (strategy, name)


@pytest.mark.world(2)
def test_gradients_may_cross_ranks_in_16_bits_under_every_strategy(world):
    world(check_narrow_training)


def check_compiled() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    expected = tower(depth=2)
    for after in (False, True):
        backend = CompileCounterWithBackend("aot_eager")
        torch.manual_seed(0)
        net = Tower(depth=2).double()
        if after:
            model = fully_shard_model(net, fsdp_unit_modules=[Layer, nn.Embedding])
        for layer in net.layers:
            layer.compile(backend=backend, fullgraph=True)
        if not after:
            model = fully_shard_model(net, fsdp_unit_modules=[Layer, nn.Embedding])
        for step in range(2):
            actual = []
            for one in (expected, model):
                one.zero_grad_buffer()
                one(tokens(step)).square().sum().backward()
                actual.append({name: gradient.full_tensor() for name, gradient in one.gradients().items()})
            for name, gradient in actual[0].items():
                torch.testing.assert_close(actual[1][name], gradient, rtol=1e-12, atol=1e-12)
        # Equal layers share one graph, which no hook breaks and no gather invalidates.
        assert backend.frame_count == 1
        torch.compiler.reset()


@pytest.mark.journey
@pytest.mark.world(2)
def test_a_unit_compiled_before_or_after_sharding_is_one_graph(world):
    world(check_compiled)


def check_incremental_initialisation() -> None:
    alive: list[int] = []
    whole: list[weakref.ref[torch.Tensor]] = []

    def reset(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.fill_(0.5)
            whole.append(weakref.ref(parameter))
        alive.append(sum(parameter.numel() for ref in whole if (parameter := ref()) is not None))

    with torch.device("meta"):
        net = Tower(width=8, depth=6)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model, _ = fully_shard(net, optimizer, fsdp_unit_modules=[Layer, nn.Embedding], reset_parameters=reset)
    layer = sum(parameter.numel() for parameter in Layer(8).parameters())
    # Never more whole parameters than a unit's and the root's.
    assert max(alive) <= layer + net.head.weight.numel()
    assert len(whole) == len(model.sharded_parameters()) and all(ref() is None for ref in whole)
    assert all(torch.equal(value, torch.full_like(value, 0.5)) for _, value in model.full_state_dict())
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {id(p) for p in model.sharded_parameters().values()}


@pytest.mark.world(2)
def test_units_on_the_meta_device_are_sharded_before_the_next_is_initialised(world):
    world(check_incremental_initialisation)


class Odd(nn.Module):
    """A unit with parameters of one odd shape, some of them without elements."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(rows, columns)), nn.Parameter(torch.randn(rows))
        self.deep, self.empty = nn.Parameter(torch.randn(rows, 2, columns)), nn.Parameter(torch.randn(0, columns))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.weight.t() + self.bias
        return x + y.sum(-1, keepdim=True) * self.deep.sum((0, 1)) + self.empty.sum()


def check_odd_sizes() -> None:
    shapes = [(world,) for world in (1, dist.get_world_size())] + [(2, 2)]
    for shape in shapes:
        if shape == (1,):
            options: dict[str, Any] = {"process_group": dist.new_group([dist.get_rank()], use_local_synchronization=True)}
        else:
            options = {"device_mesh": dist.device_mesh.init_device_mesh("cpu", shape)}
        torch.manual_seed(0)
        plain = nn.Sequential(*(Odd(size, 3) for size in (1, 3, 5, 7))).double()
        torch.manual_seed(0)
        net = nn.Sequential(*(Odd(size, 3) for size in (1, 3, 5, 7))).double()
        x = torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        plain(x).square().sum().backward()
        model, _ = fully_shard(net, fsdp_unit_modules=Odd, **options)
        model(x).square().sum().backward()
        gradients = model.gradients()
        for name, parameter in plain.named_parameters():
            assert torch.equal(dict(model.full_state_dict())[name], parameter)
            torch.testing.assert_close(gradients[name].full_tensor(), parameter.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.journey
@pytest.mark.world(4)
def test_odd_sizes_are_divided_over_one_two_and_four_ranks(world):
    world(check_odd_sizes)


def check_unused_units(double: bool) -> None:
    for orders in (([0, 1, 2, 3], [0, 2, 3], [3, 1], [0, 3]), ([0, 2, 3], [], [3, 2, 1, 0], [1])):
        torch.manual_seed(0)
        plain = Tower().double()
        model = tower(fsdp_double_buffer=double, fsdp_unit_modules=Layer)
        for step, order in enumerate(orders):
            plain.order = model.module.order = order
            for each in (plain, model):
                each.zero_grad()
                each(tokens(step)).square().sum().backward()
            for name, parameter in plain.named_parameters():
                if parameter.grad is None:
                    assert name not in model.gradients()
                    continue
                dist.all_reduce(parameter.grad)
                expected = parameter.grad / dist.get_world_size()
                torch.testing.assert_close(model.gradients()[name].full_tensor(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.world(2)
@pytest.mark.parametrize("double", [False, True])
def test_units_that_no_rank_calls_in_a_step_get_no_gradient_and_no_rank_waits(world, double):
    world(check_unused_units, double=double)


class Nest(nn.Module):
    """A unit with a unit inside it and a parameter that is left over."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = Layer(8), nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.inner(x)


def check_gathers() -> None:
    torch.manual_seed(0)
    model = fully_shard_model(nn.Sequential(nn.Linear(8, 8), Nest(), Nest()).double(), fsdp_unit_modules=[Nest, Layer])
    gathers: collections.Counter[str] = collections.Counter()

    def counted(name: str, start: Callable[[], None]) -> None:
        gathers[name] += 1
        start()

    for unit in model.runtime.units:
        for group in unit.groups:
            group.start_gather = functools.partial(counted, unit.name, group.start_gather)  # type: ignore[method-assign]
    for _ in range(3):
        gathers.clear()
        model(torch.ones(2, 8, dtype=torch.float64)).sum().backward()
    # Once before the forward and once before the backward; the root and the unit that a backward begins with stay.
    assert gathers == {"": 1, "1": 2, "1.inner": 2, "2": 2, "2.inner": 1}


@pytest.mark.world(2)
def test_a_unit_inside_another_is_gathered_once_before_forward_and_backward(world):
    world(check_gathers)


def check_outer_sums() -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    model = tower(device_mesh=mesh, dp_shard_dim="inner", dp_outer_dim="outer")
    model(tokens()).sum().backward()

    class Calls(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: collections.Counter[str] = collections.Counter()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names[str(func)] += 1
            return func(*args, **(kwargs or {}))

    counts = []
    for scope in (model.no_sync, functools.partial(model.no_sync, "outer"), model.sync):
        with scope(), Calls() as calls:
            model(tokens()).sum().backward()
        counts.append((calls.names["c10d._reduce_scatter_base_.default"], calls.names["c10d.allreduce_.default"]))
    # Six units: the second scope sums over the shards, the third over their replicas too.
    assert counts == [(0, 0), (6, 0), (6, 6)], counts


@pytest.mark.world(4)
def test_replicas_are_summed_over_in_the_last_micro_batch_alone(world):
    world(check_outer_sums)


def check_registered() -> None:
    gradients = []
    for options in ({}, {"nccl_ub": True}, {"nccl_ub": True, "disable_symmetric_registration": True, "fsdp_double_buffer": True}):
        model = tower(fsdp_unit_modules=Layer, **options)
        for _ in range(2):
            model.zero_grad()
            model(tokens()).square().sum().backward()
        model.close()
        gradients.append({name: gradient.full_tensor() for name, gradient in model.gradients().items()})
    assert all(torch.equal(value, actual[name]) for actual in gradients[1:] for name, value in gradients[0].items())


@pytest.mark.world(2)
def test_registered_memory_is_ignored_where_there_is_no_nccl(world):
    world(check_registered)


def check_bound_anew() -> None:
    model = tower()
    net = model.module
    saved = net.entry.weight
    net.entry.weight = saved  # what is there may be registered again
    model(tokens()).sum().backward()
    net.entry.weight = net.head.weight
    with pytest.raises(RuntimeError, match=r"'entry\.weight' was bound to another parameter after fully_shard"):
        model(tokens())
    net.entry.weight = saved
    model(tokens()).sum().backward()
    assert {id(p) for p in model.parameters()} == {id(p) for p in model.sharded_parameters().values()}
    with pytest.raises(ValueError, match="module is sharded already"):
        fully_shard(net)
    adapted = tower()
    # Whether it has trained before or not.
    adapted(tokens()).sum().backward()
    adapted.module.layers[1].adapter = nn.Linear(8, 8)
    with pytest.raises(RuntimeError, match=r"'layers\.1\.adapter\.weight' was added after fully_shard"):
        adapted(tokens())
    adapted.module.layers[1].adapter.requires_grad_(False)
    adapted(tokens()).sum().backward()


@pytest.mark.world(2)
def test_parameters_tied_or_added_after_sharding_are_refused_by_name(world):
    world(check_bound_anew)

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Modules that are divided by themselves, over tensor- and expert-parallel ranks, are sharded further and train as one rank does."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from megatron_fsdp import MegatronFSDP, fully_shard
from tests.support.world import run

WIDTH, HIDDEN, EXPERTS = 3, 10, 4


class Spread(torch.autograd.Function):
    """Tokens of all ranks; backward sums over them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, pg: dist.ProcessGroup) -> torch.Tensor:
        ctx.pg = pg
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(pg))]
        dist.all_gather(parts, x.contiguous(), group=pg)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.pg)
        return grad.chunk(dist.get_world_size(ctx.pg))[dist.get_rank(ctx.pg)], None


class Collect(torch.autograd.Function):
    """Own tokens of a sum over ranks; backward gathers."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, pg: dist.ProcessGroup) -> torch.Tensor:
        ctx.pg = pg
        y = y.clone()
        dist.all_reduce(y, group=pg)
        return y.chunk(dist.get_world_size(pg))[dist.get_rank(pg)].clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return Spread.forward(ctx, grad, ctx.pg), None


class Experts(nn.Module):
    """Every token goes to every expert, weighted; this rank has the experts ``mine`` of ``EXPERTS``."""

    def __init__(self, pg: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        weight = torch.randn(EXPERTS, WIDTH, WIDTH)
        ranks, rank = (dist.get_world_size(pg), dist.get_rank(pg)) if pg else (1, 0)
        self.mine = slice(rank * EXPERTS // ranks, (rank + 1) * EXPERTS // ranks)
        self.weight = nn.Parameter(weight[self.mine].clone())
        self.pg = pg

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = Spread.apply(x, self.pg) if self.pg else x
        share = self.gate(tokens).softmax(-1)[:, self.mine]
        y = torch.einsum("te,edf,td->tf", share, self.weight, tokens)
        return x + (Collect.apply(y, self.pg) if self.pg else y)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(x)))


class Copy(torch.autograd.Function):
    """The same on all ranks; backward sums, because each of them used it for its part."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, pg: dist.ProcessGroup) -> torch.Tensor:
        ctx.pg = pg
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.pg)
        return grad, None


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, pg: dist.ProcessGroup) -> torch.Tensor:
        y = y.clone()
        dist.all_reduce(y, group=pg)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return grad, None


class SplitMlp(Mlp):
    """The rows of ``up`` and the columns of ``down`` are split over a group, as plain tensors."""

    def __init__(self, pg: dist.ProcessGroup) -> None:
        super().__init__()
        self.pg, rank, ranks = pg, dist.get_rank(pg), dist.get_world_size(pg)
        self.up.weight = nn.Parameter(self.up.weight.detach().chunk(ranks)[rank].clone())
        self.up.bias = nn.Parameter(self.up.bias.detach().chunk(ranks)[rank].clone())
        self.down.weight = nn.Parameter(self.down.weight.detach().chunk(ranks, 1)[rank].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * Sum.apply(self.down(torch.tanh(self.up(Copy.apply(x, self.pg)))), self.pg)


class Net(nn.Module):
    def __init__(self, mlp: Callable[[], nn.Module] = Mlp, pg: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([mlp(), Experts(pg), mlp()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return x


def build(mlp: Callable[[], nn.Module] = Mlp, pg: dist.ProcessGroup | None = None) -> Net:
    torch.manual_seed(0)
    return Net(mlp, pg).double()


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def train(model: Any, optimizer: torch.optim.Optimizer, rank: int, ranks: int, steps: range = range(2)) -> list[float]:
    """Steps on this replica's part of the batches; gradient norms."""
    norms = []
    for step in steps:
        model(batch(step).chunk(ranks)[rank]).square().mean().backward()
        if isinstance(model, MegatronFSDP):
            norms.append(model.clip_grad_norm_(0.05).item())
        else:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.02)


@functools.cache
def serial() -> tuple[dict[str, torch.Tensor], list[float]]:
    net = build()
    norms = train(net, adamw(net), 0, 1)
    return dict(net.state_dict()), norms


def assert_serial(model: MegatronFSDP, norms: list[float]) -> None:
    expected, expected_norms = serial()
    assert norms == pytest.approx(expected_norms, rel=1e-10)
    actual = dict(model.full_state_dict())
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-10, atol=1e-12, msg=name)
    for name, value in model.state_dict().items():
        if isinstance(value, DTensor):
            assert torch.equal(value.full_tensor(), actual[name]), name


UNITS = [Mlp, Experts]
BY_NAME = {"blocks.[02].up.*": 0, "*.down.weight": {"tp": 1}}


def check_tensor_parallel() -> None:
    for shape, names in (((2, 2), ("dp_shard", "tp")), ((2, 2), ("tp", "dp_shard")), ((1, 2, 2), ("dp_outer", "dp_shard", "tp"))):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        axes = {"device_mesh": mesh, "dp_shard_dim": "dp_shard", "dp_outer_dim": "dp_outer" if len(names) == 3 else None}
        rank, ranks = mesh.get_local_rank("dp_shard"), 2
        for strategy in (0, 2, 3) if shape == (2, 2) and names[0] == "dp_shard" else (3,):
            net = build(lambda mesh=mesh: SplitMlp(mesh.get_group("tp")))
            model, optimizer = fully_shard(
                net, adamw(net), fsdp_unit_modules=UNITS, zero_dp_strategy=strategy, tp_dim="tp", placements=BY_NAME, **axes
            )
            assert optimizer is not None
            assert_serial(model, train(model, optimizer, rank, ranks))
    net = build()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    for block in ("blocks.0", "blocks.2"):
        parallelize_module(net.get_submodule(block), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model, optimizer = fully_shard(net, adamw(net), fsdp_unit_modules=UNITS, device_mesh=mesh, dp_shard_dim="dp_shard")
    assert optimizer is not None
    assert_serial(model, train(model, optimizer, mesh.get_local_rank("dp_shard"), 2))


@pytest.mark.world(4)
def test_tensor_parallel_modules_train_as_one_rank_does(world):
    """Handed over by name, on meshes in either order, and as DTensors."""
    world(check_tensor_parallel)


class Uneven(nn.Module):
    """Rows, columns and an exact division over the axis ``tp``, all of them DTensors."""

    def __init__(self, size: int, mesh: Any) -> None:
        super().__init__()
        torch.manual_seed(size)
        for name, dim, shape in (("rows", 0, (size, 3)), ("columns", 1, (3, size)), ("even", 0, (4 * size, 3))):
            whole = torch.randn(shape, dtype=torch.float64)
            self.register_parameter(name, nn.Parameter(distribute_tensor(whole, mesh["tp"], [Shard(dim)])))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = (parameter.to_local().square().sum() * x.sum() for parameter in self.parameters())
        return torch.stack(list(parts)).sum()


def check_uneven_tensor_parallel() -> None:
    for names in (("dp_shard", "tp"), ("tp", "dp_shard")):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        for size in (1, 3, 5, 7):
            net = Uneven(size, mesh)
            expected = {name: parameter.full_tensor().clone() for name, parameter in net.named_parameters()}
            model, _ = fully_shard(net, device_mesh=mesh, dp_shard_dim="dp_shard", separate_parameters="even")
            shards = model.sharded_parameters()
            model(torch.ones(2, dtype=torch.float64)).backward()
            for name, gradient in model.gradients().items():
                assert torch.equal(shards[name].full_tensor(), expected[name]), (names, size, name)
                assert torch.equal(gradient.full_tensor(), 4 * expected[name]), (names, size, name)
            # Where every cut is even torch's own arithmetic finds the same whole from the placements.
            even = shards["even"]
            assert even.to_local().numel() * 4 == even.numel() and torch.equal(DTensor.full_tensor(even), expected["even"]), names


@pytest.mark.journey
@pytest.mark.world(4)
def test_tensors_that_are_unevenly_divided_already_are_divided_further(world):
    world(check_uneven_tensor_parallel)


# (outer, inner) of the dense mesh, ep.
EXPERT_MESHES = [((1, 4), 1), ((1, 4), 2), ((2, 2), 2), ((4, 1), 1), ((1, 4), 4)]


def expert_options(shape: tuple[int, int], ep: int) -> dict[str, Any]:
    outer, inner = shape
    names = ("dp_outer", "dp_shard")
    dense = init_device_mesh("cpu", shape, mesh_dim_names=names)
    expert = init_device_mesh("cpu", (outer, inner // ep, ep), mesh_dim_names=(*names, "ep"))
    return {
        "device_mesh": dense,
        "dp_shard_dim": "dp_shard",
        "dp_outer_dim": "dp_outer",
        "expt_device_mesh": expert,
        "expert_parameters": "blocks.1.weight",
        "placements": {"blocks.1.weight": {"ep": 0}},
        "fsdp_unit_modules": UNITS,
    }


def with_experts(shape: tuple[int, int], ep: int, **options: Any) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    options = {**expert_options(shape, ep), **options}
    net = build(pg=options["expt_device_mesh"].get_group("ep"))
    model, optimizer = fully_shard(net, adamw(net), **options)
    assert optimizer is not None
    return model, optimizer


def check_experts() -> None:
    for shape, ep in EXPERT_MESHES:
        every: list[dict[str, Any]] = [{}]
        if shape != (1, 4):
            every.append({"outer_dp_sharding_strategy": 1})
        elif ep == 2:
            every.append({"zero_dp_strategy": "optim"})
        for options in every:
            model, optimizer = with_experts(shape, ep, **options)
            assert_serial(model, train(model, optimizer, dist.get_rank(), 4))
            experts = model.sharded_parameters()["blocks.1.weight"]
            held = EXPERTS * WIDTH * WIDTH // (4 if "outer_dp_sharding_strategy" in options else shape[1])
            assert experts.shape == (EXPERTS, WIDTH, WIDTH) and experts.to_local().numel() <= held + WIDTH


@pytest.mark.journey
@pytest.mark.world(4)
def test_experts_on_a_mesh_of_their_own_train_as_one_rank_does(world):
    world(check_experts)


def check_communicators() -> None:
    for shape, ep in EXPERT_MESHES:
        for _ in range(2):
            model, _ = with_experts(shape, ep)
            (exchanged,) = {module.pg.group_name for module in model.modules() if isinstance(module, Experts) and module.pg}
            used = {ranks.name for group in model.runtime.groups for ranks in group.topology.all_ranks if ranks.size > 1}
            assert used and exchanged not in used
    # Models whose experts lie among all ranks need one, and share it.
    descriptions = [pg.group_desc for pg in dist.distributed_c10d._world.pg_map]
    assert descriptions.count("megatron_fsdp") == 1
    plain, _ = fully_shard(Mlp())
    assert {group.topology.shards.pg for group in plain.runtime.groups if group.topology.shards.size > 1} == {dist.group.WORLD}


@pytest.mark.journey
@pytest.mark.world(4)
def test_what_a_module_exchanges_never_waits_behind_a_gather(world):
    world(check_communicators)


def check_mixed_strategies() -> None:
    strategies = {"entry.*": "no_shard", "blocks.0.*": 1}
    model, optimizer = with_experts((2, 2), 2, parameter_strategies=strategies)
    assert_serial(model, train(model, optimizer, dist.get_rank(), 4))
    chosen = {parameter.name: int(group.strategy) for group in model.runtime.groups for parameter in group.parameters}
    assert [chosen[name] for name in ("entry.weight", "blocks.0.up.bias", "blocks.1.weight", "blocks.2.up.weight")] == [0, 1, 3, 3]


@pytest.mark.world(4)
def test_parameters_may_have_strategies_of_their_own(world):
    world(check_mixed_strategies)


def save(directory: Path, shape: tuple[int, int], ep: int, **options: Any) -> list[float]:
    model, optimizer = with_experts(shape, ep, **options)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    train(model, optimizer, rank, ranks, range(2))
    dcp.save({"model": model.state_dict(), "optimizer": model.optimizer_state_dict(optimizer)}, checkpoint_id=directory)
    return train(model, optimizer, rank, ranks, range(2, 4))


def load(directory: Path, shape: tuple[int, int], ep: int, **options: Any) -> list[float]:
    model, optimizer = with_experts(shape, ep, **options)
    state = {"model": model.state_dict(), "optimizer": model.optimizer_state_dict(optimizer)}
    dcp.load(state, checkpoint_id=directory)
    model.load_state_dict(state["model"])
    model.load_optimizer_state_dict(optimizer, state["optimizer"])
    return train(model, optimizer, dist.get_rank(), dist.get_world_size(), range(2, 4))


@pytest.mark.journey
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (((1, 4), 2, {}), ((1, 2), 1, {"zero_dp_strategy": "optim"})),
        (((1, 2), 1, {"zero_dp_strategy": 2}), ((2, 2), 2, {"outer_dp_sharding_strategy": "optim"})),
    ],
)
def test_a_checkpoint_with_experts_continues_on_other_meshes(tmp_path, source, target):
    wanted = run(save, source[0][0] * source[0][1], directory=tmp_path, shape=source[0], ep=source[1], **source[2])
    actual = run(load, target[0][0] * target[0][1], directory=tmp_path, shape=target[0], ep=target[1], **target[2])
    assert actual[0] == pytest.approx(wanted[0], rel=1e-10)


def check_wrong_meshes() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "tp"))
    named = {"device_mesh": mesh, "dp_shard_dim": "dp_shard"}
    expert = {"expt_device_mesh": mesh, "expert_parameters": "blocks.1.weight"}
    for options, message in (
        ({"device_mesh": mesh}, r"device_mesh has axes \('dp_shard', 'tp'\); name the data axes"),
        ({"device_mesh": mesh, "dp_shard_dim": "dp"}, "dp_shard_dim='dp' is no axis of device_mesh"),
        ({"dp_shard_dim": "dp_shard"}, "dp_shard_dim='dp_shard' names an axis of device_mesh, which is not given"),
        ({"device_mesh": mesh, "dp_outer_dim": "dp_shard"}, "needs dp_shard_dim"),
        ({**named, "dp_outer_dim": "dp_shard"}, "both 'dp_shard'; name two axes"),
        ({**named, "process_group": dist.group.WORLD}, "both given"),
        ({**named, "outer_dp_sharding_strategy": 1}, "needs a second data axis"),
        ({"outer_dp_sharding_strategy": "optim"}, "needs device_mesh"),
        ({**named, "dp_outer_dim": "tp", "outer_dp_sharding_strategy": 1, "zero_dp_strategy": 2}, r"found \['optim_grads'\]"),
        ({"outer_dp_sharding_strategy": "params"}, "outer_dp_sharding_strategy='params' is unknown"),
        ({**named, "placements": {"nothing.*": {"tp": 0}}}, "'nothing.*', which matches no parameter"),
        ({**named, "placements": {"entry.*": 0}}, "a dim without an axis"),
        ({**named, "placements": {"entry.*": {"ep": 0}}}, "over axis 'ep', but .* model axes"),
        ({**named, "placements": {"entry.bias": {"tp": 1}}}, "along dim 1, but has 1 dims"),
        ({"expert_parameters": "blocks.1.weight"}, "belong together"),
        ({"expt_device_mesh": mesh, "dp_shard_dim": "dp_shard", "device_mesh": mesh}, "belong together"),
        ({**named, **expert, "expert_parameters": "*.expert"}, "expert_parameters has '.*expert', which matches no parameter"),
        ({**named, **expert, "expert_parameters": [3]}, "has 3; use name patterns"),
        ({**named, "parameter_strategies": {"entry.*": "zero"}}, r"parameter_strategies\['entry.\*'\]='zero' is unknown"),
    ):
        with pytest.raises(ValueError, match=message):
            fully_shard(build(), **options)
    net = build()
    parallelize_module(net.get_submodule("blocks.0"), mesh["tp"], {"up": ColwiseParallel()})
    with pytest.raises(ValueError, match="'blocks.0.up.weight' is a DTensor over mesh axis 'tp', but device_mesh has model axes"):
        fully_shard(net, device_mesh=mesh["dp_shard"])


@pytest.mark.world(2)
def test_meshes_that_do_not_fit_are_refused_by_name(world):
    world(check_wrong_meshes)

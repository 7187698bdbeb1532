# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The place of a shard's rows goes with every copy of it, or is refused."""

import copy
import io
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim.optimizer import _foreach_supported_types
from torch.utils._foreach_utils import _has_foreach_support

from megatron_fsdp import MegatronFSDP, TensorAtomic, fully_shard, fully_shard_model

COPIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "clone": torch.clone,
    "detach": torch.detach,
    "keep the best": lambda value: value.detach().clone(),
    "cpu": lambda value: value.detach().cpu().clone(),
    "deepcopy": copy.deepcopy,
    "deepcopy of detach": lambda value: copy.deepcopy(value.detach()),
    "data": lambda value: value.data.clone(),
    "add": lambda value: (value + 1) - 1,
    "cast": lambda value: value.to(torch.float64, copy=True),
    "like": lambda value: torch.zeros_like(value).copy_(value),
    "new": lambda value: value.new_zeros(value.shape).copy_(value),
    "foreach": lambda value: torch._foreach_mul([value, value], [1.0, 2.0])[0],
    "in place": lambda value: value.clone().mul_(2).div_(2),
    "where": lambda value: torch.where(value > 0, value, value),
}
# Of the ways that a copy is made: torch's, Python's, arithmetic among shards, and over lists of them.
FEW = ("keep the best", "deepcopy", "like", "foreach")


class Odd(nn.Module):
    """Whole rows that do not divide, fewer rows than ranks, a scalar, a dimension too coarse to divide, even rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in ((7, 5), (5, 3), (3, 1), (1, 4)))
        self.scale = nn.Parameter(torch.randn(()))
        self.stacked = nn.Parameter(torch.randn(2, 50, 7))
        self.register_buffer("counter", torch.arange(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x * self.scale).sum() + self.stacked.square().mean()


def build(seed: int, **options: object) -> MegatronFSDP:
    torch.manual_seed(seed)
    return fully_shard_model(Odd().double(), **{"fsdp_unit_modules": nn.Linear, **options})


def check_copies(strategy: str, outer: bool) -> None:
    options: dict[str, object] = {"zero_dp_strategy": strategy}
    if outer:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        options |= {"device_mesh": mesh, "dp_shard_dim": "inner", "dp_outer_dim": "outer", "outer_dp_sharding_strategy": "optim"}
    elif strategy == "optim_grads":
        options["shard_placements"] = {"layers.0.weight": TensorAtomic()}
    model = build(1, **options)
    best = {name: value.clone() for name, value in model.full_state_dict()}
    other = build(2, **options)
    # How a copy is made does not depend on how many ranks hold a row: all of them where most is divided, and over two axes.
    for how in COPIES if outer or strategy == "optim_grads_params" else FEW:
        make = COPIES[how]
        copies = {name: make(value) for name, value in model.state_dict().items()}
        for name, value in copies.items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            assert torch.equal(whole, best[name]), (how, name)
        for value in other.state_dict().values():
            value.zero_()
        assert not any(value.any() for _, value in other.full_state_dict())
        other.load_state_dict(copies)
        assert all(torch.equal(value, best[name]) for name, value in other.full_state_dict()), how


@pytest.mark.world(4, shared=True)
@pytest.mark.parametrize(
    "strategy",
    [
        "no_shard",
        "optim",
        "optim_grads",
        pytest.param("optim_grads_params", marks=pytest.mark.journey),
        pytest.param("outer", marks=pytest.mark.journey),
    ],
)
def test_every_copy_of_a_state_dict_loads_what_it_holds(world, strategy):
    world(check_copies, strategy="optim_grads_params" if strategy == "outer" else strategy, outer=strategy == "outer")


def check_other_tensors() -> None:
    torch.manual_seed(0)
    net = Odd().double()
    model, optimizer = fully_shard(net, torch.optim.AdamW(net.parameters(), lr=0.1), fsdp_unit_modules=nn.Linear)
    assert optimizer is not None
    model(torch.ones(2, 7, dtype=torch.float64)).backward()
    whole = dict(model.full_state_dict())
    norms = []
    for name, parameter in model.named_parameters():
        name = name.removeprefix("module.")
        assert isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor)
        assert torch.equal(parameter.detach().full_tensor(), whole[name]), name
        assert torch.equal((2 * parameter.grad.clone()).full_tensor(), 2 * parameter.grad.full_tensor()), name
        assert torch.equal(parameter.redistribute(placements=[Replicate()]).to_local(), whole[name]), name
        torch.testing.assert_close(parameter.detach().sum().full_tensor(), whole[name].sum(), rtol=1e-12, atol=1e-12)
        norms.append(parameter.grad.norm().full_tensor())
    total = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    torch.testing.assert_close(total.full_tensor(), torch.stack(norms).norm(), rtol=1e-12, atol=1e-12)
    optimizer.step()
    state = copy.deepcopy(model.optimizer_state_dict(optimizer))
    copies = {name: value["exp_avg"].full_tensor().clone() for name, value in state["state"].items()}
    model(torch.ones(2, 7, dtype=torch.float64)).backward()
    optimizer.step()
    model.load_optimizer_state_dict(optimizer, state)
    for name, value in model.optimizer_state_dict(optimizer)["state"].items():
        assert torch.equal(value["exp_avg"].full_tensor(), copies[name]), name


@pytest.mark.journey
@pytest.mark.world(3)
def test_parameters_gradients_and_moments_keep_their_place_too(world):
    world(check_other_tensors)


REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": torch.mean,
    "mean of columns": lambda value: value.mean(0, keepdim=True),
    "mean in float32": lambda value: value.mean(dtype=torch.float32),
    "largest": torch.max,
    "largest of columns": lambda value: value.amax(0),
    "smallest": torch.min,
    "norm": torch.norm,
    "largest absolute": lambda value: torch.linalg.vector_norm(value, torch.inf),
    "of integers": lambda value: (100 * value).long().amin(),
    "smallest absolute": lambda value: torch.linalg.vector_norm(value, -torch.inf),
    "any of booleans": lambda value: (value > 0).max(),
    "all of booleans": lambda value: (value > -9).min(),
    "largest absolute of a list": lambda value: torch._foreach_norm([value], torch.inf)[0],
    "largest of a list": lambda value: torch._foreach_max([value])[0],
}
ORDERED: dict[str, Callable[[torch.Tensor], object]] = {
    "slice": lambda value: value[1:3],
    "row": lambda value: value[0],
    "index": lambda value: value[[0, 1]],
    "chunk": lambda value: value.chunk(2),
    "softmax": lambda value: value.softmax(0),
    "sort": lambda value: value.sort(0),
    "cumsum": lambda value: value.cumsum(0),
    "argmax": torch.argmax,
    "largest with its place": lambda value: value.max(0),
    "median": torch.median,
    "std": torch.std,
    "smallest and largest": torch.aminmax,
    "squared error": lambda value: nn.functional.mse_loss(value, torch.zeros_like(value)),
}


def check_reductions() -> None:
    model = build(1)
    whole, state = dict(model.full_state_dict()), model.state_dict()
    # Rows that do not divide, whole on one rank or a few, even.
    for name in ("layers.0.weight", "layers.1.weight", "layers.1.bias", "layers.2.weight", "layers.3.weight"):
        shard = state[name]
        assert isinstance(shard, DTensor)
        for what, reduce in REDUCTIONS.items():
            reduced = reduce(shard)
            full = reduced.full_tensor() if isinstance(reduced, DTensor) else reduced
            torch.testing.assert_close(
                full, reduce(whole[name]), rtol=1e-6, atol=1e-12, msg=lambda text, at=f"{what} of {name}": f"{at}: {text}"
            )
        for ordered in ORDERED.values():
            with pytest.raises(RuntimeError, match="moved or reshaped its rows"):
                ordered(shard)
        # Their sum is beyond the range of float16.
        for dtype in (torch.float16, torch.bfloat16):
            mean = (60000 + shard).to(dtype).mean()
            assert isinstance(mean, DTensor)
            torch.testing.assert_close(mean.full_tensor(), (60000 + whole[name]).to(dtype).mean())
        with pytest.raises(RuntimeError, match="must be either a floating point or complex dtype"):
            shard.long().mean()
        assert torch.equal(shard[:].full_tensor(), whole[name])
    model(torch.ones(2, 7, dtype=torch.float64)).backward()
    grads = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in (p.grad for p in model.parameters()) if grad is not None]
    for foreach in (False, True):
        total = nn.utils.clip_grad_norm_(model.parameters(), 1e9, torch.inf, foreach=foreach)
        assert isinstance(total, DTensor)
        assert total.full_tensor() == max(grad.abs().max() for grad in grads)


@pytest.mark.world(4)
def test_reductions_are_of_all_rows_and_what_needs_their_order_is_refused_on_every_rank(world):
    world(check_reductions)


def check_refusals() -> None:
    model = build(1)
    state = model.state_dict()
    name = "layers.0.weight"
    shard = state[name]
    assert isinstance(shard, DTensor)
    for moved in (shard.t(), shard[:, :3]):
        with pytest.raises(RuntimeError, match=r"moved or reshaped its rows.*take full_tensor\(\) before"):
            moved.full_tensor()
        with pytest.raises(ValueError, match=r"'layers.0.weight' has shape"):
            model.load_state_dict({**state, name: moved})
    # Whole on one rank, where even chunks have one row on each of the first three.
    bias = state["layers.1.bias"]
    assert isinstance(bias, DTensor)
    even = distribute_tensor(bias.full_tensor(), bias.device_mesh, [Shard(0)])
    with pytest.raises(RuntimeError, match="divided otherwise"):
        bias.add(even)
    stripped = DTensor.from_local(bias.to_local(), bias.device_mesh, bias.placements, shape=bias.shape, stride=bias.stride())
    with pytest.raises(ValueError, match=r"'layers.1.bias' is a DTensor whose parts are no even chunks.*entries of state_dict"):
        model.load_state_dict({**state, "layers.1.bias": stripped})
    for value in (shard, shard.clone(), shard.detach() * 2):
        with pytest.raises(TypeError, match="cannot be pickled; save it by torch.distributed.checkpoint"):
            torch.save(value, io.BytesIO())
    model.load_state_dict({**state, "layers.1.bias": even + 1})
    assert torch.equal(bias.full_tensor(), even.full_tensor() + 1)


@pytest.mark.world(4)
def test_what_lost_its_place_is_refused_on_every_rank(world):
    world(check_refusals)


def check_saved_files() -> None:
    model = build(1)
    best = {name: value.clone() for name, value in model.full_state_dict()}
    file = io.BytesIO()
    torch.save({name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in model.state_dict().items()}, file)
    other = build(2)
    other.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    assert all(torch.equal(value, best[name]) for name, value in other.full_state_dict())
    assert dist.get_world_size() == 4


@pytest.mark.world(4)
def test_whole_tensors_go_through_a_file(world):
    world(check_saved_files)


def check_lists() -> None:
    torch.manual_seed(0)
    nets = [Odd().double() for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    plain: dict[str, torch.Tensor] = {}
    for net, options in zip(nets, ({"foreach": False}, {"foreach": True}), strict=True):
        model, optimizer = fully_shard(
            net, torch.optim.AdamW(net.parameters(), lr=0.1, amsgrad=True, **options), fsdp_unit_modules=nn.Linear
        )
        assert optimizer is not None
        for step in range(3):
            model(torch.full((2, 7), step + 1.0, dtype=torch.float64)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, **options)
            optimizer.step()
            optimizer.zero_grad()
        shards = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
        assert all(_has_foreach_support([shard], shard.device) for shard in shards)
        assert {type(shard) for shard in shards} <= {*_foreach_supported_types}
        whole = dict(model.full_state_dict())
        for name, value in plain.items():
            torch.testing.assert_close(whole[name], value, rtol=1e-12, atol=1e-12)
        plain = whole


@pytest.mark.journey
@pytest.mark.world(3)
def test_kernels_over_lists_step_and_clip_shards(world):
    world(check_lists)

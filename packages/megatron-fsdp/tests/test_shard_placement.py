# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Parameters that lie whole on one rank, and shards of whole blocks of rows."""

import functools
import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from megatron_fsdp import BlockAtomic, MegatronFSDP, TensorAtomic, fully_shard, fully_shard_model, fully_shard_optimizer
from megatron_fsdp._layout import plan_atomic, plan_layout
from tests.support.world import run

MATRICES = ("*.up.weight", "*.down.weight")


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(5, 7)
        self.blocks = nn.Sequential(*(Block(7, hidden) for hidden in (9, 4, 11)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(self.entry(x))


def build() -> tuple[Net, torch.optim.Optimizer, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Net().double()
    matrices = [parameter for name, parameter in net.named_parameters() if name.startswith("blocks") and parameter.ndim == 2]
    rest = [parameter for name, parameter in net.named_parameters() if not (name.startswith("blocks") and parameter.ndim == 2)]
    return net, torch.optim.Muon(matrices, lr=0.05, weight_decay=0.1), torch.optim.AdamW(rest, lr=0.01)


def sharded(**options: Any) -> tuple[MegatronFSDP, tuple[torch.optim.Optimizer, ...]]:
    net, muon, adamw = build()
    model = fully_shard_model(net, **{"fsdp_unit_modules": Block, "shard_placements": dict.fromkeys(MATRICES, TensorAtomic()), **options})
    return model, tuple(fully_shard_optimizer(each, model) for each in (muon, adamw))


def train(model: nn.Module, optimizers: tuple[torch.optim.Optimizer, ...], steps: range, *, whole: bool = False) -> list[float]:
    """Clipped steps on the samples of all ranks, or on this rank's."""
    norms = []
    for step in steps:
        x = torch.randn(4, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        if not whole:
            x = x.chunk(dist.get_world_size())[dist.get_rank()]
        model(x).square().mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1) if whole else model.clip_grad_norm_(0.1)
        norms.append(norm.item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return norms


def difference(model: MegatronFSDP, expected: dict[str, torch.Tensor]) -> float:
    return max((value - expected[name]).abs().max().item() for name, value in model.full_state_dict())


@functools.cache
def one_device(steps: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    net, *optimizers = build()
    norms = train(net, tuple(optimizers), range(steps), whole=True)
    return dict(net.state_dict()), norms


def check_muon(every: tuple[str, ...]) -> None:
    expected, norms = one_device(2)
    outer = dist.device_mesh.init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("outer", "inner"))
    named = {"device_mesh": outer, "dp_shard_dim": "inner", "dp_outer_dim": "outer"}
    choices: dict[str, dict[str, Any]] = {
        **{strategy: {"zero_dp_strategy": strategy} for strategy in ("no_shard", "optim", "optim_grads", "optim_grads_params")},
        "outer": named,
        "outer optim": {**named, "outer_dp_sharding_strategy": "optim"},
        "double buffer": {"fsdp_double_buffer": True, "maxpool_double_buffer": True},
        "offload": {"cpu_offload": True},
    }
    for name in every:
        options = choices[name]
        model, optimizers = sharded(**options)
        actual = train(model, optimizers, range(2))
        assert difference(model, expected) < 1e-10, options
        assert max(abs(a - b) for a, b in zip(actual, norms, strict=True)) < 1e-10, options


@pytest.mark.journey
@pytest.mark.world(2)
def test_muon_steps_whole_matrices_as_on_one_device(world):
    world(check_muon, every=("no_shard", "optim", "optim_grads", "optim_grads_params", "double buffer", "offload"))


@pytest.mark.journey
@pytest.mark.world(4)
def test_muon_steps_whole_matrices_as_on_one_device_with_more_ranks_than_matrices_of_a_unit(world):
    world(check_muon, every=("optim", "optim_grads_params", "outer", "outer optim"))


def check_owners() -> None:
    model, _ = sharded()
    ranks = dist.get_world_size()
    shards = model.sharded_parameters()
    sizes = {name: shards[name].to_local().numel() for name in shards if "blocks" in name and shards[name].ndim == 2}
    assert all(size in (0, shards[name].numel()) for name, size in sizes.items())
    bytes_of = torch.tensor([8 * sum(sizes.values())])
    every = [torch.zeros_like(bytes_of) for _ in range(ranks)]
    dist.all_gather(every, bytes_of)
    total, largest = sum(each.item() for each in every), 8 * max(shards[name].numel() for name in sizes)
    assert total == 8 * sum(shards[name].numel() for name in sizes)
    assert max(each.item() for each in every) <= total / ranks + largest


@pytest.mark.world(4)
def test_whole_matrices_are_shared_out_evenly(world):
    world(check_owners)


def save(folder: str, placements: dict[str, Any]) -> None:
    model, optimizers = sharded(shard_placements=placements)
    train(model, optimizers, range(2))
    state = {"model": model.state_dict(), **{str(i): model.optimizer_state_dict(each) for i, each in enumerate(optimizers)}}
    dcp.save(state, checkpoint_id=folder)


def load(folder: str, placements: dict[str, Any]) -> None:
    expected, _ = one_device(4)
    model, optimizers = sharded(shard_placements=placements)
    state = {"model": model.state_dict(), **{str(i): model.optimizer_state_dict(each) for i, each in enumerate(optimizers)}}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    for index, each in enumerate(optimizers):
        model.load_optimizer_state_dict(each, state[str(index)])
    train(model, optimizers, range(2, 4))
    assert difference(model, expected) < 1e-10


@pytest.mark.journey
@pytest.mark.parametrize(("source", "target"), [(2, 4), (4, 1)])
def test_a_checkpoint_of_whole_matrices_and_blocks_continues_on_other_ranks(tmp_path: Path, source: int, target: int):
    placements = dict.fromkeys(MATRICES, TensorAtomic())
    run(save, source, folder=str(tmp_path), placements={**placements, "entry.*": BlockAtomic(2)})
    run(load, target, folder=str(tmp_path), placements={**placements, "entry.weight": BlockAtomic(3)})


def check_blocks() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 130, dtype=torch.float64), nn.Tanh(), nn.Linear(130, 96, dtype=torch.float64))
    results = []
    for placements in ({}, {"*.weight": BlockAtomic(32), "*.bias": BlockAtomic(7)}):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(5, 130), nn.Tanh(), nn.Linear(130, 96)).double()
        model, optimizer = fully_shard(net, torch.optim.AdamW(net.parameters()), shard_placements=placements)
        assert optimizer is not None
        for step in range(2):
            model(torch.full((2, 5), 1.0 + step + dist.get_rank(), dtype=torch.float64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(dict(model.full_state_dict()))
    for parameter in model.runtime.parameters:
        first, last = parameter.place.rows
        block, rows = (32 if "weight" in parameter.name else 7), parameter.place.segment.num_rows
        assert all(border % block == 0 or border == rows for border in (first, last)), (parameter.name, first, last)
    assert all(torch.allclose(value, results[1][name], rtol=1e-12, atol=1e-12) for name, value in results[0].items())


@pytest.mark.world(4)
def test_borders_of_shards_are_multiples_of_a_block(world):
    world(check_blocks)


@pytest.mark.parametrize("seed", range(20))
def test_blocks_and_whole_tensors_are_never_split_and_never_overlap(seed):
    source = random.Random(seed)
    shapes = [tuple(source.randint(1, 40) for _ in range(source.randint(1, 3))) for _ in range(source.randint(1, 6))]
    shards, block = source.choice([1, 2, 3, 8]), source.choice([1, 2, 5, 32])
    rows = [(shape[0], *shapes[0][1:]) for shape in shapes]
    whole = plan_atomic(shapes, shards, [source.randint(0, 99) for _ in range(shards)])
    for layout, unit in ((plan_layout(rows, shards, block_rows=block), block), (whole, None)):
        spans = sorted((segment.offset, segment.offset + segment.numel) for segment in layout.segments)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans)) and spans[-1][1] <= layout.numel
        for segment in layout.segments:
            borders = [border for shard in range(shards) for border in segment.rows(shard, layout.shard_numel)]
            assert all(border % (unit or segment.num_rows) == 0 or border == segment.num_rows for border in borders)
    assert whole.shard_numel <= sum(torch.Size(shape).numel() + 64 for shape in shapes)


def check_refused() -> None:
    net, muon, _ = build()
    with pytest.raises(ValueError, match=r"Muon looks at whole matrices and 'blocks.*weight' is divided; .*TensorAtomic"):
        fully_shard(net, muon, fsdp_unit_modules=Block)


@pytest.mark.world(2)
def test_muon_refuses_matrices_that_are_divided(world):
    world(check_refused)


@pytest.mark.parametrize(
    ("placements", "message"),
    [
        ({"nothing": TensorAtomic()}, "shard_placements has 'nothing', which matches no parameter"),
        ({"*": 32}, "shard_placements\\['\\*'\\]=32 is no placement"),
    ],
)
def test_placements_that_mean_nothing_are_refused(placements, message):
    with pytest.raises(ValueError, match=message):
        fully_shard_model(Net(), shard_placements=placements)
    with pytest.raises(ValueError, match="block_size=0"):
        BlockAtomic(0)

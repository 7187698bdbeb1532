# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What megatron_fsdp shards, mcore_ckpt saves and loads in another world, mesh and strategy."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from mcore_ckpt import load, save
from megatron_fsdp import BlockAtomic, TensorAtomic, fully_shard
from tests.support.world import run


class Net(nn.Module):
    """Rows too coarse to divide, a scalar, and weights that are divided over ranks already."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self.gated = nn.Parameter(torch.randn(2, 50, 7))
        self.scale = nn.Parameter(torch.ones(()))
        self.experts = nn.Parameter(torch.randn(4, 3, 7).chunk(ranks)[rank].clone())
        self.columns = nn.Parameter(torch.randn(7, 10).chunk(ranks, 1)[rank].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.gated @ x).square().sum() * self.scale + (self.experts @ x).square().sum() + (x @ self.columns).square().sum()


def build(seed: int, model_ranks: int, **options: Any) -> tuple[Any, torch.optim.Optimizer, dict[str, torch.Tensor]]:
    shards = dist.get_world_size() // model_ranks
    mesh = init_device_mesh("cpu", (shards, model_ranks), mesh_dim_names=("dp_shard", "ep"))
    torch.manual_seed(seed)
    net = Net(mesh.get_local_rank("ep"), model_ranks).double()
    model, optimizer = fully_shard(
        net,
        torch.optim.AdamW(net.parameters(), lr=0.01),
        device_mesh=mesh,
        dp_shard_dim="dp_shard",
        expt_device_mesh=mesh,
        expert_parameters="experts",
        placements={"experts": {"ep": 0}, "columns": {"ep": 1}},
        **options,
    )
    assert optimizer is not None
    return model, optimizer, everything(model, optimizer)


def everything(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    state = dict(model.state_dict())
    for name, entries in model.optimizer_state_dict(optimizer)["state"].items():
        state |= {f"optimizer.{name}.{key}": value for key, value in entries.items() if key != "step"}
    return state


def saved(folder: str) -> dict[str, torch.Tensor]:
    model, optimizer, _ = build(1, 2, shard_placements={"gated": TensorAtomic(), "columns": BlockAtomic(2)})
    model(torch.ones(7, 7, dtype=torch.float64)).backward()
    optimizer.step()
    state = everything(model, optimizer)
    save(state, folder)
    return {name: value.full_tensor() for name, value in state.items()}


def loaded(folder: str, model_ranks: int, strategy: int) -> dict[str, torch.Tensor]:
    placements = {"columns": TensorAtomic(), "experts": BlockAtomic(3)} if model_ranks == 1 else {}
    _, _, state = build(2, model_ranks, zero_dp_strategy=strategy, shard_placements=placements)
    load(state, folder)
    return {name: value.full_tensor() for name, value in state.items()}


def test_sharded_parameters_and_moments_load_on_other_meshes(tmp_path: Path) -> None:
    folder = str(tmp_path / "c")
    expected = run(saved, 4, folder=folder)[0]
    assert expected["experts"].shape == (4, 3, 7) and expected["optimizer.columns.exp_avg"].shape == (7, 10)
    for ranks, model_ranks, strategy in ((2, 1, 1), (2, 2, 3), (3, 1, 3)):
        for found in run(loaded, ranks, folder=folder, model_ranks=model_ranks, strategy=strategy):
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in expected), (ranks, model_ranks, strategy)

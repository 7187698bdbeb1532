# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Muon on whole matrices, spread over the replicas."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mcore_parallel import ParallelPlan, ProcessGroups, ShardSpec, named_shards
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig, orthogonalise
from mcore_parallel.optim._muon import assign_largest_first
from mcore_parallel.training import optimizer_state


class Model(nn.Module):
    """An embedding, a fused gated weight and an output matrix that tp cuts, a norm, grouped heads."""

    def __init__(self, groups: ProcessGroups) -> None:
        super().__init__()
        self.groups = groups
        generator = torch.Generator().manual_seed(5)
        for name, spec in self.shard_specs().items():
            whole = torch.randn(spec.shape, generator=generator, dtype=torch.float64)
            self.register_parameter(name, nn.Parameter(whole[spec.slices(groups)].clone()))

    def shard_specs(self) -> dict[str, ShardSpec]:
        return {
            "embedding": ShardSpec(shape=(8, 6), shards={"tp": 0}),
            "norm": ShardSpec(shape=(6,)),
            "qkv": ShardSpec(shape=(2, 8, 6), shards={"tp": 0}),
            "up": ShardSpec(shape=(2, 4, 6), shards={"tp": 1}),
            "down": ShardSpec(shape=(6, 4), shards={"tp": 1}),
        }


def fill(ddp: DistributedDataParallel, groups: ProcessGroups, step: int) -> None:
    """Main gradients that sum to the same over the replicas in every layout."""
    ddp.zero_grad_buffer()
    for number, shard in enumerate(named_shards(ddp.module)):
        whole = torch.randn(shard.spec.shape, generator=torch.Generator().manual_seed(100 * step + number), dtype=torch.float64)
        ddp.gradients()[shard.name].copy_(whole[shard.spec.slices(groups)] / groups.dp.size)
    ddp.finish_grad_sync()


CONFIG = {"lr": 0.05, "weight_decay": 0.1, "optimizer": "muon", "muon_split_rows": (("qkv", 2),)}


def train(groups: ProcessGroups, *, sliced: bool = False, steps: int = 4, **options: object):
    config = DistributedDataParallelConfig(use_distributed_optimizer=sliced, layerwise_param_patterns=("qkv", "up", "down"))
    ddp = DistributedDataParallel(config, Model(groups), groups)
    optimizer = MegatronOptimizer(OptimizerConfig(use_distributed_optimizer=sliced, **{**CONFIG, **options}), ddp, groups)  # type: ignore[arg-type]
    for step in range(steps):
        fill(ddp, groups, step)
        optimizer.step()
    return ddp, optimizer


def test_updates_are_orthogonal_scaled_and_decayed() -> None:
    for mode, scale in (("spectral", 6**0.5), ("shape", 1.5**0.5)):
        groups = ProcessGroups.single()
        start = Model(groups)
        ddp, _ = train(groups, steps=1, muon_scale_mode=mode, clip_grad=0.0)
        moved = (start.down * (1 - 0.05 * 0.1) - ddp.module.down) / 0.05 / scale
        spread = torch.linalg.svdvals(moved)
        assert spread.min() > 0.65 and spread.max() < 1.25
        # Heads on their own: blocks of two rows are orthogonal, larger ones are not.
        heads = (start.qkv * (1 - 0.05 * 0.1) - ddp.module.qkv).detach() / 0.05 / (6**0.5 if mode == "spectral" else 1.0)
        assert (torch.linalg.svdvals(heads.unflatten(1, (4, 2))) - 0.95).abs().max() < 0.3
        # The embedding and the norm belong to Adam: their first step is lr in size.
        expected = start.embedding * (1 - 0.05 * 0.1)
        step = torch.full((8, 6), 0.05, dtype=torch.float64)
        torch.testing.assert_close((expected - ddp.module.embedding).abs(), step, rtol=1e-5, atol=0)


def test_newton_schulz_keeps_the_singular_vectors() -> None:
    for shape in ((5, 9), (9, 5), (3, 4, 4)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        u, _, vh = torch.linalg.svd(x, full_matrices=False)
        found = u.mT @ orthogonalise(x, 12) @ vh.mT
        off = found - torch.diag_embed(found.diagonal(dim1=-2, dim2=-1))
        assert off.abs().max() < 1e-6 and (found.diagonal(dim1=-2, dim2=-1) - 0.95).abs().max() < 0.3


def check_layouts() -> None:
    expected = dict(train(ProcessGroups.single())[0].module.named_parameters())
    for degrees in ({"dp": 4}, {"tp": 2, "dp": 2}):
        for sliced in (False, True):
            groups = ProcessGroups.build(ParallelPlan(**degrees))
            ddp, optimizer = train(groups, sliced=sliced)
            for shard in named_shards(ddp.module):
                torch.testing.assert_close(shard.parameter, expected[shard.name][shard.spec.slices(groups)], rtol=1e-9, atol=1e-11)
            check_state_once(optimizer, groups)


def check_state_once(optimizer: MegatronOptimizer, groups: ProcessGroups) -> None:
    count: dict[str, Tensor] = {}
    kinds = {"momentum": ("qkv", "up", "down"), "exp_avg": ("embedding", "norm"), "exp_avg_sq": ("embedding", "norm")}
    specs = Model(ProcessGroups.single()).shard_specs()
    for kind, names in kinds.items():
        for name in names:
            count[f"optimizer.{kind}.{name}"] = torch.zeros(specs[name].shape)
    for name, part in optimizer_state(optimizer, groups).items():
        for box in part if isinstance(part, list) else [part]:
            if box.replica == 0:
                count[name][tuple(slice(b, b + n) for b, n in zip(box.offset, box.data.shape, strict=True))] += 1
    for held in count.values():
        dist.all_reduce(held)
        assert (held == 1).all()


@pytest.mark.world(4)
def test_muon_trains_the_same_in_every_layout(world) -> None:
    world(check_layouts)


def test_the_largest_tensors_are_placed_first() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        sizes = torch.randint(1, 1000, (int(torch.randint(1, 40, (), generator=generator)),), generator=generator).tolist()
        ranks = int(torch.randint(1, 9, (), generator=generator))
        owners = assign_largest_first(sizes, ranks)
        loads = [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(ranks)]
        assert max(loads) - min(loads) <= max(sizes)
        assert max(loads) <= (4 / 3) * max(sum(sizes) / ranks, max(sizes), sorted(sizes)[-ranks - 1] * 2 if len(sizes) > ranks else 0)
    assert assign_largest_first([], 3) == []


def test_a_sliced_matrix_is_an_error() -> None:
    groups = ProcessGroups.single()
    ddp = DistributedDataParallel(DistributedDataParallelConfig(use_distributed_optimizer=True), Model(groups), groups)
    with pytest.raises(ValueError, match="muon updates qkv whole, but its gradient is sliced; add it to layerwise_param_patterns"):
        MegatronOptimizer(OptimizerConfig(use_distributed_optimizer=True, **CONFIG), ddp, groups)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="gives qkv blocks of 3 rows, which do not divide its 8 rows"):
        train(groups, muon_split_rows=(("qkv", 3),))

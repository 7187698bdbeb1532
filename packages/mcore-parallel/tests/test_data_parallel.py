# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Gradients summed over replicas against one rank with all the data."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from mcore_parallel import ParallelPlan, ProcessGroups, ShardSpec
from mcore_parallel.backends import Fp8Config, choose_backend, quantize_base
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig, lay_out_buckets
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.nn import Step
from mcore_parallel.tensor_parallel import ColumnParallelLinear, LoraConfig, RowParallelLinear, WeightGradientSink, add_lora


class Model(nn.Module):
    """An embedding tied to the output, a block, and a parameter that only some batches use."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.table = nn.Parameter(torch.randn(8, 6, dtype=dtype))
        self.blocks = nn.ModuleList(nn.Linear(6, 6, dtype=dtype) for _ in range(3))
        self.norm = nn.Parameter(torch.ones(6, dtype=dtype))
        self.rare = nn.Parameter(torch.ones(6, dtype=dtype))
        self.frozen = nn.Parameter(torch.ones(6, dtype=dtype), requires_grad=False)

    def forward(self, tokens: Tensor, use_rare: bool) -> Tensor:
        hidden = F.embedding(tokens, self.table)
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        hidden = hidden * self.norm * self.frozen
        if use_rare:
            hidden = hidden + self.rare
        return (hidden @ self.table.T).logsumexp(-1).sum()


def batch(step: int, rank: int, microbatch: int) -> Tensor:
    return torch.randint(0, 8, (5,), generator=torch.Generator().manual_seed(100 * step + 10 * rank + microbatch))


def reference(step: int, ranks: int, microbatches: int) -> dict[str, Tensor]:
    model = Model()
    for rank in range(ranks):
        for number in range(microbatches):
            model(batch(step, rank, number), use_rare=rank == 1).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def train(bucket_size: int | None, overlap: bool, microbatches: int = 3, steps: int = 3) -> list[dict[str, Tensor]]:
    world, rank = dist.get_world_size(), dist.get_rank()
    groups = ProcessGroups.build(ParallelPlan(dp=world))
    ddp = DistributedDataParallel(DistributedDataParallelConfig(bucket_size=bucket_size, overlap_grad_reduce=overlap), Model(), groups)
    found = []
    for step in range(steps):
        ddp.zero_grad_buffer()
        for number in range(microbatches - 1):
            with ddp.no_sync():
                ddp(batch(step, rank, number), use_rare=rank == 1).backward()
        ddp(batch(step, rank, microbatches - 1), use_rare=rank == 1).backward()
        started = sum(bucket.launched for buffer in ddp.grad_buffers for bucket in buffer.buckets)
        total = sum(len(buffer.buckets) for buffer in ddp.grad_buffers)
        # Overlap begins after the step that learns.
        assert started == (total if overlap and step else 0)
        assert all(p.grad is None for p in ddp.parameters())
        ddp.finish_grad_sync()
        found.append({name: grad.clone() for name, grad in ddp.gradients().items()})
    return found


def check_orders_differ() -> None:
    """Gradients become complete in another order on each rank; the sums still meet."""
    groups = ProcessGroups.build(ParallelPlan(dp=2))
    model = nn.ParameterList(nn.Parameter(torch.zeros(3)) for _ in range(4))
    ddp = DistributedDataParallel(DistributedDataParallelConfig(bucket_size=1), model, groups)
    order = [0, 2, 1, 3] if dist.get_rank() else [3, 1, 2, 0]
    for _ in range(3):
        ddp.zero_grad_buffer()
        x = torch.zeros(3)
        for number in order:  # a chain: the backward meets the last one first
            x = x + model[number]
        x.sum().backward()
        ddp.finish_grad_sync()
        assert all((grad == 2.0).all() for grad in ddp.gradients().values())


@pytest.mark.world(2)
def test_ranks_may_complete_gradients_in_different_orders(world) -> None:
    world(check_orders_differ)


def check_sums() -> None:
    world = dist.get_world_size()
    for bucket_size in (1, 40, None):
        without, overlapped = train(bucket_size, overlap=False), train(bucket_size, overlap=True)
        for step, (plain, early) in enumerate(zip(without, overlapped, strict=True)):
            expected = reference(step, world, 3)
            assert list(plain) == [name for name, p in Model().named_parameters() if p.requires_grad]
            for name, grad in plain.items():
                assert torch.equal(grad, early[name])
                torch.testing.assert_close(grad, expected[name], rtol=1e-12, atol=1e-12)


@pytest.mark.world(2)
def test_replica_sums_equal_serial_on_two_ranks(world) -> None:
    world(check_sums)


@pytest.mark.world(4)
def test_replica_sums_equal_serial_on_four_ranks(world) -> None:
    world(check_sums)


def test_one_rank_accumulates() -> None:
    ddp = DistributedDataParallel(DistributedDataParallelConfig(), Model(), ProcessGroups.single())
    for number in range(3):
        ddp(batch(0, 0, number), use_rare=False).backward()
        ddp.finish_grad_sync()
    expected = reference(0, 1, 3)
    gradients = ddp.gradients()
    assert not gradients.pop("rare").any() and "frozen" not in gradients
    for name, grad in gradients.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-12, atol=1e-14)
    ddp.zero_grad_buffer()
    assert not any(grad.any() for grad in ddp.gradients().values())


def test_main_gradients_tile_their_buffer() -> None:
    ddp = DistributedDataParallel(DistributedDataParallelConfig(bucket_size=30), Model(torch.bfloat16), ProcessGroups.single())
    (buffer,) = ddp.grad_buffers
    assert buffer.data.dtype == torch.float32
    starts = sorted((grad.data_ptr() - buffer.data.data_ptr(), grad.numel() * 4) for grad in ddp.gradients().values())
    end = 0
    for start, size in starts:
        assert start == end
        end += size
    assert end == buffer.data.numel() * 4
    # Reverse registration order: the parameter registered last lies first.
    assert sorted(ddp.gradients(), key=lambda name: ddp.gradients()[name].data_ptr()) == list(ddp.gradients())[::-1]
    narrow = DistributedDataParallelConfig(grad_reduce_in_fp32=False)
    sixteen = DistributedDataParallel(narrow, Model(torch.bfloat16), ProcessGroups.single())
    assert sixteen.grad_buffers[0].data.dtype == torch.bfloat16


def test_small_gradients_survive_in_float32() -> None:
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    ddp = DistributedDataParallel(DistributedDataParallelConfig(), model, ProcessGroups.single())
    with ddp.no_sync():
        ddp(torch.full((1, 1), 256.0, dtype=torch.bfloat16)).sum().backward()
        for _ in range(4):
            ddp(torch.full((1, 1), 0.5, dtype=torch.bfloat16)).sum().backward()
    assert ddp.gradients()["weight"].item() == 258.0  # in bfloat16 each 0.5 would be lost


class Mixed(nn.Module):
    """Tensor-parallel layers, a norm that sees this rank's tokens, an expert-like parameter."""

    def __init__(self, groups: ProcessGroups) -> None:
        super().__init__()
        self.groups = groups
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 4, dtype=torch.float64))
        self.up = ColumnParallelLinear(4, 8, groups, dtype=torch.float64, seed=1)
        self.down = RowParallelLinear(8, 4, groups, bias=True, dtype=torch.float64, seed=2)

    def shard_specs(self) -> dict[str, ShardSpec]:
        return {"scale": ShardSpec(shape=(4,), partial=("tp",) if self.groups.sequence_parallel else ())}

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x * self.scale).relu()).sin().sum()


def mixed_input(replica: int) -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(replica), dtype=torch.float64)


def check_partial() -> None:
    single = ProcessGroups.single()
    model = Mixed(single)
    for replica in range(2):
        model(mixed_input(replica)).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    for sequence_parallel in (True, False):
        groups = ProcessGroups.build(ParallelPlan(tp=2, dp=2, sequence_parallel=sequence_parallel))
        for overlap in (True, False):
            ddp = DistributedDataParallel(DistributedDataParallelConfig(overlap_grad_reduce=overlap, bucket_size=8), Mixed(groups), groups)
            assert len(ddp.grad_buffers) == (2 if sequence_parallel else 1)
            for _ in range(2):
                ddp.zero_grad_buffer()
                x = mixed_input(groups.dp.rank)
                ddp(x.chunk(2)[groups.tp.rank] if sequence_parallel else x).backward()
                ddp.finish_grad_sync()
                for name, grad in ddp.gradients().items():
                    spec = {**ddp.module.shard_specs(), **_specs(ddp.module)}[name]
                    torch.testing.assert_close(grad, expected[name][spec.slices(groups)], rtol=1e-10, atol=1e-12)


def _specs(model: nn.Module) -> dict[str, ShardSpec]:
    return {f"{layer}.{name}": spec for layer in ("up", "down") for name, spec in getattr(model, layer).shard_specs().items()}


@pytest.mark.world(4)
def test_partial_gradients_are_summed_over_tp_as_well(world) -> None:
    world(check_partial)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Parameter(torch.ones(2))
        self.expert = nn.Parameter(torch.ones(1, 2))

    def shard_specs(self) -> dict[str, ShardSpec]:
        return {"expert": ShardSpec(shape=(2, 2), view="expert", shards={"ep": 0})}


def check_expert_view() -> None:
    groups = ProcessGroups.build(ParallelPlan(dp=4, ep=2))
    ddp = DistributedDataParallel(DistributedDataParallelConfig(), Expert(), groups)
    ((ddp.module.dense.sum() + ddp.module.expert.sum()) * (dist.get_rank() + 1)).backward()
    ddp.finish_grad_sync()
    gradients = ddp.gradients()
    assert gradients["dense"].tolist() == [10.0, 10.0]
    # Ranks 0 and 2 hold one expert, 1 and 3 the other.
    assert gradients["expert"].tolist() == ([[4.0, 4.0]] if dist.get_rank() % 2 == 0 else [[6.0, 6.0]])


@pytest.mark.world(4)
def test_expert_gradients_are_summed_over_the_expert_replicas(world) -> None:
    world(check_expert_view)


def check_late_gradient() -> None:
    groups = ProcessGroups.build(ParallelPlan(dp=2))
    model = nn.Linear(3, 1, bias=False)
    ddp = DistributedDataParallel(DistributedDataParallelConfig(), model, groups)
    ddp(torch.ones(2, 3)).sum().backward()
    ddp.finish_grad_sync()
    ddp(torch.ones(2, 3)).sum().backward()
    with pytest.raises(RuntimeError, match="a gradient of weight came after its sum"):
        ddp(torch.ones(2, 3)).sum().backward()
    # A new graph that reports twice is learnt anew.
    ddp.finish_grad_sync()
    ddp.reset_overlap()
    for _ in range(2):
        ddp.zero_grad_buffer()
        for _ in range(2):
            ddp(torch.ones(2, 3)).sum().backward()
        ddp.finish_grad_sync()
        assert ddp.gradients()["weight"].tolist() == [[8.0, 8.0, 8.0]]


@pytest.mark.world(2)
def test_a_gradient_after_its_sum_is_an_error(world) -> None:
    world(check_late_gradient)


def check_fusion() -> None:
    """Layers that add their own weight gradients, with overlap and without, against autograd's."""
    groups = ProcessGroups.build(ParallelPlan(tp=2, dp=2))
    found = []
    for options in ({"gradient_accumulation_fusion": False}, {}, {"overlap_grad_reduce": False}):
        ddp = DistributedDataParallel(DistributedDataParallelConfig(bucket_size=8, **options), Mixed(groups), groups)
        for _ in range(3):
            ddp.zero_grad_buffer()
            with ddp.no_sync():
                ddp(mixed_input(2 + groups.dp.rank)).backward()
            ddp(mixed_input(groups.dp.rank)).backward()
            ddp.finish_grad_sync()
        found.append(ddp.gradients())
    for name, grad in found[0].items():
        assert grad.any() and torch.equal(grad, found[1][name]) and torch.equal(grad, found[2][name])
    assert isinstance(ddp.module.up, WeightGradientSink)
    # Autograd hands the weight over in one case only.
    (grad,) = torch.autograd.grad(ddp(mixed_input(0)), ddp.module.up.weight, allow_unused=True)
    assert grad is None


@pytest.mark.world(4)
def test_layers_may_add_their_own_weight_gradients(world) -> None:
    world(check_fusion)


def check_broadcast() -> list[float]:
    groups = ProcessGroups.build(ParallelPlan(tp=2, dp=2))
    module = nn.Linear(1, 1, bias=False)
    module.register_buffer("seen", torch.tensor([float(dist.get_rank())]))
    nn.init.constant_(module.weight, float(dist.get_rank()))
    DistributedDataParallel(DistributedDataParallelConfig(), module, groups).broadcast_params()
    return [module.weight.item(), module.seen.item()]


@pytest.mark.world(4)
def test_replicas_take_the_parameters_of_the_first_one(world) -> None:
    assert world(check_broadcast) == [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0], [1.0, 1.0]]


def check_broadcast_in_eight_bits() -> Tensor:
    groups, tokens = ProcessGroups.build(ParallelPlan(dp=2)), torch.arange(16)
    sizes = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2, ffn_hidden_size=32, vocab_size=32)
    model = GPTModel(sizes, groups, backend=choose_backend("torch", fp8=Fp8Config(recipe="tensorwise")), seed=groups.dp.rank)
    sync = DistributedDataParallel(DistributedDataParallelConfig(), model, groups)
    with torch.no_grad():
        before = model(tokens, Step.causal(1, 16))[0].hidden
        sync.broadcast_params()
        after = model(tokens, Step.causal(1, 16))[0].hidden
    assert torch.equal(after, before) == groups.dp.is_first
    base = GPTModel(sizes, groups)
    add_lora(base, LoraConfig(rank=2, base_dtype="fp8_weight_only"), groups)
    quantize_base(base)
    with pytest.raises(ValueError, match=r"in torch.float8_e4m3fn, and its scales .*; call broadcast_params before quantize_base"):
        DistributedDataParallel(DistributedDataParallelConfig(), base, groups).broadcast_params()
    return after


@pytest.mark.world(2)
def test_layers_with_eight_bit_copies_take_the_parameters_of_the_first_replica(world) -> None:
    first, second = world(check_broadcast_in_eight_bits)
    assert torch.equal(first, second)


def test_buckets_cover_the_buffer_once() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        numels = torch.randint(1, 50, (int(torch.randint(1, 30, (), generator=generator)),), generator=generator).tolist()
        size = int(torch.randint(1, 120, (), generator=generator))
        buckets = lay_out_buckets(numels, size)
        assert [index for bucket in buckets for index in bucket.members] == list(range(len(numels)))
        assert [bucket.start for bucket in buckets] == [0, *(bucket.end for bucket in buckets[:-1])]
        for bucket in buckets:
            assert bucket.end - bucket.start == sum(numels[index] for index in bucket.members)
            assert bucket is buckets[-1] or size <= bucket.end - bucket.start < size + numels[bucket.members[-1]]
    assert lay_out_buckets([], 10) == ()


def test_config_names_what_does_not_go_together() -> None:
    for name in ("overlap_param_gather", "separate_all_gather_group"):
        with pytest.raises(ValueError, match=f"{name}=True needs use_distributed_optimizer=True"):
            DistributedDataParallelConfig(**{name: True})
    with pytest.raises(ValueError, match="num_distributed_optimizer_instances=2 needs"):
        DistributedDataParallelConfig(num_distributed_optimizer_instances=2)
    with pytest.raises(ValueError, match="reduce_scatter_with_fp32_accumulation=True needs grad_reduce_in_fp32=False"):
        DistributedDataParallelConfig(reduce_scatter_with_fp32_accumulation=True)
    with pytest.raises(ValueError, match="bucket_size=0"):
        DistributedDataParallelConfig(bucket_size=0)
    assert DistributedDataParallelConfig().bucket_elements(8) == 40_000_000
    assert DistributedDataParallelConfig().bucket_elements(64) == 64_000_000

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The optimizer in slices against the replicated one."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from mcore_parallel import ParallelPlan, ProcessGroups, ShardSpec, named_shards
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig, boxes, finish_param_gathers, lay_out_slices
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_parallel.training import Batch, CrossEntropyObjective, optimizer_state, train_step


class Model(nn.Module):
    """Tied ends, three-dim weights, an expert that two ranks share, a layer list, a parameter no batch reaches."""

    def __init__(self, groups: ProcessGroups, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.groups = groups
        generator = torch.Generator().manual_seed(3)
        self.table = nn.Parameter(torch.randn(12, 6, generator=generator, dtype=torch.float64).to(dtype))
        self.layers = nn.ModuleList(Layer(groups, generator, dtype) for _ in range(3))
        self.norm = nn.Parameter(torch.ones(6, dtype=dtype))
        self.unused = nn.Parameter(torch.ones(5, dtype=dtype))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = F.embedding(tokens, self.table)
        for layer in self.layers:
            hidden = layer(hidden)
        return ((hidden * self.norm) @ self.table.T).double().logsumexp(-1).sum()


class Layer(nn.Module):
    def __init__(self, groups: ProcessGroups, generator: torch.Generator, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec = ShardSpec(shape=(2, 3, 6), view="expert", shards={"ep": 0})
        self.up = nn.Parameter(torch.randn(3, 5, 6, generator=generator, dtype=torch.float64).to(dtype))
        self.down = nn.Linear(5, 6, dtype=dtype)
        with torch.no_grad():
            self.down.weight.copy_(torch.randn(6, 5, generator=generator, dtype=torch.float64))
            self.down.bias.zero_()
        whole = torch.randn(2, 3, 6, generator=generator, dtype=torch.float64)
        self.expert = nn.Parameter(whole[self.spec.slices(groups)].to(dtype))

    def shard_specs(self) -> dict[str, ShardSpec]:
        return {"expert": self.spec}

    def forward(self, x: Tensor) -> Tensor:
        parts = torch.einsum("td,afd->taf", x, self.up)
        # A stand-in for routing: rank-local experts act on this rank's tokens, with the token's sign as the gate.
        gate = torch.einsum("td,efd->t", x, self.expert).tanh()
        return torch.tanh(self.down(parts[:, 0].tanh() * parts[:, 1] + parts[:, 2])) * (1 + 0.1 * gate[:, None]) + x


def start(
    ddp_config: dict, optimizer_config: dict, plan: dict, dtype: torch.dtype = torch.float64
) -> tuple[DistributedDataParallel, MegatronOptimizer]:
    groups = ProcessGroups.build(ParallelPlan(**plan))
    ddp = DistributedDataParallel(DistributedDataParallelConfig(bucket_size=90, **ddp_config), Model(groups, dtype), groups)
    config = {"lr": 1e-2, "weight_decay": 0.1, "clip_grad": 0.02, "log_num_zeros_in_grad": True, **optimizer_config}
    return ddp, MegatronOptimizer(OptimizerConfig(**config), ddp, groups)


def advance(
    ddp: DistributedDataParallel, optimizer: MegatronOptimizer, steps: range, poison: int = -1
) -> list[tuple[float, bool, int, float]]:
    """Norm, whether it was skipped, zeros and the loss scale after each step; at step ``poison`` one replica overflows."""
    results = []
    for step in steps:
        ddp.zero_grad_buffer()
        scale = 1.0 if optimizer.loss_scale is None else optimizer.loss_scale
        for number in range(2):
            tokens = torch.randint(0, 12, (6,), generator=torch.Generator().manual_seed(100 * step + 10 * ddp.groups.dp.rank + number))
            loss = ddp(tokens) * scale
            if number == 0:
                with ddp.no_sync():
                    loss.backward()
            else:
                if step == poison and ddp.groups.dp.rank == 1:
                    loss = loss * math.inf
                loss.backward()
        ddp.finish_grad_sync()
        result = optimizer.step(grad_scale=1 / 24)
        assert result.num_zeros is not None
        scale = 1.0 if optimizer.loss_scale is None else optimizer.loss_scale.item()
        results.append((result.grad_norm.item(), result.skipped, int(result.num_zeros), scale))
    ddp.finish_param_sync()
    return results


def values(ddp: DistributedDataParallel) -> dict[str, Tensor]:
    ddp.finish_param_sync()
    return {name: p.detach().clone() for name, p in ddp.module.named_parameters()}


def train(
    ddp_config: dict, optimizer_config: dict, plan: dict, *, steps: int = 10, dtype: torch.dtype = torch.float64, poison: int = -1
) -> tuple[dict[str, Tensor], list, DistributedDataParallel, MegatronOptimizer]:
    ddp, optimizer = start(ddp_config, optimizer_config, plan, dtype)
    results = advance(ddp, optimizer, range(steps), poison)
    return values(ddp), results, ddp, optimizer


SLICED = {"use_distributed_optimizer": True}


def check_equal(plan: dict, variants: list[dict], poison: int = -1, **options: object) -> None:
    expected, norms, _, _ = train({}, options, plan, steps=6, poison=poison)
    assert any(skipped for _, skipped, _, _ in norms) == (poison >= 0)
    # The parameter that no batch reaches has five.
    assert all(zeros >= 5 for _, skipped, zeros, _ in norms if not skipped)
    for variant in variants:
        found, results, ddp, optimizer = train({**SLICED, **variant}, {**SLICED, **options}, plan, steps=6, poison=poison)
        for (norm, *rest), (wanted, *wanted_rest) in zip(results, norms, strict=True):
            assert norm == pytest.approx(wanted, rel=1e-9) or rest[0]
            assert rest == wanted_rest or rest[0]
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-11)
        check_storage(ddp)
        instances = variant.get("num_distributed_optimizer_instances", 1)
        check_tiling(optimizer, ddp.groups, instances)


def check_storage(ddp: DistributedDataParallel) -> None:
    for buffer in ddp.grad_buffers:
        assert buffer.params is not None
        for shard in buffer.shards:
            at = (shard.parameter.data_ptr() - buffer.params.data_ptr()) // buffer.params.element_size()
            grad = (buffer.grads[shard.name].data_ptr() - buffer.data.data_ptr()) // buffer.data.element_size()
            assert 0 <= at == grad < buffer.params.numel()


def check_tiling(optimizer: MegatronOptimizer, groups: ProcessGroups, instances: int) -> None:
    """Over all ranks, the boxes with replica 0 cover every global tensor exactly once; every copy covers it too."""
    mine = {}
    for name, value in optimizer_state(optimizer, groups).items():
        for part in value if isinstance(value, list) else [value]:
            assert part.data.numel() and part.data.is_contiguous()
            mine.setdefault(name, []).append((part.global_shape, part.offset, tuple(part.data.shape), part.replica))
    everyone: list[dict] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    names = {name for rank in everyone for name in rank}
    assert len(names) == 2 * len(list(named_shards(Model(ProcessGroups.single())))) + (optimizer.loss_scale is not None)
    for name in names:
        parts = [part for rank in everyone for part in rank.get(name, [])]
        covered: dict[int, Tensor] = {}
        for shape, offset, size, replica in parts:
            count = covered.setdefault(replica, torch.zeros(shape, dtype=torch.int64))
            count[tuple(slice(begin, begin + length) for begin, length in zip(offset, size, strict=True))] += 1
        assert sorted(covered) == list(range(len(covered)))
        assert (covered[0] == 1).all(), name
        if instances == 1 and "expert" not in name and "loss_scale" not in name:
            assert len(covered) == 1


@pytest.mark.world(2)
def test_slices_train_like_replicas_on_two_ranks(world) -> None:
    gathers = {"overlap_param_gather": True, "separate_all_gather_group": True}
    variants = [{}, {"overlap_grad_reduce": False}, {"average_in_collective": True}, gathers]
    world(check_equal, plan={"dp": 2}, variants=variants)


@pytest.mark.journey
@pytest.mark.world(4)
def test_slices_train_like_replicas_on_four_ranks_with_experts_and_instances(world) -> None:
    variants = [{}, {"num_distributed_optimizer_instances": 2}]
    world(check_equal, plan={"dp": 4, "ep": 2}, variants=variants, poison=4)


FP16 = {"fp16": True, "initial_loss_scale": 2.0**10, "loss_scale_window": 3, "hysteresis": 1}


def check_overflows(plan: dict, variants: list[dict], clips: tuple[float, ...]) -> None:
    for clip in clips:
        check_equal(plan, variants, poison=4, clip_grad=clip, **FP16)
    _, results, _, _ = train(SLICED, {**SLICED, **FP16}, plan, poison=4)
    assert [scale for *_, scale in results] == [2.0**k for k in (10, 10, 11, 11, 10, 10, 10, 11, 11, 11)]


@pytest.mark.journey
@pytest.mark.world(2)
def test_overflows_on_one_rank_are_skipped_alike_in_slices_on_two_ranks(world) -> None:
    world(check_overflows, plan={"dp": 2}, variants=[{}, {"num_distributed_optimizer_instances": 2}], clips=(0.0, 0.02))


@pytest.mark.journey
@pytest.mark.world(4)
def test_overflows_on_one_rank_are_skipped_alike_in_slices_on_four_ranks(world) -> None:
    world(check_overflows, plan={"dp": 4}, variants=[{}, {"num_distributed_optimizer_instances": 2}], clips=(0.02,))


def check_half() -> None:
    """Parameters in float16: the scale that they start with is too large for them."""
    options = {"fp16": True, "initial_loss_scale": 2.0**14, "hysteresis": 1}
    expected, wanted, _, _ = train({}, options, {"dp": 2}, dtype=torch.float16)
    found, results, _, _ = train(SLICED, {**SLICED, **options}, {"dp": 2}, dtype=torch.float16)
    skips = [skipped for _, skipped, _, _ in results]
    assert skips == [skipped for _, skipped, _, _ in wanted] and skips[0] and sum(skips) < 9
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=2**-9, atol=2**-12)


@pytest.mark.world(2)
def test_float16_finds_its_loss_scale_alike_in_slices(world) -> None:
    world(check_half)


def check_overlap() -> None:
    plain, results, _, _ = train({**SLICED, "overlap_grad_reduce": False}, SLICED, {"dp": 2}, steps=6, dtype=torch.bfloat16)
    for more in ({"overlap_param_gather": True}, {"overlap_param_gather": True, "nccl_ub": True}):
        found, other, ddp, _ = train({**SLICED, **more}, SLICED, {"dp": 2}, steps=6, dtype=torch.bfloat16)
        assert other == results
        assert all(torch.equal(value, plain[name]) for name, value in found.items())
    ddp.disable_forward_pre_hook()
    tokens = torch.arange(6)
    before = ddp(tokens)
    ddp.enable_forward_pre_hook()
    assert torch.equal(ddp(tokens), before)


@pytest.mark.world(2)
def test_overlap_of_gathers_has_the_same_bits(world) -> None:
    world(check_overlap)


class Slow:
    """A gather that is late: it fills in the parameters only when somebody waits."""

    def __init__(self, flat: Tensor, values: Tensor, log: list[int], number: int) -> None:
        self.flat, self.values, self.log, self.number = flat, values, log, number

    def wait(self) -> None:
        self.log.append(self.number)
        self.flat.copy_(self.values)


def test_each_module_waits_for_its_own_parameters_before_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = ProcessGroups.single()
    config = DistributedDataParallelConfig(bucket_size=1, overlap_param_gather=True, **SLICED)
    ddp = DistributedDataParallel(config, Model(groups), groups)
    expected = ddp(torch.arange(6)).detach()
    (buffer,) = ddp.grad_buffers
    assert buffer.params is not None
    values, log = buffer.params.clone(), []
    params = buffer.params

    def late(index: int) -> Slow:
        part = buffer.layout.buckets[index]
        params[part.start : part.end].fill_(math.nan)
        return Slow(params[part.start : part.end], values[part.start : part.end], log, index)

    monkeypatch.setattr(buffer, "start_gather", late)
    ddp.start_param_sync()
    seen: list[int] = []
    ddp.module.layers[0].register_forward_hook(lambda *_: seen.append(len(log)))
    assert torch.equal(ddp(torch.arange(6)), expected)
    # The table, norm and the unused one belong to the root, then come the four parameters of the first layer.
    assert seen == [3 + 4] and sorted(log) == list(range(len(buffer.buckets)))
    ddp.start_param_sync()
    ddp.start_param_sync()
    ddp.finish_param_sync()
    assert torch.equal(params, values)


def test_gathers_that_no_forward_waits_for_are_found_until_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = ProcessGroups.single()
    ddp = DistributedDataParallel(DistributedDataParallelConfig(overlap_param_gather=True, **SLICED), Model(groups), groups)
    (buffer,) = ddp.grad_buffers
    params = buffer.params
    assert params is not None
    values, log = params.clone(), []

    def late(index: int) -> Slow:
        part = buffer.layout.buckets[index]
        params[part.start : part.end].fill_(math.nan)
        return Slow(params[part.start : part.end], values[part.start : part.end], log, index)

    monkeypatch.setattr(buffer, "start_gather", late)
    ddp.start_param_sync()
    ddp.disable_forward_pre_hook(param_sync=False)
    assert ddp(torch.arange(6)).isnan().all() and not log, "forwards do not wait"
    finish_param_gathers(ddp.module)
    assert torch.equal(params, values) and not ddp.module._forward_hooks
    # Whoever lets them wait again meanwhile has one mark.
    ddp.enable_forward_pre_hook()
    ddp.start_param_sync()
    ddp.disable_forward_pre_hook(param_sync=False)
    ddp.enable_forward_pre_hook()
    assert len(ddp.module._forward_hooks) == 1
    assert ddp(torch.arange(6)).isfinite().all() and torch.equal(params, values)


def check_resume() -> None:
    """Save in slices, load into replicas, and the other way round; masters and moments keep their bits."""
    whole, _, _, sliced = train(SLICED, SLICED, {"dp": 2}, steps=5, dtype=torch.bfloat16)
    _, _, ddp, replicated = train({}, {}, {"dp": 2}, steps=0, dtype=torch.bfloat16)
    copy_state(sliced, replicated, ddp.groups)
    with torch.no_grad():
        for name, p in ddp.module.named_parameters():
            p.copy_(whole[name])
    replicated.load_step_count(sliced.step_count)
    _, _, ddp2, again = train(SLICED, SLICED, {"dp": 2}, steps=0, dtype=torch.bfloat16)
    copy_state(replicated, again, ddp.groups)
    with torch.no_grad():
        for name, p in ddp2.module.named_parameters():
            p.copy_(whole[name])
    again.load_step_count(replicated.step_count)
    for name, value in sliced.state_shards().items():
        for a, b in zip(listed(value), listed(again.state_shards()[name]), strict=True):
            assert torch.equal(a.tensor, b.tensor) and a.tensor.any() == ("unused" not in name or "master" in name)
    assert again.step_count == 5


NARROW = {"use_precision_aware_optimizer": True}
STATES = [
    (torch.float32, {}),
    (torch.bfloat16, {}),
    (torch.float16, {"fp16": True, "initial_loss_scale": 2.0**8, "loss_scale_window": 3}),
    (torch.bfloat16, {**NARROW, "exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.float16}),
    (torch.bfloat16, {**NARROW, "exp_avg_dtype": torch.float8_e4m3fn, "exp_avg_sq_dtype": torch.float8_e4m3fn}),
    (torch.bfloat16, {**NARROW, "store_param_remainders": False, "exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.bfloat16}),
    (torch.bfloat16, {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.4}),
]


def check_continuation() -> None:
    """Three more steps after a reload have the bits of the run that was not interrupted."""
    for dtype, options in STATES:
        ddp, optimizer = start(SLICED, {**SLICED, **options}, {"dp": 2}, dtype)
        advance(ddp, optimizer, range(4))
        resumed, again = start(SLICED, {**SLICED, **options}, {"dp": 2}, dtype)
        advance(resumed, again, range(90, 91))  # what is loaded replaces everything
        with torch.no_grad():
            for p, q in zip(resumed.module.parameters(), ddp.module.parameters(), strict=True):
                p.copy_(q)
        copy_state(optimizer, again, ddp.groups)
        for _ in range(2):  # as often as one likes
            again.load_step_count(optimizer.step_count)
        assert again.step_count == 4
        results, others = (repr(advance(some, which, range(4, 7))) for some, which in ((ddp, optimizer), (resumed, again)))
        assert results == others, (dtype, options)  # nan of an overflow included
        for name, value in values(ddp).items():
            assert torch.equal(value, values(resumed)[name]), (dtype, options, name)


@pytest.mark.journey
@pytest.mark.world(2)
def test_a_reloaded_run_continues_bit_for_bit(world) -> None:
    world(check_continuation)


def listed(value):
    return value if isinstance(value, list) else [value]


def copy_state(source: MegatronOptimizer, target: MegatronOptimizer, groups: ProcessGroups) -> None:
    """What a checkpoint does: boxes of global tensors, written by whoever has them, read by whoever wants them."""
    full = {}
    for name, value in optimizer_state(source, groups).items():
        for part in listed(value):
            place = full.setdefault(name, torch.zeros(part.global_shape, dtype=part.data.dtype))
            if part.replica == 0:
                place[tuple(slice(b, b + n) for b, n in zip(part.offset, part.data.shape, strict=True))] = part.data
    gathered: list[dict] = [{}] * groups.world.size
    dist.all_gather_object(gathered, {name: value.tolist() for name, value in full.items()})
    for name, value in optimizer_state(target, groups).items():
        for part in listed(value):
            total = sum(torch.tensor(rank[name], dtype=part.data.dtype) for rank in gathered if name in rank)
            part.data.copy_(total[tuple(slice(b, b + n) for b, n in zip(part.offset, part.data.shape, strict=True))])


@pytest.mark.world(2)
def test_state_moves_between_slices_and_replicas(world) -> None:
    world(check_resume)


def check_train_step(plans: list[dict]) -> None:
    config = TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=2, vocab_size=32, ffn_hidden_size=24)

    def batches(step: int, groups: ProcessGroups) -> list[Batch]:
        tokens = torch.randint(0, 32, (4, 2, 9), generator=torch.Generator().manual_seed(step))
        mine = tokens.chunk(groups.dp.size)[groups.dp.rank]
        return [Batch(tokens=t[:, :-1], labels=t[:, 1:], loss_mask=torch.ones(2, 8)) for t in mine]

    def losses(groups: ProcessGroups, sliced: bool, **options: object) -> list[tuple[float, float]]:
        model = GPTModel(config, groups, dtype=torch.float64)
        fuse = {"gradient_accumulation_fusion": sliced, "overlap_param_gather": sliced}
        sync = DistributedDataParallel(
            DistributedDataParallelConfig(bucket_size=500, use_distributed_optimizer=sliced, **fuse), model, groups
        )
        rule = OptimizerConfig(lr=1e-2, use_distributed_optimizer=sliced, **options)  # type: ignore[arg-type]
        optimizer = MegatronOptimizer(rule, sync, groups)
        reports = [train_step(model, batches(step, groups), CrossEntropyObjective(), sync, optimizer, lr=1e-2) for step in range(2)]
        return [(report.loss, report.grad_norm) for report in reports]

    expected = losses(ProcessGroups.single(), False)
    for plan in plans:
        groups = ProcessGroups.build(ParallelPlan(**plan))
        for options in ({}, {"fp16": True, "initial_loss_scale": 1024.0}):
            for found, wanted in zip(losses(groups, True, **options), expected, strict=True):
                assert found == pytest.approx(wanted, rel=1e-8)


@pytest.mark.journey
@pytest.mark.world(4)
def test_the_train_step_is_the_same_over_slices(world) -> None:
    world(check_train_step, plans=[{"dp": 4}, {"tp": 2, "dp": 2, "sequence_parallel": True}, {"pp": 2, "dp": 2}])


def check_memory() -> None:
    _, _, ddp, optimizer = train(SLICED, SLICED, {"dp": 4}, steps=1, dtype=torch.bfloat16)
    held = sum(part.tensor.numel() for value in optimizer.state_shards().values() for part in listed(value))
    numel = sum(p.numel() for p in ddp.module.parameters())
    # Two moments of float32, and 16 bits of each master beside the parameter's.
    assert optimizer.state_bytes == {"device": (4 + 4 + 2) * held // 3, "host": 0}
    # Slices end between rows and begin at multiples of 64.
    assert held <= 3 * (numel / 4 + 64 * sum(len(buffer.buckets) for buffer in ddp.grad_buffers))
    totals: list[int] = [0] * 4
    dist.all_gather_object(totals, held)
    assert sum(totals) == 3 * numel  # masters and two moments, each element once


@pytest.mark.world(4)
def test_every_state_element_is_held_once(world) -> None:
    world(check_memory)


def test_slices_of_random_shapes_cut_matrices_between_rows() -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    for _ in range(200):
        shapes = [tuple(draw(1, 9) for _ in range(draw(1, 4))) for _ in range(draw(1, 12))]
        ranks = draw(1, 6)
        layout = lay_out_slices(shapes, draw(1, 400), ranks)
        assert [index for bucket in layout.buckets for index in bucket.members] == list(range(len(shapes)))
        assert [bucket.start for bucket in layout.buckets] == [0, *(bucket.end for bucket in layout.buckets[:-1])]
        for bucket in layout.buckets:
            slices = [layout.slice_of(bucket, rank) for rank in range(ranks)]
            assert slices[0][0] == bucket.start and slices[-1][1] == bucket.end
            assert len({high - low for low, high in slices}) == 1 and (slices[0][1] - slices[0][0]) % 64 == 0
            end = bucket.start
            for index in bucket.members:
                start, numel = layout.starts[index], math.prod(shapes[index])
                assert start >= end and start % 64 == 0
                end = start + numel
                held = 0
                for low, high in slices:
                    begin, stop = max(low - start, 0), min(high - start, numel)
                    found = boxes(shapes[index], begin, stop)
                    held += max(stop - begin, 0)
                    assert len(found) <= (1 if len(shapes[index]) <= 2 else 2 * len(shapes[index]) - 3)
                assert held == numel
            assert end <= bucket.end


def test_boxes_are_the_flat_range_in_order() -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(300):
        shape = tuple(torch.randint(1, 5, (int(torch.randint(0, 5, (), generator=generator)),), generator=generator).tolist())
        numel = math.prod(shape)
        begin, end = sorted(torch.randint(0, numel + 1, (2,), generator=generator).tolist())
        values = torch.arange(numel).view(shape)
        parts = [values[tuple(slice(b, b + n) for b, n in zip(offset, size, strict=True))] for offset, size in boxes(shape, begin, end)]
        flat = torch.cat([part.reshape(-1) for part in parts]) if parts else torch.empty(0)
        assert flat.tolist() == list(range(begin, end))
        assert len(parts) <= max(1, 2 * len(shape) - 1)


def test_config_must_agree_with_the_source() -> None:
    groups = ProcessGroups.single()
    for sliced in (True, False):
        ddp = DistributedDataParallel(DistributedDataParallelConfig(use_distributed_optimizer=sliced), nn.Linear(2, 2), groups)
        with pytest.raises(ValueError, match=f"use_distributed_optimizer={not sliced} of the optimizer"):
            MegatronOptimizer(OptimizerConfig(lr=1.0, use_distributed_optimizer=not sliced), ddp, groups)


def check_instances_divide() -> None:
    groups = ProcessGroups.build(ParallelPlan(dp=2))
    with pytest.raises(ValueError, match="num_distributed_optimizer_instances=3 must divide the 2 replicas"):
        DistributedDataParallel(DistributedDataParallelConfig(num_distributed_optimizer_instances=3, **SLICED), nn.Linear(2, 2), groups)


@pytest.mark.world(2)
def test_instances_must_divide_the_replicas(world) -> None:
    world(check_instances_divide)

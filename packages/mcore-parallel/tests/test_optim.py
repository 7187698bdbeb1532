# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The optimizer against torch's, and the gradient norm over layouts."""

import dataclasses
import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mcore_parallel import Group, NamedShard, ParallelPlan, Piece, ProcessGroups, ShardSpec, named_shards
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.optim import AdamOptimizerConfig, MegatronOptimizer, OptimizerConfig, ParamGroup, StepResult, global_grad_norm
from mcore_parallel.optim._norm import GradientNorm
from mcore_parallel.optim._piece_state import whole_piece
from mcore_parallel.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.norm = nn.Parameter(torch.ones(4, dtype=dtype))
        self.up = nn.Linear(4, 6, dtype=dtype)
        self.down = nn.Linear(6, 1, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x * self.norm))).square().sum()


def data(step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step)).to(dtype)


def wrap(model: nn.Module, **config: object) -> tuple[DistributedDataParallel, MegatronOptimizer]:
    groups = ProcessGroups.single()
    ddp = DistributedDataParallelConfig()
    wrapped = DistributedDataParallel(ddp, model, groups)
    return wrapped, MegatronOptimizer(OptimizerConfig(**{"lr": 1e-2, **config}), wrapped, groups)  # type: ignore[arg-type]


def backward(ddp: DistributedDataParallel, x: Tensor) -> None:
    ddp.zero_grad_buffer()
    ddp(x).backward()
    ddp.finish_grad_sync()


@pytest.mark.parametrize("decoupled", [True, False])
def test_fifty_steps_equal_torch(decoupled: bool) -> None:
    ours, twin = Net(), Net()
    ddp, optimizer = wrap(ours, decoupled_weight_decay=decoupled, weight_decay=0.1, clip_grad=0.5)
    matrices = [p for p in twin.parameters() if p.dim() > 1]
    vectors = [p for p in twin.parameters() if p.dim() <= 1]
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    reference = kind([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], lr=1e-2)
    for step in range(50):
        lr = 1e-2 / (1 + step)
        for group in reference.param_groups:
            group["lr"] = lr
        backward(ddp, data(step))
        result = optimizer.step(grad_scale=0.125, lr=lr)
        reference.zero_grad()
        (twin(data(step)) * 0.125).backward()
        norm = nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        reference.step()
        assert not result.skipped
        torch.testing.assert_close(result.grad_norm.float(), norm)
        for mine, theirs in zip(ours.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    assert optimizer.step_count == 50


def test_decay_mode_matters_only_with_decay() -> None:
    finals = {}
    for decay in (0.0, 0.5):
        for decoupled in (True, False):
            model = Net()
            ddp, optimizer = wrap(model, weight_decay=decay, decoupled_weight_decay=decoupled)
            for step in range(3):
                backward(ddp, data(step))
                optimizer.step()
            finals[decay, decoupled] = model.up.weight.detach().clone()
    assert torch.equal(finals[0.0, True], finals[0.0, False])
    assert not torch.allclose(finals[0.5, True], finals[0.5, False])


def test_a_master_keeps_what_sixteen_bits_would_lose() -> None:
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(model.weight)
    ddp, optimizer = wrap(model, lr=1e-4, weight_decay=0.0, clip_grad=0.0)
    for _ in range(40):
        backward(ddp, torch.ones(1, 1, dtype=torch.bfloat16))
        optimizer.step()
    shards = optimizer.state_shards()
    assert shards["optimizer.master.weight"].tensor.item() == pytest.approx(1 - 40e-4, rel=1e-5)
    assert model.weight.item() == torch.tensor(1 - 40e-4, dtype=torch.bfloat16).item() != 1.0
    nn.init.zeros_(model.weight)
    optimizer.reload_model_params()
    assert optimizer.state_shards()["optimizer.master.weight"].tensor.item() == 0.0


@pytest.mark.parametrize("remainders", [True, False])
def test_parameters_that_are_loaded_without_masters_stay(remainders: bool) -> None:
    model = nn.Linear(2, 2, bias=False, dtype=torch.bfloat16)
    _, optimizer = wrap(model, store_param_remainders=remainders)
    shards = optimizer.state_shards()
    with torch.no_grad():
        model.weight.fill_(3.0)
    optimizer.load_step_count(0)
    optimizer.reload_model_params()
    assert (model.weight == 3.0).all() and (optimizer.state_shards()["optimizer.master.weight"].tensor == 3.0).all()
    assert not (shards["optimizer.master.weight"].tensor == 3.0).any() or not remainders


def test_gradient_scale_may_be_a_tensor() -> None:
    results = []
    for scale in (0.25, torch.tensor(0.25)):
        model = Net()
        ddp, optimizer = wrap(model, clip_grad=0.1)
        backward(ddp, data(0))
        norm = optimizer.step(grad_scale=scale).grad_norm
        results.append((norm, [p.detach().clone() for p in model.parameters()]))
    torch.testing.assert_close(results[0], results[1])


def test_a_step_with_a_bad_norm_is_skipped() -> None:
    model = Net()
    ddp, optimizer = wrap(model, grad_norm_skip_threshold=1e6)
    backward(ddp, data(0))
    optimizer.step()
    before = {name: shard.tensor.clone() for name, shard in optimizer.state_shards().items()}
    parameters = [p.detach().clone() for p in model.parameters()]
    for poison in (float("nan"), float("inf"), 1e9):
        backward(ddp, data(1))
        ddp.gradients()["up.bias"][0] = poison
        result = optimizer.step()
        assert result.skipped and optimizer.step_count == 1
        assert all(torch.equal(shard.tensor, before[name]) for name, shard in optimizer.state_shards().items())
        assert all(torch.equal(p, old) for p, old in zip(model.parameters(), parameters, strict=True))
    backward(ddp, data(1))
    assert not optimizer.step().skipped


def trained(**options: object) -> list[Tensor]:
    model = Net()
    ddp, optimizer = wrap(model, **options)
    for step in range(3):
        backward(ddp, data(step))
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("optimizer", "option", "value"),
    [
        ("adam", "adam_eps", 0.1),
        ("lion", "lion_beta1", 0.1),
        ("lion", "lion_beta2", 0.1),
        ("sgd", "sgd_momentum", 0.5),
        ("muon", "muon_momentum", 0.5),
        ("muon", "muon_nesterov", False),
        ("muon", "muon_num_ns_steps", 2),
        ("muon", "muon_extra_scale", 0.2),
    ],
)
def test_each_option_of_a_rule_changes_the_update(optimizer: str, option: str, value: object) -> None:
    usual, other = trained(optimizer=optimizer), trained(optimizer=optimizer, **{option: value})
    assert not all(torch.equal(a, b) for a, b in zip(usual, other, strict=True))


@pytest.mark.parametrize(
    ("options", "scales"),
    [
        ({}, [4.0, 4.0, 2.0, 1.0]),
        ({"hysteresis_rearms": True}, [4.0, 4.0, 4.0, 2.0]),
        ({"min_loss_scale": 2.0}, [4.0, 4.0, 2.0, 2.0]),
    ],
)
def test_the_loss_scale_follows_its_options(options: dict[str, object], scales: list[float]) -> None:
    """An overflow, a good step, two overflows."""
    ddp, optimizer = wrap(Net(), fp16=True, initial_loss_scale=4.0, hysteresis=2, loss_scale_window=100, **options)
    read = []
    for poison in (math.inf, 0.0, math.inf, math.inf):
        backward(ddp, data(0))
        ddp.gradients()["up.bias"][0] = poison
        optimizer.step()
        assert optimizer.loss_scale is not None
        read.append(float(optimizer.loss_scale))
    assert read == scales


def check_skip_everywhere() -> bool:
    groups = ProcessGroups.build(ParallelPlan(tp=2))
    ddp = DistributedDataParallel(DistributedDataParallelConfig(), ColumnParallelLinear(2, 2, groups), groups)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=1.0), ddp, groups)
    if groups.tp.rank == 1:
        ddp.gradients()["weight"].fill_(float("nan"))
    return optimizer.step().skipped


@pytest.mark.world(2)
def test_a_bad_gradient_on_one_rank_skips_on_all(world) -> None:
    assert world(check_skip_everywhere) == [True, True]


def test_a_run_continues_from_its_state_bit_for_bit() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        whole = Net(dtype)
        ddp, optimizer = wrap(whole)
        for step in range(3):
            backward(ddp, data(step, dtype))
            optimizer.step()
        saved = {name: shard.tensor.clone() for name, shard in optimizer.state_shards().items()}
        resumed = Net(dtype)
        resumed.load_state_dict(whole.state_dict())
        ddp2, optimizer2 = wrap(resumed)
        for name, shard in optimizer2.state_shards().items():
            shard.tensor.copy_(saved[name])
        optimizer2.load_step_count(optimizer.step_count)
        for step in range(3, 6):
            for some, which in ((ddp, optimizer), (ddp2, optimizer2)):
                backward(some, data(step, dtype))
                which.step()
        assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


def test_state_names_and_places_follow_the_parameters() -> None:
    _, optimizer = wrap(Net(torch.bfloat16))
    shards = optimizer.state_shards()
    of_norm = sorted(name for name in shards if "norm" in name)
    assert of_norm == ["optimizer.exp_avg.norm", "optimizer.exp_avg_sq.norm", "optimizer.master.norm"]
    assert all(shard.name == name and tuple(shard.tensor.shape) == shard.spec.shape for name, shard in shards.items())
    _, optimizer = wrap(Net())
    assert not any("master" in name for name in optimizer.state_shards())


class Everything(nn.Module):
    """Every kind of placement: split and replicated dense parameters, partial ones, experts, another part a stage."""

    def __init__(self, groups: ProcessGroups) -> None:
        super().__init__()
        stage = groups.pp.rank
        self.groups = groups
        self.embedding = VocabParallelEmbedding(8, 4, groups, seed=10 + stage)
        self.up = ColumnParallelLinear(4, (2, 4), groups, shard_dim=1, bias=True, seed=20 + stage)
        self.down = RowParallelLinear(4, 4, groups, bias=True, seed=30 + stage)
        self.norm = nn.Parameter(torch.empty(4))
        self.router = nn.Parameter(torch.empty(4, 4))
        self.experts = nn.Parameter(torch.empty(self.shard_specs()["experts"].local_shape(groups)))

    def shard_specs(self) -> dict[str, ShardSpec]:
        partial = ("tp",) if self.groups.sequence_parallel else ()
        return {
            "norm": ShardSpec(shape=(4,), partial=partial),
            "router": ShardSpec(shape=(4, 4)),
            "experts": ShardSpec(shape=(4, 3, 4), view="expert", shards={"ep": 0, "tp": 2}),
        }


def gradient(name: str, stage: int, spec: ShardSpec) -> Tensor:
    generator = torch.Generator().manual_seed(sum(map(ord, name)) + 1000 * stage)
    values = torch.randn(spec.shape, generator=generator, dtype=torch.float64)
    return values.masked_fill(values.abs() < 0.3, 0.0)


def check_norm(plans: list[dict[str, int]]) -> None:
    for degrees in plans:
        groups = ProcessGroups.build(ParallelPlan(**degrees))
        shards = list(named_shards(Everything(groups)))
        gradients = {}
        for shard in shards:
            gradients[shard.name] = gradient(shard.name, groups.pp.rank, shard.spec)[shard.spec.slices(groups)].contiguous()
        norm = global_grad_norm(gradients, shards, groups)
        expected = sum(gradient(shard.name, stage, shard.spec).square().sum() for shard in shards for stage in range(groups.pp.size))
        torch.testing.assert_close(norm, expected.sqrt(), rtol=1e-12, atol=0.0, msg=lambda text, degrees=degrees: f"{degrees}: {text}")
        pieces = [whole_piece(shard.name, shard.spec, shard.parameter, gradients[shard.name], groups) for shard in shards]
        for p in (1.0, 3.5, math.inf):
            found = global_grad_norm(gradients, shards, groups, norm_type=p)
            everything = torch.cat([gradient(s.name, stage, s.spec).flatten() for s in shards for stage in range(groups.pp.size)])
            torch.testing.assert_close(found, torch.linalg.vector_norm(everything, p), rtol=1e-12, atol=0.0)
        check_parts(shards, pieces, groups)
        zeros = sum(int((gradient(shard.name, stage, shard.spec) == 0).sum()) for shard in shards for stage in range(groups.pp.size))
        for p in (2.0, math.inf):
            assert GradientNorm(pieces, groups, norm_type=p).totals(count_zeros=True)[1] == zeros > 0, degrees


def check_parts(shards: list[NamedShard], pieces: list[Piece], groups: ProcessGroups) -> None:
    """Norms of two groups of parameters taken apart."""
    of_second = {shard.name: 1 for shard in shards if shard.name in ("experts", "up.weight")}
    for p in (2.0, math.inf):
        norms, _ = GradientNorm(pieces, groups, norm_type=p, parts=of_second, num_parts=2).totals()
        for part in range(2):
            chosen = [shard for shard in shards if of_second.get(shard.name, 0) == part]
            values = torch.cat([gradient(s.name, stage, s.spec).flatten() for s in chosen for stage in range(groups.pp.size)])
            torch.testing.assert_close(norms[part], torch.linalg.vector_norm(values, p), rtol=1e-12, atol=0.0)


@pytest.mark.world(4)
def test_every_parameter_counts_once_in_every_layout(world) -> None:
    plans = [
        {"dp": 4},
        {"tp": 4},
        {"tp": 4, "etp": 4},
        {"pp": 4},
        {"cp": 2, "dp": 2},
        {"tp": 2, "pp": 2},
        {"tp": 2, "dp": 2, "ep": 4},
        {"dp": 4, "ep": 2},
        {"tp": 2, "dp": 2, "ep": 2},
        {"tp": 2, "dp": 2, "ep": 2, "etp": 2},
        {"tp": 2, "pp": 2, "ep": 2},
    ]
    world(check_norm, plans=plans)


def test_one_rank_counts_every_parameter() -> None:
    check_norm([{}])


class SharedEnds(nn.Module):
    """The embedding of the first stage is the output layer of the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(3, 2, dtype=torch.float64))

    def shard_specs(self) -> dict[str, ShardSpec]:
        return {"table": ShardSpec(shape=(3, 2), partial=("embd",))}


def check_shared_ends() -> None:
    groups = ProcessGroups.build(ParallelPlan(pp=2))
    ddp = DistributedDataParallel(DistributedDataParallelConfig(), SharedEnds(), groups)
    (ddp.module.table.sum() * (groups.pp.rank + 1)).backward()
    ddp.finish_grad_sync()
    assert (ddp.gradients()["table"] == 3.0).all()
    optimizer = MegatronOptimizer(OptimizerConfig(lr=1.0), ddp, groups)
    assert optimizer.step().grad_norm.item() == pytest.approx(math.sqrt(6 * 9))


@pytest.mark.world(2)
def test_a_parameter_of_two_stages_is_summed_and_counts_once(world) -> None:
    world(check_shared_ends)


class Block(nn.Module):
    def __init__(self, groups: ProcessGroups) -> None:
        super().__init__()
        self.groups = groups
        self.norm = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.up = ColumnParallelLinear(4, 8, groups, dtype=torch.float64, seed=1)
        self.down = RowParallelLinear(8, 4, groups, dtype=torch.float64, seed=2)

    def shard_specs(self) -> dict[str, ShardSpec]:
        return {"norm": ShardSpec(shape=(4,), partial=("tp",) if self.groups.sequence_parallel else ())}

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x * self.norm).relu()).sin().sum()


CLIPPING: list[dict[str, object]] = [
    {},
    {"grad_norm_type": 1.0},
    {"grad_norm_type": math.inf},
    {"param_groups": (ParamGroup(patterns=("up.*", "norm"), grad_norm_group="first"),)},
]


def numbers_of(result: StepResult) -> list[float]:
    return [result.grad_norm.item(), *(norm.item() for norm in result.group_norms.values())]


def trajectory(groups: ProcessGroups, clipping: dict[str, object]) -> tuple[list[float], dict[str, Tensor], Group]:
    """Two clipped steps on eight rows of data, two of them on each of four micro-batches over the replicas."""
    ddp = DistributedDataParallel(DistributedDataParallelConfig(bucket_size=8), Block(groups), groups)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=1e-2, weight_decay=0.1, clip_grad=0.05, **clipping), ddp, groups)
    norms = []
    for step in range(2):
        rows = data(step).double()[:, :4].chunk(groups.dp.size)[groups.dp.rank]
        if groups.sequence_parallel:
            rows = rows.chunk(groups.tp.size)[groups.tp.rank]
        backward(ddp, rows)
        norms += numbers_of(optimizer.step(grad_scale=1 / 8))
    whole = {}
    for shard in named_shards(ddp.module):
        full = torch.zeros(shard.spec.shape, dtype=torch.float64)
        full[shard.spec.slices(groups)] = shard.parameter.detach() if shard.spec.replica(groups) == 0 else 0.0
        dist.all_reduce(full)
        whole[shard.name] = full
    return norms, whole, groups.dp


def check_trajectories(clipping: dict[str, object]) -> None:
    alone = ProcessGroups.single()
    model = Block(alone)
    ddp = DistributedDataParallel(DistributedDataParallelConfig(), model, alone)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=1e-2, weight_decay=0.1, clip_grad=0.05, **clipping), ddp, alone)
    norms = []
    for step in range(2):
        backward(ddp, data(step).double())
        norms += numbers_of(optimizer.step(grad_scale=1 / 8))
    for degrees in ({"dp": 4}, {"tp": 4}, {"tp": 2, "dp": 2}):
        for sequence_parallel in (True, False):
            groups = ProcessGroups.build(ParallelPlan(**degrees, sequence_parallel=sequence_parallel))
            ours, whole, _ = trajectory(groups, clipping)
            assert ours == pytest.approx(norms, rel=1e-10)
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(whole[name], parameter.detach(), rtol=1e-9, atol=1e-11)


@pytest.mark.world(4, shared=True)
@pytest.mark.parametrize("clipping", CLIPPING)
def test_training_is_the_same_in_every_layout(world, clipping: dict[str, object]) -> None:
    world(check_trajectories, clipping=clipping)


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("optimizer", ["sgd", "muon"])
def test_groups_are_clipped_by_norms_of_their_own(p: float, optimizer: str) -> None:
    ours, twin = Net(torch.float64), Net(torch.float64)
    groups = (
        ParamGroup(patterns=("up.*",), grad_norm_group="up"),
        ParamGroup(patterns=("down.weight",), grad_norm_group="down"),
        ParamGroup(patterns=("down.bias",), grad_norm_group="down", lr_mult=1.0),
    )
    options = {"optimizer": optimizer, "lr": 0.1, "weight_decay": 0.0, "clip_grad": 0.5, "grad_norm_type": p}
    ddp, apart = wrap(ours, **options, param_groups=groups)
    twin_ddp, plain = wrap(twin, **{**options, "clip_grad": 0.0})
    for step in range(3):
        backward(ddp, data(step, torch.float64))
        backward(twin_ddp, data(step, torch.float64))
        result = apart.step()
        gradients = twin_ddp.gradients()
        members = {"up": ("up.weight", "up.bias"), "down": ("down.weight", "down.bias"), "rest": ("norm",)}
        norms = {}
        for group, names in members.items():
            norms[group] = torch.linalg.vector_norm(torch.cat([gradients[name].flatten() for name in names]), p)
            for name in names:
                gradients[name].mul_((0.5 / (norms[group] + 1e-6)).clamp(max=1.0))
        plain.step()
        assert list(result.group_norms) == ["down", "up"]
        torch.testing.assert_close(dict(result.group_norms), {name: norms[name] for name in ("down", "up")}, rtol=1e-10, atol=0.0)
        torch.testing.assert_close(result.grad_norm, torch.linalg.vector_norm(torch.stack(list(norms.values())), p))
        assert step or max(norms.values()) > 0.5, "something is clipped"
    for parameter, expected in zip(ours.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("p", [1.0, math.inf])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_other_norms_see_bad_gradients_too(p: float, bad: float) -> None:
    ddp, optimizer = wrap(Net(), grad_norm_type=p, param_groups=(ParamGroup(patterns=("up.*",), grad_norm_group="up"),))
    backward(ddp, data(0))
    ddp.gradients()["up.weight"][0, 0] = bad
    before = [parameter.clone() for parameter in ddp.parameters()]
    assert optimizer.step().skipped
    assert all(map(torch.equal, before, ddp.parameters()))


def test_config_names_what_is_wrong() -> None:
    with pytest.raises(ValueError, match=r"grad_norm_type=0\.0 must be positive"):
        OptimizerConfig(lr=1e-3, grad_norm_type=0.0)
    with pytest.raises(ValueError, match="overlap_cpu_optimizer_d2h_h2d=True needs optimizer_cpu_offload=True"):
        OptimizerConfig(lr=1e-3, overlap_cpu_optimizer_d2h_h2d=True)
    with pytest.raises(ValueError, match=r"optimizer_offload_fraction=0\.5 needs optimizer_cpu_offload=True"):
        OptimizerConfig(lr=1e-3, optimizer_offload_fraction=0.5)
    with pytest.raises(ValueError, match=r"exp_avg_dtype=torch\.bfloat16 needs use_precision_aware_optimizer=True"):
        OptimizerConfig(lr=1e-3, exp_avg_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"loss_scale=0\.0 must be positive"):
        OptimizerConfig(lr=1e-3, loss_scale=0.0)
    with pytest.raises(ValueError, match=r"loss_scale=4\.0 needs fp16=True; set it"):
        wrap(nn.Linear(1, 1), loss_scale=4.0)
    with pytest.raises(ValueError, match="optimizer='shampoo' must be one of adam, lion, muon, sgd"):
        OptimizerConfig(lr=1e-3, optimizer="shampoo")
    with pytest.raises(ValueError, match=r"lr=-1\.0 must not be negative"):
        OptimizerConfig(lr=-1.0)
    with pytest.raises(ValueError, match=r"clip_grad=nan must not be negative"):
        OptimizerConfig(lr=1.0, clip_grad=math.nan)
    with pytest.raises(ValueError, match=r"adam_beta2=1\.0"):
        OptimizerConfig(lr=1.0, adam_beta2=1.0)


def test_a_rank_that_trains_nothing_sums_on_the_device_of_its_model() -> None:
    _, optimizer = wrap(nn.Linear(3, 2, device="meta").requires_grad_(False), lr=0.1)
    assert optimizer.step().grad_norm.device.type == "meta"


def test_the_config_of_adam_is_of_adam() -> None:
    config = AdamOptimizerConfig(lr=0.1, decoupled_weight_decay=False, weight_decay=0.5)
    assert dataclasses.asdict(config) == dataclasses.asdict(OptimizerConfig(lr=0.1, decoupled_weight_decay=False, weight_decay=0.5))
    assert isinstance(dataclasses.replace(config, lr=0.2), AdamOptimizerConfig)
    with pytest.raises(ValueError, match="optimizer='lion' is not Adam; use OptimizerConfig"):
        AdamOptimizerConfig(lr=0.1, optimizer="lion")
    with pytest.raises(ValueError, match="optimizer='muon' is not Adam"):
        AdamOptimizerConfig(lr=0.1, param_groups=(ParamGroup(patterns=("*",), optimizer="muon"),))
    with pytest.raises(ValueError, match="adam_beta1=1.0"):
        AdamOptimizerConfig(lr=0.1, adam_beta1=1.0)

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Parameter groups with limits of their own, update rules against torch's, and what all ranks agree about."""

import pytest
import torch
from torch import Tensor, nn

from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.optim import (
    ConstantSchedule,
    CosineSchedule,
    MegatronOptimizer,
    OptimizerConfig,
    ParamGroup,
    RateAndDecaySchedule,
    WeightDecaySchedule,
)


class Ends(nn.Module):
    """An embedding, an inner matrix with a bias of two dims, a norm, an output matrix; a stage may lack some."""

    def __init__(self, names: tuple[str, ...] = ("embedding", "inner", "norm", "output"), dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        shapes = {"embedding": (8, 4), "inner": (2, 4), "norm": (4,), "output": (8, 4)}
        for name in names:
            module = nn.Module()
            generator = torch.Generator().manual_seed(len(name))
            module.register_parameter("weight", nn.Parameter(torch.randn(shapes[name], generator=generator, dtype=dtype)))
            if name == "inner":
                module.register_parameter("bias", nn.Parameter(torch.ones(2, 2, dtype=dtype)))
            self.add_module(name, module)


def build(module: nn.Module, groups: ProcessGroups | None = None, **options: object):
    groups = groups or ProcessGroups.single()
    ddp = DistributedDataParallel(DistributedDataParallelConfig(), module, groups)
    config = {"lr": 1e-2, "weight_decay": 0.0, "clip_grad": 0.0, **options}
    return ddp, MegatronOptimizer(OptimizerConfig(**config), ddp, groups)  # type: ignore[arg-type]


def moved(ddp: DistributedDataParallel, optimizer: MegatronOptimizer, **step: object) -> dict[str, float]:
    """How far each parameter moves in a first step of Adam, which is its learning rate."""
    before = {name: p.detach().clone() for name, p in ddp.module.named_parameters()}
    for gradient in ddp.gradients().values():
        gradient.fill_(1.0)
    optimizer.step(**step)  # type: ignore[arg-type]
    return {name: (before[name] - p).mean().item() for name, p in ddp.module.named_parameters()}


def test_groups_follow_the_schedule_between_limits_of_their_own() -> None:
    schedule = CosineSchedule(max_lr=1e-2, min_lr=1e-3, warmup_steps=10, decay_steps=110, init_lr=1e-4)
    groups = (ParamGroup(patterns=("inner.*",), max_lr=4e-2), ParamGroup(patterns=("norm.*",), min_lr=5e-3, lr_mult=2.0))
    for step in (0, 5, 10, 60, 110, 500):
        ddp, optimizer = build(Ends(), decoupled_lr=1e-3, decoupled_min_lr=5e-4, param_groups=groups)
        found = moved(ddp, optimizer, lr=schedule.lr(step))

        def rate(top: float, low: float, step: int = step) -> float:
            return CosineSchedule(max_lr=top, min_lr=low, warmup_steps=10, decay_steps=110, init_lr=1e-4).lr(step)

        ends, inner, norm = rate(1e-3, 5e-4), rate(4e-2, 1e-3), 2 * rate(1e-2, 5e-3)
        expected = {"embedding.weight": ends, "output.weight": ends, "inner.weight": inner, "inner.bias": inner, "norm.weight": norm}
        assert found == pytest.approx(expected, rel=1e-6)
    # Warm-up begins at init_lr for everybody.
    assert schedule.lr(0).between(4e-2, None) == schedule.lr(0) == 1e-4


def test_a_plain_rate_scales_the_limits_in_proportion() -> None:
    for lr, expected in ((None, 1e-3), (5e-3, 5e-4), (torch.tensor(5e-3), 5e-4)):
        found = moved(*build(Ends(), decoupled_lr=1e-3), lr=lr)
        assert found["embedding.weight"] == pytest.approx(expected, rel=1e-6)
        assert found["inner.weight"] == pytest.approx(10 * expected, rel=1e-6)
    with pytest.raises(ValueError, match=r"min_lr=0\.0005 of a parameter group needs the rate of a schedule; pass lr=schedule\.lr\(n\)"):
        moved(*build(Ends(), decoupled_lr=1e-3, decoupled_min_lr=5e-4), lr=5e-3)
    with pytest.raises(ValueError, match=r"compared with the config's lr=0\.0"):
        moved(*build(Ends(), lr=0.0, decoupled_lr=1e-3))
    with pytest.raises(ValueError, match="decoupled_min_lr=0.1 needs decoupled_lr"):
        OptimizerConfig(lr=1.0, decoupled_min_lr=0.1)


def test_vectors_and_biases_of_any_shape_are_not_decayed_unless_a_group_says_so() -> None:
    _, optimizer = build(Ends(), optimizer="muon")
    assert {name: rule.wd_mult for name, rule in optimizer.rules.items()} == {
        "embedding.weight": 1.0, "inner.weight": 1.0, "inner.bias": 0.0, "norm.weight": 0.0, "output.weight": 1.0,
    }  # fmt: skip
    assert [name for name, rule in optimizer.rules.items() if rule.kind == "muon"] == ["inner.weight"]
    qk_norm = ParamGroup(predicate=lambda name, shape: name.startswith("norm") and shape == (4,), wd_mult=1.0)
    _, optimizer = build(Ends(), param_groups=(qk_norm,))
    assert optimizer.rules["norm.weight"].wd_mult == 1.0 and optimizer.rules["inner.bias"].wd_mult == 0.0


def test_weight_decay_follows_its_schedule_or_an_argument() -> None:
    decay = WeightDecaySchedule(start=0.0, end=0.5, steps=10)
    both = RateAndDecaySchedule(rate=ConstantSchedule(max_lr=1e-1), decay=decay)
    ddp, optimizer = build(Ends(), param_groups=(ParamGroup(patterns=("output.*",), wd_mult=0.5, max_lr=1e-2),))
    for step, options in ((0, {}), (5, {}), (10, {}), (20, {}), (5, {"weight_decay": 1.0})):
        before = {name: p.detach().clone() for name, p in ddp.module.named_parameters()}
        ddp.zero_grad_buffer()
        optimizer.step(lr=both.lr(step), **options)
        wanted = options.get("weight_decay", decay.weight_decay(step))
        for name, factor in (("embedding.weight", 1e-1 * wanted), ("output.weight", 1e-2 * 0.5 * wanted), ("norm.weight", 0.0)):
            value = dict(ddp.module.named_parameters())[name].detach()
            torch.testing.assert_close(value, before[name] * (1 - factor), rtol=1e-12, atol=0)


STAGES = (("embedding", "inner"), ("norm", "output"))


def check_stages() -> None:
    """A stage may lack all members of a group; what is wrong anywhere is an error everywhere."""
    groups = ProcessGroups.build(ParallelPlan(pp=2))

    def make(**options: object):
        return build(Ends(STAGES[groups.pp.rank]), groups, **options)

    only_first = ParamGroup(patterns=("inner.weight",), optimizer="sgd", max_lr=1e-3)
    ddp, optimizer = make(param_groups=(only_first,), decoupled_lr=2e-3)
    found = moved(ddp, optimizer, lr=ConstantSchedule(max_lr=1e-2).lr(0))
    expected = {"embedding.weight": 2e-3, "inner.weight": 1e-3, "inner.bias": 1e-2, "norm.weight": 1e-2, "output.weight": 2e-3}
    assert found == pytest.approx({name: expected[name] for name in found}, rel=1e-6)
    _, whole = build(Ends(), param_groups=(only_first,), decoupled_lr=2e-3)
    assert all(whole.rules[name] == rule for name, rule in optimizer.rules.items())
    assert set(optimizer.state_shards()) <= set(whole.state_shards())
    twice = (ParamGroup(patterns=("norm.*",), lr_mult=2.0), ParamGroup(patterns=("norm.weight",), lr_mult=3.0))
    with pytest.raises(ValueError, match=("norm.weight the values", "of another rank")[groups.pp.is_first]):
        make(param_groups=twice)
    with pytest.raises(ValueError, match=("output.weight the values", "embedding.weight the values")[groups.pp.is_first]):
        make(decoupled_lr=1e-3, param_groups=(ParamGroup(patterns=("*",), max_lr=1e-2),))
    with pytest.raises(ValueError, match=r"patterns \['layers\.\*'\] of param_groups match no parameter of the model"):
        make(param_groups=(ParamGroup(patterns=("norm.*", "layers.*"), lr_mult=2.0),))


@pytest.mark.world(2)
def test_groups_are_the_same_on_all_stages(world) -> None:
    world(check_stages)


def lion_by_hand(p: Tensor, gradients: list[Tensor], lr: float, decay: float) -> Tensor:
    m = torch.zeros_like(p)
    for g in gradients:
        p = p * (1 - lr * decay) - lr * torch.sign(0.9 * m + 0.1 * g)
        m = 0.99 * m + 0.01 * g
    return p


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fifty_steps_of_sgd_equal_torch(momentum: float) -> None:
    ours, twin = Ends(), Ends()
    ddp, optimizer = build(ours, optimizer="sgd", sgd_momentum=momentum, weight_decay=0.1)
    matrices = [p for name, p in twin.named_parameters() if p.dim() > 1 and "bias" not in name]
    others = [p for name, p in twin.named_parameters() if p.dim() == 1 or "bias" in name]
    reference = torch.optim.SGD([{"params": matrices, "weight_decay": 0.1}, {"params": others}], lr=1e-2, momentum=momentum)
    for step in range(50):
        for number, (name, p) in enumerate(twin.named_parameters()):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + number), dtype=p.dtype)
            ddp.gradients()[name].copy_(p.grad)
        optimizer.step()
        reference.step()
    for mine, theirs in zip(ours.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_lion_follows_the_sign_of_its_momentum() -> None:
    ddp, optimizer = build(Ends(), optimizer="lion", weight_decay=0.1)
    begin = ddp.module.output.weight.detach().clone()
    gradients = [torch.randn(8, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64) for step in range(10)]
    for gradient in gradients:
        ddp.gradients()["output.weight"].copy_(gradient)
        optimizer.step()
    torch.testing.assert_close(ddp.module.output.weight.detach(), lion_by_hand(begin, gradients, 1e-2, 0.1), rtol=1e-12, atol=0)
    assert {name.split(".")[1] for name in optimizer.state_shards()} == {"momentum"}


@pytest.mark.parametrize("kind", ["adam", "lion", "muon", "sgd"])
def test_coupled_decay_joins_the_gradient_in_every_rule(kind: str) -> None:
    """A gradient with the decay in it already moves the parameter to the same place."""
    ends = []
    for coupled in (True, False):
        ddp, optimizer = build(Ends(), optimizer=kind, weight_decay=0.3 if coupled else 0.0, decoupled_weight_decay=False)
        weight = ddp.module.inner.weight
        for step in range(3):
            g = torch.randn(2, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            ddp.gradients()["inner.weight"].copy_(g if coupled else g + 0.3 * weight.detach())
            optimizer.step()
        ends.append(weight.detach().clone())
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-10, atol=1e-12)


def test_bad_groups_are_named() -> None:
    with pytest.raises(ValueError, match=r"patterns=\(\) must be a tuple of name patterns, at least one unless there is a predicate"):
        ParamGroup()
    with pytest.raises(ValueError, match=r"min_lr=2\.0 must not exceed max_lr=1\.0"):
        ParamGroup(patterns=("*",), max_lr=1.0, min_lr=2.0)
    with pytest.raises(ValueError, match=r"max_lr=-1\.0 must not be negative"):
        ParamGroup(patterns=("*",), max_lr=-1.0)
    with pytest.raises(ValueError, match="optimizer_cpu_offload=True keeps states of Adam in host memory, but optimizer='sgd'"):
        OptimizerConfig(lr=1.0, optimizer="sgd", optimizer_cpu_offload=True)
    narrow = {"use_precision_aware_optimizer": True, "exp_avg_dtype": torch.bfloat16}
    with pytest.raises(ValueError, match=r"exp_avg_dtype=torch.bfloat16 is of Adam's moments, and optimizer='lion' has none"):
        OptimizerConfig(lr=1.0, optimizer="lion", **narrow)
    OptimizerConfig(lr=1.0, optimizer="lion", param_groups=(ParamGroup(patterns=("*.bias",), optimizer="adam"),), **narrow)

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The train step: one loss curve in every layout."""

import dataclasses
import functools
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from mcore_parallel import ParallelPlan, ProcessGroups, ShardSpec
from mcore_parallel.comm import copy_to_tensor_model_parallel_region
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import Aux, AuxLoss, AuxSpec, GPTModel, ModelOutput, Site, TransformerConfig, dense_feed_forward
from mcore_parallel.nn import RecomputeConfig, Step
from mcore_parallel.optim import ConstantSchedule, MegatronOptimizer, OptimizerConfig
from mcore_parallel.training import (
    Batch,
    CrossEntropyObjective,
    LossReport,
    TensorShard,
    TrainReport,
    evaluate,
    model_state,
    optimizer_state,
    train_step,
)
from mcore_parallel.training._aux import AuxSums
from mcore_parallel.training._totals import add_up

CONFIG = TransformerConfig(
    num_layers=4, hidden_size=16, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=24, vocab_size=32, init_method_std=0.2
)


class Router(nn.Module):
    """A dense feed-forward with a parameter of its own that only an auxiliary loss reaches, and that counts its tokens by parity."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.layer = site.layer
        self.seen: list[tuple[list[float], bool, int | None]] = []
        self.inner, self.groups = dense_feed_forward(site), site.groups
        self.gate = nn.Parameter(torch.empty(site.config.hidden_size, dtype=site.dtype))

    def shard_specs(self) -> dict[str, ShardSpec]:
        return {"gate": ShardSpec(shape=tuple(self.gate.shape), partial=("tp",))}

    def end_of_batch(self, counts: Tensor, skipped: Tensor, step: int | None) -> None:
        self.seen.append((counts.tolist(), bool(skipped), step))

    def forward(self, x: Tensor, step: Step) -> tuple[Tensor, Aux]:
        seen, share = x, 1.0
        if not self.groups.sequence_parallel:
            # All tp ranks see all tokens: each takes an equal part of the loss.
            seen, share = copy_to_tensor_model_parallel_region(x, self.groups.tp), 1.0 / self.groups.tp.size
        loss = (seen @ self.gate).square().sum() * share / step.positions.numel()
        # Every tp rank counts the same tokens; one of them reports.
        odd = step.tokens % 2 if self.groups.tp.is_first else step.tokens.new_zeros(0)
        counts = torch.stack([(odd == 0).sum(), (odd == 1).sum()])
        return self.inner(x, step)[0], Aux(losses={(self.layer, "gate"): AuxLoss(loss * 4, 0.25)}, counts={self.layer: counts})


@dataclasses.dataclass(frozen=True)
class Routed:
    """Builds ``Router``."""

    def __call__(self, site: Site) -> nn.Module:
        return Router(site)

    def aux_spec(self, layer: int, config: TransformerConfig) -> AuxSpec:
        return AuxSpec(losses=("gate",), num_counts=2)


@dataclasses.dataclass(frozen=True)
class Measured:
    """Cross entropy that also reports how many labels are even, and the sum of their losses."""

    def __call__(self, output: ModelOutput, batch: Batch) -> LossReport:
        report = CrossEntropyObjective()(output, batch)
        return dataclasses.replace(report, metrics={"even": ((batch.labels % 2 == 0) * batch.loss_mask).sum(), "loss": report.sum.detach()})


# Reports of the steps, the final evaluation, and the parameters.
Run = tuple[list[TrainReport], LossReport, dict[str, TensorShard]]


def micro_batches(step: int, count: int = 4) -> list[Batch]:
    """Micro-batches with very different numbers of counted labels."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 32, (count, 2, 7), generator=generator)
    mask = (torch.rand(count, 2, 6, generator=generator) < torch.linspace(0.2, 1.0, count)[:, None, None]).float()
    return [Batch(tokens=tokens[i, :, :-1], labels=tokens[i, :, 1:], loss_mask=mask[i]) for i in range(count)]


def run(groups: ProcessGroups, routed: bool = False, steps: int = 2) -> Run:
    """Train for some steps, then evaluate."""
    feed_forward = Routed() if routed else dense_feed_forward
    model = GPTModel(CONFIG, groups, feed_forward=feed_forward, dtype=torch.float64)
    sync = DistributedDataParallel(DistributedDataParallelConfig(), model, groups)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=1.0, clip_grad=0.5, weight_decay=0.1), sync, groups)
    mine = slice(groups.dp.rank, None, groups.dp.size)
    reports = [train_step(model, micro_batches(step)[mine], Measured(), sync, optimizer, lr=0.01 * (step + 1)) for step in range(steps)]
    final = evaluate(model, micro_batches(99)[mine], Measured())
    return reports, final, model_state(model, groups)


@functools.cache
def serial(routed: bool = False) -> Run:
    return run(ProcessGroups.single(), routed)


def check_layout(plan: ParallelPlan, routed: bool, expected: Run) -> None:
    groups = ProcessGroups.build(plan)
    reports, final, state = run(groups, routed)
    for report, wanted in zip(reports, expected[0], strict=True):
        assert report.layers.counts == wanted.layers.counts and set(report.layers.counts) == (set(range(4)) if routed else set())
        assert report.layers.losses == pytest.approx(wanted.layers.losses, rel=1e-8)
    for report, wanted in zip(reports, expected[0], strict=True):
        assert report.num_tokens == wanted.num_tokens and not report.skipped
        assert set(report.metrics) == {"even", "loss"}
        found = [report.loss, report.grad_norm, report.aux, report.metrics["even"], report.metrics["loss"]]
        torch.testing.assert_close(
            found, [wanted.loss, wanted.grad_norm, wanted.aux, wanted.metrics["even"], wanted.metrics["loss"]], rtol=1e-8, atol=1e-12
        )
    torch.testing.assert_close(
        [final.sum, final.count, final.metrics], [expected[1].sum, expected[1].count, expected[1].metrics], rtol=1e-8, atol=0
    )
    for name, shard in state.items():
        part = tuple(slice(begin, begin + size) for begin, size in zip(shard.offset, shard.data.shape, strict=True))
        torch.testing.assert_close(shard.data, expected[2][name].data[part], rtol=1e-8, atol=1e-8)


@pytest.mark.world(2, shared=True)
@pytest.mark.parametrize("degrees", [{"tp": 2}, {"tp": 2, "sequence_parallel": False}, {"pp": 2}, {"dp": 2}])
def test_two_ranks_train_as_one(world, degrees: dict[str, int]) -> None:
    world(check_layout, plan=ParallelPlan(**degrees), routed=False, expected=serial())


@pytest.mark.world(4, shared=True)
@pytest.mark.parametrize("degrees", [{"tp": 2, "pp": 2}, {"pp": 4}, {"pp": 2, "dp": 2}])
def test_four_ranks_train_as_one(world, degrees: dict[str, int]) -> None:
    world(check_layout, plan=ParallelPlan(**degrees), routed=False, expected=serial())


@pytest.mark.world(4, shared=True)
@pytest.mark.parametrize("degrees", [{"tp": 2, "pp": 2}, {"tp": 2, "dp": 2, "sequence_parallel": False}])
def test_auxiliary_losses_weigh_the_same_in_every_layout(world, degrees: dict[str, int]) -> None:
    world(check_layout, plan=ParallelPlan(**degrees), routed=True, expected=serial(routed=True))


def parts(model: GPTModel, lr: float = 0.01) -> tuple[DistributedDataParallel, MegatronOptimizer]:
    sync = DistributedDataParallel(DistributedDataParallelConfig(), model, model.groups)
    return sync, MegatronOptimizer(OptimizerConfig(lr=lr, clip_grad=0.0), sync, model.groups)


def test_the_gradient_is_that_of_the_mean_over_all_counted_tokens() -> None:
    model = GPTModel(CONFIG, ProcessGroups.single(), feed_forward=Routed(), dtype=torch.float64)
    sync, optimizer = parts(model)
    batches = micro_batches(0)
    report = train_step(model, batches, Measured(), sync, optimizer, lr=0.0)
    sync.close()  # gives weight gradients back to autograd
    total, count, aux = 0.0, sum(batch.loss_mask.sum() for batch in batches), 0.0
    for batch in batches:
        output, cost = model(batch.tokens.flatten(), batch.step())
        losses = nn.functional.cross_entropy(output.logits(), batch.labels.flatten(), reduction="none")
        total, aux = total + (losses * batch.loss_mask.flatten()).sum(), aux + cost.total() * batch.loss_mask.sum()
    grads = torch.autograd.grad((total + aux) / count, list(model.parameters()))
    assert report.num_tokens == count
    torch.testing.assert_close([report.loss, report.aux], [(total / count).item(), (aux / count).item()], rtol=1e-10, atol=0)
    assert report.metrics["loss"] == pytest.approx(report.loss)
    for (name, found), wanted in zip(model.named_parameters(), grads, strict=True):
        torch.testing.assert_close(sync.gradients()[name] / count, wanted, rtol=1e-9, atol=1e-12)
        assert found.grad is None


@pytest.mark.parametrize(
    "again", [None, RecomputeConfig(granularity="full"), RecomputeConfig(modules=("mlp",))], ids=["none", "full", "mlp"]
)
def test_what_layers_report_comes_by_name_once_and_reaches_them_after_the_step(again: RecomputeConfig | None) -> None:
    model = GPTModel(CONFIG, ProcessGroups.single(), feed_forward=Routed(), recompute=again, dtype=torch.float64)
    batches = micro_batches(0)
    report = train_step(model, batches, Measured(), *parts(model), lr=ConstantSchedule(max_lr=0.01).lr(7))
    odd = sum(int((batch.tokens % 2).sum()) for batch in batches)
    counted = (sum(batch.tokens.numel() for batch in batches) - odd, odd)
    assert report.layers.counts == dict.fromkeys(range(4), counted)
    assert [layer.mlp.seen for layer in model.layers.values()] == [[([float(count) for count in counted], False, 7)]] * 4
    assert sum(report.layers.losses.values()) * 0.25 == pytest.approx(report.aux)
    values = report.layers.values()
    assert values["aux/gate"] * 4 * 0.25 == pytest.approx(report.aux)
    assert values["aux/gate/layer_2"] == report.layers.losses[2, "gate"]
    assert values["aux/load"] == values["aux/load/layer_0"] == pytest.approx(max(counted) / (sum(counted) / 2))
    assert set(report.layers.values(per_layer=False)) == {"aux/gate", "aux/load", "aux/idle_experts"}


def test_evaluation_equals_the_loss_of_the_next_step_and_changes_nothing() -> None:
    model = GPTModel(CONFIG, ProcessGroups.single())
    model.train()
    sync, optimizer = parts(model)
    before = {name: shard.data.clone() for name, shard in model_state(model, model.groups).items()}
    found = evaluate(model, micro_batches(1), Measured())
    assert model.training and not found.sum.requires_grad
    assert all(torch.equal(before[name], shard.data) for name, shard in model_state(model, model.groups).items())
    report = train_step(model, micro_batches(1), Measured(), sync, optimizer, lr=0.01)
    assert found.mean.item() == pytest.approx(report.loss, rel=1e-6)
    assert (found.metrics["even"] / found.count).item() == pytest.approx(report.metrics["even"])


def test_a_step_in_which_no_label_counts_updates_by_nothing() -> None:
    model = GPTModel(CONFIG, ProcessGroups.single())
    sync, optimizer = parts(model)
    batch = dataclasses.replace(micro_batches(0)[0], loss_mask=torch.zeros(2, 6))
    report = train_step(model, [batch], Measured(), sync, optimizer, lr=0.01)
    assert (report.loss, report.grad_norm, report.num_tokens, report.skipped) == (0.0, 0.0, 0, False)


def test_a_gradient_that_is_not_finite_is_reported_and_skipped() -> None:
    model = GPTModel(CONFIG, ProcessGroups.single())
    sync, optimizer = parts(model)
    batch = micro_batches(0)[3]
    mask = batch.loss_mask.clone()
    mask[0, 0] = torch.inf
    before = model.output.weight.detach().clone()
    report = train_step(model, [dataclasses.replace(batch, loss_mask=mask)], CrossEntropyObjective(), sync, optimizer, lr=0.01)
    assert report.skipped and report.loss != report.loss
    assert torch.equal(model.output.weight, before)


def test_no_micro_batch_is_an_error() -> None:
    model = GPTModel(CONFIG, ProcessGroups.single())
    sync, optimizer = parts(model)
    with pytest.raises(ValueError, match=r"0 micro-batches"):
        train_step(model, [], CrossEntropyObjective(), sync, optimizer, lr=0.01)
    with pytest.raises(ValueError, match=r"0 micro-batches"):
        evaluate(model, [], CrossEntropyObjective())


def test_metrics_must_not_change_between_micro_batches() -> None:
    def fickle(output: ModelOutput, batch: Batch) -> LossReport:
        report = CrossEntropyObjective()(output, batch)
        return dataclasses.replace(report, metrics={f"first {batch.tokens[0, 0]}": report.count})

    model = GPTModel(CONFIG, ProcessGroups.single())
    with pytest.raises(ValueError, match=r"report the same for every micro-batch"):
        evaluate(model, micro_batches(0), fickle)


def check_too_many_metrics() -> None:
    groups = ProcessGroups.build(ParallelPlan(pp=2))
    reports = [LossReport(sum=torch.ones(()), count=torch.ones(()), metrics={f"metric {i}": torch.ones(()) for i in range(65)})]
    if groups.pp.is_last:
        with pytest.raises(ValueError, match=r"65 metrics .* report at most 64"):
            add_up(reports, AuxSums(), groups, torch.device("cpu"))


@pytest.mark.world(2)
def test_more_metrics_than_the_stages_can_exchange_are_an_error(world) -> None:
    world(check_too_many_metrics)


def test_a_batch_of_different_shapes_is_an_error() -> None:
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"loss_mask of shape \(2, 2\) must have the shape of tokens, \(2, 3\)"):
        Batch(tokens=tokens, labels=tokens, loss_mask=torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"must be"):
        Batch(tokens=tokens[0], labels=tokens[0], loss_mask=torch.ones(3))


def test_positions_of_a_batch_travel_with_its_step() -> None:
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    batch = Batch(tokens=tokens, labels=tokens, loss_mask=torch.ones(2, 3))
    assert batch.step().positions.tolist() == [0, 1, 2, 0, 1, 2]
    packed = dataclasses.replace(batch, positions=torch.tensor([[0, 1, 0], [0, 0, 1]]))
    assert packed.step().positions.tolist() == [0, 1, 0, 0, 0, 1]


def test_bounds_on_the_device_are_of_a_fixed_number_of_sequences() -> None:
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    rows = Batch(tokens=tokens, labels=tokens, loss_mask=torch.ones(2, 3))
    batch = dataclasses.replace(rows, cu_seqlens=torch.tensor([0, 2, 3, 6]))
    step = batch.with_device_bounds(5).step()
    assert step.cu_seqlens is not None and step.cu_seqlens.dtype == torch.int32 and step.cu_seqlens.tolist() == [0, 2, 3, 6, 6, 6]
    assert step.max_seqlen == 3 and step.positions.tolist() == batch.step().positions.tolist() == [0, 1, 0, 0, 1, 2]
    with pytest.raises(ValueError, match="3 sequences are packed, more than num_sequences=2; raise it"):
        batch.with_device_bounds(2)
    with pytest.raises(ValueError, match="a sequence of 4 tokens goes over the end of a row of 3"):
        dataclasses.replace(rows, cu_seqlens=torch.tensor([0, 2, 6])).with_device_bounds(2)
    for other in (rows, dataclasses.replace(batch, prefixes=torch.tensor([-1, 0, -1]))):
        with pytest.raises(ValueError, match="of packed sequences \\(cu_seqlens\\) without prefixes"):
            other.with_device_bounds(9)
    with pytest.raises(ValueError, match="max_seqlen=3 is of packed sequences"):
        dataclasses.replace(rows, max_seqlen=3)
    with pytest.raises(ValueError, match="bounds on the device cannot be split over cp=2 ranks"):
        batch.with_device_bounds(5).context_share(SimpleNamespace(size=2, rank=0))  # type: ignore[arg-type]


def check_state() -> list[str]:
    groups = ProcessGroups.build(ParallelPlan(tp=2, dp=2))
    model = GPTModel(CONFIG, groups)
    _, optimizer = parts(model)
    state = {**model_state(model, groups), **optimizer_state(optimizer, groups)}
    for prefix in ("", "optimizer.exp_avg.", "optimizer.exp_avg_sq."):
        qkv, norm = (state[f"{prefix}layers.0.{name}.weight"] for name in ("attention.qkv", "input_norm"))
        assert (qkv.global_shape, qkv.offset, tuple(qkv.data.shape)) == ((2, 16, 16), (groups.tp.rank, 0, 0), (1, 16, 16))
        assert (norm.global_shape, norm.offset) == ((16,), (0,))
        assert qkv.replica == groups.dp.rank
        assert (norm.replica == 0) == (groups.world.rank == 0)
    state["output.weight"].data.fill_(7.0)
    assert model.output.weight.eq(7).all()
    return list(state)


@pytest.mark.world(4)
def test_state_says_where_each_part_lies(world) -> None:
    names = world(check_state)
    assert names[1:] == names[:-1]

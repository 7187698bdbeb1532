# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Every schedule that a run can choose, through the train step: losses, gradients and evaluation are those of one stage."""

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mcore_parallel import ParallelPlan, ProcessGroups, named_shards
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.nn import RecomputeConfig
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_parallel.pipeline import ModelChunks, Overlap, PipelineConfig, ScheduleError
from mcore_parallel.training import Batch, CrossEntropyObjective, Trainer, TrainerConfig, evaluate, train_step

CONFIG = TransformerConfig(
    num_layers=8, hidden_size=8, num_attention_heads=2, num_query_groups=2, ffn_hidden_size=12, vocab_size=16, init_method_std=0.2
)
RATE = 0.02


@dataclass(frozen=True)
class Rate:
    def lr(self, step: int) -> float:
        return RATE


def micro_batches(step: int, count: int, ragged: bool = False) -> list[Batch]:
    """Seeded; the ragged ones have one to three sequences."""
    generator = torch.Generator().manual_seed(100 * count + step)
    found = []
    for number in range(count):
        tokens = torch.randint(0, 16, (1 + number % 3 if ragged else 2, 5), generator=generator)
        mask = (torch.rand(len(tokens), 4, generator=generator) > 0.2).double()
        found.append(Batch(tokens=tokens[:, :-1], labels=tokens[:, 1:], loss_mask=mask))
    return found


@dataclass
class Recorded:
    """Keeps the gradients that an optimizer is given."""

    optimizer: MegatronOptimizer
    sync: DistributedDataParallel
    grads: list[dict[str, Tensor]] = field(default_factory=list)

    def step(self, **arguments: Any) -> Any:
        self.grads.append({name: grad.clone() for name, grad in self.sync.gradients().items()})
        return self.optimizer.step(**arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


@dataclass(frozen=True)
class Curve:
    losses: list[float]
    evaluation: float
    grads: list[dict[str, Tensor]]
    """Of each step, whole or this rank's part."""


def train(
    groups: ProcessGroups,
    pipeline: PipelineConfig,
    count: int,
    ragged: bool = False,
    chunks: int = 1,
    recompute: RecomputeConfig | None = None,
    fusion: bool = False,
    layers: int = CONFIG.num_layers,
    steps: int = 2,
) -> tuple[Curve, nn.Module]:
    config = replace(CONFIG, num_layers=layers)
    parts = pipeline.place(layers, num_stages=groups.pp.size, num_chunks=chunks).of_rank(groups.pp.rank)
    model = ModelChunks([GPTModel(config, groups, layers=part, dtype=torch.float64, recompute=recompute) for part in parts])
    sync = DistributedDataParallel(DistributedDataParallelConfig(gradient_accumulation_fusion=fusion), model, groups)
    optimizer = Recorded(MegatronOptimizer(OptimizerConfig(lr=RATE, clip_grad=0.5, weight_decay=0.1), sync, groups), sync)
    schedule, overlap, losses = pipeline.build(chunks), Overlap() if pipeline.schedule == "combined" else None, []
    for step in range(steps):
        batches = micro_batches(step, count, ragged)
        report = train_step(
            model, batches, CrossEntropyObjective(), sync, optimizer, lr=RATE, groups=groups, pipeline=schedule, overlap=overlap
        )
        losses += [report.loss, report.grad_norm]
    found = evaluate(model, micro_batches(9, count + 1, ragged), CrossEntropyObjective(), groups=groups)
    return Curve(losses, found.mean.item(), optimizer.grads), model


@cache
def serial(count: int, ragged: bool = False, layers: int = CONFIG.num_layers, steps: int = 2) -> Curve:
    return train(ProcessGroups.single(), PipelineConfig(), count, ragged, layers=layers, steps=steps)[0]


def compare(expected: Curve, groups: ProcessGroups, *arguments: Any, **options: Any) -> None:
    ours, model = train(groups, *arguments, **options)
    torch.testing.assert_close([*ours.losses, ours.evaluation], [*expected.losses, expected.evaluation], rtol=1e-10, atol=0)
    shards = {shard.name: shard.spec for shard in named_shards(model)}
    for step, grads in enumerate(ours.grads):
        assert set(shards) == set(grads)
        for name, grad in grads.items():
            wanted = expected.grads[step][name][shards[name].slices(groups)]
            if step == 0 and groups.tp.size == 1:
                assert torch.equal(grad, wanted), name  # later the norm, added up over the stages, rounds otherwise
            torch.testing.assert_close(grad, wanted, rtol=1e-10, atol=1e-13)


# Those of one chunk a stage, and those of two.
SINGLE = [
    PipelineConfig(schedule="1f1b"),
    PipelineConfig(schedule="zero_bubble"),
    PipelineConfig(schedule="combined"),
    PipelineConfig(schedule="combined", delay_weight_grad=True),
]
DOUBLE = [
    PipelineConfig(),
    PipelineConfig(schedule="interleaved", layout="Et|tt||t|t|t|t|tL"),
    PipelineConfig(schedule="combined", delay_weight_grad=True),
]


def check_every_schedule(stages: int, count: int, expected: Curve, layers: int = CONFIG.num_layers, steps: int = 2) -> None:
    groups = ProcessGroups.build(ParallelPlan(pp=stages))
    for pipeline in SINGLE:
        compare(expected, groups, pipeline, count, layers=layers, steps=steps)
    for pipeline in DOUBLE:
        if pipeline.layout is None or stages == 4:
            compare(expected, groups, pipeline, count, chunks=2, layers=layers, steps=steps)


@pytest.mark.journey
@pytest.mark.world(2)
@pytest.mark.parametrize("count", [4, 5])
def test_two_stages_train_as_one_with_every_schedule(world, count: int) -> None:
    world(check_every_schedule, stages=2, count=count, expected=serial(count, layers=4), layers=4)


@pytest.mark.journey
@pytest.mark.world(4)
@pytest.mark.parametrize("count", [pytest.param(4, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow), 7])
def test_four_stages_train_as_one_with_every_schedule(world, count: int) -> None:
    # A step, and the evaluation of what it made; that steps follow one another is shown with two stages.
    world(check_every_schedule, stages=4, count=count, expected=serial(count, steps=1), steps=1)


def check_groups_and_ragged(expected: Curve) -> None:
    groups = ProcessGroups.build(ParallelPlan(pp=2))
    for pipeline, chunks in (
        (PipelineConfig(schedule="interleaved", group_size=5), 2),
        (PipelineConfig(schedule="combined", group_size=4), 2),
        (PipelineConfig(schedule="interleaved", account_for_embedding=True, account_for_loss=True), 3),
        (PipelineConfig(schedule="zero_bubble", num_layers_in_first_stage=6), 1),
    ):
        compare(expected, groups, pipeline, 7, True, chunks=chunks, steps=1)


@pytest.mark.journey
@pytest.mark.world(2)
def test_micro_batches_of_different_shapes_train_as_on_one_stage(world) -> None:
    world(check_groups_and_ragged, expected=serial(7, True, steps=1))


def check_tensor_parallel(sequence_parallel: bool, expected: Curve, twice: Curve) -> None:
    groups = ProcessGroups.build(ParallelPlan(tp=2, pp=2, sequence_parallel=sequence_parallel))
    compare(expected, groups, PipelineConfig(schedule="combined", delay_weight_grad=True), 3, chunks=2, layers=4, steps=1)
    zero_bubble = PipelineConfig(schedule="zero_bubble")
    # What a queue holds and what runs again does not depend on how the activations are cut.
    if sequence_parallel:
        compare(expected, groups, zero_bubble, 3, layers=4, steps=1)
        compare(expected, groups, zero_bubble, 3, layers=4, steps=1, recompute=RecomputeConfig(granularity="full"))
    # The products add to buffers that the step before has filled.
    compare(twice, groups, zero_bubble, 3, layers=4, fusion=True)
    compare(expected, groups, zero_bubble, 3, layers=4, steps=1, recompute=RecomputeConfig(modules=("norm", "mlp")))


@pytest.mark.journey
@pytest.mark.world(4)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_split_backward_trains_as_one_rank_beside_tensor_parallelism(world, sequence_parallel: bool) -> None:
    alone = {steps: serial(3, layers=4, steps=steps) for steps in (1, 2)}
    world(check_tensor_parallel, sequence_parallel=sequence_parallel, expected=alone[1], twice=alone[2])


def check_few_micro_batches() -> list[float]:
    """Fewer micro-batches than stages: an evaluation runs over the chunks, training is refused before anything runs."""
    groups = ProcessGroups.build(ParallelPlan(pp=2))
    layout = PipelineConfig().place(CONFIG.num_layers, num_stages=2, num_chunks=2)
    model = ModelChunks([GPTModel(CONFIG, groups, layers=part, dtype=torch.float64) for part in layout.of_rank(groups.pp.rank)])
    sync = DistributedDataParallel(DistributedDataParallelConfig(), model, groups)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=RATE), sync, groups)
    with pytest.raises(ScheduleError, match="group_size=2 must lie between num_stages=2 and num_microbatches=1; run at least 2"):
        train_step(model, micro_batches(0, 1), CrossEntropyObjective(), sync, optimizer, lr=RATE, groups=groups)
    found = [evaluate(model, micro_batches(9, count, True), CrossEntropyObjective(), groups=groups) for count in (1, 2, 3, 5)]
    assert all(parameter.grad is None for parameter in model.parameters()) and model.training and model[1].training
    return [report.mean.item() for report in found]


@pytest.mark.world(2)
def test_an_evaluation_over_chunks_takes_any_number_of_micro_batches(world) -> None:
    alone = GPTModel(CONFIG, ProcessGroups.single(), dtype=torch.float64)
    expected = [evaluate(alone, micro_batches(9, count, True), CrossEntropyObjective()).mean.item() for count in (1, 2, 3, 5)]
    for found in world(check_few_micro_batches):
        assert found == pytest.approx(expected, rel=1e-12)


def losses_of_trainer(groups: ProcessGroups, pipeline: PipelineConfig, chunks: int) -> list[float]:
    config = replace(CONFIG, num_layers=4)
    layout = pipeline.place(config.num_layers, num_stages=groups.pp.size, num_chunks=chunks)
    model = ModelChunks([GPTModel(config, groups, layers=part, dtype=torch.float64) for part in layout.of_rank(groups.pp.rank)])
    sync = DistributedDataParallel(DistributedDataParallelConfig(), model, groups)
    optimizer, found = MegatronOptimizer(OptimizerConfig(lr=RATE), sync, groups), []

    class Keep:
        def write(self, step: int, values: Any) -> None:
            found.extend([values["loss"], values.get("eval/loss", 0.0)])

        def close(self) -> None: ...

    trainer = Trainer(
        TrainerConfig(steps=4, eval_every=2),
        model,
        sync,
        optimizer,
        CrossEntropyObjective(),
        lambda consumed: [micro_batches(step, 4) for step in range(4)],
        Rate(),
        [Keep()],
        evaluation=lambda: micro_batches(9, 3),
        pipeline=pipeline.build(chunks),
        overlap=Overlap(),
    )
    assert trainer.groups is groups and trainer.run().step == 4
    return found


def check_trainer() -> list[list[float]]:
    groups = ProcessGroups.build(ParallelPlan(pp=2))
    choices = [("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1), ("combined", 2)]
    return [losses_of_trainer(groups, PipelineConfig(schedule=name), chunks) for name, chunks in choices]


@pytest.mark.world(2)
def test_the_trainer_runs_the_schedule_it_is_given(world) -> None:
    expected = losses_of_trainer(ProcessGroups.single(), PipelineConfig(), 1)
    assert expected[-1] < expected[3], "evaluations of the same batches after four steps and two"
    curves, nothing = world(check_trainer)
    assert nothing == [[]] * 4
    for curve in curves:
        assert curve == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"schedule": "gpipe"}, "schedule='gpipe' must be one of auto, 1f1b, interleaved, zero_bubble, combined"),
        ({"delay_weight_grad": True}, "delay_weight_grad=True needs schedule='combined', found 'auto'"),
        ({"schedule": "zero_bubble", "group_size": 4}, "group_size=4 has no meaning for schedule='zero_bubble'"),
        ({"layout": "EtL", "account_for_loss": True}, "layout='EtL' places every layer already"),
        ({"layout": "EtL", "num_layers_in_first_stage": 0}, "layout='EtL' places every layer already"),
    ],
)
def test_fields_that_exclude_one_another_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        PipelineConfig(**fields)


def test_a_schedule_that_does_not_fit_the_plan_is_named() -> None:
    for name in ("1f1b", "zero_bubble"):
        with pytest.raises(ScheduleError, match=f"schedule='{name}' has one chunk a stage, found vpp=2; set vpp=1"):
            PipelineConfig(schedule=name).build(2)
    with pytest.raises(ScheduleError, match="schedule='interleaved' needs vpp of at least 2, found vpp=1"):
        PipelineConfig(schedule="interleaved").build(1)
    with pytest.raises(ScheduleError, match="group_size=4 needs vpp of at least 2"):
        PipelineConfig(schedule="combined", group_size=4).build(1)
    with pytest.raises(ScheduleError, match=r"num_layers=7 are fewer than pp\*vpp=4\*2 virtual stages; lower vpp or pp"):
        PipelineConfig().place(7, num_stages=4, num_chunks=2)
    with pytest.raises(ScheduleError, match=r"layout='Et\|tL' has 1 chunks a stage, but vpp=2; make them equal"):
        PipelineConfig(layout="Et|tL").place(2, num_stages=2, num_chunks=2)
    with pytest.raises(ValueError, match="num_layers_in_first_stage=3 must be a multiple of num_chunks=2"):
        PipelineConfig(num_layers_in_first_stage=3).place(8, num_stages=2, num_chunks=2)

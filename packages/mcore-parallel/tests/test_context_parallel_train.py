# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A model whose sequences are split over ranks trains as one rank does."""

import dataclasses
import functools

import pytest
import torch
from torch import Tensor

from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.context_parallel import context_parallel_attention
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import GPTModel, MixerBuilder, TransformerConfig, self_attention
from mcore_parallel.nn import AttentionCore, RecomputeConfig
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_parallel.training import Batch, CrossEntropyObjective, TensorShard, evaluate, model_state, train_step

CONFIG = TransformerConfig(
    num_layers=2, hidden_size=16, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=24, vocab_size=32, init_method_std=0.3
)
PACKED = (8, 16, 24)


@dataclasses.dataclass(frozen=True)
class Run:
    """Losses and gradient norms of the steps, the loss of an evaluation, gradients of the first step, the parameters."""

    numbers: list[float]
    gradients: dict[str, Tensor]
    parameters: dict[str, TensorShard]


def micro_batches(step: int, packed: bool, count: int = 2) -> list[Batch]:
    """Labels count unevenly over the ranks' shares."""
    generator = torch.Generator().manual_seed(step)
    B, S = (1, sum(PACKED)) if packed else (2, 16)
    tokens = torch.randint(0, 32, (count, B, S + 1), generator=generator)
    mask = (torch.rand(count, B, S, generator=generator) < torch.linspace(0.1, 1.0, S)).double()
    bounds = torch.tensor([0, *PACKED]).cumsum(0) if packed else None
    return [Batch(tokens=x[:, :-1], labels=x[:, 1:], loss_mask=m, cu_seqlens=bounds) for x, m in zip(tokens, mask, strict=True)]


def train(
    groups: ProcessGroups,
    core: AttentionCore | None,
    packed: bool,
    recompute: RecomputeConfig | None = None,
    mixer: MixerBuilder | None = None,
    steps: int = 2,
) -> Run:
    model = GPTModel(CONFIG, groups, attention_core=core, mixer=mixer, recompute=recompute, dtype=torch.float64)
    sync = DistributedDataParallel(DistributedDataParallelConfig(), model, groups)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=1.0, clip_grad=0.5, weight_decay=0.1), sync, groups)
    mine = slice(groups.dp.rank, None, groups.dp.size)
    numbers: list[float] = []
    gradients: dict[str, Tensor] = {}
    for step in range(steps):
        report = train_step(model, micro_batches(step, packed)[mine], CrossEntropyObjective(), sync, optimizer, lr=0.02)
        numbers += [report.loss, report.grad_norm, report.num_tokens]
        gradients = gradients or {name: grad.clone() for name, grad in sync.gradients().items()}
    final = evaluate(model, micro_batches(9, packed)[mine], CrossEntropyObjective())
    return Run([*numbers, float(final.mean)], gradients, model_state(model, groups))


def check_layout(plan: ParallelPlan, expected: dict[bool, Run], names: dict[bool, tuple[str | None, ...]], steps: int = 2) -> None:
    """``names``: the exchanges of rows that are packed, and of those that are not."""
    groups = ProcessGroups.build(plan)
    for packed, wanted in expected.items():
        for name in names[packed]:
            core = None if name is None else context_parallel_attention(groups, name)
            check_equal(train(groups, core, packed, steps=steps), wanted)


def check_equal(found: Run, wanted: Run) -> None:
    torch.testing.assert_close(found.numbers, wanted.numbers, rtol=1e-9, atol=1e-12)
    for key, shard in found.parameters.items():
        part = tuple(slice(begin, begin + size) for begin, size in zip(shard.offset, shard.data.shape, strict=True))
        torch.testing.assert_close(shard.data, wanted.parameters[key].data[part], rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(found.gradients[key], wanted.gradients[key][part], rtol=1e-9, atol=1e-10)


@functools.cache
def serial(steps: int = 2) -> dict[bool, Run]:
    return {packed: train(ProcessGroups.single(), None, packed, steps=steps) for packed in (False, True)}


@pytest.mark.journey
@pytest.mark.world(2)
def test_two_ranks_train_as_one(world) -> None:
    world(
        check_layout,
        plan=ParallelPlan(cp=2),
        expected=serial(),
        names={False: (None, "all_gather", "a2a"), True: ("p2p", "all_gather", "a2a")},
    )


def check_recomputed(expected: Run) -> None:
    """Rings run again in the backward, in the same order on all ranks."""
    groups = ProcessGroups.build(ParallelPlan(cp=2))
    for recompute in (RecomputeConfig(modules=("core_attention",)), RecomputeConfig(granularity="full")):
        found = train(groups, None, False, recompute)
        torch.testing.assert_close(found.numbers, expected.numbers, rtol=1e-9, atol=1e-12)


@pytest.mark.world(2)
def test_a_ring_can_be_recomputed(world) -> None:
    world(check_recomputed, expected=serial()[False])


@pytest.mark.world(4, shared=True)
@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(ParallelPlan(cp=4, hierarchical_cp=(2, 2)), marks=pytest.mark.journey),
        ParallelPlan(tp=2, cp=2, hierarchical_cp=(2, 1)),
        ParallelPlan(tp=2, cp=2, hierarchical_cp=(1, 2), sequence_parallel=False),
        ParallelPlan(cp=2, pp=2, hierarchical_cp=(2, 1)),
        ParallelPlan(cp=2, dp=2, hierarchical_cp=(1, 2)),
    ],
)
def test_four_ranks_train_as_one(world, plan: ParallelPlan) -> None:
    # A step, and the evaluation of what it made; that steps follow one another is shown on two ranks.
    # Beside another axis each exchange sees one kind of rows; the others are shown on two ranks and on four.
    names = {False: ("a2a+p2p",), True: ("p2p",)} if plan.cp == 2 else dict.fromkeys((False, True), ("p2p", "a2a", "a2a+p2p"))
    world(check_layout, plan=plan, expected=serial(1), names=names, steps=1)


def train_with_sinks(groups: ProcessGroups, name: str) -> Run:
    """A window in one layer, and a learnt sink a head in both."""
    core = context_parallel_attention(groups, name, window_size=[(3, 0), None])
    return train(groups, None, True, mixer=self_attention(core, softmax_type="learnable"), steps=1)


def check_sinks(plan: ParallelPlan, expected: Run) -> None:
    groups = ProcessGroups.build(plan)
    for name in ("p2p", "a2a"):
        check_equal(train_with_sinks(groups, name), expected)


@pytest.mark.world(4, shared=True)
@pytest.mark.parametrize("plan", [ParallelPlan(cp=4), ParallelPlan(tp=2, cp=2)])
def test_learnt_sinks_train_as_on_one_rank(world, plan: ParallelPlan) -> None:
    expected = train_with_sinks(ProcessGroups.single(), "p2p")
    assert expected.gradients["layers.1.attention.softmax_offset"].abs().min() > 0
    world(check_sinks, plan=plan, expected=expected)


def test_an_unknown_softmax_is_refused() -> None:
    with pytest.raises(ValueError, match=r"softmax_type='off-by-one' must be .*choice of the core"):
        GPTModel(
            CONFIG,
            ProcessGroups.single(),
            mixer=self_attention(context_parallel_attention(ProcessGroups.single()), softmax_type="off-by-one"),
        )

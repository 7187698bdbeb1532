# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""With products in blocks a model gives the same bits for every tp."""

import dataclasses
import functools

import pytest
import torch
from torch import Tensor

from mcore_parallel import Group, ParallelPlan, ProcessGroups, named_shards
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.nn import Step
from mcore_parallel.tensor_parallel import (
    ColumnParallelLinear,
    InvariantProducts,
    RowParallelLinear,
    make_tp_invariant,
    vocab_parallel_cross_entropy,
)
from mcore_parallel.tensor_parallel._invariant import invariant_cross_entropy

# A block of queries, keys and values is 32 channels wide, as is one of the feed-forward's gates.
CONFIG = TransformerConfig(
    num_layers=2, hidden_size=24, num_attention_heads=8, num_query_groups=4, kv_channels=8, ffn_hidden_size=128, vocab_size=60,
    add_bias_linear=True, add_qkv_bias=True, init_method_std=0.3,
)  # fmt: skip
TIED = dataclasses.replace(CONFIG, share_embeddings_and_output_weights=True)


def results(groups: ProcessGroups, config: TransformerConfig, dtype: torch.dtype, blocks: int | None, fusion: bool) -> dict[str, Tensor]:
    """Loss, last hidden states, and main gradients after two micro-batches."""
    model = GPTModel(config, groups, unpadded_vocab_size=57, dtype=dtype, seed=3)
    if blocks is not None:
        make_tp_invariant(model, blocks)
    sync = DistributedDataParallel(DistributedDataParallelConfig(gradient_accumulation_fusion=fusion), model, groups)
    generator = torch.Generator().manual_seed(1)
    found = {}
    for _ in range(2):
        tokens = torch.randint(57, (14,), generator=generator)
        output = sync(tokens, Step.causal(2, 7))[0]
        found["loss"] = output.loss_sum(tokens.roll(-1).index_fill(0, torch.tensor([6]), -1), torch.rand(14, generator=generator))
        found["loss"].backward()
    sync.finish_grad_sync()
    return {"hidden": output.hidden, **found, **sync.gradients()} | {"log_probs": output.log_probs(tokens, 0.7)}


def check_bits(config: TransformerConfig, dtype: torch.dtype, expected: dict[str, Tensor]) -> bool:
    """Whether this layout has the bits of ``expected``; and whether the plain products have them, too."""
    tp = torch.distributed.get_world_size()
    groups = ProcessGroups.build(ParallelPlan(tp=tp, sequence_parallel=False))
    shards = {shard.name: shard.spec.slices(groups) for shard in named_shards(GPTModel(config, groups, seed=None))}
    for name, found in results(groups, config, dtype, 4, fusion=True).items():
        assert torch.equal(found, expected[name][shards.get(name, ())]), name
    plain = results(groups, config, dtype, None, fusion=True)
    return all(torch.equal(found, expected[name][shards.get(name, ())]) for name, found in plain.items())


@functools.cache
def alone(tied: bool, dtype: torch.dtype) -> dict[str, Tensor]:
    # The two gradients of a tied table are rounded together first when both go through autograd.
    found = results(ProcessGroups.single(), TIED if tied else CONFIG, dtype, 4, fusion=tied)
    return {name: value.detach() for name, value in found.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.world(2)), pytest.param(4, marks=pytest.mark.world(4))])
def test_every_tp_gives_the_bits_of_one_rank(world, ranks: int, tied: bool, dtype: torch.dtype) -> None:
    same = world(check_bits, config=TIED if tied else CONFIG, dtype=dtype, expected=alone(tied, dtype))
    assert not any(same), "plain products have these bits too, so this test shows nothing"


def test_blocks_change_rounding_only() -> None:
    single = ProcessGroups.single()
    plain, blocked = (results(single, CONFIG, torch.float64, blocks, fusion=False) for blocks in (None, 2))
    for name, value in plain.items():
        torch.testing.assert_close(blocked[name], value, rtol=1e-10, atol=1e-12)


def test_the_cross_entropy_in_blocks_is_differentiable() -> None:
    torch.manual_seed(0)
    logits, target = torch.randn(5, 12, dtype=torch.float64, requires_grad=True), torch.tensor([0, 3, -100, 9, 4])
    alone = Group.single()
    expected = vocab_parallel_cross_entropy(logits, target, group=alone, vocab_size=10)
    torch.testing.assert_close(invariant_cross_entropy(logits, target, alone, 4, 10), expected, rtol=1e-12, atol=1e-13)
    assert torch.autograd.gradcheck(lambda x: invariant_cross_entropy(x, target, alone, 4, 10), logits)


def with_tp(tp: int, *, sequence_parallel: bool = False) -> ProcessGroups:
    plan = ParallelPlan(tp=tp, sequence_parallel=sequence_parallel)
    return dataclasses.replace(ProcessGroups.single(), plan=plan, tp=Group(tuple(range(tp)), 0))


@pytest.mark.parametrize(
    ("layer", "blocks", "message"),
    [
        (lambda: ColumnParallelLinear(4, 6, with_tp(1)), 4, r"blocks=4 must divide dim 0 of .*weight \(6, 4\)"),
        (lambda: RowParallelLinear(12, 6, with_tp(3)), 4, "tp=3 must divide blocks=4"),
        (lambda: RowParallelLinear(12, 6, with_tp(2, sequence_parallel=True)), 4, "sequence_parallel=True"),
        (
            lambda: RowParallelLinear(12, 6, with_tp(1), products=InvariantProducts(2, (6,), 1, Group.single())),
            4,
            "InvariantProducts computes its products",
        ),
    ],
)
def test_what_cannot_be_cut_into_blocks_is_named(layer, blocks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_tp_invariant(layer(), blocks)


def test_norms_of_the_heads_of_a_rank_are_refused() -> None:
    model = GPTModel(dataclasses.replace(CONFIG, qk_layernorm=True), ProcessGroups.single(), seed=None)
    with pytest.raises(ValueError, match=r"gradient of layers.0.attention.[qk]_norm.weight is a sum"):
        make_tp_invariant(model, 4)
    assert model.output is not None and model.output.products is None, "nothing has changed"

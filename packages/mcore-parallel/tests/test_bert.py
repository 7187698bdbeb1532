# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""BERT in every layout, its heads, token types and padding."""

import dataclasses
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.models import BertModel, BertOutput, TransformerConfig
from mcore_parallel.nn import Step
from mcore_parallel.pipeline import PipelineLayout
from mcore_parallel.training import Batch, BertObjective
from tests.support.layouts import Curve, check_curve, train_in

B, S, V = 2, 6, 16
PUBLISHED = TransformerConfig(
    num_layers=4, hidden_size=8, num_attention_heads=2, ffn_hidden_size=12, vocab_size=V, normalization="LayerNorm", post_norm=True,
    add_bias_linear=True, add_qkv_bias=True, activation="gelu", position_embedding_type="learned_absolute", max_position_embeddings=S,
    share_embeddings_and_output_weights=True, init_method_std=0.3,
)  # fmt: skip
ROTARY = dataclasses.replace(
    PUBLISHED, post_norm=False, position_embedding_type="rope", max_position_embeddings=None, share_embeddings_and_output_weights=False
)
CONFIGS = {"published": PUBLISHED, "rotary": ROTARY}


def batch(seed: int) -> Batch:
    """Two sentences a row, some tokens masked, the last ones of the first row padding."""
    source = torch.Generator().manual_seed(seed)
    tokens, labels = torch.randint(1, V, (2, B, S), generator=source)
    padding = torch.zeros(B, 1, 1, S, dtype=torch.bool)
    padding[0, ..., -2:] = True
    mask = (torch.rand(B, S, generator=source) < 0.5).double()
    mask[0, -2:], mask[1, 0] = 0.0, 1.0
    extras = {
        "token_types": (torch.arange(S) >= 3).long().repeat(B, 1), "attention_mask": padding,
        "is_random": torch.randint(0, 2, (B,), generator=source),
    }  # fmt: skip
    return Batch(tokens=tokens, labels=labels, loss_mask=mask, extras=extras)


def batches() -> list[list[Batch]]:
    return [[batch(micro) for micro in range(2)]]


def build(groups: ProcessGroups, config: TransformerConfig, **options: Any) -> BertModel:
    return BertModel(config, groups, dtype=torch.float64, **options)


def curve(groups: ProcessGroups, name: str, layout: PipelineLayout, **sync_options: Any) -> Curve:
    return train_in(groups, layout, functools.partial(build, config=CONFIGS[name]), batches(), BertObjective(), **sync_options)


@functools.cache
def serial(name: str) -> Curve:
    return curve(ProcessGroups.single(), name, PipelineLayout.even(4, num_stages=1))


def check(degrees: dict[str, Any], expected: dict[str, Curve]) -> None:
    plan = ParallelPlan(**degrees)
    groups = ProcessGroups.build(plan)
    layout = PipelineLayout.even(4, num_stages=plan.pp, num_chunks=plan.vpp)
    for name, whole in expected.items():
        check_curve(curve(groups, name, layout), whole)


@pytest.mark.world(2, shared=True)
@pytest.mark.parametrize("degrees", [{"tp": 2}, {"tp": 2, "sequence_parallel": False}, {"pp": 2}, {"pp": 2, "vpp": 2}, {"dp": 2}], ids=str)
def test_two_ranks_train_as_one(world: Any, degrees: dict[str, Any]) -> None:
    world(check, degrees=degrees, expected={name: serial(name) for name in CONFIGS})


@pytest.mark.world(4)
def test_four_ranks_of_two_axes_and_virtual_stages_train_as_one(world: Any) -> None:
    world(check, degrees={"tp": 2, "pp": 2, "vpp": 2}, expected={name: serial(name) for name in CONFIGS})


def output_of(model: BertModel, step: Step, tokens: torch.Tensor) -> BertOutput:
    output, aux = model(tokens, step)
    assert isinstance(output, BertOutput) and aux is None
    return output


@pytest.fixture
def model() -> BertModel:
    return build(ProcessGroups.single(), PUBLISHED)


def test_every_token_sees_those_behind_it_and_none_of_the_padding(model: BertModel) -> None:
    given = batch(0)
    output = output_of(model, given.step(), given.tokens.flatten())
    assert output.pooled is not None
    changed = given.tokens.clone()
    changed[0, -1] = 0
    padded = output_of(model, given.step(), changed.flatten())
    assert torch.equal(padded.sequence[: S - 2], output.sequence[: S - 2])
    assert torch.equal(padded.pooled, output.pooled)
    changed[1, -1] = 0
    seen = output_of(model, given.step(), changed.flatten())
    assert not torch.isclose(seen.sequence[S], output.sequence[S]).any()


def test_packed_sequences_are_masked_padding(model: BertModel) -> None:
    given = batch(0)
    packed = dataclasses.replace(given.step(), attention=None, cu_seqlens=torch.tensor([0, S - 2, S, 2 * S]))
    real = [*range(S - 2), *range(S, 2 * S)]
    found, masked = (output_of(model, step, given.tokens.flatten()).logits()[real] for step in (packed, given.step()))
    torch.testing.assert_close(found, masked, rtol=1e-10, atol=1e-10)


def test_token_types_are_added_to_the_embeddings(model: BertModel) -> None:
    given = batch(0)
    types = given.extras["token_types"].flatten()
    bare = output_of(model, dataclasses.replace(given.step(), token_types=None), given.tokens.flatten())
    first = output_of(model, dataclasses.replace(given.step(), token_types=torch.zeros_like(types)), given.tokens.flatten())
    assert torch.equal(bare.sequence, first.sequence)
    shifted = output_of(model, dataclasses.replace(given.step(), token_types=1 - types), given.tokens.flatten())
    assert not torch.isclose(shifted.sequence, output_of(model, given.step(), given.tokens.flatten()).sequence).any()


def test_both_losses_are_those_of_the_logits(model: BertModel) -> None:
    given = batch(0)
    output = output_of(model, given.step(), given.tokens.flatten())
    pairs, chosen = given.extras["is_random"], given.loss_mask.flatten().bool()
    words = F.cross_entropy(output.logits()[chosen], given.labels.flatten()[chosen])
    assert output.binary_logits is not None
    sentences = F.cross_entropy(output.binary_logits, pairs)
    report = BertObjective()(output, given)
    torch.testing.assert_close(report.mean, words + sentences)
    torch.testing.assert_close(report.metrics["lm_loss"] / report.count, words.detach())
    torch.testing.assert_close(report.metrics["sentence_loss"] / report.counts["sentence_loss"], sentences.detach())
    alone = BertObjective()(output, dataclasses.replace(given, extras={}))
    torch.testing.assert_close(alone.mean, words)


def test_without_the_sentence_head_its_loss_is_an_error() -> None:
    given = batch(0)
    model = build(ProcessGroups.single(), PUBLISHED, add_binary_head=False, num_token_types=0)
    assert not any(name.startswith(("pooler", "binary_head", "token_type")) for name, _ in model.named_parameters())
    output = output_of(model, given.step(), given.tokens.flatten())
    with pytest.raises(ValueError, match="add_binary_head=False"):
        BertObjective()(output, given)


def test_what_bert_cannot_be_is_an_error() -> None:
    single = ProcessGroups.single()
    with pytest.raises(ValueError, match="mtp_num_layers=1 predicts later tokens"):
        BertModel(dataclasses.replace(PUBLISHED, mtp_num_layers=1), single)
    with pytest.raises(ValueError, match="num_token_types=-1"):
        BertModel(PUBLISHED, single, num_token_types=-1)
    with pytest.raises(ValueError, match=r"hybrid_layer_pattern='\*-\*-' is not for BertModel"):
        BertModel(dataclasses.replace(PUBLISHED, hybrid_layer_pattern="*-*-"), single)
    wrong = dataclasses.replace(batch(0).step(), attention=torch.zeros(B, S, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"attention_mask is torch.bool of shape \(2, 6\)"):
        build(single, PUBLISHED)(batch(0).tokens.flatten(), wrong)

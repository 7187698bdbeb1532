# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""T5: its samples, its masks, ten steps of training, and the same in every layout."""

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.data import DataError, SpanCorruptionConfig, SpanCorruptionDataset
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import T5Model, TransformerConfig
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_parallel.pipeline import PipelineLayout
from mcore_parallel.training import Batch, CrossEntropyObjective, train_step
from tests.support.journeys import TWO_RANKS
from tests.support.layouts import Curve, check_curve, train_in

S, R, V = 16, 12, 24
BOS, EOS, PAD = 20, 21, 22
SPANS = SpanCorruptionConfig(
    sentinels=(23, 19, 18), bos_token=BOS, eos_token=EOS, pad_token=PAD, decoder_length=R, probability=0.3, max_ngram=3
)
ROTARY = TransformerConfig(
    num_layers=2, hidden_size=16, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=24, vocab_size=V, init_method_std=0.2
)
LEARNED = dataclasses.replace(
    ROTARY, position_embedding_type="learned_absolute", max_position_embeddings=S, share_embeddings_and_output_weights=True,
    normalization="LayerNorm", activation="gelu", add_bias_linear=True, add_qkv_bias=True,
)  # fmt: skip
CONFIGS = {"rotary": ROTARY, "learned": LEARNED}


class Counting:
    """Texts that count upwards, of which some end early."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, idx: int, /) -> dict[str, Tensor]:
        tokens, mask = (torch.arange(S) + idx) % 17, torch.ones(S)
        if idx % 2:
            tokens[-4:], mask[-4:] = PAD, 0.0
        return {"tokens": tokens, "labels": tokens, "loss_mask": mask}


@functools.cache
def samples() -> SpanCorruptionDataset:
    return SpanCorruptionDataset(Counting(), SPANS, vocab_size=17, seed=3)


def batch(first: int, dtype: torch.dtype = torch.float64) -> Batch:
    rows = [samples()[(first + row) % 40] for row in range(4)]
    of = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    extras = {name: of[name] for name in ("encoder_tokens", "encoder_mask", "attention_mask")}
    return Batch(tokens=of["tokens"], labels=of["labels"], loss_mask=of["loss_mask"].to(dtype), extras=extras)


def test_spans_go_from_the_encoder_to_the_decoder_and_nothing_is_lost() -> None:
    for number in range(40):
        sample, text = samples()[number], Counting()[number]["tokens"].tolist()[: 12 if number % 2 else 16]
        used = int(sample["loss_mask"].sum())
        tokens, labels = sample["tokens"].tolist(), sample["labels"].tolist()
        assert tokens[0] == BOS and labels[used - 1] == EOS and tokens[1:used] == labels[: used - 1]
        assert set(tokens[used:] + labels[used:]) <= {PAD}
        spans: dict[int, list[int]] = {}
        for token in labels[: used - 1]:
            if token in SPANS.sentinels:
                spans[token] = []
            else:
                spans[next(reversed(spans))].append(token)
        assert list(spans) == list(SPANS.sentinels[: len(spans)]) and spans
        shown = sample["encoder_tokens"][~sample["encoder_mask"][0, 0]].tolist()
        assert [token for one in shown for token in spans.get(one, [one])] == text
        assert sample["attention_mask"].shape == (1, 1, R) and (~sample["attention_mask"]).sum() == used


def test_the_choice_follows_from_seed_and_number_and_bad_settings_are_named() -> None:
    again = SpanCorruptionDataset(Counting(), SPANS, vocab_size=17, seed=3)
    other = SpanCorruptionDataset(Counting(), SPANS, vocab_size=17, seed=4)
    assert all(torch.equal(samples()[5][name], again[5][name]) for name in again[5])
    assert any(not torch.equal(samples()[n]["labels"], other[n]["labels"]) for n in range(5))
    fixed = SpanCorruptionDataset(Counting(), dataclasses.replace(SPANS, decoder_length=3), vocab_size=17, seed=3, special_tokens=[3])
    assert all(fixed[n]["loss_mask"].sum() == 3 for n in range(10))
    assert not any((fixed[n]["labels"] == 3).any() for n in range(40))
    for change, message in (
        ({"sentinels": (1, 1)}, "must be distinct ids"),
        ({"decoder_length": 2}, "decoder_length=2 must be at least 3"),
        ({"probability": 1.0}, "probability=1.0 must lie in"),
        ({"max_ngram": 0}, "max_ngram=0 must be at least 1"),
    ):
        with pytest.raises(DataError, match=message):
            dataclasses.replace(SPANS, **change)


def test_it_learns_in_ten_steps() -> None:
    groups = ProcessGroups.single()
    model = T5Model(ROTARY, groups, seed=1)
    sync = DistributedDataParallel(DistributedDataParallelConfig(), model, groups)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=2e-2), sync, groups)
    losses = [
        train_step(model, [batch(4 * number, torch.float32)], CrossEntropyObjective(), sync, optimizer, lr=2e-2).loss
        for number in range(10)
    ]
    assert losses[-1] < 0.85 * losses[0]


def logits(model: T5Model, one: Batch) -> Tensor:
    return model(one.tokens.flatten(), one.step())[0].logits().view(4, R, -1)


@pytest.mark.parametrize("name", CONFIGS)
def test_masks_hide_padding_and_later_tokens_only(name: str) -> None:
    model, one = T5Model(CONFIGS[name], ProcessGroups.single(), dtype=torch.float64), batch(0)
    whole = logits(model, one)
    padding = one.extras["encoder_mask"][:, 0, 0]
    assert padding.any() and not padding.all()
    hidden = {**one.extras, "encoder_tokens": one.extras["encoder_tokens"].masked_fill(padding, 1)}
    torch.testing.assert_close(logits(model, dataclasses.replace(one, extras=hidden)), whole, rtol=1e-12, atol=1e-12)
    later = one.tokens.clone()
    later[:, 5] = (later[:, 5] + 1) % 17
    changed = logits(model, dataclasses.replace(one, tokens=later))
    torch.testing.assert_close(changed[:, :5], whole[:, :5], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(changed[:, 5], whole[:, 5])
    text = one.extras["encoder_tokens"].clone()
    text[:, 0] = (text[:, 0] + 1) % 17
    assert not torch.allclose(logits(model, dataclasses.replace(one, extras={**one.extras, "encoder_tokens": text}))[:, 0], whole[:, 0])


def build(groups: ProcessGroups, config: TransformerConfig, layers: Any) -> T5Model:
    return T5Model(config, groups, encoder_layers=1, dtype=torch.float64)


def curve(groups: ProcessGroups, name: str) -> Curve:
    batches = [[batch(8 * step), batch(8 * step + 4)] for step in range(2)]
    layout = PipelineLayout.even(2, num_stages=1)
    return train_in(groups, layout, functools.partial(build, config=CONFIGS[name]), batches, CrossEntropyObjective())


def check(degrees: dict[str, Any], expected: dict[str, Curve]) -> None:
    groups = ProcessGroups.build(ParallelPlan(**degrees))
    for name, whole in expected.items():
        check_curve(curve(groups, name), whole)


@pytest.mark.world(2)
@pytest.mark.parametrize("degrees", TWO_RANKS, ids=str)
def test_two_ranks_train_as_one(world: Any, degrees: dict[str, Any]) -> None:
    world(check, degrees=degrees, expected={name: curve(ProcessGroups.single(), name) for name in CONFIGS})


def check_refused(degrees: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        T5Model(ROTARY, ProcessGroups.build(ParallelPlan(**degrees)))


@pytest.mark.world(2)
@pytest.mark.parametrize("axis", ["pp", "cp"])
def test_layouts_that_it_cannot_have_are_refused(world: Any, axis: str) -> None:
    world(check_refused, degrees={axis: 2}, message=f"{axis}=2 is not for T5Model")


def test_choices_that_it_has_no_place_for_are_refused() -> None:
    groups = ProcessGroups.single()
    with pytest.raises(ValueError, match="post_norm=True is not for T5Model"):
        T5Model(dataclasses.replace(LEARNED, post_norm=True), groups)
    with pytest.raises(ValueError, match="encoder_layers=0 must be at least 1"):
        T5Model(ROTARY, groups, encoder_layers=0)
    one = batch(0)
    with pytest.raises(ValueError, match="the step has no encoder_tokens"):
        T5Model(ROTARY, groups)(one.tokens.flatten(), dataclasses.replace(one, extras={}).step())

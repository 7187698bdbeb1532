# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Pairs of stretches, and what a BERT is trained on."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mcore_parallel import ProcessGroups
from mcore_parallel.data import (
    BlendedMegatronDatasetBuilder,
    DataError,
    IndexedDatasetBuilder,
    MaskedTokensConfig,
    MaskedTokensDataset,
    PretrainingSampler,
    SentencePairConfig,
    SentencePairDataset,
    batches,
)
from mcore_parallel.models import BertModel, TransformerConfig
from mcore_parallel.training import Batch, BertObjective

S, V, CLS, SEP, MASK, PAD, STOP = 16, 60, 60, 61, 62, 63, 9
LENGTHS = [1, 2, 13, 14, 40, 0, 5]


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    source = np.random.default_rng(0)
    with IndexedDatasetBuilder(tmp_path / "c.bin", dtype="u2") as builder:
        for length in LENGTHS:
            builder.add_document(source.integers(0, V, length), [length])
        builder.finalize()
    return str(tmp_path / "c")


def build(corpus: str, num_samples: int | None = None, **options: Any) -> SentencePairDataset:
    fields: dict[str, Any] = {"random_seed": 1, "sequence_length": S, "cls_token": CLS, "sep_token": SEP, "pad_token": PAD, **options}
    config = SentencePairConfig(blend=([corpus], None), split="1", **fields)
    return BlendedMegatronDatasetBuilder(SentencePairDataset, [num_samples, None, None], lambda: True, config).build()[0]


def stretches(sample: dict[str, torch.Tensor]) -> tuple[list[int], list[int]]:
    """The two of a sample, in the order of the document."""
    ids = sample["tokens"].tolist()
    assert ids[0] == CLS and ids.count(SEP) == 2
    middle, end = (place for place, token in enumerate(ids) if token == SEP)
    assert ids[end + 1 :] == [PAD] * (S - end - 1)
    assert sample["token_types"].tolist() == [0] * (middle + 1) + [1] * (end - middle) + [0] * (S - end - 1)
    assert sample["loss_mask"].tolist() == [float(token < V) for token in ids]
    assert sample["attention_mask"].tolist() == [[[place > end for place in range(S)]]]
    pair = ids[1:middle], ids[middle + 1 : end]
    return pair[::-1] if sample["is_random"] else pair


def test_an_epoch_holds_every_token_of_documents_of_two_and_more(corpus: str) -> None:
    dataset = build(corpus, short_share=0.0)
    found = [stretches(dataset[number]) for number in range(len(dataset))]
    assert all(first and second for first, second in found)
    texts = {row: first + second for (first, second), row in zip(found, map(tuple, dataset.sample_index.tolist()), strict=True)}
    for document, length in enumerate(LENGTHS):
        joined = [token for row in sorted(texts) if row[0] == document for token in texts[row]]
        assert joined == (dataset.dataset[document].tolist() if length > 1 else [])
    assert 0 < sum(int(dataset[number]["is_random"]) for number in range(len(dataset))) < len(dataset)


def test_half_are_swapped_and_cuts_fall_behind_sentence_ends(corpus: str) -> None:
    dataset = build(corpus, 600, sentence_ends=(STOP, 10, 11, 12, 13), short_share=0.3)
    assert len(dataset) >= 600
    swapped = lengths = behind = possible = 0
    for number in range(len(dataset)):
        first, second = stretches(dataset[number])
        swapped += int(dataset[number]["is_random"])
        lengths += len(first) + len(second)
        text = first + second
        if any(STOP <= token <= 13 for token in text[:-1]):
            possible += 1
            behind += STOP <= first[-1] <= 13
    assert abs(swapped / len(dataset) - 0.5) < 0.06
    assert behind == possible > 100
    assert lengths < 0.95 * dataset.sample_index[:, 2].sum()


def test_a_sample_follows_from_seed_and_number(corpus: str) -> None:
    one, again, other = build(corpus, 50), build(corpus, 50), build(corpus, 50, random_seed=2)
    for number in (0, 7, 49, -1):
        assert all(torch.equal(one[number][name], again[number][name]) for name in one[number])
    assert any(not torch.equal(one[number]["tokens"], other[number]["tokens"]) for number in range(50))
    assert torch.equal(one[-1]["tokens"], one[len(one) - 1]["tokens"])
    with pytest.raises(IndexError):
        one[len(one)]


def test_a_model_learns_hidden_tokens_and_the_order(corpus: str) -> None:
    masked = MaskedTokensConfig(mask_token=MASK, max_ngram=3)
    pairs = MaskedTokensDataset(build(corpus, 40), masked, vocab_size=V, seed=1, special_tokens=[CLS, SEP, PAD])
    sampler = PretrainingSampler(len(pairs), consumed=0, micro_batch_size=4, dp_rank=0, dp_size=1, global_batch=4)
    row = next(batches(pairs, sampler))
    extras = {name: row[name] for name in ("token_types", "attention_mask", "is_random")}
    batch = Batch(tokens=row["tokens"], labels=row["labels"], loss_mask=row["loss_mask"], extras=extras)
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=V + 4)
    model = BertModel(config, ProcessGroups.single())
    output, _ = model(batch.tokens.flatten(), batch.step())
    report = BertObjective()(output, batch)
    assert set(report.metrics) == {"lm_loss", "sentence_loss"} and torch.isfinite(report.sum)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequence_length": 5}, "sequence_length=5 must be at least 6"),
        ({"sep_token": -1}, "sep_token=-1 must not be negative"),
        ({"short_share": 1.5}, r"short_share=1.5 must lie in \[0, 1\]"),
    ],
)
def test_fields_out_of_range_are_errors(corpus: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        build(corpus, **changes)


def test_documents_without_pairs_are_an_error(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "c.bin", dtype="u2") as builder:
        builder.add_document([1], [1])
        builder.finalize()
    with pytest.raises(DataError, match="none of the 1 documents of this split has two tokens"):
        build(str(tmp_path / "c"))

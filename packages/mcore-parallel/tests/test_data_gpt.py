# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""GPTDataset against a walk in plain Python, its cache, and its masks."""

import itertools
import os
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from mcore_parallel.data import DataError, GPTDataset, GPTDatasetConfig, IndexedDataset, IndexedDatasetBuilder, Split

EOD = 99


class Words:
    """Ids below 100, eod 99."""

    vocab_size = 100
    eod = EOD
    unique_identifiers = {"class": "Words"}  # noqa: RUF012

    def __init__(self, pad=None):
        self.pad = pad


def write_corpus(prefix, lengths, seed=0):
    generator = np.random.default_rng(seed)
    with IndexedDatasetBuilder(f"{prefix}.bin", dtype="u2") as builder:
        for length in lengths:
            tokens = generator.integers(0, 98, length)
            tokens[-1:] = EOD
            builder.add_document(tokens, [length])
        builder.finalize()
    return IndexedDataset(prefix)


def make(corpus, *, seq_len=8, num_samples=None, split=Split.train, documents=None, cache=None, seed=1, **options):
    config = GPTDatasetConfig(random_seed=seed, sequence_length=seq_len, path_to_cache=cache, **{"tokenizer": Words(), **options})
    chosen = np.arange(len(corpus)) if documents is None else documents
    return GPTDataset(corpus, None, chosen, num_samples, split, config)


def oracle(lengths, documents, num_samples, seq_len, extra, seed, drop_last):
    """Document, sample and shuffle index by walking token counts one document at a time."""
    per_epoch = sum(int(lengths[document]) for document in documents)
    epochs = 1
    while num_samples is not None and epochs * per_epoch < num_samples * seq_len + extra:
        epochs += 1
    apart = False
    before = 0
    if epochs > 1:
        before = ((epochs - 1) * per_epoch - extra) // seq_len
        apart = num_samples - before < int(0.80 * ((per_epoch - extra) // seq_len))
    generator = np.random.RandomState(seed)
    order = []
    for count in [epochs - 1, 1] if apart else [epochs]:
        part = np.array(list(documents) * count, dtype=np.int32)
        generator.shuffle(part)
        order += part.tolist()
    available = epochs * per_epoch - extra
    total = available // seq_len if drop_last else -(-available // seq_len)
    rows, position, offset = [(0, 0)], 0, 0
    for _ in range(total):
        remaining = seq_len + extra
        while True:
            tail = int(lengths[order[position]]) - offset
            remaining -= tail
            if remaining <= 0:
                offset += remaining + tail - extra
                break
            if position + 1 == len(order):
                while not lengths[order[position]]:  # the end lies in the last document that has tokens
                    position -= 1
                offset = int(lengths[order[position]]) - extra
                break
            position, offset = position + 1, 0
        rows.append((position, offset))
    shuffle = []
    for start, stop in [(0, before), (before, total)] if apart else [(0, total)]:
        part = np.arange(start, stop)
        generator.shuffle(part)
        shuffle += part.tolist()
    return order, rows, shuffle


def test_indices_equal_the_walk_over_random_corpora(tmp_path):
    generator = np.random.default_rng(3)
    compared = 0
    for trial in range(120):
        lengths = generator.integers(int(generator.integers(0, 2)), int(generator.integers(2, 30)), int(generator.integers(1, 30)))
        corpus = write_corpus(tmp_path / f"c{trial}", lengths)
        documents = np.arange(int(generator.integers(0, len(lengths))), len(lengths))
        seq_len, extra, drop_last = int(generator.integers(1, 20)), bool(generator.integers(0, 2)), bool(generator.integers(0, 2))
        num_samples = [None, 1, 7, 100][int(generator.integers(0, 4))]
        split = Split.valid if not drop_last else Split.train
        if int(lengths[documents].sum()) < seq_len + extra:
            continue
        dataset = make(
            corpus,
            seq_len=seq_len,
            num_samples=num_samples,
            documents=documents,
            split=split,
            seed=trial,
            add_extra_token_to_sequence=extra,
            drop_last_partial_validation_sequence=drop_last,
        )
        order, rows, shuffle = oracle(lengths, documents.tolist(), num_samples, seq_len, int(extra), trial, drop_last)
        assert dataset.document_index.tolist() == order
        assert [tuple(row) for row in dataset.sample_index.tolist()] == rows
        assert dataset.shuffle_index.tolist() == shuffle
        assert (dataset.document_index.dtype, dataset.sample_index.dtype, dataset.shuffle_index.dtype) == (np.int32, np.int32, np.uint32)
        stream = np.concatenate([corpus[document] for document in order]).tolist()
        for idx in range(len(dataset)):
            start = shuffle[idx] * seq_len
            expected = stream[start : start + seq_len]
            sample = dataset[idx]
            assert sample["tokens"].tolist() == expected + [0] * (seq_len - len(expected))
            known = stream[start + 1 : start + seq_len + extra]
            assert sample["labels"].tolist() == known + [0] * (seq_len - len(known))
            assert sample["loss_mask"].tolist() == [1.0] * len(known) + [0.0] * (seq_len - len(known))
        compared += 1
    assert compared > 80


def test_orders_are_the_golden_ones(tmp_path):
    corpus = write_corpus(tmp_path / "c", [5, 9, 2, 7, 4, 6])
    dataset = make(corpus, seq_len=6, num_samples=9, seed=1234)
    assert dataset.document_index.tolist() == GOLDEN["documents"]
    assert dataset.sample_index.tolist() == GOLDEN["samples"]
    assert dataset.shuffle_index.tolist() == GOLDEN["shuffle"]


# From Megatron's published dataset code on the same lengths, seed and sequence length.
GOLDEN = {
    "documents": [1, 2, 5, 2, 3, 4, 1, 0, 4, 5, 0, 3],
    "samples": [[0, 0], [0, 6], [2, 1], [3, 1], [4, 5], [6, 0], [6, 6], [7, 3], [9, 0], [10, 0], [11, 1]],
    "shuffle": [3, 9, 2, 1, 7, 5, 4, 0, 8, 6],
}


def test_each_token_is_used_once_an_epoch(tmp_path):
    corpus = write_corpus(tmp_path / "c", [13, 1, 0, 40, 7, 22])
    dataset = make(corpus, seq_len=5, num_samples=None, add_extra_token_to_sequence=False)
    seen = Counter(itertools.chain.from_iterable(dataset[idx]["tokens"].tolist() for idx in range(len(dataset))))
    stream = Counter(itertools.chain.from_iterable(part.tolist() for part in corpus[:]))
    assert sum(seen.values()) == 80  # 83 tokens, 3 are a tail
    assert not seen - stream


@pytest.mark.parametrize("split", [Split.train, Split.valid, Split.test])
def test_train_always_drops_the_partial_sample(tmp_path, split):
    corpus = write_corpus(tmp_path / "c", [10])
    dataset = make(corpus, seq_len=6, split=split, drop_last_partial_validation_sequence=False)
    assert len(dataset) == (1 if split is Split.train else 2)


def test_cached_indices_equal_built_ones_and_name_their_inputs(tmp_path):
    corpus = write_corpus(tmp_path / "c", [30, 40])
    cache = str(tmp_path / "cache")
    built = make(corpus, cache=cache, num_samples=50)
    files = sorted(os.listdir(cache))
    assert [name.split("-", 1)[1] for name in files] == [
        "GPTDataset-train-description.txt",
        "GPTDataset-train-document_index.npy",
        "GPTDataset-train-sample_index.npy",
        "GPTDataset-train-shuffle_index.npy",
    ]
    stamps = [os.stat(os.path.join(cache, name)).st_mtime_ns for name in files]
    loaded = make(corpus, cache=cache, num_samples=50)
    assert [os.stat(os.path.join(cache, name)).st_mtime_ns for name in files] == stamps
    for name in ("document_index", "sample_index", "shuffle_index"):
        assert isinstance(getattr(loaded, name).base, np.memmap)
        assert np.array_equal(getattr(built, name), getattr(loaded, name))
        assert getattr(built, name).dtype == getattr(loaded, name).dtype


def test_what_indices_follow_from_changes_their_name(tmp_path):
    corpus = write_corpus(tmp_path / "c", [30, 40])
    other = write_corpus(tmp_path / "d", [40, 30])
    changes = [
        {},
        {"seed": 2},
        {"seq_len": 9},
        {"num_samples": 3},
        {"documents": np.array([0])},
        {"split": Split.test},
        {"add_extra_token_to_sequence": False},
        {"drop_last_partial_validation_sequence": False},
        {"tokenizer": None},
    ]
    descriptions = [make(corpus, **change).description for change in changes] + [make(other).description]
    assert len(set(descriptions)) == len(descriptions)


@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: b"", lambda data: b"x" * len(data)])
@pytest.mark.parametrize("victim", ["description.txt", "sample_index.npy", "shuffle_index.npy"])
def test_damaged_cache_is_built_again(tmp_path, damage, victim):
    corpus = write_corpus(tmp_path / "c", [30, 40])
    cache = tmp_path / "cache"
    first = make(corpus, cache=str(cache), num_samples=50)
    (path,) = cache.glob(f"*{victim}")
    intact = path.read_bytes()
    path.write_bytes(damage(intact))
    again = make(corpus, cache=str(cache), num_samples=50)
    assert np.array_equal(again.sample_index, first.sample_index)
    assert path.read_bytes() == intact


def test_many_builders_at_once_agree_and_leave_only_whole_files(tmp_path):
    corpus = write_corpus(tmp_path / "c", [30, 40] * 50)
    cache = str(tmp_path / "cache")
    with ThreadPoolExecutor(8) as pool:
        datasets = list(pool.map(lambda _: make(corpus, cache=cache, num_samples=2000), range(16)))
    assert all(np.array_equal(dataset.shuffle_index, datasets[0].shuffle_index) for dataset in datasets)
    assert len(os.listdir(cache)) == 4


def test_cache_that_cannot_be_written_warns_and_goes_on(tmp_path):
    corpus = write_corpus(tmp_path / "c", [30, 40])
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="set path_to_cache to a writable folder"):
        dataset = make(corpus, cache=str(tmp_path / "file" / "cache"))
    assert len(dataset) == 8


def test_a_full_disk_is_told_in_words_also_where_numpy_raises_without_a_reason(tmp_path, monkeypatch):
    def full(file, array, allow_pickle):
        raise OSError("512 requested and 0 written")

    monkeypatch.setattr("numpy.save", full)
    corpus = write_corpus(tmp_path / "c", [30, 40])
    with pytest.warns(UserWarning, match=r"cannot be written \(512 requested and 0 written\)"):
        make(corpus, cache=str(tmp_path / "cache"))


def text_corpus(tmp_path, documents):
    with IndexedDatasetBuilder(tmp_path / "t.bin", dtype="u2") as builder:
        for document in documents:
            builder.add_document(document, [len(document)])
        builder.finalize()
    return IndexedDataset(tmp_path / "t")


def test_documents_in_a_sample_are_told_apart(tmp_path):
    corpus = text_corpus(tmp_path, [[1, 2, EOD, 3, EOD, EOD, 4, 5, 6]])
    options = {"reset_position_ids": True, "eod_mask_loss": True, "create_attention_mask": True, "reset_attention_mask": True}
    sample = make(corpus, **options)[0]
    assert sample["tokens"].tolist() == [1, 2, EOD, 3, EOD, EOD, 4, 5]
    assert sample["labels"].tolist() == [2, EOD, 3, EOD, EOD, 4, 5, 6]
    assert sample["loss_mask"].tolist() == [1, 1, 0, 1, 0, 0, 1, 1]
    assert sample["position_ids"].tolist() == [0, 1, 2, 0, 1, 0, 0, 1]
    document = [0, 0, 0, 1, 1, 2, 3, 3]
    allowed = [[key <= query and document[key] == document[query] for key in range(8)] for query in range(8)]
    assert torch.equal(~sample["attention_mask"], torch.tensor([allowed]))
    plain = make(corpus)[0]
    assert plain["position_ids"].tolist() == list(range(8))
    assert plain["loss_mask"].tolist() == [1.0] * 8
    assert sorted(plain) == ["labels", "loss_mask", "position_ids", "tokens"]
    assert [plain[name].dtype for name in sorted(plain)] == [torch.int64, torch.float32, torch.int64, torch.int64]


def test_bounds_tell_documents_apart_without_a_mask(tmp_path):
    corpus = text_corpus(tmp_path, [[1, 2, EOD, 3, EOD, EOD, 4, 5, 6]])
    sample = make(corpus, inter_document_masking=True)[0]
    assert sample["cu_seqlens"].tolist() == [0, 3, 5, 6, 8]
    assert sample["cu_seqlens"].dtype == torch.int32
    assert sample["position_ids"].tolist() == [0, 1, 2, 0, 1, 0, 0, 1]
    assert "attention_mask" not in sample
    ending = make(text_corpus(tmp_path, [[1, 2, 3, 4, 5, 6, 7, EOD, 8]]), inter_document_masking=True)[0]
    assert ending["cu_seqlens"].tolist() == [0, 8]


def test_sample_none_has_shapes_and_no_loss(tmp_path):
    dataset = make(text_corpus(tmp_path, [list(range(1, 20))]))
    assert dataset[None]["tokens"].shape == (8,)
    assert dataset[None]["loss_mask"].sum() == 0


def test_changing_a_sample_changes_no_other(tmp_path):
    dataset = make(text_corpus(tmp_path, [list(range(1, 40))]), create_attention_mask=True)
    first = dataset[0]
    expected = {name: value.clone() for name, value in first.items()}
    for value in first.values():
        value.zero_()
    assert all(torch.equal(dataset[0][name], value) for name, value in expected.items())


def padded(tmp_path, pad, allow):
    corpus = text_corpus(tmp_path, [[1, 2, EOD, 3, EOD]])
    return make(
        corpus,
        split=Split.valid,
        tokenizer=Words(pad),
        allow_ambiguous_pad_tokens=allow,
        drop_last_partial_validation_sequence=False,
    )


def test_pad_that_is_also_eod_keeps_the_loss_of_eod(tmp_path):
    with pytest.warns(UserWarning, match="pad id 99 is also eod; padding is marked apart"):
        dataset = padded(tmp_path, EOD, False)
    sample = dataset[0]
    assert sample["tokens"].tolist() == [1, 2, EOD, 3, EOD, 0, 0, 0]
    assert sample["labels"].tolist() == [2, EOD, 3, EOD, 0, 0, 0, 0]
    assert sample["loss_mask"].tolist() == [1, 1, 1, 1, 0, 0, 0, 0]


def test_ambiguous_pad_is_loud_when_allowed(tmp_path):
    with pytest.warns(UserWarning, match="every such token loses its loss"):
        dataset = padded(tmp_path, EOD, True)
    assert dataset[0]["loss_mask"].tolist() == [1, 0, 1, 0, 0, 0, 0, 0]
    assert dataset[0]["tokens"].min() >= 0


@pytest.mark.parametrize("pad", [None, 98])
def test_clear_pad_is_silent(tmp_path, pad):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sample = padded(tmp_path, pad, False)[0]
    assert sample["loss_mask"].tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    assert sample["tokens"].tolist()[5:] == [0, 0, 0]


def test_too_little_text_names_the_need(tmp_path):
    corpus = text_corpus(tmp_path, [[1, 2, 3]])
    with pytest.raises(DataError, match="hold 3 tokens, one sample needs 9; lower sequence_length"):
        make(corpus)
    with pytest.raises(DataError, match="hold 0 tokens"):
        make(text_corpus(tmp_path, [[]]))
    with pytest.raises(IndexError, match="ask the builder for more samples"):
        make(text_corpus(tmp_path, [[1] * 9]))[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequence_length": 0}, "sequence_length=0"),
        ({"random_seed": -1}, "random_seed=-1"),
        ({"eod_mask_loss": True}, "eod_mask_loss=True needs a tokenizer with an eod id"),
        ({"inter_document_masking": True}, "inter_document_masking=True needs a tokenizer with an eod id"),
        ({"reset_attention_mask": True, "tokenizer": Words()}, "create_attention_mask=True"),
    ],
)
def test_config_refuses_what_contradicts(options, message):
    with pytest.raises(DataError, match=message):
        GPTDatasetConfig(**{"random_seed": 1, "sequence_length": 4, **options})

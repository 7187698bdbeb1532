# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Filling in the middle: what is rearranged, how often, and that nothing else changes."""

import copy
import itertools
import random
import re

import numpy as np
import pytest
import torch

from mcore_parallel.data import (
    DataError,
    GPTDataset,
    GPTDatasetConfig,
    GPTFIMDataset,
    GPTFIMDatasetConfig,
    IndexedDataset,
    IndexedDatasetBuilder,
    Split,
)

EOD, PRE, MID, SUF, PAD, CUT = range(256, 262)
NAMES = {"<eod>": EOD, "<pre>": PRE, "<mid>": MID, "<suf>": SUF, "<pad>": PAD, "<cut>": CUT}
TOKENS = {"prefix": "<pre>", "middle": "<mid>", "suffix": "<suf>", "pad": "<pad>"}


class Bytes:
    """Latin-1 characters as ids, and six special tokens that are parsed out of text."""

    vocab_size = 262
    eod = EOD
    pad = None
    unique_identifiers = {"class": "Bytes"}  # noqa: RUF012

    def tokenize(self, text):
        parts = re.split("(" + "|".join(NAMES) + ")", text)
        return [token for part in parts for token in ([NAMES[part]] if part in NAMES else part.encode("latin-1"))]

    def detokenize(self, ids, skip_special=True):
        return bytes(token for token in ids if token < 256).decode("latin-1")


def corpus(tmp_path, documents):
    with IndexedDatasetBuilder(tmp_path / "c.bin", dtype="u2") as builder:
        for document in documents:
            builder.add_document(document, [len(document)])
        builder.finalize()
    return IndexedDataset(tmp_path / "c")


def words(seed, count, length):
    source = random.Random(seed)
    return [[*(source.randrange(97, 123) for _ in range(source.randrange(length))), EOD] for _ in range(count)]


def make(data, *, cls=GPTFIMDataset, seq_len=64, split=Split.train, num_samples=None, **options):
    common = {"random_seed": 7, "sequence_length": seq_len, "tokenizer": Bytes()}
    if cls is GPTFIMDataset:
        config = GPTFIMDatasetConfig(**{**common, "fim_rate": 1.0, "fim_extra_tokens": TOKENS, **options})
    else:
        config = GPTDatasetConfig(**common, **options)
    return cls(data, None, np.arange(len(data)), num_samples, split, config)


def restored(ids):
    """Text of a rearranged document, by its form."""
    assert ids[0] == PRE
    suf, mid = ids.index(SUF), ids.index(MID)
    prefix, suffix, middle = ids[1:suf], ids[suf + 1 : mid], ids[mid + 1 :]
    return (middle, suffix) if suf == 1 else ([*prefix, *middle], suffix)


@pytest.mark.parametrize("extra", [True, False])
def test_rate_zero_is_the_plain_dataset(tmp_path, extra):
    data = corpus(tmp_path, [[EOD, EOD], *words(1, 40, 50), [EOD]])
    options = {"add_extra_token_to_sequence": extra, "drop_last_partial_validation_sequence": False, "split": Split.valid}
    plain = make(data, cls=GPTDataset, eod_mask_loss=True, **options)
    filled = make(data, fim_rate=0.0, eod_mask_loss=True, **options)
    assert len(plain) == len(filled) > 5
    for idx in range(len(plain)):
        assert all(torch.equal(plain[idx][name], filled[idx][name]) for name in plain[idx])


@pytest.mark.parametrize("spm_rate", [0.0, 1.0])
def test_rate_one_keeps_the_text_of_each_document_that_fits(tmp_path, spm_rate):
    documents = [[EOD], *([*b"abcdefghij"[: 1 + number % 9], EOD] for number in range(60)), [EOD, EOD]]
    data = corpus(tmp_path, documents)
    # One sample holds all of them, with room for three more ids each.
    text = sum(map(len, documents))
    dataset = make(data, seq_len=text + 200, split=Split.valid, drop_last_partial_validation_sequence=False, fim_spm_rate=spm_rate)
    assert len(dataset) == 1
    plain = [part for number in dataset.document_index for part in [data[number].tolist()]]
    expected = "".join(Bytes().detokenize(part) + "\n" * part.count(EOD) for part in plain)
    sample = dataset[0]
    ids = sample["tokens"].tolist()[: text + 3 * 60]
    parts, start = [], 0
    for place in [place for place, token in enumerate(ids) if token == EOD]:
        part = ids[start:place]
        start = place + 1
        if part:
            assert [part.count(token) for token in (PRE, MID, SUF)] == [1, 1, 1]
            assert (part.index(SUF) == 1) >= (spm_rate == 1.0)
            before, after = restored(part)
            part = [*before, *after]
        parts.append(Bytes().detokenize(part) + "\n")
    assert "".join(parts) == expected
    assert start == text + 3 * 60
    assert sample["tokens"][start:].tolist() == [0] * (text + 200 - start)
    # The last label before the padding is known, everything after it carries no loss.
    assert sample["loss_mask"].tolist() == [1.0] * (start - 1) + [0.0] * (text + 200 - start + 1)


def test_length_is_kept_and_loss_falls_on_text_only(tmp_path):
    dataset = make(corpus(tmp_path, words(2, 200, 90)))
    for idx in range(len(dataset)):
        sample = dataset[idx]
        assert all(value.shape == (64,) for value in sample.values())
        assert min(sample["tokens"].min(), sample["labels"].min()) >= 0
        assert max(sample["tokens"].max(), sample["labels"].max()) < Bytes.vocab_size
        assert PAD not in sample["tokens"]
        assert torch.equal(sample["tokens"][1:], sample["labels"][:-1])


def test_shares_are_as_asked(tmp_path):
    dataset = make(corpus(tmp_path, [[*b"abcdefgh", EOD]] * 4000), seq_len=4000, num_samples=8, fim_rate=0.3, fim_spm_rate=0.2)
    total = chosen = suffix_first = 0
    cuts = np.zeros(9)
    for idx in range(8):
        ids = dataset[idx]["tokens"].tolist()
        ends = [place for place, token in enumerate(ids) if token == EOD]
        for start, end in itertools.pairwise(ends):
            part = ids[start + 1 : end]
            total += 1
            if PRE in part:
                chosen += 1
                suffix_first += part[1] == SUF
                cuts[len(restored(part)[1])] += 1
    assert total > 2000
    # An empty prefix, the lower of two cuts at 0, looks like suffix first.
    for count, of, share in ((chosen, total, 0.3), (suffix_first, chosen, 0.2 + 0.8 * 17 / 81)):
        assert abs(count - of * share) < 3 * (of * share * (1 - share)) ** 0.5
    # The suffix is what lies behind the later of two uniform cuts: (2 k + 1) / 81 for a cut at k.
    expected = chosen * (2 * np.arange(9)[::-1] + 1) / 81
    assert (np.abs(cuts - expected) < 4 * np.sqrt(expected) + 1).all()


def test_a_sample_follows_from_seed_and_number(tmp_path):
    data = corpus(tmp_path, words(3, 100, 60))
    first, again = make(data, fim_rate=0.5), copy.copy(make(data, fim_rate=0.5))
    backwards = {idx: again[idx]["tokens"] for idx in reversed(range(len(again)))}
    assert all(torch.equal(first[idx]["tokens"], backwards[idx]) for idx in range(len(first)))
    assert torch.equal(first[-1]["tokens"], first[len(first) - 1]["tokens"])
    other = make(data, fim_rate=0.5, random_seed=8)
    assert any(not torch.equal(first[idx]["tokens"], other[idx]["tokens"]) for idx in range(len(first)))


def test_fragments_are_rearranged_by_themselves(tmp_path):
    files = [CUT, *b"one", CUT, CUT, *b"three", CUT, *b"keep four", EOD]
    data = corpus(tmp_path, [files, [*b"plain", EOD]])
    options = {"seq_len": 60, "split": Split.valid, "drop_last_partial_validation_sequence": False, "fim_split_sample": "<cut>"}
    dataset = make(data, fim_fragment_rate=1.0, fim_no_prefix="keep", **options)
    ids = dataset[0]["tokens"].tolist()
    ids = ids[: max(place for place, token in enumerate(ids) if token == EOD) + 1]
    assert ids.count(CUT) == 4
    assert ids.count(PRE) == ids.count(MID) == ids.count(SUF) == 3  # one, three and the document without fragments
    last = [place for place, token in enumerate(ids) if token == CUT][-1]
    assert ids[last:][:11] == [CUT, *b"keep four", EOD]
    untouched = make(data, fim_fragment_rate=0.0, fim_rate=1.0, **options)[0]["tokens"].tolist()
    assert untouched.count(PRE) == 1
    assert untouched[untouched.index(CUT) :][: len(files)] == files


def test_text_that_spells_a_token_stays(tmp_path):
    data = corpus(tmp_path, [[*b"x<mid>", EOD]])
    options = {"seq_len": 20, "split": Split.valid, "drop_last_partial_validation_sequence": False, "fim_no_prefix": None}
    samples = [make(data, random_seed=seed, **options)[0]["tokens"].tolist() for seed in range(30)]
    for ids in samples:
        if PRE not in ids:
            assert ids[:7] == [*b"x<mid>", EOD]
        else:  # a cut inside the name leaves no token
            assert ids.count(MID) == 1


def test_padding_that_is_also_eod_keeps_the_loss_of_eod(tmp_path):
    data = corpus(tmp_path, [[*b"ab", EOD]])
    options = {"seq_len": 12, "split": Split.valid, "drop_last_partial_validation_sequence": False}
    with pytest.warns(UserWarning, match="pad id 256 is also eod, fim eod; padding is marked apart"):
        dataset = make(data, fim_extra_tokens={**TOKENS, "pad": "<eod>"}, **options)
    sample = dataset[0]
    assert sample["loss_mask"].tolist() == [1.0] * 5 + [0.0] * 7
    assert sample["labels"][4] == EOD
    with pytest.warns(UserWarning, match="every such token loses its loss"):
        dataset = make(data, fim_extra_tokens={**TOKENS, "pad": "<eod>"}, allow_ambiguous_pad_tokens=True, **options)
    assert dataset[0]["loss_mask"].tolist() == [1.0] * 4 + [0.0] * 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fim_rate": 1.5}, r"fim_rate=1.5 must lie in \[0, 1\]"),
        ({"fim_split_sample": "<cut>"}, "fim_split_sample and fim_fragment_rate go together"),
        ({"fim_fragment_rate": 0.5}, "go together"),
        ({"fim_extra_tokens": {"prefix": "<pre>", "middel": "<mid>"}}, r"lacks \['middle', 'suffix'\] and has unknown \['middel'\]"),
        ({"fim_extra_tokens": {**TOKENS, "suffix": "suf"}}, "suffix='suf' is 3 ids to the tokenizer, not one"),
        ({"fim_extra_tokens": {**TOKENS, "suffix": "<mid>"}}, "must differ from each other"),
        ({"tokenizer": None}, "works on text; set tokenizer"),
    ],
)
def test_config_refuses_what_contradicts(options, message):
    with pytest.raises(DataError, match=message):
        GPTFIMDatasetConfig(
            **{"random_seed": 1, "sequence_length": 8, "tokenizer": Bytes(), "fim_rate": 0.5, "fim_extra_tokens": TOKENS, **options}
        )

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Blends, splits, the builder and the sampler."""

import numpy as np
import pytest
import torch

from mcore_parallel.data import (
    BlendedDataset,
    BlendedMegatronDatasetBuilder,
    BlendedMegatronDatasetConfig,
    DataError,
    GPTDataset,
    GPTDatasetConfig,
    IndexedDatasetBuilder,
    IndexedDatasetError,
    PretrainingSampler,
    batches,
    parse_blend,
    parse_split,
)


class Numbers:
    """``length`` samples, sample i holds 1000 * name + i."""

    def __init__(self, name, length):
        self.name, self.length = name, length

    def __len__(self):
        return self.length

    def __getitem__(self, idx):
        return {"value": torch.tensor(1000 * self.name + idx)}


def greedy(weights, size):
    """The rule read literally."""
    counts, chosen = [0] * len(weights), []
    for k in range(size):
        lag = [weight * max(k, 1) - count for weight, count in zip(weights, counts, strict=True)]
        best = lag.index(max(lag))
        chosen.append((best, counts[best]))
        counts[best] += 1
    return chosen


def test_blend_follows_the_greedy_rule_and_keeps_shares_at_every_point():
    generator = np.random.default_rng(0)
    for trial in range(30):
        count = int(generator.integers(1, 7))
        weights = generator.random(count) if trial % 2 else generator.integers(1, 5, count).astype(float)
        size = int(generator.integers(1, 400)) if trial else 5000
        blend = BlendedDataset([Numbers(number, size) for number in range(count)], weights.tolist(), size)
        shares = [weight / float(sum(weights.tolist())) for weight in weights.tolist()]
        assert list(zip(blend.dataset_index.tolist(), blend.dataset_sample_index.tolist(), strict=True)) == greedy(shares, size)
        taken = np.cumsum(blend.dataset_index[:, None] == np.arange(count), axis=0)
        due = np.arange(1, size + 1)[:, None] * np.array(shares)
        assert np.abs(taken - due).max() < 2.0


def test_exhaustive_blend_takes_each_sample_once():
    blend = BlendedDataset([Numbers(0, 3), Numbers(1, 90), Numbers(2, 17)], [3, 90, 17], None)
    assert len(blend) == 110
    assert sorted(int(blend[idx]["value"]) for idx in range(110)) == [*range(3), *range(1000, 1090), *range(2000, 2017)]
    # the small parts are spread, not at one end
    assert np.diff(np.flatnonzero(blend.dataset_index == 0)).min() > 20


def test_blend_orders_are_the_golden_ones():
    # From Megatron's published blending code.
    weighted = BlendedDataset([Numbers(0, 20), Numbers(1, 20), Numbers(2, 20)], [0.5, 0.2, 0.3], 12)
    assert weighted.dataset_index.tolist() == GOLDEN_WEIGHTED
    exhaustive = BlendedDataset([Numbers(0, 2), Numbers(1, 7), Numbers(2, 4)], [2, 7, 4], None)
    assert exhaustive.dataset_index.tolist() == GOLDEN_EXHAUSTIVE


GOLDEN_WEIGHTED = [0, 2, 1, 0, 2, 0, 1, 0, 2, 0, 0, 2]
GOLDEN_EXHAUSTIVE = [1, 2, 0, 1, 2, 1, 1, 2, 1, 0, 1, 2, 1]


def test_samples_come_with_the_number_of_their_part():
    blend = BlendedDataset([Numbers(0, 9), Numbers(1, 9)], [1.0, 3.0], 8)
    assert [(int(blend[idx]["dataset_id"]), int(blend[idx]["value"])) for idx in range(4)] == [(1, 1000), (0, 0), (1, 1001), (1, 1002)]
    assert int(blend[-1]["value"]) == int(blend[7]["value"])
    with pytest.raises(IndexError, match="ask for a larger size"):
        blend[8]


def test_asking_a_part_for_too_much_names_it_and_the_remedy():
    with pytest.raises(IndexError, match="dataset 1 of the blend has 3 samples, 5 are asked.*raise mid_level_dataset_surplus"):
        BlendedDataset([Numbers(0, 100), Numbers(1, 3)], [0.5, 0.5], 10)
    with pytest.raises(IndexError, match="dataset 0 of the blend has 3 samples, 4 are asked"):
        BlendedDataset([Numbers(0, 3)], [4], None)


@pytest.mark.parametrize(
    ("datasets", "weights", "size", "message"),
    [
        ([Numbers(0, 9)] * 2, [1.0, 0.0], 3, "weight=0.0 of dataset 1 must be positive"),
        ([Numbers(0, 9)] * 2, [1.0, float("nan")], 3, "weight=nan"),
        ([Numbers(0, 9)] * 2, [1.0], 3, "1 weights for 2 datasets"),
        ([Numbers(0, 9)], [1.5], None, "whole number of samples"),
        ([], [], 1, "0 datasets in one blend"),
        ([Numbers(0, 9)] * 32767, [1.0] * 32767, 1, "32767 datasets in one blend"),
        ([Numbers(0, 9)], [1.0], -1, "size=-1"),
    ],
)
def test_blend_refuses_weights_that_mean_nothing(datasets, weights, size, message):
    with pytest.raises(DataError, match=message):
        BlendedDataset(datasets, weights, size)


def test_blend_index_is_cached(tmp_path):
    config = BlendedMegatronDatasetConfig(random_seed=1, sequence_length=4, path_to_cache=str(tmp_path))
    parts = [Numbers(0, 50), Numbers(1, 50)]
    built = BlendedDataset(parts, [1.0, 2.0], 30, config)
    loaded = BlendedDataset(parts, [1.0, 2.0], 30, config)
    assert isinstance(loaded.dataset_index, np.memmap)
    assert np.array_equal(built.dataset_index, loaded.dataset_index)
    assert len(list(tmp_path.iterdir())) == 3
    assert BlendedDataset(parts, [2.0, 1.0], 30, config).dataset_index.tolist() != loaded.dataset_index.tolist()


def test_splits_cover_everything_once():
    assert parse_split("99,1,0") == [(0.0, 0.99), (0.99, 1.0), None]
    assert parse_split("0,1,1") == [None, (0.0, 0.5), (0.5, 1.0)]
    assert parse_split("1") == [(0.0, 1.0), None, None]
    for text in ("", "0,0,0", "a,b", "1,-1", "1,1,1,1", "nan"):
        with pytest.raises(DataError, match="up to three non-negative numbers"):
            parse_split(text)


def test_blend_of_a_command_line():
    assert parse_blend(["3", "wiki", "1", "code"]) == (["wiki", "code"], [3.0, 1.0])
    assert parse_blend(["wiki", "code"]) == (["wiki", "code"], None)
    with pytest.raises(DataError, match="the blend is empty"):
        parse_blend([])


def write_corpus(prefix, num_documents, value):
    with IndexedDatasetBuilder(f"{prefix}.bin", dtype="u2") as builder:
        builder.add_documents(np.full(num_documents * 10, value), [10] * num_documents)
        builder.finalize()
    return str(prefix)


def build(sizes, on_rank=True, **options):
    config = GPTDatasetConfig(random_seed=7, sequence_length=4, **options)
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: on_rank, config).build()


def test_one_corpus_is_split_by_documents(tmp_path):
    prefix = write_corpus(tmp_path / "a", 100, 1)
    train, valid, test = build([500, 5, None], blend=([prefix], None), split="90,10,0")
    assert sorted(set(train.document_index.tolist())) == list(range(90))
    assert sorted(set(valid.document_index.tolist())) == list(range(90, 100))
    assert test is None
    assert len(train) >= 500
    assert (tmp_path / "cache" / "GPTDataset_indices").is_dir()


def test_corpora_are_read_without_maps_and_with_a_surplus(tmp_path):
    prefixes = [write_corpus(tmp_path / name, 50, value) for name, value in (("a", 1), ("b", 2))]
    usual, read, more = (
        build([200, None, None], blend=(prefixes, [0.5, 0.5]), split="1", **options)[0]
        for options in ({}, {"mmap_bin_files": False}, {"mid_level_dataset_surplus": 1.0})
    )
    assert all(torch.equal(usual[i]["tokens"], read[i]["tokens"]) for i in range(len(usual)))
    assert all(len(part) < len(other) for part, other in zip(usual.datasets, more.datasets, strict=True))


@pytest.mark.parametrize("threads", [1, 4])
def test_weights_decide_what_a_blend_reads(tmp_path, threads):
    a, b = write_corpus(tmp_path / "a", 50, 1), write_corpus(tmp_path / "b", 20, 2)
    cache = str(tmp_path / "cache")
    train, valid, _ = build(
        [1000, 100, None], blend=([a, b], [3.0, 1.0]), split="80,20,0", path_to_cache=cache, num_dataset_builder_threads=threads
    )
    assert (len(train), len(valid)) == (1000, 100)
    values = [int(train[idx]["tokens"][0]) for idx in range(1000)]
    assert (values.count(1), values.count(2)) == (750, 250)


def test_no_weights_read_every_corpus_once(tmp_path):
    a, b = write_corpus(tmp_path / "a", 5, 1), write_corpus(tmp_path / "b", 3, 2)
    train, _, _ = build([None, None, None], blend=([a, b], None), split="1")
    assert len(train) == (50 - 1) // 4 + (30 - 1) // 4
    assert len(build([6, None, None], blend=([a, b], None), split="1")[0]) == 6
    with pytest.raises(DataError, match="asks for 1000 samples, its corpora hold 19; give weights"):
        build([1000, None, None], blend=([a, b], None), split="1")


def test_each_split_can_have_its_own_blend(tmp_path):
    a, b = write_corpus(tmp_path / "a", 5, 1), write_corpus(tmp_path / "b", 5, 2)
    train, valid, test = build([8, 4, None], blend_per_split=[([a], None), ([a, b], [1.0, 1.0]), None])
    assert set(train[0]["tokens"].tolist()) == {1}
    assert sorted(int(valid[idx]["tokens"][0]) for idx in range(4)) == [1, 1, 2, 2]
    assert test is None


def test_ranks_that_read_nothing_touch_no_file(tmp_path):
    assert build([1, 1, 1], on_rank=False, blend=([str(tmp_path / "missing")], None), split="1,1,1") == [None, None, None]
    with pytest.raises(IndexedDatasetError, match="missing"):
        build([1, 1, 1], blend=([str(tmp_path / "missing")], None), split="1,1,1")


def test_builder_names_the_corpus_that_is_too_small(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "a.bin") as builder:
        builder.add_documents([1, 1], [2])
        builder.finalize()
    with pytest.raises(DataError, match=r"split train of .*a: the documents of this split hold 2 tokens"):
        build([None, 0, 0], blend=([str(tmp_path / "a")], None), split="1")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blend": (["a"], None)}, "blend needs split"),
        ({"blend": (["a"], [1.0, 2.0]), "split": "1"}, "1 prefixes and 2 weights"),
        ({"blend": (["a", "b"], [1.0, 0.0]), "split": "1"}, "weight=0.0 of b must be positive"),
        ({"blend": ([], None), "split": "1"}, "names no path prefix"),
        ({"blend_per_split": [None]}, "needs train, valid, test; got 1"),
        ({"blend_per_split": [None] * 3, "split": "1"}, "excludes blend and split"),
        ({}, "config names no data"),
    ],
)
def test_builder_and_config_refuse_contradictions(options, message):
    with pytest.raises(DataError, match=message):
        build([1, 1, 1], **options)


def deal(total, consumed, micro, dp_size, global_batch):
    ranks = [list(PretrainingSampler(total, consumed, micro, rank, dp_size, global_batch)) for rank in range(dp_size)]
    return [index for step in zip(*ranks, strict=True) for part in step for index in part]


@pytest.mark.parametrize(("micro", "dp_size"), [(1, 1), (2, 1), (1, 4), (2, 2), (6, 2)])
def test_every_layout_deals_the_same_global_order(micro, dp_size):
    assert deal(40, 0, micro, dp_size, 12) == list(range(36))
    assert deal(40, 12, micro, dp_size, 12) == list(range(12, 36))


def test_consumed_is_the_whole_state():
    first = PretrainingSampler(100, 0, 2, 1, 2, 4)
    assert len(first) == 25
    head = [next(iter(first)) for _ in range(6)]
    assert first.consumed == 24
    assert len(first) == 19
    tail = list(PretrainingSampler(100, first.consumed, 2, 1, 2, 4))
    assert head + tail == list(PretrainingSampler(100, 0, 2, 1, 2, 4))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((10, 0, 2, 0, 2, 6), "global_batch=6 must be a multiple of .* = 4"),
        ((10, 8, 2, 0, 2, 4), "consumed=8 of total=10 samples leaves no global batch of 4"),
        ((10, -4, 2, 0, 2, 4), "consumed=-4"),
        ((10, 0, 2, 2, 2, 4), r"dp_rank=2 in 0\.\.1"),
    ],
)
def test_sampler_refuses_sizes_that_do_not_divide(arguments, message):
    with pytest.raises(DataError, match=message):
        PretrainingSampler(*arguments)


def test_batches_stack_what_the_sampler_deals(tmp_path):
    prefix = write_corpus(tmp_path / "a", 30, 3)
    train, _, _ = build([40, None, None], blend=([prefix], None), split="1")
    dealt = list(batches(train, PretrainingSampler(40, 0, 4, 0, 2, 8)))
    assert len(dealt) == 5
    assert {name: tuple(value.shape) for name, value in dealt[0].items()} == dict.fromkeys(
        ("tokens", "labels", "loss_mask", "position_ids"), (4, 4)
    )

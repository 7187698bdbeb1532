# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Corpora behind URLs: only the bytes asked for travel, and failures are named."""

import copy
import os
import uuid

import fsspec
import numpy as np
import pytest

from mcore_parallel.data import GPTDataset, GPTDatasetConfig, IndexedDataset, IndexedDatasetBuilder, IndexedDatasetError, Split


@pytest.fixture
def store(tmp_path):
    """A local corpus, its URL in a store of this test's own, and the file system that holds it."""
    with IndexedDatasetBuilder(tmp_path / "a.bin", dtype="u2", multimodal=True) as builder:
        for number in range(40):
            builder.add_document(np.arange(number, 2 * number), [number], [number % 3])
        builder.finalize()
    system = fsspec.filesystem("memory")
    url = f"memory://{uuid.uuid4().hex}/a"
    for end in (".bin", ".idx"):
        system.pipe_file(url + end, (tmp_path / f"a{end}").read_bytes())
    yield IndexedDataset(tmp_path / "a"), url, system
    system.rm(url.rsplit("/", 1)[0], recursive=True)


def counted(monkeypatch, system):
    """Byte ranges asked of the store."""
    asked, plain = [], type(system).cat_file

    def cat_file(self, path, start=None, end=None, **options):
        asked.append((path.rsplit(".", 1)[1], start, end))
        return plain(self, path, start=start, end=end, **options)

    monkeypatch.setattr(type(system), "cat_file", cat_file)
    return asked


def test_only_the_bytes_asked_for_travel(store, monkeypatch):
    local, url, system = store
    asked = counted(monkeypatch, system)
    remote = IndexedDataset(url)
    assert [end for end, _, _ in asked] == ["idx"]
    del asked[:]
    assert remote.get(7, 2, 3).tolist() == [9, 10, 11]
    begin = 2 * (7 * 6 // 2 + 2)
    assert asked == [("bin", begin, begin + 6)]
    assert remote[0].tolist() == []
    assert len(asked) == 1
    assert all(np.array_equal(here, there) for here, there in zip(local[:], remote[:], strict=True))
    assert len(asked) == 2
    remote.verify()


def test_modes_workers_and_existence(store):
    local, url, _ = store
    remote = copy.copy(IndexedDataset(url, multimodal=True))
    tokens, mode = remote[5]
    assert (tokens.tolist(), mode) == (local[5].tolist(), 2)
    assert IndexedDataset.exists(url)
    assert not IndexedDataset.exists(url + "x")


def test_a_forked_worker_connects_anew(store, monkeypatch):
    local, url, _ = store
    remote = IndexedDataset(url)
    made, plain = [], fsspec.core.url_to_fs
    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda *place, **options: made.append(place) or plain(*place, **options))
    assert remote[5].tolist() == local[5].tolist()
    assert made == []
    child = os.getpid() + 1
    monkeypatch.setattr(os, "getpid", lambda: child)
    assert remote[5].tolist() == remote[5].tolist() == local[5].tolist()
    assert made == [(url + ".bin",)]


def test_samples_equal_those_of_a_disk(store, tmp_path, monkeypatch):
    local, url, _ = store
    monkeypatch.chdir(tmp_path)  # where a cache beside the URL would appear
    config = GPTDatasetConfig(random_seed=1, sequence_length=16)
    before = sorted(tmp_path.iterdir())
    there = GPTDataset(GPTDataset.build_low_level_dataset(url, config), url, np.arange(40), 90, Split.train, config)
    here = GPTDataset(local, None, np.arange(40), 90, Split.train, config)
    assert sorted(tmp_path.iterdir()) == before
    assert len(here) == len(there) >= 90
    assert all(here[idx]["tokens"].tolist() == there[idx]["tokens"].tolist() for idx in range(0, 90, 9))


def test_failures_are_named(store):
    _, url, system = store
    with pytest.raises(IndexedDatasetError, match=r"cannot open memory://.*x\.idx"):
        IndexedDataset(url + "x")
    remote = IndexedDataset(url)
    system.pipe_file(url + ".bin", b"\x01\x00")
    with pytest.raises(IndexedDatasetError, match=r"gave 0 of 78 bytes .* it shrank"):
        remote[39]
    with pytest.raises(IndexedDatasetError, match="has 2 bytes, its index describes 1560: truncated"):
        IndexedDataset(url)
    system.rm(url + ".bin")
    with pytest.raises(IndexedDatasetError, match="cannot read bytes"):
        remote[39]
    with pytest.raises(IndexedDatasetError, match=r"cannot read nothing://a/b\.idx: .*pip install 'mcore-parallel\[s3\]'"):
        IndexedDataset("nothing://a/b")

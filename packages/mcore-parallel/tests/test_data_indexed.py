# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The .bin/.idx format, byte for byte, and what happens to damaged files."""

import copy
import itertools
import os
import signal

import numpy as np
import pytest
import torch

from mcore_parallel.data import (
    BlendedMegatronDatasetBuilder,
    GPTDataset,
    GPTDatasetConfig,
    IndexedDataset,
    IndexedDatasetBuilder,
    IndexedDatasetError,
    merge_indexed,
    token_dtype,
)
from tests.support.commands import run_command

DTYPES = ["u1", "i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2"]

# Three sequences [1 2 3] [] [258] in documents {0, 1} {} {2}, uint16, modes 0 1 2; written by hand from the format's table.
GOLDEN_HEAD = "4d4d494449445800 000100000000000000"  # magic, version
GOLDEN_COUNTS = "0300000000000000 040000000000000003000000 00000000 01000000"  # sequences, boundaries; lengths
GOLDEN_BOUNDS = "0000000000000000 0200000000000000 0200000000000000 0300000000000000"
GOLDEN_POINTERS = "0000000000000000 0600000000000000 0600000000000000"
GOLDEN_IDX = GOLDEN_HEAD + "08" + GOLDEN_COUNTS + GOLDEN_POINTERS + GOLDEN_BOUNDS  # 08: uint16
GOLDEN_MODES = "000102"
GOLDEN_BIN = "0100 0200 0300 0201"


def write_golden(prefix, multimodal):
    with IndexedDatasetBuilder(f"{prefix}.bin", dtype="u2", multimodal=multimodal) as builder:
        builder.add_document(torch.tensor([1, 2, 3]), [3, 0], [0, 1] if multimodal else None)
        builder.end_document()
        builder.add_item([258], 2 if multimodal else 0)
        builder.end_document()
        builder.finalize()


@pytest.mark.parametrize("multimodal", [False, True])
def test_builder_writes_the_golden_bytes(tmp_path, multimodal):
    write_golden(tmp_path / "a", multimodal)
    assert (tmp_path / "a.idx").read_bytes() == bytes.fromhex(GOLDEN_IDX + (GOLDEN_MODES if multimodal else ""))
    assert (tmp_path / "a.bin").read_bytes() == bytes.fromhex(GOLDEN_BIN)
    assert sorted(os.listdir(tmp_path)) == ["a.bin", "a.idx"]


@pytest.mark.parametrize("mmap", [False, True])
def test_reader_understands_the_golden_bytes(tmp_path, mmap):
    (tmp_path / "a.idx").write_bytes(bytes.fromhex(GOLDEN_IDX + GOLDEN_MODES))
    (tmp_path / "a.bin").write_bytes(bytes.fromhex(GOLDEN_BIN))
    dataset = IndexedDataset(tmp_path / "a", multimodal=True, mmap=mmap)
    assert [(tokens.tolist(), mode) for tokens, mode in dataset[:]] == [([1, 2, 3], 0), ([], 1), ([258], 2)]
    assert dataset.document_indices.tolist() == [0, 2, 2, 3]
    assert dataset.sequence_lengths.tolist() == [3, 0, 1]
    assert dataset.num_tokens == 4
    dataset.verify()
    plain = IndexedDataset(tmp_path / "a", mmap=mmap)  # modes may be left unread
    assert plain.get(0, 1, 1).tolist() == [2]
    assert plain[-1].tolist() == [258]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mmap", [False, True])
def test_every_dtype_comes_back(tmp_path, dtype, mmap):
    generator = np.random.default_rng(0)
    documents = [generator.integers(0, 100, length).astype(dtype) for length in (5, 0, 1, 17)]
    with IndexedDatasetBuilder(tmp_path / "a.bin", dtype=dtype) as builder:
        for document in documents:
            builder.add_document(document, [len(document)])
        builder.finalize(tmp_path / "a.idx")
    dataset = IndexedDataset(tmp_path / "a", mmap=mmap)
    assert dataset.dtype == np.dtype(dtype)
    assert len(dataset) == 4
    for number, document in enumerate(documents):
        assert np.array_equal(dataset[number], document)
        assert not dataset[number].flags.writeable
    assert [part.tolist() for part in dataset[1:3]] == [documents[1].tolist(), documents[2].tolist()]
    assert dataset[2:2] == []


def test_bulk_documents_equal_one_by_one(tmp_path):
    for name in ("a", "b"):
        with IndexedDatasetBuilder(tmp_path / f"{name}.bin") as builder:
            if name == "a":
                builder.add_documents(np.arange(6), np.array([1, 0, 5]))
            else:
                for tokens in ([0], [], [1, 2, 3, 4, 5]):
                    builder.add_document(tokens, [len(tokens)])
            builder.finalize()
    for end in ("bin", "idx"):
        assert (tmp_path / f"a.{end}").read_bytes() == (tmp_path / f"b.{end}").read_bytes()


# Dtype, its code, the byte offset of the second and third sequence, the .bin of [1 2 3] [] [100]: as Megatron-Core 0.16.1 wrote them.
GOLDEN_DTYPES = [
    ("u1", "01", "03", "01020364"),
    ("i1", "02", "03", "01020364"),
    ("<i2", "03", "06", "0100 0200 0300 6400"),
    ("<i4", "04", "0c", "01000000 02000000 03000000 64000000"),
    ("<i8", "05", "18", "0100000000000000 0200000000000000 0300000000000000 6400000000000000"),
    ("<f8", "06", "18", "000000000000f03f 0000000000000040 0000000000000840 0000000000005940"),
    ("<f4", "07", "0c", "0000803f 00000040 00004040 0000c842"),
    ("<u2", "08", "06", "0100 0200 0300 6400"),
]


@pytest.mark.parametrize("multimodal", [False, True])
@pytest.mark.parametrize(("dtype", "code", "offset", "tokens"), GOLDEN_DTYPES)
def test_every_dtype_and_mode_has_the_bytes_of_megatron(tmp_path, dtype, code, offset, tokens, multimodal):
    with IndexedDatasetBuilder(tmp_path / "a.bin", dtype=dtype, multimodal=multimodal) as builder:
        builder.add_document(torch.tensor([1, 2, 3]), [3, 0], [0, 1] if multimodal else None)
        builder.end_document()
        builder.add_item(torch.tensor([100]), 2 if multimodal else 0)
        builder.end_document()
        builder.finalize()
    pointers = "00" * 8 + 2 * (offset + "00" * 7)
    golden = GOLDEN_HEAD + code + GOLDEN_COUNTS + pointers + GOLDEN_BOUNDS + (GOLDEN_MODES if multimodal else "")
    assert (tmp_path / "a.idx").read_bytes() == bytes.fromhex(golden)
    assert (tmp_path / "a.bin").read_bytes() == bytes.fromhex(tokens)


@pytest.mark.parametrize("multimodal", [False, True])
def test_merged_shards_equal_one_build(tmp_path, multimodal):
    write_golden(tmp_path / "a", multimodal)
    write_golden(tmp_path / "b", multimodal)
    (tmp_path / "b.bin").write_bytes((tmp_path / "b.bin").read_bytes() + b"junk")  # bytes of no sequence stay out
    merge_indexed([tmp_path / "a", tmp_path / "b"], tmp_path / "ab", multimodal=multimodal)
    with IndexedDatasetBuilder(tmp_path / "once.bin", dtype="u2", multimodal=multimodal) as builder:
        for _ in range(2):
            builder.add_document([1, 2, 3], [3, 0], [0, 1] if multimodal else None)
            builder.end_document()
            builder.add_item([258], 2 if multimodal else 0)
            builder.end_document()
        builder.finalize()
    for end in ("bin", "idx"):
        assert (tmp_path / f"ab.{end}").read_bytes() == (tmp_path / f"once.{end}").read_bytes()


def test_merge_refuses_other_dtypes_and_no_shards(tmp_path):
    write_golden(tmp_path / "a", False)
    with IndexedDatasetBuilder(tmp_path / "b.bin", dtype="i4") as builder:
        builder.finalize()
    with pytest.raises(IndexedDatasetError, match="merge shards of one dtype"):
        merge_indexed([tmp_path / "a", tmp_path / "b"], tmp_path / "c")
    with pytest.raises(IndexedDatasetError, match="name at least one"):
        merge_indexed([], tmp_path / "c")
    assert sorted(os.listdir(tmp_path)) == ["a.bin", "a.idx", "b.bin", "b.idx"]


@pytest.mark.parametrize("mmap", [False, True])
def test_gathered_sequences_equal_those_read_one_by_one(tmp_path, mmap):
    generator = np.random.default_rng(5)
    parts = [generator.integers(0, 1000, length) for length in (4, 0, 7, 1, 12)]
    with IndexedDatasetBuilder(tmp_path / "a.bin", dtype="u2") as builder:
        for part in parts:
            builder.add_document(part, [part.size])
        builder.finalize()
    dataset = IndexedDataset(tmp_path / "a", mmap=mmap)
    for _ in range(200):
        indices = generator.integers(0, 5, int(generator.integers(1, 6)))
        begin, end = int(generator.integers(0, parts[indices[0]].size + 1)), int(generator.integers(0, parts[indices[-1]].size + 1))
        out = np.full(80, -1)
        stream = [parts[index] for index in indices]
        if len(indices) == 1 and begin > end:
            with pytest.raises(ValueError, match=f"begin={begin}, end={end} give"):
                dataset.gather(indices, begin, end, out)
            continue
        stream[-1] = stream[-1][:end]
        stream[0] = stream[0][begin:]
        expected = np.concatenate(stream)
        assert dataset.gather(indices, begin, end, out) == expected.size
        assert out.tolist() == expected.tolist() + [-1] * (80 - expected.size)
    with pytest.raises(ValueError, match="give 4 tokens, out holds 3"):
        dataset.gather(np.array([0]), 0, 4, np.empty(3, np.int64))
    with pytest.raises(ValueError, match="begin=5 or end=4 leaves"):
        dataset.gather(np.array([0]), 5, 4, np.empty(9, np.int64))


def test_dataset_without_sequences_opens(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "a.bin") as builder:
        builder.finalize()
    assert len(IndexedDataset(tmp_path / "a")) == 0


def damage_idx(start, data):
    return lambda idx, bin_: (idx[:start] + data + idx[start + len(data) :], bin_)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda idx, bin_: (None, bin_), r"cannot open .*a\.idx: No such file.*without \.idx"),
        (lambda idx, bin_: (idx, None), r"cannot open .*a\.bin: No such file.*copy the \.bin"),
        (lambda idx, bin_: (b"", bin_), r"a\.idx is empty, expected at least 34 bytes.*write it again"),
        (lambda idx, bin_: (idx[:20], bin_), r"a\.idx has 20 bytes, its header alone needs 34: truncated"),
        (lambda idx, bin_: (idx[:-1], bin_), r"a\.idx has 101 bytes, expected 102 for 3 sequences and 4 document boundaries: truncated"),
        (lambda idx, bin_: (idx + b"12", bin_), r"a\.idx has 104 bytes, expected 102 .*foreign bytes"),
        (damage_idx(0, b"TNTIDX"), r"a\.idx begins with b'TNTIDX.*expected b'MMIDIDX.*not an index"),
        (damage_idx(9, b"\x02"), r"a\.idx has format version 2, expected 1"),
        (damage_idx(17, b"\x09"), r"a\.idx has token dtype code 9, expected one of 1\.\.8"),
        (damage_idx(17, b"\x00"), r"token dtype code 0"),
        (damage_idx(18, b"\xff" * 8), r"truncated"),
        (damage_idx(46, b"\x08"), r"points outside of its \.bin"),
        (lambda idx, bin_: (idx, bin_[:-1]), r"a\.bin has 7 bytes, its index describes 8: truncated or paired"),
        (lambda idx, bin_: (idx, b""), r"a\.bin has 0 bytes, its index describes 8"),
    ],
)
def test_damaged_files_are_named_with_the_remedy(tmp_path, damage, message):
    write_golden(tmp_path / "a", False)
    files = [tmp_path / "a.idx", tmp_path / "a.bin"]
    for file, data in zip(files, damage(*(file.read_bytes() for file in files)), strict=True):
        file.unlink()
        if data is not None:
            file.write_bytes(data)
    with pytest.raises(IndexedDatasetError, match=message):
        IndexedDataset(tmp_path / "a")


def test_modes_are_asked_of_an_index_that_has_none(tmp_path):
    write_golden(tmp_path / "a", False)
    with pytest.raises(IndexedDatasetError, match="open it with multimodal=False"):
        IndexedDataset(tmp_path / "a", multimodal=True)


def test_verify_finds_an_entry_that_opening_does_not_read(tmp_path):
    write_golden(tmp_path / "a", False)
    data = bytearray((tmp_path / "a.idx").read_bytes())
    data[46 + 8] = 4  # second pointer
    (tmp_path / "a.idx").write_bytes(data)
    with pytest.raises(IndexedDatasetError, match="pointer differs .* at entry 1"):
        IndexedDataset(tmp_path / "a").verify()


@pytest.mark.journey
def test_every_damaged_length_pointer_and_outer_boundary_is_found_before_training(tmp_path):
    write_golden(tmp_path / "a", False)
    IndexedDataset(tmp_path / "a").verify()
    sound = (tmp_path / "a.idx").read_bytes()
    config = GPTDatasetConfig(random_seed=1, sequence_length=1, blend=([str(tmp_path / "a")], None), split="1,0,0")
    # 3 lengths of 4 bytes and 3 pointers of 8, then 4 boundaries of 8: the inner ones have no second witness.
    places = [*range(34, 78), *range(102 - 8, 102)]
    for place, bit in itertools.product(places, range(8)):
        damaged = bytearray(sound)
        damaged[place] ^= 1 << bit
        (tmp_path / "a.idx").write_bytes(damaged)
        with pytest.raises(IndexedDatasetError, match=r"a\.idx|its index describes"):
            BlendedMegatronDatasetBuilder(GPTDataset, [None] * 3, lambda: True, config).build()
    # The last length is lower: only verifying knows.
    (tmp_path / "a.idx").write_bytes(sound[:42] + b"\x00" + sound[43:])
    with pytest.raises(IndexedDatasetError, match=r"lengths add up to \d bytes, .*a\.bin has 8"):
        IndexedDataset(tmp_path / "a").verify()
    builder = BlendedMegatronDatasetBuilder(GPTDataset, [None] * 3, lambda: True, config, is_verified_on_rank=lambda: False)
    assert builder.build()[0] is not None


def test_verify_goes_through_a_long_index_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr("mcore_parallel.data.corpus._indexed._VERIFIED_AT_ONCE", 7)
    with IndexedDatasetBuilder(tmp_path / "a.bin", dtype="u2") as builder:
        for length in range(50):
            builder.add_document([1] * length, [length])
        builder.finalize()
    IndexedDataset(tmp_path / "a").verify()
    sound = (tmp_path / "a.idx").read_bytes()
    for entry in (6, 7, 8, 20, 40):
        damaged = bytearray(sound)
        damaged[34 + 4 * 50 + 8 * entry] ^= 2
        (tmp_path / "a.idx").write_bytes(damaged)
        with pytest.raises(IndexedDatasetError, match=f"pointer differs .* at entry {entry};"):
            IndexedDataset(tmp_path / "a").verify()


def read_after_truncation(words):
    prefix, end = words
    dataset, path = IndexedDataset(prefix), prefix + end
    assert dataset[len(dataset) - 1].size == 5000
    os.truncate(path, os.path.getsize(path) // 3)
    last = len(dataset) - 1
    for read in (
        lambda: dataset[last].sum(),
        lambda: dataset[last - 3 : last],
        lambda: dataset.gather(np.array([last]), 0, 5000, np.empty(5000, np.int64)),
    ):
        with pytest.raises(IndexedDatasetError) as error:
            read()
        assert path in str(error.value) and "it shrank during the run" in str(error.value), error.value
    print("named")
    return 0


@pytest.mark.parametrize("end", [".bin", ".idx"])
def test_a_corpus_that_is_cut_short_during_a_run_is_named(tmp_path, end):
    with IndexedDatasetBuilder(tmp_path / "a.bin", dtype="u2") as builder:
        builder.add_documents(np.ones(5000 * 4000, np.uint16), [5000] * 4000)
        builder.finalize()
    code, output, errors = run_command(read_after_truncation, [str(tmp_path / "a"), end])
    assert (code, output) == (0, "named\n"), errors


def test_bin_that_shrinks_while_open_gives_no_short_read(tmp_path):
    write_golden(tmp_path / "a", False)
    dataset = IndexedDataset(tmp_path / "a", mmap=False)
    (tmp_path / "a.bin").write_bytes(b"\x01\x00")
    with pytest.raises(IndexedDatasetError, match="gave 2 of 6 bytes"):
        dataset[0]


@pytest.mark.parametrize(
    ("dtype", "tokens", "message"),
    [
        ("u2", [1, 65536], r"token 65536 does not fit uint16 \(0\.\.65535\)"),
        ("u2", [-1], "token -1 does not fit uint16"),
        ("i1", [128], "token 128 does not fit int8"),
        ("i4", [0.5], "float64 tokens given to a dataset of int32"),
    ],
)
def test_tokens_that_do_not_fit_are_refused(tmp_path, dtype, tokens, message):
    with IndexedDatasetBuilder(tmp_path / "a.bin", dtype=dtype) as builder, pytest.raises(IndexedDatasetError, match=message):
        builder.add_item(tokens)
    assert os.listdir(tmp_path) == []


def test_wrong_arguments_are_refused(tmp_path):
    with pytest.raises(IndexedDatasetError, match="has no code"):
        IndexedDatasetBuilder(tmp_path / "a.bin", dtype="u4")
    with pytest.raises(IndexedDatasetError, match="name a writable folder"):
        IndexedDatasetBuilder(tmp_path / "none" / "a.bin")
    with IndexedDatasetBuilder(tmp_path / "a.bin") as builder:
        with pytest.raises(IndexedDatasetError, match="lengths sum to 3"):
            builder.add_document([1, 2], [3])
        with pytest.raises(IndexedDatasetError, match="pass multimodal=True"):
            builder.add_item([1], mode=1)
        builder.add_document([1, 2], [2])
        builder.finalize()
        with pytest.raises(IndexedDatasetError, match="already finished"):
            builder.finalize()
    dataset = IndexedDataset(tmp_path / "a")
    with pytest.raises(IndexError):
        dataset[1]
    with pytest.raises(ValueError, match="leaves sequence 0 of 2 tokens"):
        dataset.get(0, 1, 2)
    with pytest.raises(ValueError, match="step=2"):
        dataset[::2]


def test_failed_builder_leaves_the_older_dataset_whole(tmp_path):
    write_golden(tmp_path / "a", False)
    before = (tmp_path / "a.idx").read_bytes(), (tmp_path / "a.bin").read_bytes()
    with pytest.raises(RuntimeError), IndexedDatasetBuilder(tmp_path / "a.bin") as builder:
        builder.add_document([7] * 100, [100])
        raise RuntimeError
    assert ((tmp_path / "a.idx").read_bytes(), (tmp_path / "a.bin").read_bytes()) == before
    assert sorted(os.listdir(tmp_path)) == ["a.bin", "a.idx"]


def build_and_die(words):
    builder = IndexedDatasetBuilder(words[0] + ".bin")
    builder.add_document([1] * 10**6, [10**6])
    os.kill(os.getpid(), signal.SIGKILL)


def test_killed_builder_leaves_no_dataset(tmp_path):
    code, *_ = run_command(build_and_die, [str(tmp_path / "a")])
    assert code == -signal.SIGKILL
    assert not IndexedDataset.exists(tmp_path / "a")
    assert not (tmp_path / "a.bin").exists()
    assert not (tmp_path / "a.idx").exists()


def test_reader_can_be_sent_to_a_worker(tmp_path):
    write_golden(tmp_path / "a", False)
    sent = copy.copy(IndexedDataset(tmp_path / "a", mmap=False))  # by the protocol that sending uses
    assert [part.tolist() for part in sent[:]] == [[1, 2, 3], [], [258]]
    assert not sent.mmap


def test_dtype_follows_the_vocabulary():
    assert [token_dtype(size).str for size in (100, 65499, 65500, None)] == ["<u2", "<u2", "<i4", "<i4"]

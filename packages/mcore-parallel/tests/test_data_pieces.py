# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Corpora made in pieces: packed and columnar input, partitions, resumption, and indices built ahead of a run."""

import bz2
import errno
import gzip
import json
import lzma
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mcore_parallel.data import (
    BlendedMegatronDatasetBuilder,
    ByteTokenizer,
    DataError,
    DocumentError,
    GPTDataset,
    GPTDatasetConfig,
    IndexedDataset,
    IndexedDatasetError,
    TokenizerError,
    preprocess,
    read_documents,
)
from mcore_parallel.data.datasets import _gpt as gpt_module
from mcore_parallel.data.preprocessing._cli import main

TEXTS = [f"document {number} " * (number % 9) for number in range(300)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def same(first: Path, second: Path) -> bool:
    return all(Path(f"{first}{end}").read_bytes() == Path(f"{second}{end}").read_bytes() for end in (".bin", ".idx"))


def zstd(data: bytes) -> bytes:
    return pytest.importorskip("zstandard").ZstdCompressor().compress(data)


def write_parquet(path: Path, columns: dict[str, list[Any]], **options: Any) -> Path:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    parquet.write_table(pyarrow.table(columns), path, **options)
    return path


@pytest.mark.parametrize(("ending", "pack"), [("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress), ("zst", zstd)])
def test_packed_lines_are_read_as_plain_ones(tmp_path, ending, pack):
    half = LINES.index(b"\n", len(LINES) // 2) + 1
    packed = pack(LINES[:half]) + pack(LINES[half:])  # two streams in a row, as parallel packers write them
    (tmp_path / f"a.jsonl.{ending}").write_bytes(packed)
    assert list(read_documents(tmp_path)) == TEXTS
    (tmp_path / f"a.jsonl.{ending}").write_bytes(packed[:-9])
    with pytest.raises(DocumentError, match=rf"cannot read .*a\.jsonl\.{ending}: .*copy it again"):
        list(read_documents(tmp_path))
    (tmp_path / f"a.jsonl.{ending}").write_bytes(b"plain text, not packed")
    with pytest.raises(DocumentError, match=rf"cannot read .*a\.jsonl\.{ending}"):
        list(read_documents(tmp_path))


def test_parquet_is_read_by_column(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", {"id": list(range(300)), "body": TEXTS}, row_group_size=70)
    assert list(read_documents(path, json_key="body")) == TEXTS
    preprocess([path], tmp_path / "c", "byte", json_key="body", workers=1, partitions=3)
    (tmp_path / "a.jsonl").write_bytes(LINES)
    preprocess([tmp_path / "a.jsonl"], tmp_path / "d", "byte")
    assert same(tmp_path / "c", tmp_path / "d")


def test_bad_parquet_is_named(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", {"id": [1, 2, 3], "text": ["x", None, "y"]})
    with pytest.raises(DocumentError, match=r"a\.parquet has no column 'body' \(columns are id, text\); choose the field with --json-key"):
        list(read_documents(path, json_key="body"))
    with pytest.raises(DocumentError, match=r"a\.parquet has int64 in column 'id', expected text"):
        list(read_documents(path, json_key="id"))
    with pytest.raises(DocumentError, match=r"a\.parquet row 2 has no text in column 'text'"):
        list(read_documents(path))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DocumentError, match=r"cannot read .*a\.parquet: .*write it again"):
        list(read_documents(path))


@pytest.mark.parametrize("partitions", [1, 2, 7, 40])
def test_pieces_joined_equal_one_run(tmp_path, partitions):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(LINES)
    (folder / "b.txt").write_text("one file, one document")
    (folder / "c.jsonl.gz").write_bytes(gzip.compress(LINES))
    (folder / "d.jsonl").write_bytes(LINES[:-1])
    (folder / "e.txt").write_text("")
    whole = preprocess([folder], tmp_path / "whole", "byte", append_eod=True)
    shares: list[float] = []
    report = preprocess(
        [folder], tmp_path / "c", "byte", append_eod=True, partitions=partitions, on_progress=lambda *told: shares.append(told[2])
    )
    assert same(tmp_path / "whole", tmp_path / "c")
    assert (report.num_documents, report.num_tokens, report.num_skipped) == (whole.num_documents, whole.num_tokens, whole.num_skipped)
    assert shares == sorted(shares) and shares[-1] == pytest.approx(1.0)
    assert not (tmp_path / "c.pieces").exists()


class Dying(ByteTokenizer):
    """Fails at its third batch."""

    left = 2

    def tokenize_batch(self, texts):
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return super().tokenize_batch(texts)


def test_killed_run_goes_on_with_the_piece_it_was_at(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(LINES)
    preprocess([tmp_path / "a.jsonl"], tmp_path / "whole", "byte")
    with pytest.raises(KeyboardInterrupt):
        preprocess([tmp_path / "a.jsonl"], tmp_path / "c", Dying(), partitions=5)
    pieces = tmp_path / "c.pieces"
    assert not (tmp_path / "c.bin").exists() and not (tmp_path / "c.idx").exists()
    assert sorted(path.name for path in pieces.glob("*.json")) == ["0.json", "1.json", "job.json"]
    (pieces / "2.bin.1-ab.partial").write_bytes(b"left by a kill")
    times = [(pieces / f"{number}.bin").stat().st_mtime_ns for number in range(2)]
    first = preprocess([tmp_path / "a.jsonl"], tmp_path / "c", "byte", partitions=5, partition=2)
    assert [(pieces / f"{number}.bin").stat().st_mtime_ns for number in range(2)] == times
    assert not list(pieces.glob("*.partial")) and 0 < first.num_documents < 266
    report = preprocess([tmp_path / "a.jsonl"], tmp_path / "c", "byte", partitions=5)
    assert same(tmp_path / "whole", tmp_path / "c") and 0 < report.num_resumed < report.num_documents == 266


@pytest.mark.slow
def test_killed_process_loses_its_piece_only(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(LINES * 300)
    words = ["--input", tmp_path / "a.jsonl", "--output-prefix", tmp_path / "c", "--tokenizer", "byte", "--partitions", "20"]
    process = subprocess.Popen([sys.executable, "-m", "mcore_parallel.data.preprocessing._cli", *map(str, words)])
    while process.poll() is None and not (tmp_path / "c.pieces" / "2.json").exists():
        time.sleep(0.001)
    process.kill()
    process.wait()
    assert not (tmp_path / "c.idx").exists() and not (tmp_path / "c.bin").exists()
    report = preprocess([tmp_path / "a.jsonl"], tmp_path / "c", "byte", partitions=20)
    preprocess([tmp_path / "a.jsonl"], tmp_path / "whole", "byte")
    assert same(tmp_path / "whole", tmp_path / "c") and 0 < report.num_resumed < report.num_documents


@pytest.mark.parametrize("number", [-1, 261, 70000])
def test_ids_beyond_the_vocabulary_are_errors(tmp_path, number):
    class Wrong(ByteTokenizer):
        def tokenize_batch(self, texts):
            return [[number] for _ in texts]

    (tmp_path / "a.jsonl").write_bytes(LINES)
    with pytest.raises(TokenizerError, match=rf"id {number} lies outside of 0\.\.260"):
        preprocess([tmp_path / "a.jsonl"], tmp_path / "c", Wrong())
    assert os.listdir(tmp_path) == ["a.jsonl"]


def test_pieces_of_another_job_are_not_joined(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(LINES)
    preprocess([tmp_path / "a.jsonl"], tmp_path / "c", "byte", partitions=2, partition=0)
    with pytest.raises(DataError, match=r"c\.pieces holds pieces made with another append_eod, partitions; repeat the command"):
        preprocess([tmp_path / "a.jsonl"], tmp_path / "c", "byte", partitions=3, append_eod=True)
    assert not (tmp_path / "c.idx").exists()


def test_damaged_marks_are_made_again(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(LINES)
    for number in (0, 1):
        preprocess([tmp_path / "a.jsonl"], tmp_path / "c", "byte", partitions=2, partition=number)
    (tmp_path / "c.pieces" / "0.json").write_bytes(b"{")
    report = preprocess([tmp_path / "a.jsonl"], tmp_path / "c", "byte", partitions=2)
    assert report.num_documents == 266 and 0 < report.num_resumed < 266


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"partition": 1}, "partition=1 needs partitions"),
        ({"partitions": 0}, "partitions=0 must be at least 1"),
        ({"partitions": 2, "partition": 2}, r"partition=2 lie in 0\.\.1"),
        ({"encoding_errors": "ignore"}, "encoding_errors='ignore' must be strict or replace"),
    ],
)
def test_numbers_out_of_range_are_errors(tmp_path, numbers, message):
    (tmp_path / "a.jsonl").write_bytes(LINES)
    with pytest.raises(DataError, match=message):
        preprocess([tmp_path / "a.jsonl"], tmp_path / "c", "byte", **numbers)
    assert os.listdir(tmp_path) == ["a.jsonl"]


def test_empty_input_in_pieces_leaves_nothing(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n' * 4)
    with pytest.raises(DocumentError, match=r"no document with text \(4 empty ones\)"):
        preprocess([tmp_path / "a.jsonl"], tmp_path / "c", "byte", partitions=2)
    assert os.listdir(tmp_path) == ["a.jsonl"]


def test_full_disk_is_named_and_leaves_nothing(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_bytes(LINES)

    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(IndexedDatasetError, match=r"cannot write .*c\.bin: No space left on device; make room"):
        preprocess([tmp_path / "a.jsonl"], tmp_path / "c", "byte")
    assert os.listdir(tmp_path) == ["a.jsonl"]


def test_line_of_a_piece_is_named_by_its_byte(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(LINES + b'{"text": 3}\n')
    with pytest.raises(DocumentError, match=r"a\.jsonl:\d+ after byte \d+ has no text in the field 'text' \(it is a int\)"):
        preprocess([tmp_path / "a.jsonl"], tmp_path / "c", "byte", partitions=2, partition=1)


def command(*words: Any) -> int:
    return main([str(word) for word in words])


def test_indices_built_ahead_are_those_a_run_finds(tmp_path, capsys, monkeypatch):
    (tmp_path / "a.jsonl").write_bytes(LINES)
    monkeypatch.chdir(tmp_path)
    common = ("--tokenizer", "byte", "--build-cache", "--sequence-length", 32, "--seed", 7, "--split", "9,1,0", "--cache", "cache")
    assert command("--input", "a.jsonl", "--output-prefix", "c", "--append-eod", *common, "--samples", 500, "all", 0) == 0
    assert command("--blend", 3, "c", 1, "c", *common, "--samples", 50, 9, 0) == 0
    assert re.search(r"indices in cache: samples of train \d{3,}, valid \d+;", capsys.readouterr().out)

    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("the run builds what should be there")

    monkeypatch.setattr(gpt_module, "build_gpt_indices", refuse)
    shared: dict[str, Any] = {"random_seed": 7, "sequence_length": 32, "split": "9,1,0", "tokenizer": ByteTokenizer()}
    for blend, sizes in ((["c"], None), [500, None, 0]), ((["c", "c"], [3.0, 1.0]), [50, 9, 0]):
        config = GPTDatasetConfig(blend=blend, path_to_cache="cache", inter_document_masking=True, **shared)
        train, valid, _ = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()
        assert len(train) >= sizes[0] and valid is not None


def test_indices_that_cannot_be_written_fail_the_command(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / "file").write_text("")
    options = ("--tokenizer", "byte", "--build-cache", "--sequence-length", 32, "--samples", 9, 9, 0, "--split", "9,1,0")
    assert command("--input", tmp_path / "a.jsonl", "--output-prefix", tmp_path / "c", *options, "--cache", tmp_path / "file" / "x") == 1
    assert "cannot be written" in capsys.readouterr().err
    assert command("--output-prefix", tmp_path / "missing", *options) == 2
    assert "missing.idx" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--output-prefix", "c"], "--input or --build-cache is required"),
        (["--input", "a", "--output-prefix", "c", "--build-cache"], "--build-cache requires --sequence-length"),
        (["--build-cache"], "--output-prefix is required"),
    ],
)
def test_wrong_usage_names_what_is_missing(capsys, words, message):
    with pytest.raises(SystemExit) as stopped:
        main(["--tokenizer", "byte", *words])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_progress_tells_rate_and_time_left(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_bytes(LINES)
    words = ("--input", tmp_path / "a.jsonl", "--output-prefix", tmp_path / "c", "--tokenizer", "byte", "--partitions", 3)
    assert command(*words, "--progress", "on") == 0
    assert re.search(r"\d+% [\d,]+ documents, [\d,]+ tokens, [\d,]+ documents/s, \d+ s left", capsys.readouterr().err)
    assert len(IndexedDataset(tmp_path / "c")) == 266

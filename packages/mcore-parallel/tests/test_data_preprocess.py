# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Reading documents, and the command that turns them into a corpus."""

import gzip
import json
import os
import re

import pytest

from mcore_parallel.data import DocumentError, IndexedDataset, preprocess, read_documents
from mcore_parallel.data.preprocessing._cli import main


def write_lines(path, texts, key="text"):
    opener = gzip.open if str(path).endswith(".gz") else open
    with opener(path, "wt", encoding="utf-8") as file:
        for text in texts:
            file.write(json.dumps({key: text, "id": 1}) + "\n")
    return path


def texts_of(prefix, eod=None):
    return [bytes(token for token in part.tolist() if token != eod).decode() for part in IndexedDataset(prefix)[:]]


def test_folder_is_read_in_order_of_names_with_gzip_and_lines(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_bytes("\ufeffsecond\r\n".encode())
    (tmp_path / "a.md").write_text("first")
    (tmp_path / "sub" / "code.py").write_text("x = 1")
    (tmp_path / "sub" / "other.bin").write_text("not read")
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"third"))
    write_lines(tmp_path / "d.jsonl.gz", ["fourth", "f\u00fcnf"])
    assert list(read_documents(tmp_path)) == ["first", "second\r\n", "third", "fourth", "f\u00fcnf", "x = 1"]


def test_lines_may_be_blank_and_end_without_newline(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n  \n{"text": ""}\n{"text": "two"}')
    assert list(read_documents(tmp_path / "a.jsonl")) == ["one", "", "two"]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', r"a\.jsonl:2 is no JSON"),
        ("a.jsonl", b'{"body": "x"}', r"a\.jsonl:1 has no text in the field 'text' \(fields are body\); choose the field with --json-key"),
        ("a.jsonl", b'{"text": 3}', "it is a int"),
        ("a.jsonl", b"[1]", "holds a list, expected an object"),
        ("a.jsonl", b'{"text": "\\ud800"}', "half a surrogate pair at character 0"),
        ("a.jsonl", b'{"text": "\xff"}', r"a\.jsonl:1 is not UTF-8: byte 0xff at 10"),
        ("a.txt", b"ab\xff", r"a\.txt is not UTF-8: byte 0xff at 2"),
        ("a.txt.gz", gzip.compress(b"x" * 1000, mtime=0)[:-10], r"cannot read .*a\.txt\.gz"),
        ("a.txt.gz", b"plain", r"cannot read .*a\.txt\.gz"),
    ],
)
def test_unreadable_text_is_named(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DocumentError, match=message):
        list(read_documents(tmp_path / name))


def test_bad_bytes_can_be_replaced(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"ab\xff")
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "\\ud800x"}')
    assert list(read_documents(tmp_path, encoding_errors="replace")) == ["ab\ufffd", "?x"]


def test_missing_and_empty_places_are_named(tmp_path):
    with pytest.raises(DocumentError, match="no such file or folder"):
        list(read_documents(tmp_path / "none"))
    with pytest.raises(DocumentError, match=r"holds no \.py, \.txt, \.md, \.jsonl or \.parquet file"):
        list(read_documents(tmp_path))


@pytest.mark.parametrize("eod", [False, True])
def test_preprocess_writes_one_document_each(tmp_path, eod):
    source = write_lines(tmp_path / "in.jsonl", ["hello", "", "\u4e2d\u6587"])
    report = preprocess([source], tmp_path / "out" / "corpus", "byte", append_eod=eod)
    dataset = IndexedDataset(tmp_path / "out" / "corpus")
    assert (report.num_documents, report.num_skipped, report.num_tokens) == (2, 1, 11 + 2 * eod)
    assert report.dtype == dataset.dtype.name == "uint16"
    assert dataset.document_indices.tolist() == [0, 1, 2]
    assert [part[-1] == 256 for part in dataset[:]] == [eod, eod]
    assert texts_of(tmp_path / "out" / "corpus", eod=256) == ["hello", "\u4e2d\u6587"]


@pytest.mark.journey
def test_workers_do_not_change_the_result(tmp_path):
    source = write_lines(tmp_path / "in.jsonl", [f"document {number} " * (number % 7) for number in range(5000)])
    for workers in (1, 2):
        preprocess([source], tmp_path / f"w{workers}", "byte", append_eod=True, workers=workers)
    for end in ("bin", "idx"):
        assert (tmp_path / f"w1.{end}").read_bytes() == (tmp_path / f"w2.{end}").read_bytes()


def run(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    return code, *capsys.readouterr()


def test_command_reports_what_it_wrote(tmp_path, capsys):
    source = write_lines(tmp_path / "in.jsonl", ["abc", "de"], key="body")
    code, out, err = run(
        capsys, "--input", source, "--output-prefix", tmp_path / "c", "--tokenizer", "byte", "--json-key", "body", "--append-eod"
    )
    assert (code, err) == (0, "")
    assert "2 documents, 7 uint16 tokens" in out
    assert texts_of(tmp_path / "c", eod=256) == ["abc", "de"]


def test_progress_can_be_forced(tmp_path, capsys):
    source = write_lines(tmp_path / "in.jsonl", ["abc"])
    code, _, err = run(capsys, "--input", source, "--output-prefix", tmp_path / "c", "--tokenizer", "byte", "--progress", "on")
    assert code == 0
    assert "1 documents, 3 tokens" in err


@pytest.mark.parametrize(
    ("texts", "extra", "message"),
    [
        (["", ""], [], r"no document with text \(2 empty ones\); nothing was written"),
        ([], [], r"no document with text \(0 empty ones\)"),
        (["x"], ["--json-key", "body"], "has no text in the field 'body'"),
        (["x"], ["--tokenizer", "nonsense"], "tokenizer='nonsense' is no choice"),
        (["1 x"], ["--tokenizer", "null:9"], "not all decimal ids"),
        (["x"], ["--workers", "0"], "workers=0"),
        (["x"], ["--input", "missing-file"], "cannot read missing-file"),
    ],
)
def test_command_fails_with_one_line_and_writes_nothing(tmp_path, capsys, texts, extra, message):
    source = write_lines(tmp_path / "in.jsonl", texts)
    code, out, err = run(capsys, "--input", source, "--output-prefix", tmp_path / "c", "--tokenizer", "byte", *extra)
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert re.search(message, err)
    assert os.listdir(tmp_path) == ["in.jsonl"]


def test_wrong_usage_exits_with_two(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--input", "x", "--tokenizer", "byte"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "error: --output-prefix is required; mcore-preprocess --help lists what there is\n"

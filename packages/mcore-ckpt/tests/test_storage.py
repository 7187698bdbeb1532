# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The safetensors container against its reference library, and against damaged headers."""

import hashlib
import json
import random
import struct

import pytest
import safetensors.torch
import torch

from mcore_ckpt import CheckpointingException
from mcore_ckpt._storage import FileRecord, SafetensorsFile, dtype_code, dtype_of, file_digest, read_header, write_file, write_safetensors

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
]
DTYPES += [torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu]


def sample(dtype, shape=(3, 5)):
    return torch.randint(0, 2, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype).reshape(shape)


def same_bits(one, other):
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    )


def write(path, tensors):
    entries = [(key, dtype_code(value.dtype), tuple(value.shape), lambda value=value: value) for key, value in tensors.items()]
    return write_safetensors(path, entries, {"format": "pt"})


def test_what_we_write_the_reference_library_reads_and_the_other_way(tmp_path):
    tensors = {str(dtype): sample(dtype) for dtype in DTYPES}
    tensors |= {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4), "strided": torch.arange(12.0).reshape(3, 4).t()}
    record = write(tmp_path / "ours.safetensors", tensors)
    assert record == file_digest(tmp_path / "ours.safetensors")
    theirs = safetensors.torch.load_file(tmp_path / "ours.safetensors")
    assert theirs.keys() == tensors.keys() and all(same_bits(theirs[key], tensors[key]) for key in tensors)
    safetensors.torch.save_file({key: value.contiguous() for key, value in tensors.items()}, tmp_path / "theirs.safetensors")
    with SafetensorsFile(tmp_path / "theirs.safetensors") as file:
        assert file.slots.keys() == tensors.keys()
        assert all(same_bits(file.tensor(key), tensors[key]) for key in tensors)


def test_a_file_with_unaligned_tensors_is_read(tmp_path):
    header = json.dumps(
        {
            "a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
            "b": {"dtype": "F32", "shape": [2], "data_offsets": [3, 11]},
        }
    ).encode()
    data = bytes([1, 2, 3]) + struct.pack("<2f", 1.5, -2.0)
    (tmp_path / "f").write_bytes(struct.pack("<Q", len(header)) + header + data)
    with SafetensorsFile(tmp_path / "f") as file:
        assert file.tensor("b").tolist() == [1.5, -2.0]
        with pytest.raises(CheckpointingException, match="no tensor 'c'"):
            file.tensor("c")


def test_views_survive_the_file_and_never_write_to_it(tmp_path):
    write(tmp_path / "f", {"a": torch.ones(4)})
    before = (tmp_path / "f").read_bytes()
    with SafetensorsFile(tmp_path / "f") as file:
        view = file.tensor("a")
    view.zero_()
    assert (tmp_path / "f").read_bytes() == before


def test_a_file_named_through_a_link_is_read(tmp_path):
    write(tmp_path / "blob", {"a": torch.ones(4)})
    (tmp_path / "model.safetensors").symlink_to("blob")
    with SafetensorsFile(tmp_path / "model.safetensors") as file:
        assert file.tensor("a").tolist() == [1.0] * 4


HEADERS = {
    "not json": b"{",
    "a list": b"[]",
    "a gap": b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}',
    "an overlap": b'{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"b":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}',
    "bytes left over": b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}',
    "past the end": b'{"a":{"dtype":"U8","shape":[9],"data_offsets":[0,9]}}',
    "a shape that lies": b'{"a":{"dtype":"U8","shape":[9],"data_offsets":[0,4]}}',
    "a huge shape": b'{"a":{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,4]}}',
    "negative": b'{"a":{"dtype":"U8","shape":[-4],"data_offsets":[0,4]}}',
    "a bool": b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[false,4]}}',
    "an unknown type": b'{"a":{"dtype":"F3","shape":[4],"data_offsets":[0,4]}}',
    "a key twice": b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
    "no offsets": b'{"a":{"dtype":"U8","shape":[4]}}',
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS.keys())
def test_a_malformed_header_is_refused_by_name(tmp_path, header):
    (tmp_path / "bad.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"1234")
    with pytest.raises(CheckpointingException, match=r"bad\.safetensors"):
        read_header(tmp_path / "bad.safetensors")


@pytest.mark.parametrize("content", [b"", b"1234", struct.pack("<Q", 2**63) + b"{}", struct.pack("<Q", 3) + b"{}"])
def test_a_header_longer_than_the_file_is_refused(tmp_path, content):
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(CheckpointingException, match="not a sound safetensors file"):
        read_header(tmp_path / "f")


def test_600_mutated_headers_either_read_or_raise_the_one_error(tmp_path):
    rng = random.Random(5)
    write(tmp_path / "f", {"a": torch.ones(3), "b": torch.ones(2, 2, dtype=torch.int16)})
    good = (tmp_path / "f").read_bytes()
    refused = 0
    for _ in range(600):
        bad = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            bad[rng.randrange(len(bad) - 20)] = rng.randrange(256)
        (tmp_path / "g").write_bytes(bad[: rng.choice((len(bad), len(bad), rng.randrange(len(bad))))])
        try:
            with SafetensorsFile(tmp_path / "g") as file:
                for key in file.slots:
                    file.tensor(key)
        except CheckpointingException:
            refused += 1
    assert refused > 300


def test_existing_files_are_never_overwritten(tmp_path):
    write_file(tmp_path / "f", [b"abc", memoryview(b"def")])
    with pytest.raises(FileExistsError):
        write_file(tmp_path / "f", [b"x"])
    assert (tmp_path / "f").read_bytes() == b"abcdef"


def test_unknown_types_name_the_known_ones():
    with pytest.raises(ValueError, match=r"complex128 cannot be stored.*torch\.float32"):
        dtype_code(torch.complex128)
    with pytest.raises(ValueError, match="unknown element type 'F128'"):
        dtype_of("F128")


def test_parts_of_any_length_come_together_where_no_disk_is(tmp_path, monkeypatch):
    monkeypatch.setattr("mcore_ckpt._storage._stream._is_on_disk", lambda handle: False)
    rng = random.Random(2)
    lengths = [0, 1, 2**20 - 1, 2**20, 2**20 + 1, 3, 2**22, 17 * 2**20, 5, *[2**20 - 1] * 6, *rng.choices(range(100), k=50)]
    parts = [rng.randbytes(length) for length in lengths]
    record = write_file(tmp_path / "file", parts)
    content = b"".join(parts)
    assert (tmp_path / "file").read_bytes() == content
    assert record == FileRecord(len(content), hashlib.sha256(content).hexdigest())
    assert write_file(tmp_path / "empty", []).bytes == 0 and (tmp_path / "empty").stat().st_size == 0

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Files that are hashed and handed out in one reading: every byte where it belongs, whatever is asked of which file."""

import hashlib
import random

import pytest
import torch

from mcore_ckpt import ShardedTensor, load, save
from mcore_ckpt._storage import BLOCK_BYTES, ByteRangeSink, StoredFile, digest_file
from mcore_ckpt._storage._stream import CHUNK_BYTES
from mcore_ckpt.storage import MemoryFolder
from tests.support.counting import Counting


@pytest.mark.parametrize("seed", range(4))
def test_every_taker_gets_its_bytes_and_the_digest_is_that_of_the_file(seed, tmp_path):
    rng = random.Random(seed)
    size = rng.choice([1, 5000, BLOCK_BYTES, BLOCK_BYTES + 1, 2 * BLOCK_BYTES + 7, CHUNK_BYTES + 3 * BLOCK_BYTES + 11])
    content = rng.randbytes(size)
    folder = Counting(tmp_path)
    folder.write("f", [memoryview(content)])
    sinks, want, got, position = [], [], [], 0
    while position < size:
        begin = position + rng.choice([0, 0, 1, 4097, BLOCK_BYTES, BLOCK_BYTES + 5])
        called = rng.random() < 0.5
        length = rng.choice([1, 100, 2**20 - 1, 2**20, 3 * 2**20 + 1, BLOCK_BYTES] + [CHUNK_BYTES + 5] * (not called))
        position = begin + length
        if position > size:
            break
        want.append(content[begin:position])
        if called:
            got.append(bytearray())
            sinks.append(ByteRangeSink(begin, position, got[-1].extend))
        else:
            got.append(bytearray(length))
            sinks.append(ByteRangeSink(begin, position, memoryview(got[-1])))
    record = digest_file(StoredFile(folder, "f"), sinks)
    assert record.bytes == size and record.sha256 == hashlib.sha256(content).hexdigest()
    assert got == want
    assert folder.num_bytes == size


@pytest.mark.parametrize("format", ["native", "torch_dist"])
def test_long_tensors_in_any_boxes_come_out_of_one_reading(format, tmp_path):
    # Longer than a block, with rows longer than a block, of odd lengths, and one that is read by columns only.
    shapes = {"long": (3, 1_500_000), "tall": (700_001, 3), "deep": (2, 2, 600_000), "flat": (1_234_567,), "scalar": ()}
    whole = {name: torch.rand(shape) for name, shape in shapes.items()}
    folder = Counting(tmp_path / "c")
    save(whole, folder, format=format)
    boxes = {
        "long": [((0, 0), (3, 7)), ((1, 7), (1, 1_499_993)), ((2, 7), (1, 1_499_993))],
        "tall": [((1, 1), (700_000, 2))],
        "deep": [((1, 0, 0), (1, 1, 600_000)), ((0, 0, 5), (1, 2, 599_000))],
        "flat": [((0,), (1_000,)), ((1_000,), (1_233_567,))],
        "scalar": [((), ())],
    }
    parts = {name: [ShardedTensor(torch.zeros(shape), shapes[name], offset) for offset, shape in rows] for name, rows in boxes.items()}
    for verify in (True, False):
        folder.num_bytes = 0
        load(parts, folder, verify=verify)
        for name, rows in parts.items():
            for part in rows:
                assert torch.equal(part.data, whole[name][part.box.slices()]), name
                part.data.zero_()
        # The manifest and the headers come on top. Unverified, rows are mapped: only what is touched is read.
        assert not verify or folder.num_bytes < sum(tensor.nbytes for tensor in whole.values()) + 60_000


def test_targets_that_are_not_plain_memory_are_filled_too():
    whole = {"w": torch.rand(300, 70), "z": torch.rand(40, 8, dtype=torch.complex64)}
    folder = MemoryFolder()
    save(whole, folder)
    transposed, conjugate = torch.zeros(70, 300).t(), torch.zeros(40, 8, dtype=torch.complex64).conj()
    load({"w": transposed, "z": conjugate}, folder)
    assert torch.equal(transposed, whole["w"]) and torch.equal(conjugate, whole["z"])

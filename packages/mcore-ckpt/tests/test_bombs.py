# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Small files that would eat memory or time: every reader answers at once, from little memory."""

import io
import itertools
import json
import math
import os
import random
import struct
import time
import zipfile

import pytest
import torch

from mcore_ckpt import CheckpointingException, load
from mcore_ckpt._formats import DistcpFile
from mcore_ckpt._formats._records import Call, Name, Persistent, Table, encode_records
from mcore_ckpt._formats._torch_dist import write_metadata
from mcore_ckpt._storage import StoredFile, open_folder
from mcore_ckpt.chunks import Box
from mcore_ckpt.foreign import import_torch, read_entry, read_torch
from mcore_ckpt.inspect import verify
from mcore_ckpt.manifest import Chunk, FileRecord, Manifest, TensorRecord, read_manifest
from tests.support.journeys import journeys_among

FILES_PER_KIND = 5
CAMPAIGN_FILES_PER_KIND = 77
MAX_S = 1.0
MAX_BYTES = 64 * 2**20
_MODULE = "torch.distributed.checkpoint.metadata"


def stored(stream, *, data=bytes(64), order=b"little", compressed=(), more=()):
    """A file of torch.save around an object stream."""
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as archive:
        for name, content in (("data.pkl", stream), ("byteorder", order), ("data/0", data), ("version", b"3\n"), *more):
            kind = zipfile.ZIP_DEFLATED if name in compressed else zipfile.ZIP_STORED
            archive.writestr(zipfile.ZipInfo(f"archive/{name}"), content, compress_type=kind)
    return sink.getvalue()


def tensor(shape, stride, num_elements=16):
    storage = Persistent(("storage", Name("torch.FloatStorage"), "0", "cpu", num_elements))
    return Call("torch._utils._rebuild_tensor_v2", (storage, 0, shape, stride, False, Call("collections.OrderedDict")))


def stream(body):
    return b"\x80\x02" + body + b"."


def nested(rng):
    """A value that refers to the one before, again and again: in tuples, lists, dicts or calls, as a value or as a key."""
    depth, width = rng.randint(12, 60), rng.randint(2, 9)
    start = rng.choice([b"K\x01", b"X\x40\x00\x00\x00" + b"x" * 64, b")"]) + b"q\x00"
    wrap = rng.choice(["tuple", "list", "dict", "call"])
    body = start
    for level in range(depth):
        again = b"h" + bytes([level])
        if wrap == "tuple":
            body = b"(" + body + again * width + b"t"
        elif wrap == "list":
            body = b"](" + body + again * width + b"e"
        elif wrap == "dict":
            body = b"}(N" + body + b"".join(b"K" + bytes([key]) + again for key in range(width)) + b"u"
        else:
            body = b"ca\nb\n(" + body + again * width + b"tR"
        body += b"q" + bytes([level + 1])
    if wrap == "tuple" and rng.random() < 0.5:
        # As the key of a dict it is hashed.
        body = b"}" + body + b"K\x01s"
    return stored(stream(body))


def late(rng):
    """Lists that refer to each other while they are empty, and are filled last."""
    depth, width = rng.randint(18, 60), rng.randint(2, 6)
    body = b"(" + b"".join(b"]q" + bytes([level]) for level in range(depth))
    for level in range(depth - 1):
        body += b"h" + bytes([level]) + b"(" + (b"h" + bytes([level + 1])) * width + b"e"
    return stored(stream(body + b"t"))


def order(rng):
    """A byte order that is inflated."""
    return stored(stream(b"N"), order=bytes(rng.choice([1, 1, 1, 64]) * 2**20), compressed=("byteorder",))


def inflated(rng):
    """A stream, or the data of a tensor, that are inflated."""
    size = rng.randint(1, 6) * 2**20
    name = rng.choice(["data.pkl", "data/0"])
    content = stream(b"N" + b"0N" * (size // 2)) if name == "data.pkl" else encode_records({"w": tensor((size // 4,), (1,), size // 4)})
    return stored(content, data=bytes(size) if name == "data/0" else bytes(64), compressed=(name,))


def strides(rng):
    """A tensor of many elements in the memory of few."""
    shape = tuple(2 ** rng.randint(4, 12) for _ in range(rng.randint(2, 5)))
    return stored(encode_records({f"w{i}": tensor(shape, (0,) * len(shape)) for i in range(rng.randint(1, 4))}))


def shares(rng):
    """Many tensors in the same memory."""
    num_elements = rng.randint(2**12, 2**15)
    many = {f"w{i}": tensor((num_elements,), (1,), num_elements) for i in range(rng.randint(300, 800))}
    return stored(encode_records(many), data=bytes(4 * num_elements))


def items(rng):
    """A dict of its own class, set item by item, or with keys of one hash."""
    count = rng.randint(1_000, 8_000)
    if rng.random() < 0.5:
        return stored(stream(b"ccollections\nOrderedDict\n)R" + b"".join(b"J" + struct.pack("<i", i) + b"Ns" for i in range(count))))
    keys = (i * (2**61 - 1) for i in range(1, count))
    return stored(encode_records(Table([(key if rng.random() < 0.5 else (key,), None) for key in keys])))


def containers(rng):
    """Empty containers of a byte each, or nested so deeply that nobody can walk them."""
    count = rng.randint(1_000, 20_000) * rng.choice([1, 1, 1, 1, 1, 9])
    body = rng.choice([b"}" * count, b"]" * count, b"(" * count, b")" * count, b"](" * (count // 2), b"]" + b"\x85" * (count // 8)])
    return stored(stream(body))


def entries(rng):
    """An archive of many entries."""
    return stored(stream(b"N"), more=[(f"data/{i}", b"") for i in range(1, rng.randint(200, 1000))])


FILES = (nested, late, order, inflated, strides, shares, items, containers, entries)


def irregular(rng):
    """Parts that no plane divides: long rods along three dims, side by side, or steps of stairs."""
    count = rng.randint(200, 1200)
    kind = rng.choice(["rods", "stairs", "rows"])
    if kind == "rods":
        half = math.isqrt(count // 3)
        boxes = []
        for first, second in itertools.product(range(0, 2 * half, 2), repeat=2):
            boxes.append(Box((0, first, second + 1), (2 * half, 1, 1)))
            boxes.append(Box((first + 1, 0, second), (1, 2 * half, 1)))
            boxes.append(Box((first, second + 1, 0), (1, 1, 2 * half)))
        return (2 * half,) * 3, boxes
    if kind == "stairs":
        return (count, count), [Box((i, 0), (1, count - i)) for i in range(count)] + [Box((0, i), (count - i, 1)) for i in range(count)]
    return (count, 4), [Box((0, 0), (count, 1)) for _ in range(2)] + [Box((i, 1), (1, 2)) for i in range(count)]


def gaps(rng):
    """Parts that are disjoint and leave holes everywhere."""
    side = rng.randint(15, 40)
    return (2 * side, 2 * side), [Box((2 * i, 2 * j), (1, 1)) for i, j in itertools.product(range(side), repeat=2)]


def manifest(rng, folder):
    """A manifest whose parts take long to compare."""
    shape, boxes = rng.choice([irregular, gaps])(rng)
    num_bytes = sum(box.num_elements for box in boxes)
    name = "01234567-r00000-000.safetensors"
    record = TensorRecord("U8", shape, tuple(Chunk(name, f"w{i}", box) for i, box in enumerate(boxes)))
    content = Manifest(tensors={"w": record}, files={name: FileRecord(num_bytes, "0" * 64)}).encode()
    (folder / "manifest.json").write_bytes(content)


def metadata(rng, folder):
    """Metadata of torch whose parts take long to compare, or overlap in their file."""
    if rng.random() < 0.5:
        shape, boxes = rng.choice([irregular, gaps])(rng)
        chunks = [("__0_0.distcp", f"{i}:{100}", box) for i, box in enumerate(boxes)]
        (folder / ".metadata").write_bytes(write_metadata({"w": ("U8", shape, chunks)}, {}))
        (folder / "__0_0.distcp").write_bytes(bytes(100 + len(boxes)))
        return
    # Each place is the same long archive with a comment less.
    count = rng.randint(50, 500)
    archive = entries(rng) + bytes(count)
    chunks = [("__0_0.distcp", f"0:{len(archive) - i}", Box((i,), (1,))) for i in range(count)]
    (folder / ".metadata").write_bytes(write_metadata({"w": ("F32", (count,), chunks)}, {}))
    (folder / "__0_0.distcp").write_bytes(archive)


def objects(rng, folder):
    """Metadata of torch that are one of the streams of FILES."""
    with zipfile.ZipFile(io.BytesIO(rng.choice([nested, late, containers])(rng))) as archive:
        content = archive.read("archive/data.pkl")
    if rng.random() < 0.5:
        field = b"X\x0c\x00\x00\x00storage_data"
        content = stream(b"c" + _MODULE.encode() + b"\nMetadata\n)\x81}(" + field + content[2:-1] + b"ub")
    (folder / ".metadata").write_bytes(content)


def header(rng, folder):
    """A safetensors file whose header is deep, or says large numbers."""
    deep = "[" * rng.randint(1000, 100_000)
    large = json.dumps({f"w{i}": {"dtype": "F64", "shape": [2**62] * 60, "data_offsets": [0, 2**62]} for i in range(rng.randint(1, 500))})
    text = rng.choice([deep, large, '{"w": ' + deep]).encode()
    name = "01234567-r00000-000.safetensors"
    content = struct.pack("<Q", len(text)) + text
    (folder / name).write_bytes(content)
    record = TensorRecord("F64", (1,), (Chunk(name, "w", Box((0,), (1,))),))
    (folder / "manifest.json").write_bytes(Manifest(tensors={"w": record}, files={name: FileRecord(len(content), "0" * 64)}).encode())


FOLDERS = (manifest, metadata, objects, header)


def _memory(name):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(name))


def attempt(read):
    """Seconds and bytes that a reader takes, and whether it refused; a file that is no bomb for this reader may be read."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before, start = _memory("VmRSS"), time.process_time()
    try:
        read()
        refused = False
    except CheckpointingException:
        refused = True
    return time.process_time() - start, _memory("VmHWM") - before, refused


def _readers(kind, folder):
    if kind in FILES:
        path, place = folder / "bomb", open_folder(folder)
        yield lambda: read_torch(path)
        yield lambda: import_torch(path, folder / f"imported-{time.monotonic_ns()}")
        yield lambda: DistcpFile(StoredFile(place, "bomb")).slot(f"0:{path.stat().st_size}")
    else:
        yield lambda: read_manifest(folder)
        yield lambda: verify(folder)
        yield lambda: read_entry(folder, "w")
        yield lambda: load({"w": torch.zeros(1, dtype=torch.float64)}, folder, verify=False)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", [FILES_PER_KIND, pytest.param(CAMPAIGN_FILES_PER_KIND, marks=pytest.mark.slow)])
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the system does not tell the peak of memory")
@pytest.mark.parametrize("kind", journeys_among([*FILES, *FOLDERS], "manifest", "metadata", "shares"), ids=lambda kind: kind.__name__)
def test_small_files_are_read_or_refused_at_once(kind, count, tmp_path):
    worst, refusals = (0.0, 0), 0
    for number in range(count):
        rng = random.Random(number)
        folder = tmp_path / str(number)
        folder.mkdir()
        if kind in FILES:
            (folder / "bomb").write_bytes(kind(rng))
        else:
            kind(rng, folder)
        for reader in _readers(kind, folder):
            size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
            seconds, num_bytes, refused = attempt(reader)
            if seconds >= MAX_S or num_bytes - size >= MAX_BYTES:
                # A bomb goes off every time; a busy machine or a late collection of garbage does not.
                again_seconds, again_bytes, _ = attempt(reader)
                seconds, num_bytes = min(seconds, again_seconds), min(num_bytes, again_bytes)
            num_bytes -= size
            worst = max(worst[0], seconds), max(worst[1], num_bytes)
            refusals += refused
            assert seconds < MAX_S and num_bytes < MAX_BYTES, (kind.__name__, number, seconds, num_bytes)
    assert refusals > 0, f"no file of this kind was refused; the worst took {worst}"

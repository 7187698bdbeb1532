# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Checkpoints of torch.distributed.checkpoint: it reads ours, we read its own, and nothing in them runs."""

import dataclasses
import io
import os
import pickle
import random
import warnings
import zipfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from mcore_ckpt import CheckpointingException, ShardedTensor, load, read_tensor, save
from mcore_ckpt._formats import METADATA_NAME, DistcpFile, read_metadata
from mcore_ckpt._formats._records import Call, Name, Table, decode_records, encode_records
from mcore_ckpt._storage import StoredFile
from mcore_ckpt.inspect import summarize, verify
from mcore_ckpt.manifest import is_checkpoint, read_manifest
from mcore_ckpt.storage import LocalFolder, MemoryFolder

DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32]
DTYPES += [torch.float64, torch.complex64, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2]


def state():
    generator = torch.Generator().manual_seed(3)
    tensors = {str(dtype): torch.randint(0, 2, (3, 5), generator=generator).to(dtype) for dtype in DTYPES}
    return {
        **tensors,
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
        "strided": torch.arange(12.0).reshape(3, 4).t(),
        "e\u00e9": torch.ones(1),
    }


def same(one, other):
    return all(
        torch.equal(one[name].contiguous().view(-1).view(torch.uint8), other[name].contiguous().view(-1).view(torch.uint8)) for name in one
    )


def blank(tensors):
    return {name: torch.zeros_like(tensor, memory_format=torch.contiguous_format) for name, tensor in tensors.items()}


def theirs(call, *arguments, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call(*arguments, **options)


def test_torch_reads_what_we_write_in_one_process(tmp_path):
    save(state(), tmp_path / "c", format="torch_dist", extra={"step": 4}, max_file_bytes=100)
    target = blank(state())
    theirs(dcp.load, target, checkpoint_id=tmp_path / "c", no_dist=True)
    assert same(target, state())
    # Its converters go by the planner's data.
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    theirs(dcp_to_torch_save, tmp_path / "c", tmp_path / "whole.pt")
    assert same(state(), torch.load(tmp_path / "whole.pt", weights_only=True))
    # And so do we, by the manifest.
    target = blank(state())
    assert load(target, tmp_path / "c") == {"step": 4} and same(target, state())
    assert verify(tmp_path / "c") == [] and is_checkpoint(tmp_path / "c")
    assert (tmp_path / "c" / "metadata.json").read_text() == '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'


def test_data_lie_where_a_reader_can_map_them(tmp_path):
    save({f"w{i}": torch.arange(100.0 + i) for i in range(5)}, tmp_path / "c", format="torch_dist")
    for record in read_manifest(tmp_path / "c").tensors.values():
        (chunk,) = record.chunks
        slot = DistcpFile(StoredFile(LocalFolder(tmp_path / "c"), chunk.file)).slot(chunk.key)
        assert slot is not None and slot.begin % 64 == 0


def test_we_read_what_torch_wrote(tmp_path):
    entries = {**state(), "step": 7, "nested": {"a": torch.ones(2), "list": [torch.zeros(1), "text"]}}
    theirs(dcp.save, entries, checkpoint_id=tmp_path / "c", no_dist=True)
    manifest = read_manifest(tmp_path / "c")
    assert set(manifest.others) == {"step", "nested.list.1"} and not is_checkpoint(tmp_path / "c")
    target = {**blank(state()), "nested.a": torch.zeros(2), "nested.list.0": torch.ones(1)}
    assert load(target, tmp_path / "c") == {} and same(state(), target)
    assert target["nested.a"].tolist() == [1, 1] and target["nested.list.0"] == 0
    part = torch.zeros(2, 2)
    load({"strided": ShardedTensor(part, (4, 3), (1, 1))}, tmp_path / "c", strict=False)
    assert torch.equal(part, state()["strided"][1:3, 1:3])
    assert summarize(tmp_path / "c").num_elements > 0 and verify(tmp_path / "c") == []
    with pytest.raises(CheckpointingException, match="of another system"):
        save(state(), tmp_path / "c")


def sharded(world, value):
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    return {
        "rows": distribute_tensor(value.clone(), mesh, [Replicate(), Shard(0)]),
        "columns": distribute_tensor(value.clone(), mesh, [Shard(0), Shard(1)]),
        "uneven": distribute_tensor(value[:5].clone(), mesh, [Shard(0), Replicate()]),
    }


def check_both_ways(folder):
    value = torch.arange(42.0).reshape(7, 6)
    save(sharded(4, value), f"{folder}/ours", format="torch_dist")
    theirs(dcp.save, sharded(4, value), checkpoint_id=f"{folder}/theirs")
    for name in ("ours", "theirs"):
        target = sharded(4, torch.zeros_like(value))
        theirs(dcp.load, target, checkpoint_id=f"{folder}/{name}")
        assert torch.equal(target["columns"].full_tensor(), value) and torch.equal(target["uneven"].full_tensor(), value[:5])
        target = sharded(4, torch.zeros_like(value))
        load(target, f"{folder}/{name}")
        assert torch.equal(target["rows"].full_tensor(), value) and torch.equal(target["uneven"].full_tensor(), value[:5])
        dist.barrier()
        if dist.get_rank() == 0:
            assert torch.equal(read_tensor(f"{folder}/{name}", "columns"), value)
    return os.listdir(f"{folder}/ours")


@pytest.mark.world(4)
def test_sharded_states_go_both_ways(world, tmp_path):
    names = world(check_both_ways, folder=str(tmp_path))[0]
    assert METADATA_NAME in names and sum(name.endswith(".distcp") for name in names) >= 2


def test_the_metadata_is_what_torch_itself_would_make_of_it(tmp_path):
    save({"w": torch.ones(2, 3)}, tmp_path / "c", format="torch_dist")
    decoded = pickle.loads((tmp_path / "c" / METADATA_NAME).read_bytes())
    assert isinstance(decoded, Metadata) and decoded.planner_data == {"w": ("w",)}
    entry = decoded.state_dict_metadata["w"]
    assert entry.size == torch.Size((2, 3)) and entry.properties.dtype == torch.float32
    assert entry.properties.memory_format == torch.contiguous_format and entry.properties.layout == torch.strided
    # Reading what torch would write of it comes to the same.
    before = read_metadata(LocalFolder(tmp_path / "c"))
    for protocol in (2, 3, 4, 5):
        (tmp_path / "c" / METADATA_NAME).write_bytes(pickle.dumps(decoded, protocol))
        assert read_metadata(LocalFolder(tmp_path / "c")) == before


class Bomb:
    def __reduce__(self):
        return (os.mkdir, ("exploded",))


@pytest.mark.parametrize("protocol", [0, 1, 2, 4])
def test_what_a_foreign_file_would_run_is_read_as_a_name(tmp_path, monkeypatch, protocol):
    monkeypatch.chdir(tmp_path)
    theirs(dcp.save, {"w": torch.ones(3)}, checkpoint_id=tmp_path / "c", no_dist=True)
    good = (tmp_path / "c" / METADATA_NAME).read_bytes()
    (tmp_path / "c" / METADATA_NAME).write_bytes(pickle.dumps(Bomb(), protocol))
    with pytest.raises(CheckpointingException, match=r"\.metadata"):
        read_manifest(tmp_path / "c")
    (tmp_path / "c" / METADATA_NAME).write_bytes(good)
    (name,) = (path.name for path in (tmp_path / "c").glob("*.distcp"))
    bomb = io.BytesIO()
    torch.save(Bomb(), bomb)
    size = (tmp_path / "c" / name).stat().st_size
    (tmp_path / "c" / name).write_bytes(bomb.getvalue()[:size].ljust(size, b"\0"))
    with pytest.raises(CheckpointingException, match=r"distcp: no sound tensor"):
        load({"w": torch.zeros(3)}, tmp_path / "c")
    assert not (tmp_path / "exploded").exists()


def test_records_come_back_as_they_were():
    value = Call("a.b.C", (1, -(2**40), "x\u00e9", None, True, 1.5), {"k": [Name("m.n"), (), []]}, make=True)
    decoded = decode_records(encode_records(value))
    assert (decoded.name, decoded.arguments, decoded.make) == ("a.b.C", value.arguments, True)
    assert isinstance(decoded.state, Table) and decoded.state.by_text()["k"] == [Name("m.n"), (), []]
    for plain in (0, 255, 65536, -1, 2**31, -(2**31), 2**200, "", "x" * 300, (1, (2, [3])), 0.1):
        assert decode_records(encode_records(plain)) == plain == decode_records(pickle.dumps(plain, 4))
    with pytest.raises(ValueError, match="no place"):
        encode_records({1, 2})


@pytest.mark.parametrize("count", [300, pytest.param(2000, marks=pytest.mark.slow)])
def test_damaged_metadata_files_and_archives_are_read_or_refused(count):
    rng, sound = random.Random(0), MemoryFolder()
    save({"w": torch.ones(3, 4), "b": torch.ones(2, dtype=torch.bfloat16)}, sound, format="torch_dist")
    sound.remove("manifest.json")
    files = {name: bytes(sound.read(name, 0, sound.size(name) or 0)) for name in sound.names()}
    refused = 0
    for _ in range(count):
        folder, name = MemoryFolder(), rng.choice([METADATA_NAME, next(file for file in files if file.endswith(".distcp"))])
        for other, content in files.items():
            bad = bytearray(content)
            if other == name:
                for _ in range(rng.randint(1, 3)):
                    bad[rng.randrange(len(bad))] = rng.randrange(256)
                bad = bad[: rng.choice((len(bad), len(bad), rng.randrange(len(bad))))]
            folder.publish(other, bytes(bad))
        try:
            load({"w": torch.zeros(3, 4), "b": torch.zeros(2, dtype=torch.bfloat16)}, folder, strict=False)
        except CheckpointingException:
            refused += 1
    assert refused > count // 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text.replace(b"__0_0", b"../0_0"), "does not stay inside"),
        (lambda text: text.replace(b"torch\nfloat32", b"torch\nload___"), "unknown element type"),
        (lambda text: text[:50], "metadata"),
    ],
)
def test_metadata_that_lie_are_refused_by_name(tmp_path, change, words):
    folder = MemoryFolder()
    save({"w": torch.ones(3)}, folder, format="torch_dist")
    folder.remove("manifest.json")
    content = bytes(folder.read(METADATA_NAME, 0, folder.size(METADATA_NAME) or 0))
    if b".." in change(content):
        content = content.replace(b"X", b"X", 1)
        size = len("__0_0_") + 8 + len(".distcp")
        assert content.count(size.to_bytes(4, "little") + b"__0_0") >= 1
        bad = content.replace(size.to_bytes(4, "little") + b"__0_0", (size + 1).to_bytes(4, "little") + b"../0_0")
    else:
        bad = change(content)
    folder.publish(METADATA_NAME, bad)
    with pytest.raises(CheckpointingException, match=words):
        read_manifest(folder)


def test_an_archive_of_something_else_is_refused():
    for content in ({"a": 1}, "text", torch.ones(3, 4).to_sparse()):
        blob = io.BytesIO()
        torch.save(content, blob)
        file = StoredFile(MemoryFolder(), "x.distcp")
        file.folder.write("x.distcp", [memoryview(blob.getvalue())])
        with pytest.raises(CheckpointingException, match="no sound tensor"):
            DistcpFile(file).slot(f"0:{len(blob.getvalue())}")
    blob = io.BytesIO()
    with zipfile.ZipFile(blob, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", encode_records(Name("x")))
    file = StoredFile(MemoryFolder(), "x.distcp")
    file.folder.write("x.distcp", [memoryview(blob.getvalue())])
    with pytest.raises(CheckpointingException, match="no description"):
        DistcpFile(file).slot(f"0:{len(blob.getvalue())}")


def test_any_stride_is_read():
    for content in (torch.arange(12).reshape(3, 4).t(), torch.arange(16.0).reshape(4, 4)[1:, :3], torch.ones(1).expand(3, 2)):
        blob = io.BytesIO()
        torch.save(content, blob)
        file = StoredFile(MemoryFolder(), "x.distcp")
        file.folder.write("x.distcp", [memoryview(blob.getvalue())])
        opened = DistcpFile(file)
        assert torch.equal(opened.tensor(f"0:{len(blob.getvalue())}"), content)
        assert torch.equal(opened.tensor(f"0:{len(blob.getvalue())}", (1, 3)), content[1:3])


def _damages(content):
    """A bit of the first, a middle and the last byte, and an end cut off."""
    for place in (0, len(content) // 2, len(content) - 1):
        yield content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
    yield content[:-1]


@pytest.mark.parametrize("name", [".metadata", "metadata.json"])
def test_verify_reads_the_files_for_other_readers(tmp_path, name):
    save({"w": torch.ones(2)}, tmp_path, format="torch_dist")
    path = tmp_path / name
    content = path.read_bytes()
    assert verify(tmp_path) == []
    for damaged in _damages(content):
        path.write_bytes(damaged)
        (problem,) = verify(tmp_path)
        assert problem.startswith(str(path)) and "damaged" in problem
    path.unlink()
    assert "missing" in verify(tmp_path)[0]


def test_verify_compares_metadata_that_an_earlier_release_did_not_record(tmp_path):
    for folder, value in (("a", torch.ones(2)), ("b", torch.ones(3))):
        save({"w": value}, tmp_path / folder, format="torch_dist")
        manifest = read_manifest(tmp_path / folder)
        (tmp_path / folder / "manifest.json").write_bytes(dataclasses.replace(manifest, side_files={}).encode())
        assert verify(tmp_path / folder) == []
    (tmp_path / "a" / ".metadata").write_bytes((tmp_path / "b" / ".metadata").read_bytes())
    (tmp_path / "a" / "metadata.json").write_text("[" * 100_000)
    first, second = verify(tmp_path / "a")
    assert "does not say what the manifest says about w" in first and "metadata.json: " in second

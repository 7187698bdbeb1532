# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Checkpoints compared, extracted and rewritten, by the command."""

import json
import math
import sys

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, state_dict_loader, state_dict_saver

from mcore_ckpt import CheckpointingException, ShardedTensor, load, read_tensor, save
from mcore_ckpt._core._load_plan import slabs
from mcore_ckpt._core._read import CheckpointReader
from mcore_ckpt._storage import SafetensorsFile
from mcore_ckpt.chunks import Box, check_tiling
from mcore_ckpt.cli import main
from mcore_ckpt.inspect import diff, summarize, verify
from mcore_ckpt.manifest import read_manifest
from mcore_ckpt.rewrite import Rewrite, rewrite
from mcore_ckpt.storage import MemoryFolder

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def state():
    generator = torch.Generator().manual_seed(5)
    return {
        "module.a.weight": torch.randn(7, 5, generator=generator),
        "module.b.weight": torch.randn(3, 2, 4, generator=generator).bfloat16(),
        "optimizer.a.step": torch.tensor(4),
        "empty": torch.zeros(0, 3),
    }


@pytest.fixture
def source(state, tmp_path):
    parts = {**state, "module.a.weight": [ShardedTensor(state["module.a.weight"][r : r + 3], (7, 5), (r, 0)) for r in (0, 3, 6)]}
    save(parts, tmp_path / "source", extra={"step": 4})
    return tmp_path / "source"


def check_holds(folder, state, extra):
    back = {name: torch.full_like(value, 7) for name, value in state.items()}
    assert load(back, folder) == extra
    assert all(torch.equal(back[name], state[name]) for name in state)


def test_reshard_gives_each_rank_a_file_of_its_own(source, state, tmp_path, capsys):
    assert main(["reshard", str(source), str(tmp_path / "out"), "--parts", "4"]) == 0
    manifest = read_manifest(tmp_path / "out")
    assert [chunk.box.shape[0] for chunk in manifest.tensors["module.a.weight"].chunks] == [2, 2, 2, 1]
    assert [chunk.box.shape[0] for chunk in manifest.tensors["module.b.weight"].chunks] == [1, 1, 1]
    starts = {}
    for tensor in manifest.tensors.values():
        for number, chunk in enumerate(tensor.chunks):
            starts.setdefault(chunk.file, set()).add(number)
    assert sorted(starts.values()) == [{0}, {1}, {2}, {3}]
    check_holds(tmp_path / "out", state, {"step": 4})
    assert main(["diff", str(source), str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("form", ["native", "torch_dist", "fsdp_dtensor"])
def test_convert_goes_to_either_format_and_keeps_the_parts(source, state, tmp_path, form):
    assert main(["convert", str(source), str(tmp_path / "out"), "--to", form]) == 0
    assert main(["convert", str(tmp_path / "out"), str(tmp_path / "back"), "--to", "native", "--no-verify"]) == 0
    check_holds(tmp_path / "back", state, {"step": 4})
    boxes = [[chunk.box for chunk in read_manifest(folder).tensors["module.a.weight"].chunks] for folder in (source, tmp_path / "back")]
    assert boxes[0] == boxes[1]
    assert summarize(tmp_path / "out").stored_format == form
    if form != "native":
        theirs = {"module.a.weight": torch.zeros(7, 5)}
        state_dict_loader.load(theirs, storage_reader=FileSystemReader(tmp_path / "out"))
        assert torch.equal(theirs["module.a.weight"], state["module.a.weight"])


def test_a_checkpoint_of_torch_comes_in_and_what_stays_behind_is_named(tmp_path, capsys):
    theirs = {"w": torch.arange(6.0).reshape(2, 3), "note": {"lr": 0.5}, "kinds": {1, 2}}
    state_dict_saver.save(theirs, checkpoint_id=tmp_path / "theirs")
    assert main(["inspect", str(tmp_path / "theirs"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert sorted(shown["others"]) == ["kinds", "note.lr"] and shown["format"] == "fsdp_dtensor" and list(shown["tensors"]) == ["w"]
    assert main(["convert", str(tmp_path / "theirs"), str(tmp_path / "ours"), "--to", "native"]) == 0
    assert capsys.readouterr().err == "left out, because they are neither tensors nor JSON values: kinds\n"
    assert read_manifest(tmp_path / "ours").extra == {"note.lr": 0.5}
    assert torch.equal(read_tensor(tmp_path / "ours", "w"), theirs["w"]) and verify(tmp_path / "ours") == []


def test_edit_renames_and_drops(source, state, tmp_path):
    arguments = ["--rename", r"module\.(.*)", r"\1", "--drop", "optimizer.*", "--drop", "empty"]
    assert main(["edit", str(source), str(tmp_path / "out"), *arguments]) == 0
    assert sorted(read_manifest(tmp_path / "out").tensors) == ["a.weight", "b.weight"]
    assert torch.equal(read_tensor(tmp_path / "out", "a.weight"), state["module.a.weight"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "nothing to edit"),
        (["--drop", "modul.a.weight"], "did you mean module.a.weight?"),
        (["--rename", "nothing", "x"], "no tensor is called nothing"),
        (["--rename", "(", "x"], "--rename '(' 'x'"),
        (["--rename", "(module.*)", r"\2"], "invalid group reference"),
        (["--rename", "module.*", "x"], "would both be called x"),
        (["--drop", "*"], "nothing would be left"),
    ],
)
def test_an_edit_that_cannot_be_meant_is_refused_before_writing(source, tmp_path, capsys, arguments, words):
    assert main(["edit", str(source), str(tmp_path / "out"), *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_rewrite_of_damaged_bytes_is_refused(source, tmp_path, capsys):
    (shard,) = source.glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert main(["convert", str(source), str(tmp_path / "out"), "--to", "torch_dist"]) == 2
    assert shard.name in capsys.readouterr().err and not (tmp_path / "out").exists()
    assert main(["convert", str(source), str(source), "--to", "native"]) == 2
    assert "already holds a checkpoint" in capsys.readouterr().err


def test_extract_writes_whole_tensors_as_one_file(source, state, tmp_path, capsys):
    out = tmp_path / "some.safetensors"
    assert main(["extract", str(source), str(out), "module.*", "optimizer.a.step"]) == 0
    with SafetensorsFile(out) as file:
        assert sorted(file.slots) == ["module.a.weight", "module.b.weight", "optimizer.a.step"]
        assert all(torch.equal(file.tensor(name), state[name]) for name in file.slots)
    assert [path.name for path in tmp_path.iterdir()] == ["source", out.name] or len(list(tmp_path.iterdir())) == 2
    assert main(["extract", str(source), str(out), "empty"]) == 2
    assert main(["extract", str(source), str(tmp_path / "b"), "module.c*"]) == 2
    assert "no tensor is called module.c*" in capsys.readouterr().err and not (tmp_path / "b").exists()


def test_diff_names_every_kind_of_difference(source, state, tmp_path, capsys):
    other = {
        "module.a.weight": state["module.a.weight"].clone(),
        "module.b.weight": state["module.b.weight"].float(),
        "optimizer.a.step": torch.tensor([4]),
        "new": torch.ones(2),
    }
    other["module.a.weight"][4, 1] += 0.25
    other["module.a.weight"][5, 0] = float("nan")
    save(other, tmp_path / "other", extra={"step": 5})
    assert main(["diff", str(source), str(tmp_path / "other"), "--json"]) == 1
    texts = {(one["name"], one["kind"]): one["text"] for one in json.loads(capsys.readouterr().out)}
    assert texts == {
        ("empty", "only in first"): "F32 [0, 3]",
        ("module.a.weight", "values"): "2 of 35 elements differ, by at most inf, the first at [4, 1]",
        ("module.b.weight", "dtype"): "BF16, F32",
        ("new", "only in second"): "F32 [2]",
        ("optimizer.a.step", "shape"): "[], [1]",
        ("extra.step", "extra"): "4, 5",
    }
    kinds = [one.kind for one in diff(source, tmp_path / "other", values=False)]
    assert "values" not in kinds and len(kinds) == 5
    with pytest.raises(ValueError, match="atol=-1"):
        diff(source, source, atol=-1)


def test_diff_within_a_tolerance_and_with_equal_nans():
    one, two = MemoryFolder("one"), MemoryFolder("two")
    value = torch.tensor([1.0, float("nan"), float("inf"), -2.0])
    save({"w": value}, one)
    save({"w": value + torch.tensor([0.0, 0.0, 0.0, 0.125])}, two)
    (difference,) = diff(one, two)
    assert difference.text == "1 of 4 elements differ, by at most 0.125, the first at [3]"
    assert diff(one, two, atol=0.125) == [] and diff(one, two, rtol=0.1) == [] and len(diff(one, two, rtol=0.01)) == 1


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (torch.tensor([1.0, 5.0]), torch.tensor([1.0, math.inf])),
        (torch.tensor([1.0, math.inf]), torch.tensor([1.0, -math.inf])),
        (torch.tensor([1, 2**62]), torch.tensor([1, 2**62 + 1])),
    ],
    ids=["finite", "sign", "integers"],
)
def test_no_tolerance_reaches_infinity_or_hides_an_integer(one, two):
    folders = [MemoryFolder("one"), MemoryFolder("two")]
    for folder, value in zip(folders, (one, two), strict=True):
        save({"w": value}, folder)
    tolerance = {"rtol": 0.5} if one.is_floating_point() else {"atol": 0.5}
    for pair in (folders, folders[::-1]):
        (difference,) = diff(*pair, **tolerance)
        assert difference.text.startswith("1 of 2 elements differ") and difference.text.endswith("the first at [1]")
    assert diff(folders[0], folders[0], **tolerance) == []


def test_infinite_elements_of_two_dtypes_are_alike_within_a_tolerance():
    folders = [MemoryFolder("one"), MemoryFolder("two")]
    for folder, dtype in zip(folders, (torch.float32, torch.bfloat16), strict=True):
        save({"w": torch.tensor([1.0, math.inf], dtype=dtype)}, folder)
    assert [one.kind for one in diff(*folders, atol=0.5)] == ["dtype"]


def test_slabs_tile_any_box():
    for box, room in [(Box((2, 1, 0), (5, 3, 4)), 7), (Box((), ()), 1), (Box((3,), (0,)), 4), (Box((0, 0), (2, 100)), 30)]:
        pieces = list(slabs(box, room))
        assert all(piece.num_elements <= room for piece in pieces)
        check_tiling(box.shape, [piece.relative_to(box) for piece in pieces])


def test_a_rewrite_reports_every_byte_it_compares_and_writes():
    value = {f"w{i}": torch.full((2**20,), i, dtype=torch.uint8) for i in range(16)}
    source, target, seen = MemoryFolder("source"), MemoryFolder("target"), []
    save(value, source)
    with pytest.raises(CheckpointingException, match="no tensor w99"):
        CheckpointReader(source).read("w99")
    rewrite(source, target, Rewrite(num_parts=2), on_bytes=seen.append)
    files = [sum(file.bytes for file in read_manifest(folder).files.values()) for folder in (source, target)]
    assert sum(seen) == sum(files)
    assert diff(source, target) == []
    with pytest.raises(ValueError, match="num_parts=0"):
        Rewrite(num_parts=0)


@pytest.mark.parametrize("terminal", ["none", "plain", "rich"])
def test_long_work_says_how_far_it_is(source, capsys, monkeypatch, terminal):
    monkeypatch.setattr("mcore_ckpt.cli._arguments._QUIET_S", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal != "none", raising=False)
    if terminal == "plain":
        monkeypatch.setitem(sys.modules, "rich.progress", None)
    if terminal == "rich":
        pytest.importorskip("rich")
    assert main(["verify", str(source)]) == 0
    output = capsys.readouterr()
    assert output.out.endswith(": sound\n")
    assert output.err.startswith("verifying: 100% of 0 MiB, ") == (terminal != "rich")

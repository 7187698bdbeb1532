# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Files kept beside the tensors: they come back, they are checked, copies keep them, and no name leaves the folder."""

import hashlib
import json

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader, state_dict_loader

from mcore_ckpt import CheckpointingException, CheckpointManager, load, save
from mcore_ckpt._core import _assets
from mcore_ckpt.assets import extract_assets, read_asset
from mcore_ckpt.cli import main
from mcore_ckpt.inspect import diff, summarize, verify
from mcore_ckpt.manifest import is_checkpoint, read_manifest
from mcore_ckpt.rewrite import Rewrite, rewrite
from mcore_ckpt.storage import MemoryFolder

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

ASSETS = {"tokenizer/tokenizer.json": b'{"model": {}}', "run.yaml": b"steps: 3\n", "empty": b"", "large.bin": bytes(range(256)) * 9000}


def state():
    return {"w": torch.arange(12.0).reshape(4, 3), "b": torch.ones(2)}


@pytest.fixture
def source(tmp_path):
    (tmp_path / "tokens").write_bytes(ASSETS["tokenizer/tokenizer.json"])
    save(state(), tmp_path / "c", extra={"step": 3}, assets={**ASSETS, "tokenizer/tokenizer.json": tmp_path / "tokens"})
    return tmp_path / "c"


def held(folder):
    return {name: read_asset(folder, name) for name in read_manifest(folder).assets}


@pytest.mark.parametrize("form", ["native", "torch_dist", "fsdp_dtensor"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_assets_come_back_in_every_format(tmp_path, form, asynchronous):
    path = tmp_path / "run.yaml"
    path.write_bytes(ASSETS["run.yaml"])
    request = save(state(), tmp_path / "c", format=form, asynchronous=asynchronous, assets={**ASSETS, "run.yaml": path})
    if request:
        # The content is that of the call.
        path.write_bytes(b"steps: 4\n")
        request.wait()
    assert held(tmp_path / "c") == ASSETS and verify(tmp_path / "c") == []
    back = {name: torch.zeros_like(value) for name, value in state().items()}
    load(back, tmp_path / "c")
    assert all(torch.equal(back[name], value) for name, value in state().items())
    if form != "native":
        theirs = {"w": torch.zeros(4, 3)}
        state_dict_loader.load(theirs, storage_reader=FileSystemReader(tmp_path / "c"))
        assert torch.equal(theirs["w"], state()["w"])


def test_inspect_lists_them_and_the_command_writes_them_out(source, tmp_path, capsys):
    assert main(["inspect", str(source)]) == 0
    assert "asset tokenizer/tokenizer.json: 13 bytes" in capsys.readouterr().out
    summary = summarize(source).to_json()
    assert summary["assets"]["run.yaml"]["sha256"] == hashlib.sha256(ASSETS["run.yaml"]).hexdigest()
    assert summary["num_bytes"] == sum(file["num_bytes"] for part in ("files", "assets") for file in summary[part].values())
    assert main(["extract-assets", str(source), str(tmp_path / "out"), "tokenizer/*"]) == 0
    assert [path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*.*")] == ["tokenizer/tokenizer.json"]
    assert {path.relative_to(tmp_path / "all").as_posix() for path in extract_assets(source, tmp_path / "all")} == set(ASSETS)
    assert main(["extract-assets", str(source), str(tmp_path / "all")]) == 2
    assert main(["extract-assets", str(source), str(tmp_path / "more"), "tokeniser/*"]) == 2
    error = capsys.readouterr().err
    assert "exists; choose another folder" in error and "no asset is called tokeniser/*" in error


@pytest.mark.parametrize(
    "command", [["convert", "--to", "torch_dist"], ["reshard", "--parts", "2"], ["edit", "--drop", "b"]], ids=lambda row: row[0]
)
def test_copies_keep_them(source, tmp_path, command):
    verb, *options = command
    assert main([verb, str(source), str(tmp_path / "out"), *options]) == 0
    assert held(tmp_path / "out") == ASSETS and verify(tmp_path / "out") == []
    assert not [one for one in diff(source, tmp_path / "out") if one.name.startswith("asset")]
    save({"w": torch.ones(1)}, tmp_path / "other", assets={"run.yaml": b"steps: 9\n"})
    kinds = {one.name: one.kind for one in diff(source, tmp_path / "other", values=False) if one.name.startswith("asset.")}
    assert kinds == {"asset.run.yaml": "asset", **{f"asset.{name}": "only in first" for name in ASSETS if name != "run.yaml"}}


def test_a_damaged_one_is_named_and_not_copied(source, tmp_path):
    path = source / read_manifest(source).assets["run.yaml"].file
    for content, word in ((b"steps: 4\n", "SHA-256"), (b"steps", "5 bytes instead of 9"), (None, "missing, or not a plain file")):
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        (problem,) = verify(source)
        assert "asset run.yaml" in problem and word in problem
        with pytest.raises(CheckpointingException, match=word):
            read_asset(source, "run.yaml")
        with pytest.raises(CheckpointingException, match=word):
            rewrite(source, tmp_path / "copy", Rewrite())
        assert not is_checkpoint(tmp_path / "copy") and not list((tmp_path / "copy").glob("*"))
    with pytest.raises(CheckpointingException, match=r"no asset run\.yml \(did you mean run\.yaml\?\)"):
        read_asset(source, "run.yml")


@pytest.mark.parametrize(
    "name", ["../x", "/etc/x", "a/../b", "a//b", "a/", "", ".hidden", "a/.git", "-x", "a\\b", "c:x", "a+b", "x" * 201, "a\nb"]
)
def test_a_name_that_leaves_the_folder_is_refused_before_anything_is_written(tmp_path, name):
    with pytest.raises(CheckpointingException, match="does not stay inside the folder"):
        save(state(), tmp_path / "c", assets={name: b"x"})
    assert not (tmp_path / "c").exists()


def test_other_bad_assets_are_named_before_anything_is_written(tmp_path, monkeypatch):
    def refused(assets):
        with pytest.raises(CheckpointingException) as caught:
            save(state(), tmp_path / "c", assets=assets)
        assert not (tmp_path / "c").exists()
        return str(caught.value)

    assert "'a' is int; give its bytes" in refused({"a": 3})
    assert "nothing.json is missing" in refused({"a": tmp_path / "nothing.json"})
    assert "is no plain file" in refused({"a": tmp_path})
    assert "'a/b' cannot be a file and the folder of 'a/b/c'" in refused({"a/b": b"", "a/b/c": b""})
    assert "1001 assets" in refused({f"a{number}": b"" for number in range(1001)})
    monkeypatch.setattr(_assets, "MAX_ASSETS_BYTES", 10)
    assert "assets of 11 bytes, the largest 'b' of 6; a checkpoint keeps at most 10" in refused({"a": b"12345", "b": b"123456"})


def reseal(folder, change):
    body = json.loads((folder / "manifest.json").read_text())
    change(body["assets"])
    body.pop("sha256")
    body["sha256"] = hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(body))


CHANGES = {
    "a name above": lambda assets: assets.update({"../../x": assets["run.yaml"]}),
    "a file above": lambda assets: assets["run.yaml"].update(file="../passwd"),
    "a file of tensors": lambda assets: assets["run.yaml"].update(file="manifest.json"),
    "too large": lambda assets: assets["run.yaml"].update(bytes=2**28 + 1),
    "no digest": lambda assets: assets["run.yaml"].update(sha256="x"),
    "no length": lambda assets: assets["run.yaml"].pop("bytes"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_manifest_whose_assets_cannot_be_believed_is_refused(source, tmp_path, change):
    reseal(source, change)
    with pytest.raises(CheckpointingException, match=r"manifest\.json"):
        extract_assets(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_every_step_of_a_manager_has_them_and_what_a_save_left_goes(tmp_path):
    path = tmp_path / "vocab.json"
    manager = CheckpointManager(tmp_path / "run", keep=1, assets={"tokenizer/vocab.json": path})
    for step, asynchronous in ((1, False), (2, True)):
        path.write_text(str(step))
        manager.save(step, state(), asynchronous=asynchronous)
        manager.wait()
        assert read_asset(manager.folder(step), "tokenizer/vocab.json") == str(step).encode()
    left = manager.path(3) / "01234567-asset-tokenizer+vocab.json"
    left.parent.mkdir()
    left.write_text("half")
    path.unlink()
    with pytest.raises(CheckpointingException, match="vocab.json is missing"):
        manager.save(3, state())
    assert manager.steps() == [2]
    path.write_text("3")
    manager.save(3, state())
    assert manager.steps() == [3] and not left.exists() and verify(manager.path(3)) == []


def test_they_lie_in_memory_too():
    folder = MemoryFolder()
    save(state(), folder, assets=ASSETS)
    assert held(folder) == ASSETS


def check_ranks(folder):
    rank = dist.get_rank()
    save(state(), f"{folder}/a", assets=ASSETS if rank == 0 else None)
    save(state(), f"{folder}/b", assets=ASSETS)
    assert held(f"{folder}/a") == held(f"{folder}/b") == ASSETS
    for number, mine in enumerate(({"other": b"x"} if rank else ASSETS, ASSETS if rank else None)):
        with pytest.raises(CheckpointingException, match="rank 1 gives other assets than rank 0"):
            save(state(), f"{folder}/c{number}", assets=mine)
    with pytest.raises(CheckpointingException, match="failed on rank 0: asset 'a'"):
        save(state(), f"{folder}/d", assets={"a": f"{folder}/nothing"})


@pytest.mark.world(2)
def test_the_first_rank_gives_them(world, tmp_path):
    world(check_ranks, folder=str(tmp_path))

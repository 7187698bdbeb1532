# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Optimizer state in the layouts of distributed optimizers: written by some ranks, loaded by others."""

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from mcore_ckpt import CheckpointingException, ShardedTensor, Strictness, load, save
from mcore_ckpt.manifest import read_manifest
from mcore_ckpt.optimizer_layouts import load_any_layout, save_in_layout
from mcore_ckpt.rewrite import Rewrite, rewrite
from tests.support.counting import Counting

WEIGHT = torch.arange(60.0).reshape(5, 12)
MOMENT = WEIGHT + 1000


def rows(tensor, begin, end, replica=0):
    return ShardedTensor(tensor[begin:end].clone(), tuple(tensor.shape), (begin, 0), replica)


def check_layout(folder, layout):
    """Two data-parallel ranks save uneven slices, a rank of them nothing of one tensor; they load as two tensor-parallel ranks."""
    rank = dist.get_rank()
    state = {
        "model.w": ShardedTensor(WEIGHT.clone(), (5, 12), (0, 0), rank),
        "optimizer.exp_avg.w": [rows(MOMENT, 0, 2), rows(MOMENT, 2, 3)] if rank == 0 else rows(MOMENT, 3, 5),
        "optimizer.master.w": rows(WEIGHT, 0, 0) if rank else rows(WEIGHT, 0, 5),
    }
    save_in_layout(state, folder, layout, extra={"step": 3})
    half = slice(6 * rank, 6 * rank + 6)
    other = {
        name: ShardedTensor(torch.zeros(5, 6), (5, 12), (0, 6 * rank)) for name in ("model.w", "optimizer.exp_avg.w", "optimizer.master.w")
    }
    assert load_any_layout(other, folder) == {"step": 3}
    assert torch.equal(other["optimizer.exp_avg.w"].data, MOMENT[:, half])
    assert torch.equal(other["optimizer.master.w"].data, WEIGHT[:, half]) and torch.equal(other["model.w"].data, WEIGHT[:, half])


@pytest.mark.world(2)
@pytest.mark.parametrize("layout", ["fully_reshardable", "dp_reshardable"])
def test_slices_of_data_ranks_load_as_slices_of_tensor_ranks(world, tmp_path, layout):
    world(check_layout, folder=str(tmp_path / "c"), layout=layout)
    names = set(read_manifest(tmp_path / "c").tensors)
    if layout == "fully_reshardable":
        assert names == {"model.w", "optimizer.state.exp_avg.w", "optimizer.state.param.w"}
    else:
        assert names == {"model.w", "optimizer.distributed.exp_avg.F32", "optimizer.distributed.param.F32"}


def test_what_save_wrote_loads_too(tmp_path):
    save({"optimizer.exp_avg.w": MOMENT}, tmp_path / "c", extra={"step": 1})
    state = {"optimizer.exp_avg.w": torch.zeros(5, 12)}
    assert load_any_layout(state, tmp_path / "c") == {"step": 1}
    assert torch.equal(state["optimizer.exp_avg.w"], MOMENT)


def test_what_does_not_fit_is_named_before_anything_is_written(tmp_path):
    folder = tmp_path / "c"
    save_in_layout({"model.w": WEIGHT, "optimizer.exp_avg.w": MOMENT, "optimizer.exp_avg.s": torch.tensor(2.0)}, folder, "dp_reshardable")
    model = {"model.w": torch.zeros(5, 12)}
    for state, message in (
        ({"optimizer.exp_avg.v": torch.zeros(5, 12)}, r"missing from the checkpoint: optimizer\.exp_avg\.v"),
        ({"optimizer.exp_avg.w": torch.zeros(5, 13)}, r"stored \[5, 12\], asked \[5, 13\]"),
        ({"optimizer.exp_avg.w": torch.zeros(5, 12).double()}, "stored F32, asked F64"),
        ({"optimizer.exp_avg.w": torch.zeros(5, 12)}, r"nobody asks for: optimizer\.exp_avg\.s"),
    ):
        with pytest.raises(CheckpointingException, match=message):
            load_any_layout(model | state, folder)
    assert not model["model.w"].any()
    wanted = model | {"optimizer.exp_avg.v": torch.ones(2), "optimizer.exp_avg.s": torch.tensor(0.0)}
    load_any_layout(wanted, folder, strict=Strictness(missing="ignore", unexpected="ignore"))
    assert wanted["optimizer.exp_avg.v"].all() and wanted["optimizer.exp_avg.s"] == 2
    with pytest.raises(ValueError, match="fully_sharded"):
        save_in_layout(model, tmp_path / "d", "fully_sharded")
    with pytest.raises(CheckpointingException, match=r"holds tensors|missing"):
        load({"optimizer.exp_avg.w": torch.zeros(5, 12)}, folder)


def test_a_damaged_vector_and_a_lying_table_are_refused(tmp_path):
    save_in_layout({"optimizer.exp_avg.w": MOMENT}, tmp_path / "c", "dp_reshardable")
    (shard,) = (tmp_path / "c").glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-3] ^= 4
    shard.write_bytes(content)
    with pytest.raises(CheckpointingException, match="SHA-256"):
        load_any_layout({"optimizer.exp_avg.w": torch.zeros(5, 12)}, tmp_path / "c")
    for rows_told in ([["optimizer.exp_avg.w", "v", 0, [5, 12], [0, 0], [6, 12]]], [[1]], 7, [["a", "v", -1, [1], [0], [1]]]):
        folder = tmp_path / f"lie{str(rows_told)[:12]}"
        save({"v": torch.zeros(60)}, folder, extra={"optimizer_layout": {"type": "dp_reshardable", "rows": rows_told}})
        with pytest.raises(CheckpointingException, match="malformed"):
            load_any_layout({"optimizer.exp_avg.w": torch.zeros(5, 12)}, folder)
    gone = [["optimizer.exp_avg.w", "elsewhere", 0, [5, 12], [0, 0], [5, 12]]]
    save({"v": torch.zeros(60)}, tmp_path / "gone", extra={"optimizer_layout": {"type": "dp_reshardable", "rows": gone}})
    with pytest.raises(CheckpointingException, match="no tensor elsewhere"):
        load_any_layout({"optimizer.exp_avg.w": torch.zeros(5, 12)}, tmp_path / "gone")


def test_a_table_whose_rows_share_elements_or_contradict_each_other_is_refused(tmp_path):
    name, other = "optimizer.exp_avg.w", "optimizer.exp_avg.v"
    tables = {
        "overlap in v": [[name, "v", 0, [30], [0], [30]], [other, "v", 29, [30], [0], [30]]],
        "contradict": [[name, "v", 0, [30], [0], [15]], [name, "v", 15, [31], [15], [15]]],
        "no part holds": [[name, "v", 0, [5, 12], [0, 0], [4, 12]]],
        "does not fit": [[name, "v", 1, [60], [0], [60]]],
        "no tensor u": [[name, "u", 0, [60], [0], [60]]],
        "malformed": [[name, ["v"], 0, [60], [0], [60]]],
    }
    for number, (words, table) in enumerate(tables.items()):
        folder = tmp_path / str(number)
        save({"v": torch.zeros(60)}, folder, extra={"optimizer_layout": {"type": "dp_reshardable", "rows": table}})
        with pytest.raises(CheckpointingException, match=f"malformed.*{words}" if words != "malformed" else words):
            load_any_layout({name: torch.zeros(5, 12)}, folder)


def test_a_state_with_a_hole_is_refused_and_a_tensor_without_elements_stays(tmp_path):
    with pytest.raises(CheckpointingException, match=r"optimizer\.exp_avg\.w: no part holds \[3:5, 0:12\]"):
        save_in_layout({"optimizer.exp_avg.w": rows(MOMENT, 0, 3)}, tmp_path / "c", "dp_reshardable")
    assert not (tmp_path / "c").exists()
    state = {"optimizer.exp_avg.w": MOMENT, "optimizer.exp_avg.none": torch.zeros(0, 3)}
    save_in_layout(state, tmp_path / "c", "dp_reshardable")
    blank = {name: torch.zeros_like(value) for name, value in state.items()}
    load_any_layout(blank, tmp_path / "c")
    assert torch.equal(blank["optimizer.exp_avg.w"], MOMENT)


@pytest.mark.parametrize("form", ["native", "torch_dist"])
def test_vectors_are_read_once_however_they_were_cut(tmp_path, form):
    generator = torch.Generator().manual_seed(2)
    shapes = {"a": (7, 5, 60_001), "b": (1_300_003,), "c": (), "d": (3, 4)}
    whole = {f"optimizer.exp_avg.{name}": torch.rand(shape, generator=generator) for name, shape in shapes.items()}
    save_in_layout(whole, tmp_path / "flat", "dp_reshardable", format=form)
    # Cut anew, rows of the table lie in several pieces of the vector, and pieces hold several of them.
    rewrite(tmp_path / "flat", tmp_path / "cut", Rewrite(num_parts=5, format=form))
    total = sum(value.nbytes for value in whole.values())
    for name, verify in (("flat", True), ("cut", True), ("cut", "first"), ("cut", False)):
        folder = Counting(tmp_path / name)
        blank = {name: torch.zeros_like(value) for name, value in whole.items()}
        load_any_layout(blank, folder, verify=verify)
        assert all(torch.equal(blank[name], value) for name, value in whole.items()), (name, verify)
        assert folder.num_bytes < total * (2 if verify == "first" else 1) + 60_000, (name, verify)
        columns = {
            "optimizer.exp_avg.a": [ShardedTensor(torch.zeros(7, 2, 30_000), shapes["a"], (0, 3, 11))],
            "optimizer.exp_avg.d": [ShardedTensor(torch.zeros(2, 1), (3, 4), (1, 3))],
        }
        load_any_layout(columns, folder, verify=verify, strict=False)
        for key, (part,) in columns.items():
            assert torch.equal(part.data, whole[key][part.box.slices()])


PEAK = """
import sys, threading, time, torch
from pathlib import Path
from mcore_ckpt.optimizer_layouts import load_any_layout
from mcore_ckpt.megatron import export_checkpoint_megatron, import_checkpoint_megatron

def anonymous():  # pages of mapped files can be dropped at any time
    return int(next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")).split()[1]) * 1024

def extra_peak(work, *arguments):
    base = peak = anonymous()
    running = True
    def watch():
        nonlocal peak
        while running:
            peak = max(peak, anonymous())
            time.sleep(0.001)
    thread = threading.Thread(target=watch)
    thread.start()
    work(*arguments)
    running = False
    thread.join()
    return peak - base

folder = sys.argv[1]
state = {f"optimizer.exp_avg.layers.{layer}.mlp.down.weight": torch.ones(2048, 2048) for layer in range(7)}
print(extra_peak(load_any_layout, state, f"{folder}/flat"))
del state
print(extra_peak(export_checkpoint_megatron, f"{folder}/ours", f"{folder}/theirs"))
print(extra_peak(import_checkpoint_megatron, f"{folder}/theirs", f"{folder}/again"))
"""


@pytest.mark.journey
def test_loading_importing_and_exporting_hold_one_tensor_and_little_more(tmp_path):
    largest = 2048 * 2048 * 4
    moments = {f"optimizer.exp_avg.layers.{layer}.mlp.down.weight": torch.full((2048, 2048), float(layer)) for layer in range(7)}
    save_in_layout(moments, tmp_path / "flat", "dp_reshardable")
    save({name.replace("optimizer.exp_avg", "model"): value for name, value in moments.items()}, tmp_path / "ours")
    # What is freed goes back at once, so that the peak is of what is held.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    done = subprocess.run([sys.executable, "-c", PEAK, str(tmp_path)], capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0, done.stderr
    peaks = [int(line) for line in done.stdout.split()]
    assert len(peaks) == 3 and max(peaks) < largest + 64 * 2**20, peaks

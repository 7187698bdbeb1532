# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Optimizer state of the two kinds that newer releases of Megatron only load; `test_megatron.py` compares every tensor of real ones."""

import random
import re
from itertools import product

import pytest
import torch

from mcore_ckpt import CheckpointingException
from mcore_ckpt._formats import read_objects
from mcore_ckpt._formats._records import decode_records, encode_records
from mcore_ckpt._storage import StoredFile, WatchedFolder, open_folder
from mcore_ckpt.manifest import read_manifest
from mcore_ckpt.megatron import import_checkpoint_megatron
from mcore_ckpt.megatron._flat import gathered_domain
from mcore_ckpt.megatron._torch_dist import find_ranges

from .test_megatron import unpack


def damage(folder, pattern, *, chunk=None):
    """Drop the entries of that pattern from the metadata, or one chunk of each."""
    root = decode_records((folder / ".metadata").read_bytes())
    fields = root.state.by_text()
    entries = fields["state_dict_metadata"]
    dropped = [key for key, _ in entries.pairs if re.fullmatch(pattern, key)]
    assert dropped
    if chunk is not None:
        for name in dropped:
            del entries.by_text()[name].state.by_text()["chunks"][chunk]
    else:
        entries.pairs = [(key, value) for key, value in entries.pairs if key not in dropped]
        fields["storage_data"].pairs = [pair for pair in fields["storage_data"].pairs if pair[0].state.by_text()["fqn"] not in dropped]
    (folder / ".metadata").write_bytes(encode_records(root))


GATHERED = r"optimizer\.distributed\.dp_group_idx_{}\.param_state/shard_0_1"
ABSENT = r"no flat optimizer state of {} rank {} \(dp_group_idx_{}\) of {}"
STATE = "optimizer.state."
# what -> (fixture, entries to damage, the chunk to drop or None for all, what the error says)
BAD = {
    "ranges": ("0.15_model_space", f"{STATE}exp_avg.decoder.layers.mlp.linear_fc1.weight", 3, "exp_avg.*linear_fc1.weight: .*"),
    "a state": ("0.15_model_space", f"{STATE}exp_avg_sq.output_layer.weight", None, "lacks exp_avg_sq of output_layer.weight"),
    "a rank": ("0.15_gathered", GATHERED.format(2), None, ABSENT.format("model-parallel", 2, 2, 4)),
    "experts": ("0.15_gathered_experts", f"chained_1.{GATHERED.format(1)}", None, ABSENT.format("expert- and model-parallel", 1, 1, 2)),
    "buckets": ("0.16_buckets", r"optimizer\.distributed\.dp_group_idx_1\.gbuf_.+", None, ABSENT.format("model-parallel", 1, 1, 2)),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_missing_is_named_before_anything_is_written(what, tmp_path):
    name, entry, chunk, message = BAD[what]
    folder = unpack(name, tmp_path)
    damage(folder, entry, chunk=chunk)
    with pytest.raises(CheckpointingException, match=message):
        import_checkpoint_megatron(folder, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
    if chunk is None:
        import_checkpoint_megatron(folder, tmp_path / "ours", optimizer=False)
        assert not any(key.startswith("optimizer.") for key in read_manifest(tmp_path / "ours").tensors)


def test_of_a_gathered_buffer_only_ranges_are_read(tmp_path):
    """A rank's buffer has 1412 elements of each kind, its largest parameter 384; entries lie at odd places of their files."""
    sizes = []
    folder = WatchedFolder(open_folder(unpack("0.15_gathered", tmp_path)), sizes.append)
    import_checkpoint_megatron(folder, tmp_path / "ours")
    metadata = (tmp_path / "0.15_gathered" / ".metadata").stat().st_size
    assert max(size for size in sizes if size != metadata) < 1412 * 4


def test_tensors_in_an_entry_are_read_by_range_wherever_the_entry_lies(tmp_path):
    values = torch.arange(300, dtype=torch.float32)
    torch.save({"flat": values[40:], "turned": values.reshape(30, 10).T}, tmp_path / "entry")
    content = (tmp_path / "entry").read_bytes()
    (tmp_path / "file").write_bytes(b"abc" + content + b"de")
    content_read = read_objects(StoredFile(open_folder(tmp_path), "file"), 3, len(content), deferred=True)
    assert torch.equal(content_read["flat"].read(7, 19), values[47:59]) and content_read["flat"].shape == (260,)
    assert torch.equal(content_read["turned"], values.reshape(30, 10).T)
    with pytest.raises(ValueError, match="elements 0 to 261"):
        content_read["flat"].read(0, 261)


def test_ranges_give_the_weights_geometry_whole_and_by_layer():
    choose = random.Random(7)
    for _ in range(60):
        cuts = [choose.randint(1, 3) for _ in range(choose.randint(1, 4))]
        piece = [choose.randint(1, 3) for _ in cuts]
        shape = tuple(count * size for count, size in zip(cuts, piece, strict=True))
        weight = torch.randn(shape)
        stored = torch.empty(*cuts, weight.numel() // torch.Size(cuts).numel())
        for place in product(*map(range, cuts)):
            index = tuple(slice(at * size, (at + 1) * size) for at, size in zip(place, piece, strict=True))
            stored[place] = weight[index].reshape(-1)
        ranges = find_ranges("state", stored.shape, shape)
        assert torch.equal(ranges.whole(stored), weight)
        for layer in range(shape[0]):
            assert torch.equal(ranges.layer(stored[ranges.box(layer).slices()]), weight[layer])


@pytest.mark.parametrize("stored", [(2, 1, 193), (5, 1, 64), (0, 1, 192), (2, 192), (384,), (2, 1, 1, 192)])
def test_a_state_that_does_not_fit_its_weight_is_named(stored):
    with pytest.raises(
        CheckpointingException, match=r"optimizer\.state\.exp_avg\.weight has the shape .*\[16, 24\].*fully_sharded_model_space"
    ):
        find_ranges("optimizer.state.exp_avg.weight", stored, (16, 24))
    assert find_ranges("optimizer.state.exp_avg.weight", (16, 24), (16, 24)) is None


def test_a_gathered_buffer_that_is_not_whole_is_named(tmp_path):
    flat = {kind: torch.ones(8) for kind in ("param", "exp_avg", "exp_avg_sq")}
    cases = {
        "no buffer 0": {1: {"float32": flat}},
        "buffer 0 .* has no flat exp_avg_sq": {0: {"float32": {**flat, "exp_avg_sq": None}}},
        "the states of buffer 1 have different lengths": {0: {"float32": flat}, 1: {"float32": {**flat, "param": torch.ones(9)}}},
    }
    for message, content in cases.items():
        torch.save({"buckets_coalesced": True, **content}, tmp_path / "entry")
        content_read = read_objects(StoredFile(open_folder(tmp_path), "entry"), deferred=True)
        with pytest.raises(CheckpointingException, match=f"here: .*{message}"):
            gathered_domain("here", content_read, 0, 0)

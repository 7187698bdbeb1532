# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Save and load plans as data: any tiling to any tiling, without a file."""

import random
import time
import tracemalloc

import pytest
import torch

from mcore_ckpt import CheckpointingException, Strictness
from mcore_ckpt._core._load_plan import assign_files, compare, plan_load
from mcore_ckpt._core._save_plan import (
    ShardRecord,
    Write,
    decode_layouts,
    decode_share,
    encode_layout,
    encode_writes,
    pack_files,
    plan_layouts,
    plan_save,
)
from mcore_ckpt._storage import itemsize
from mcore_ckpt.chunks import Box
from mcore_ckpt.manifest import Chunk, TensorRecord


def random_tiling(rng, shape, num_cuts):
    boxes = [Box.whole(shape)]
    for _ in range(num_cuts if shape else 0):
        box = boxes.pop(rng.randrange(len(boxes)))
        dim = rng.randrange(len(shape))
        cut = rng.randint(0, box.shape[dim])
        first, second, corner = list(box.shape), list(box.shape), list(box.offset)
        first[dim], second[dim], corner[dim] = cut, box.shape[dim] - cut, box.offset[dim] + cut
        boxes += [Box(box.offset, tuple(first)), Box(tuple(corner), tuple(second))]
    return boxes


def scatter(rng, tensors, num_ranks):
    """Random parts of random tensors, each part on one or more random ranks."""
    held = [[] for _ in range(num_ranks)]
    for name, tensor in tensors.items():
        for box in random_tiling(rng, tuple(tensor.shape), rng.randrange(7)):
            owners = rng.sample(range(num_ranks), rng.randint(1, num_ranks))
            for replica, rank in enumerate(owners):
                held[rank].append(ShardRecord(name, "I64", tuple(tensor.shape), box, replica))
    return held


def random_tensors(rng):
    shapes = [(), (0, 4), (7,), (5, 6), (2, 5, 3), (3, 2, 4, 2)]
    return {f"tensor.{i}": torch.randint(0, 2**40, rng.choice(shapes)) for i in range(rng.randint(1, 5))}


def test_500_random_layout_pairs_move_every_element():
    rng = random.Random(3)
    torch.manual_seed(0)
    for _ in range(500):
        tensors = random_tensors(rng)
        plan = plan_save(scatter(rng, tensors, rng.randint(1, 6)))
        disk, stored = {}, {}
        for rank, writes in enumerate(plan.writes):
            for number, write in enumerate(writes):
                assert (f"r{rank}", str(number)) not in disk
                disk[f"r{rank}", str(number)] = tensors[write.name][write.box.slices()].clone()
        for name, record in plan.tensors.items():
            chunks = [Chunk(f"r{r}", str(i), w.box) for r, writes in enumerate(plan.writes) for i, w in enumerate(writes) if w.name == name]
            stored[name] = TensorRecord(record.dtype, record.shape, tuple(chunks))
        for held in scatter(rng, tensors, rng.randint(1, 6)):
            local = {(record.name, record.box): torch.full(record.box.shape, -1) for record in held}
            for read in plan_load([(record.name, record.box) for record in held], stored):
                source = disk[read.chunk.file, read.chunk.key][read.box.relative_to(read.chunk.box).slices()]
                for (name, box), target in local.items():
                    if name == read.name and box.intersect(read.box):
                        inside = box.intersect(read.box)
                        assert inside is not None
                        target[inside.relative_to(box).slices()] = source[inside.relative_to(read.box).slices()]
            for (name, box), target in local.items():
                assert torch.equal(target, tensors[name][box.slices()])


def test_each_part_is_written_once_by_one_of_its_holders_and_the_plan_repeats():
    rng = random.Random(4)
    for _ in range(50):
        held = scatter(rng, random_tensors(rng), 4)
        plan = plan_save(held)
        assert plan == plan_save(held)
        written = [(write.name, write.box) for writes in plan.writes for write in writes]
        assert len(written) == len(set(written))
        assert set(written) == {(r.name, r.box) for rows in held for r in rows if r.box.num_elements}
        for rank, writes in enumerate(plan.writes):
            assert {(w.name, w.box) for w in writes} <= {(r.name, r.box) for r in held[rank]}


def test_replicated_parts_are_shared_out_by_bytes():
    sizes = [(rows, 64) for rows in range(1, 200)]
    held = [[ShardRecord(f"w{i}", "F32", shape, Box.whole(shape), rank) for i, shape in enumerate(sizes)] for rank in range(8)]
    loads = [sum(write.num_bytes for write in writes) for writes in plan_save(held).writes]
    mean = sum(rows * 64 * itemsize("F32") for rows, _ in sizes) / 8
    assert max(loads) - mean <= 0.02 * mean


def test_parts_only_one_rank_has_count_before_the_rest_is_shared():
    alone = ShardRecord("alone", "F32", (100,), Box.whole((100,)), 0)
    shared = [ShardRecord(f"s{i}", "F32", (50,), Box.whole((50,)), 0) for i in range(2)]
    writes = plan_save([[alone, *shared], shared]).writes
    assert [write.name for write in writes[0]] == ["alone"]
    assert [write.name for write in writes[1]] == ["s0", "s1"]


def test_disagreement_gap_and_overlap_name_tensor_and_ranks():
    half = ShardRecord("w", "F32", (4,), Box((0,), (2,)), 0)
    with pytest.raises(CheckpointingException, match=r"w is F32 \[4\] on rank 0 and BF16 \[4\] on rank 1"):
        plan_save([[half], [ShardRecord("w", "BF16", (4,), Box((2,), (2,)), 0)]])
    with pytest.raises(CheckpointingException, match=r"w \(on ranks \[0\]\): no part holds \[2:4\]"):
        plan_save([[half], []])
    with pytest.raises(CheckpointingException, match=r"ranks \[0, 1\]\): parts \[0:2\] and \[1:4\] overlap"):
        plan_save([[half], [ShardRecord("w", "F32", (4,), Box((1,), (3,)), 0)]])
    with pytest.raises(CheckpointingException, match="no part holds"):
        plan_save([[ShardRecord("w", "F32", (4,), Box.whole((4,)), 1)]])


def test_files_are_bounded_and_keep_the_order():
    writes = [Write(str(i), Box((0,), (n,)), n) for i, n in enumerate((3, 4, 10, 1, 1, 1))]
    packed = pack_files(writes, 7)
    assert [[write.num_bytes for write in file] for file in packed] == [[3, 4], [10], [1, 1, 1]]
    assert pack_files([], 7) == []


def test_a_state_that_does_not_fit_is_described_with_the_nearest_names():
    stored = {"layers.0.mlp.up.weight": TensorRecord("F32", (4,)), "norm": TensorRecord("F32", (2,)), "bias": TensorRecord("F32", (2,))}
    wanted = {"layers.0.mlp.upp.weight": TensorRecord("F32", (4,)), "norm": TensorRecord("F32", (3,)), "bias": TensorRecord("BF16", (2,))}
    problems = "\n".join(compare(wanted, stored).lines(Strictness(unexpected="ignore"), "raise"))
    assert "layers.0.mlp.upp.weight (did you mean layers.0.mlp.up.weight?)" in problems
    assert "norm (stored [2], asked [3])" in problems
    assert "bias (stored F32, asked BF16)" in problems


def test_files_to_verify_are_divided_evenly():
    shares = assign_files({f"f{i}": 10 + i for i in range(20)}, 4)
    assert sorted(name for share in shares for name in share) == sorted(f"f{i}" for i in range(20))
    assert {len(share) for share in shares} == {5}


def test_files_are_verified_by_those_who_had_best_unless_they_have_enough():
    sizes = {f"f{i}": 10 for i in range(8)}
    wish = {f"f{i}": (i + 1) % 4 for i in range(8)}
    shares = assign_files(sizes, 4, wish)
    assert all(wish[name] == rank for rank, share in enumerate(shares) for name in share)
    crowded = assign_files(sizes, 4, dict.fromkeys(sizes, 2))
    assert {len(share) for share in crowded} == {2} and sorted(name for share in crowded for name in share) == sorted(sizes)


def test_ranks_that_hold_alike_are_planned_once_and_come_to_the_same():
    rng = random.Random(6)
    for _ in range(30):
        held = scatter(rng, random_tensors(rng), 3)
        # Data-parallel copies: the same parts with other replica numbers, so that a part's main holder may be in any of them.
        held += [[ShardRecord(r.name, r.dtype, r.shape, r.box, rng.choice((0, 1, 2))) for r in rows] for rows in held]
        texts = [encode_layout(rows) for rows in held]
        assert all(texts[rank][0] == texts[rank + 3][0] for rank in range(3))
        apart = plan_layouts(decode_layouts([text for text, _ in texts], [[rank] for rank in range(6)], [runs for _, runs in texts]), 6)
        assert apart == plan_save(held)


@pytest.mark.journey
def test_a_thousand_ranks_with_thousands_of_tensors_are_planned_in_seconds():
    # 16 stages, 8 shards of each tensor, 8 data-parallel copies; a tenth of the tensors that the bound of 30 s is for.
    boxes = [Box((8 * tp, 0), (8, 16)) for tp in range(8)]
    texts, owners, runs = [], [], [[] for _ in range(1024)]
    for pp in range(16):
        for tp in range(8):
            records = [ShardRecord(f"layers.{i}.weight", "BF16", (64, 16), boxes[tp], 0) for i in range(pp, 10_000, 16)]
            texts.append(encode_layout(records)[0])
            owners.append([pp * 64 + dp * 8 + tp for dp in range(8)])
            for dp, rank in enumerate(owners[-1]):
                runs[rank] = [[dp, len(records)]]
    start = time.process_time()
    plan = plan_layouts(decode_layouts(texts, owners, runs), 1024)
    assert time.process_time() - start < 3
    loads = [sum(write.num_bytes for write in writes) for writes in plan.writes]
    assert sum(loads) == 10_000 * 64 * 16 * 2 and max(loads) - min(loads) <= 8 * 16 * 2


def test_each_rank_is_told_its_own_writes_and_knows_no_more():
    rng = random.Random(8)
    for _ in range(30):
        held = scatter(rng, random_tensors(rng), 4)
        texts = [encode_layout(rows) for rows in held]
        layouts = decode_layouts([text for text, _ in texts], [[rank] for rank in range(4)], [runs for _, runs in texts])
        plan = plan_layouts(layouts, 4)
        for rank, text in enumerate(encode_writes(layouts, plan)):
            share = decode_share(held[rank], text, plan if rank == 0 else None)
            assert tuple(share.writes) == plan.writes[rank]
            assert share.tensors.keys() == (plan.tensors.keys() if rank == 0 else {write.name for write in share.writes})


def test_the_memory_of_a_rank_does_not_grow_with_their_number():
    records = [ShardRecord(f"layers.{i}.weight", "BF16", (64, 16), Box.whole((64, 16)), 0) for i in range(500)]
    text, runs = encode_layout(records)
    shares = {}
    for num_ranks in (8, 64):
        layouts = decode_layouts([text], [range(num_ranks)], [runs] * num_ranks)
        texts = list(encode_writes(layouts, plan_layouts(layouts, num_ranks)))
        tracemalloc.start()
        share = decode_share(records, texts[-1], None)
        shares[num_ranks] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert share.writes
    assert shares[64] <= shares[8]

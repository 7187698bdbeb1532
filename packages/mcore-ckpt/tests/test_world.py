# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Several ranks: any layout from any layout, bit for bit, and one verdict for all."""

import itertools
import random

import pytest
import torch
import torch.distributed as dist

from mcore_ckpt import CheckpointingException, CheckpointManager, ShardedTensor, load, save
from mcore_ckpt.chunks import Box
from mcore_ckpt.manifest import is_checkpoint, read_manifest

LAYERS, EXPERTS = 4, 4
SHAPES = {
    "embedding.weight": (16, 6),
    **{f"layers.{i}.input_norm.weight": (6,) for i in range(LAYERS)},
    **{f"layers.{i}.attention.qkv.weight": (4, 3, 6) for i in range(LAYERS)},
    **{f"layers.{i}.mlp.up.weight": (2, 8, 6) for i in range(LAYERS)},
    **{f"layers.{i}.mlp.experts.down": (EXPERTS, 6, 8) for i in range(LAYERS)},
    "final_norm.weight": (6,),
    "optim.moments": (40,),
}
TP_DIM = {"embedding.weight": 0, "attention.qkv.weight": 0, "mlp.up.weight": 1, "mlp.experts.down": 2}


def global_state():
    generator = torch.Generator().manual_seed(11)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def local_state(rank, tp, pp, dp, ep, values=None):
    """What ``rank`` holds of the tiny model: tp innermost, then dp (ep inside dp), then pp; optimizer state cut over dp."""
    tp_rank, dp_rank, pp_rank = rank % tp, rank // tp % dp, rank // (tp * dp)
    ep_rank, expert_dp_rank = dp_rank % ep, dp_rank // ep
    stage = range(pp_rank * LAYERS // pp, (pp_rank + 1) * LAYERS // pp)
    state = {}
    for name, shape in SHAPES.items():
        words = name.split(".")
        if words[0] == "layers" and int(words[1]) not in stage:
            continue
        if (name == "embedding.weight" and pp_rank) or (name == "final_norm.weight" and pp_rank != pp - 1):
            continue
        offset, size, replica = [0] * len(shape), list(shape), dp_rank
        dim = TP_DIM.get(name, TP_DIM.get(".".join(words[2:])))
        if dim is None:
            replica = dp_rank * tp + tp_rank
        else:
            size[dim] //= tp
            offset[dim] = tp_rank * size[dim]
        if "experts" in name:
            size[0] //= ep
            offset[0], replica = ep_rank * size[0], expert_dp_rank
        if name == "optim.moments":
            # Uneven: the last data rank may hold less, or nothing.
            share = -(-shape[0] // dp) + 3
            offset[0] = min(dp_rank * share, shape[0])
            size[0], replica = min(share, shape[0] - offset[0]), pp_rank * tp + tp_rank
        box = Box(tuple(offset), tuple(size))
        data = values[name][box.slices()].clone() if values else torch.full(size, -9.0)
        state[name] = ShardedTensor(data, shape, tuple(offset), replica)
    return state


def layouts(world):
    for tp, pp, dp in itertools.product((1, 2, 4), repeat=3):
        if tp * pp * dp == world:
            yield from ((tp, pp, dp, ep) for ep in (1, 2, 4) if dp % ep == 0)


def check_every_layout_pair(folder):
    values, rank = global_state(), dist.get_rank()
    choices = list(layouts(4))
    assert len(choices) >= 8
    for number, layout in enumerate(choices):
        save(local_state(rank, *layout, values), f"{folder}/{number}", extra={"layout": list(layout)})
    for number, other in itertools.product(range(len(choices)), choices):
        state = local_state(rank, *other)
        # Digests once for each source; the pairs differ in the reading only.
        assert load(state, f"{folder}/{number}", verify=other == choices[0]) == {"layout": list(choices[number])}
        for name, shard in state.items():
            assert torch.equal(shard.data, values[name][shard.box.slices()]), (choices[number], other, name)
    return len(choices) ** 2


@pytest.mark.world(4)
def test_every_layout_loads_from_every_layout(world, tmp_path):
    pairs = world(check_every_layout_pair, folder=str(tmp_path))
    assert min(pairs) >= 64
    manifest = read_manifest(tmp_path / "0")
    assert sum(file.bytes for file in manifest.files.values()) < 1.5 * sum(t.num_bytes for t in manifest.tensors.values()) + 4000
    assert {name[9:15] for name in manifest.files} == {f"r{rank:05d}" for rank in range(4)}


def random_parts(rng, values):
    """A random tiling of every tensor, each part on random ranks; alike on every rank, which then takes its own."""
    mine = {}
    for name, value in values.items():
        boxes = [Box.whole(tuple(value.shape))]
        for _ in range(rng.randrange(6)):
            box = boxes.pop(rng.randrange(len(boxes)))
            dim = rng.randrange(value.dim())
            cut = rng.randint(0, box.shape[dim])
            low, high, corner = list(box.shape), list(box.shape), list(box.offset)
            low[dim], high[dim], corner[dim] = cut, box.shape[dim] - cut, box.offset[dim] + cut
            boxes += [Box(box.offset, tuple(low)), Box(tuple(corner), tuple(high))]
        # One part of a name on each rank: as many parts as there are ranks at most.
        ranks = list(range(dist.get_world_size()))
        rng.shuffle(ranks)
        boxes = sorted(boxes, key=lambda box: -box.num_elements)
        if len(boxes) > len(ranks):
            boxes = [Box.whole(tuple(value.shape))]
        for place, rank in enumerate(ranks):
            if rank == dist.get_rank():
                mine[name] = (boxes[place % len(boxes)], place // len(boxes))
    return mine


def check_random_layouts(folder, trials):
    rng = random.Random(12)
    torch.manual_seed(12)
    for trial in range(trials):
        values = {f"t{i}": torch.randn([rng.randrange(1, 8) for _ in range(rng.randint(1, 3))]) for i in range(4)}
        held = random_parts(rng, values)
        state = {
            name: ShardedTensor(values[name][box.slices()], tuple(values[name].shape), box.offset, r) for name, (box, r) in held.items()
        }
        save(state, f"{folder}/{trial}")
        for _ in range(2):
            wanted = {
                name: ShardedTensor(torch.zeros(box.shape), tuple(values[name].shape), box.offset)
                for name, (box, _) in random_parts(rng, values).items()
            }
            load(wanted, f"{folder}/{trial}")
            assert all(torch.equal(shard.data, values[name][shard.box.slices()]) for name, shard in wanted.items())


@pytest.mark.journey
@pytest.mark.world(4)
def test_random_layouts_load_from_random_layouts(world, tmp_path):
    world(check_random_layouts, folder=str(tmp_path), trials=12)


def check_dtensor(folder):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    values = {"even": torch.randn(8, 4, generator=torch.Generator().manual_seed(1)), "uneven": torch.arange(5 * 3.0).reshape(5, 3)}
    values["short"] = torch.arange(3.0)
    placements = [
        (Replicate(), Replicate()),
        (Shard(0), Replicate()),
        (Replicate(), Shard(0)),
        (Shard(0), Shard(0)),
        (Replicate(), Shard(-1)),
    ]
    for number, placed in enumerate(placements):
        save({name: distribute_tensor(value, mesh, placed) for name, value in values.items()}, f"{folder}/{number}")
    save({name: values[name] for name in values}, f"{folder}/plain")
    for source in (*range(len(placements)), "plain"):
        for placed in placements:
            state = {name: distribute_tensor(torch.zeros_like(value), mesh, placed) for name, value in values.items()}
            load(state, f"{folder}/{source}")
            # Not full_tensor(): the operator it gathers with damages the heap on gloo now and then.
            for name, value in values.items():
                assert torch.equal(state[name].to_local(), distribute_tensor(value, mesh, placed).to_local()), (source, placed, name)
        plain = {name: torch.zeros_like(value) for name, value in values.items()}
        load(plain, f"{folder}/{source}")
        assert all(torch.equal(plain[name], values[name]) for name in values)


@pytest.mark.journey
@pytest.mark.world(4)
def test_dtensors_also_uneven_ones_go_both_ways(world, tmp_path):
    world(check_dtensor, folder=str(tmp_path))


def check_fsdp_times_tp(folder):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(6, 12, bias=False))
    want = model[0].weight.detach().clone()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    save(dict(model.named_parameters()), folder)
    whole = torch.zeros(12, 6)
    load({"0.weight": whole}, folder)
    assert torch.equal(whole, want)
    mine = model[0].weight.to_local().detach().clone()
    with torch.no_grad():
        model[0].weight.zero_()
    load(dict(model.named_parameters()), folder)
    assert torch.equal(model[0].weight.to_local(), mine) and mine.any()


@pytest.mark.world(4)
def test_a_weight_cut_by_tensor_parallelism_and_fsdp_along_one_dim_is_one_box(world, tmp_path):
    world(check_fsdp_times_tp, folder=str(tmp_path / "c"))


class Answering(torch.Tensor):
    """A tensor that answers torch's questions for chunks: some runs of rows."""

    @staticmethod
    def __new__(cls, whole, runs):
        self = torch.Tensor._make_subclass(cls, torch.empty(whole.shape))
        self.boxes = {(begin, 0): whole[begin:end].clone() for begin, end in runs}
        return self

    def __create_chunk_list__(self):
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(offset), box.size()) for offset, box in self.boxes.items()]

    def __get_tensor_shard__(self, index):
        return self.boxes[tuple(index.offset)]


def check_chunk_protocol(folder):
    from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards

    rank, whole = dist.get_rank(), torch.arange(18.0).reshape(6, 3)
    split, lone = [[(0, 1), (4, 5)], [(1, 4), (5, 6)]][rank], [[(0, 2), (2, 6)], []][rank]

    def half(value):
        return init_from_local_shards([Shard.from_tensor_and_offsets(value[3 * rank : 3 * rank + 3].clone(), [3 * rank, 0], rank)], 6, 3)

    save({"a": Answering(whole, split), "b": half(whole + 1), "c": Answering(whole + 2, lone)}, folder)
    plain = {name: torch.zeros(6, 3) for name in "abc"}
    load(plain, folder)
    assert all(torch.equal(plain[name], whole + number) for number, name in enumerate("abc"))
    blank = {"a": half(whole * 0), "b": Answering(whole * 0, lone), "c": Answering(whole * 0, split)}
    load(blank, folder)
    assert torch.equal(blank["a"].local_shards()[0].tensor, whole[3 * rank : 3 * rank + 3])
    for number, name in ((1, "b"), (2, "c")):
        assert all(torch.equal(box, whole[at : at + len(box)] + number) for (at, _), box in blank[name].boxes.items())


@pytest.mark.world(2)
@pytest.mark.filterwarnings("ignore")
def test_tensors_that_name_their_chunks_themselves_go_both_ways(world, tmp_path):
    world(check_chunk_protocol, folder=str(tmp_path / "c"))


def check_partial_sum(folder):
    from torch.distributed.tensor import DTensor, Partial, init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(CheckpointingException, match=r"rank 0.*w: a DTensor placed.*partial sums"):
        save({"w": DTensor.from_local(torch.ones(2), mesh, [Partial()])}, folder)


@pytest.mark.world(2)
def test_partial_sums_are_refused(world, tmp_path):
    world(check_partial_sum, folder=str(tmp_path / "c"))


def check_failures(folder):
    rank = dist.get_rank()
    state = {"w": ShardedTensor(torch.ones(2) * rank, (4,), (2 * rank,))}
    problems = {
        "preparing .* rank 1: bad is object": lambda to: save({**state, **({"bad": object()} if rank else {})}, to),
        "extra differs between ranks": lambda to: save(state, to, extra={"rank": rank}),
        "directory differs between ranks": lambda to: save(state, f"{to}-{rank}"),
        "w .on ranks .0, 1..: parts .* overlap": lambda to: save({"w": ShardedTensor(torch.ones(3), (4,), (rank,))}, to),
        "w .on ranks .0..: no part holds": lambda to: save(state if rank == 0 else {}, to),
        r"w is F32 \[4\] on rank 0 and F64": lambda to: save(
            {"w": state["w"] if not rank else ShardedTensor(torch.ones(2).double(), (4,), (2,))}, to
        ),
    }
    for number, (words, attempt) in enumerate(problems.items()):
        with pytest.raises(CheckpointingException, match=words):
            attempt(f"{folder}/{number}")
        assert not is_checkpoint(f"{folder}/{number}")
    return list(problems)


@pytest.mark.world(2)
def test_a_mistake_on_one_rank_is_the_same_error_on_all(world, tmp_path):
    assert len(world(check_failures, folder=str(tmp_path))) == 2


def check_write_failure(folder, victim, asynchronous):
    import os

    rank, real, calls = dist.get_rank(), os.fsync, 0
    state = {f"w{i}": ShardedTensor(torch.ones(2) * rank, (4,), (2 * rank,)) for i in range(3)}

    def fsync(handle):
        # The first folder sync of the preparation has to pass; then the disk goes.
        nonlocal calls
        calls += 1
        if rank == victim and calls > (victim == 0):
            raise OSError(5, "Input/output error")
        real(handle)

    os.fsync = fsync
    with pytest.raises(CheckpointingException, match=f"failed on rank {victim}: OSError.*Input/output"):
        request = save(state, f"{folder}/c", asynchronous=asynchronous)
        if request:
            request.wait()
    os.fsync = real
    dist.barrier()
    assert not os.path.exists(f"{folder}/c")
    dist.barrier()
    # And the group is still in step.
    save(state, f"{folder}/c")
    load({f"w{i}": torch.zeros(4) for i in range(3)}, f"{folder}/c")


@pytest.mark.world(2)
@pytest.mark.parametrize(("victim", "asynchronous"), [(0, False), (1, False), (1, True)])
def test_a_disk_that_fails_under_one_rank_fails_the_save_on_all(world, tmp_path, victim, asynchronous):
    world(check_write_failure, folder=str(tmp_path), victim=victim, asynchronous=asynchronous)


def check_damage(folder):
    rank = dist.get_rank()
    state = {"w": ShardedTensor(torch.zeros(2), (4,), (2 * rank,))}
    with pytest.raises(CheckpointingException, match=r"verifying .* failed on rank \d: .*-r00001-000.safetensors: its SHA-256"):
        load(state, folder, verify="first")
    assert not state["w"].data.any()
    # Who reads a file compares its digest on the way.
    with pytest.raises(CheckpointingException, match=r"reading .* failed on rank 1: .*-r00001-000.safetensors: its SHA-256"):
        load(state, folder)
    with pytest.raises(CheckpointingException, match="rank 1: the state does not fit: missing from the checkpoint: z"):
        load({**state, **({"z": torch.zeros(1)} if rank else {})}, folder)


def write_halves(folder):
    rank = dist.get_rank()
    save({"w": ShardedTensor(torch.ones(2) + rank, (4,), (2 * rank,))}, folder)


@pytest.mark.world(2)
def test_damage_is_reported_on_every_rank(world, tmp_path):
    world(write_halves, folder=str(tmp_path / "c"))
    (shard,) = (tmp_path / "c").glob("*-r00001-*")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    world(check_damage, folder=str(tmp_path / "c"))


def check_subgroup(folder):
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group, place = pairs[rank // 2], rank % 2
    manager = CheckpointManager(f"{folder}/{rank // 2}", keep=2, group=group)
    for step in (1, 2, 3):
        state = {"w": ShardedTensor(torch.full((2,), float(10 * step + rank)), (4,), (2 * place,))}
        manager.save(step, state, {"step": step}, asynchronous=step == 2)
    dist.barrier()
    assert manager.steps() == [2, 3]
    whole = torch.zeros(4)
    assert manager.load({"w": whole}) == (3, {"step": 3})
    first = 30 + rank - place
    assert whole.tolist() == [first, first, first + 1, first + 1]
    assert manager.load({"w": whole}, step=2)[0] == 2
    with pytest.raises(CheckpointingException, match=rf"rank {rank - place}: .* has no step 7; it has \[2, 3\]"):
        manager.load({"w": whole}, step=7)


@pytest.mark.world(4)
def test_two_groups_keep_their_own_checkpoints(world, tmp_path):
    world(check_subgroup, folder=str(tmp_path))

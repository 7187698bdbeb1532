# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Steps on the nodes: a node that is lost, a file that is damaged, a rank that does not come."""

import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mcore_ckpt import CheckpointingException, CheckpointManager, LocalCheckpoints, ShardedTensor
from mcore_ckpt._local import _partners
from mcore_ckpt._local._partners import partners
from mcore_ckpt.storage import LocalFolder
from tests.support.commands import run_script


def state(value=0.0, rows=3):
    rank, size = dist.get_rank(), dist.get_world_size()
    part = torch.full((rows, 4), value + 10 * rank)
    return {"w": ShardedTensor(part, (rows * size, 4), (rows * rank, 0)), "same": torch.full((5,), value)}


def holds(loaded, value):
    return all(
        torch.equal(loaded[name].data if name == "w" else loaded[name], want)
        for name, want in (("w", torch.full((3, 4), value + 10 * dist.get_rank())), ("same", torch.full((5,), value)))
    )


def node_of(rank):
    """Two ranks a node."""
    return f"node{rank // 2}"


def opened(folder, **options):
    node = node_of(dist.get_rank())
    return LocalCheckpoints(Path(folder) / node, node=node, **options)


def lose(folder, node):
    # Not under the feet of a rank that still looks.
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(Path(folder) / node)
    dist.barrier()


def check_a_lost_node(folder):
    # A piece is smaller than a file, so files travel in several.
    _partners._CHUNK_BYTES = 64
    local, rank = opened(folder, keep=2), dist.get_rank()
    for step in (1, 2, 3):
        local.save(step, state(float(step)), {"rank": rank, "step": step})
    assert sorted({name[:13] for name in os.listdir(Path(folder) / node_of(rank))}) == ["step_00000002", "step_00000003"]
    lose(folder, "node1")
    loaded = state()
    assert opened(folder).load(loaded) == (3, {"rank": rank, "step": 3}) and holds(loaded, 3.0)
    # What was fetched is kept: the other node may go now.
    lose(folder, "node0")
    if rank < 2:
        assert not (Path(folder) / "node0").exists()
    own = {name for name in os.listdir(Path(folder) / "node1") if name.endswith(".json")}
    assert own == {f"step_00000003-r{r:05d}.json" for r in (2, 3)}
    persistent = CheckpointManager(Path(folder) / "shared")
    persistent.save(1, state(1.0), {"from": "shared"})
    loaded = state()
    with pytest.raises(CheckpointingException, match=r"no step is whole on the nodes: of step 3 the files of ranks \[0, 1\] are gone"):
        opened(folder).load(loaded)
    again = opened(folder)
    assert again.load(loaded, persistent) == (1, {"from": "shared"}) and holds(loaded, 1.0)
    assert again.skipped == "of step 3 the files of ranks [0, 1] are gone"


@pytest.mark.world(4)
def test_a_lost_node_comes_back_from_its_partner_and_two_from_shared_storage(world, tmp_path):
    world(check_a_lost_node, folder=str(tmp_path))


def check_damage(folder):
    local, rank = opened(folder, keep=2), dist.get_rank()
    local.save(1, state(1.0))
    local.save(2, state(2.0))

    def damage(node, of):
        if rank == 0:
            (path,) = (Path(folder) / node).glob(f"step_00000002-r{of:05d}-*.safetensors")
            content = bytearray(path.read_bytes())
            content[-3] ^= 1
            path.write_bytes(content)
        dist.barrier()

    damage("node0", 1)
    loaded = state()
    assert local.load(loaded)[0] == 2 and holds(loaded, 2.0)
    # Both copies of one file: the step before.
    damage("node0", 0)
    damage("node1", 0)
    loaded = state()
    assert local.load(loaded)[0] == 1 and holds(loaded, 1.0)
    assert local.skipped.startswith("of step 2 files are damaged")
    # Shared storage has a newer one.
    persistent = CheckpointManager(Path(folder) / "shared")
    persistent.save(7, state(7.0))
    assert local.load(loaded, persistent)[0] == 7 and holds(loaded, 7.0) and not local.skipped
    # A step that only some ranks finished is none; the next save takes it away.
    if rank == 0:
        for path in (Path(folder) / "node1").glob("step_00000001*.json"):
            shutil.copy(path, path.with_name(path.name.replace("00000001", "00000009")))
    dist.barrier()
    assert local.load(loaded)[0] == 1
    # Another layout is none of these.
    with pytest.raises(CheckpointingException, match="of another layout"):
        local.load(state(rows=2))
    local.save(3, state(3.0))
    local.save(3, state(3.5))
    assert local.load(loaded)[0] == 3 and holds(loaded, 3.5)
    names = os.listdir(Path(folder) / node_of(rank))
    assert len([name for name in names if "00000003" in name]) == 8 and not [
        name for name in names if "00000009-" in name and "safe" in name
    ]


@pytest.mark.world(4)
def test_damaged_files_come_from_the_partner_or_the_step_before(world, tmp_path):
    world(check_damage, folder=str(tmp_path))


def check_somebody_does_not_come(folder):
    local = opened(folder, copies=1)
    local.save(1, state(1.0))
    # For the step before there was time.
    local._timeout_s = 0.5
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(1.5)
        return ""
    with pytest.raises(CheckpointingException) as caught:
        local.save(2, state(2.0))
    assert dist.get_rank() or "came within 0.5 s" in str(caught.value)
    return str(caught.value)


@pytest.mark.journey
@pytest.mark.world(2)
def test_a_rank_that_does_not_come_is_named(world, tmp_path):
    assert "1" in world(check_somebody_does_not_come, folder=str(tmp_path))[0].partition("came within 0.5 s")[2].replace("1.5", "")


def check_a_partner_that_goes_silent():
    from mcore_ckpt._core._control import Control, LostContact

    control = Control()
    dist.barrier()
    if control.rank == 1:
        time.sleep(1.0)
        return None
    with pytest.raises(LostContact, match=r"copying: rank 1 did not answer rank 0 in 0\.3 s"):
        list(_partners.pass_bytes(control, "copying", None, (1, 10), 0.3))
    return None


@pytest.mark.world(2)
def test_a_partner_that_goes_silent_is_named(world):
    world(check_a_partner_that_goes_silent)


class Full(LocalFolder):
    """Rank 2 has no room for its partner's file of step 2."""

    def write(self, name, parts):
        if dist.get_rank() == 2 and "step_00000002-r00000" in name:
            raise OSError(28, "No space left on device", name)
        super().write(name, parts)


def check_a_full_disk(folder):
    node = node_of(dist.get_rank())
    local = LocalCheckpoints(Full(Path(folder) / node), node=node, timeout_s=20)
    local.save(1, state(1.0))
    with pytest.raises(CheckpointingException, match="keeping step 2 on the nodes failed on rank 2: OSError: .*No space left"):
        local.save(2, state(2.0))
    loaded = state()
    assert local.load(loaded)[0] == 1 and holds(loaded, 1.0)
    local.save(3, state(3.0))
    assert not [name for name in os.listdir(Path(folder) / node) if "step_00000003" not in name]


@pytest.mark.world(4)
def test_a_node_without_room_fails_the_step_on_all_ranks_and_loses_no_older_one(world, tmp_path):
    world(check_a_full_disk, folder=str(tmp_path))


def test_partners_are_on_other_nodes_and_each_keeps_as_many():
    nodes = [f"n{rank // 4}" for rank in range(24)]
    for copies in (1, 2, 3, 6):
        rows = partners(nodes, copies)
        assert all(row[0] == rank and len({nodes[place] for place in row}) == copies for rank, row in enumerate(rows))
        assert all(sum(place in row for row in rows) == copies for place in range(24))
    with pytest.raises(ValueError, match="copies=7 but the ranks run on 6 nodes"):
        partners(nodes, 7)
    with pytest.raises(ValueError, match=r"nodes have \[1, 2\] ranks"):
        partners(["a", "a", "b"], 2)


@pytest.mark.parametrize("wrong", [{"copies": 0}, {"keep": 0}, {"timeout_s": 0.0}])
def test_wrong_arguments_are_named(tmp_path, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        LocalCheckpoints(tmp_path, **wrong)


def test_one_process_keeps_its_own(tmp_path):
    local, weight = LocalCheckpoints(tmp_path, copies=1), torch.arange(3.0)
    local.save(4, {"w": weight}, {"lr": 0.5})
    (tmp_path / "step_00000005-r00000.json").write_text('{"step": 5}')
    weight.zero_()
    assert local.load({"w": weight}) == (4, {"lr": 0.5}) and weight.tolist() == [0, 1, 2]
    with pytest.raises(CheckpointingException, match="they keep none"):
        LocalCheckpoints(tmp_path / "other", copies=1).load({"w": weight})
    (tmp_path / "notes.json").write_text("of somebody else")
    local.save(6, {"w": weight}, asynchronous=True)
    local.clear()
    assert os.listdir(tmp_path) == ["notes.json"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_nested_state_comes_back_with_its_values(tmp_path, asynchronous):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    local = LocalCheckpoints(tmp_path, copies=1)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7}
    local.save(7, state, {"seed": 3}, asynchronous=asynchronous)
    state["optimizer"]["param_groups"][0]["lr"] = 1.0
    local.wait()
    other = torch.nn.Linear(2, 2)
    wanted = {"model": other.state_dict(), "optimizer": torch.optim.AdamW(other.parameters()).state_dict() | {"state": {}}, "step": 0}
    with pytest.raises(CheckpointingException, match="no step is whole"):
        local.load(wanted)
    moments = {0: {name: torch.zeros_like(value) for name, value in optimizer.state_dict()["state"][0].items()}}
    moments[1] = {name: torch.zeros_like(value) for name, value in optimizer.state_dict()["state"][1].items()}
    wanted["optimizer"]["state"] = moments
    assert local.load(wanted) == (7, {"seed": 3})
    assert wanted["step"] == 7 and wanted["optimizer"]["param_groups"][0]["lr"] == 0.25
    assert torch.equal(other.weight, model.weight) and torch.equal(moments[0]["exp_avg"], optimizer.state[model.weight]["exp_avg"])
    with pytest.raises(CheckpointingException, match="no value for epoch"):
        local.load({**wanted, "epoch": 1})


def test_the_name_of_values_is_theirs_and_older_steps_keep_what_had_it(tmp_path):
    local, weight = LocalCheckpoints(tmp_path, copies=1), torch.zeros(2)
    for state in ({"w": torch.ones(2)}, {"w": torch.ones(2), "step": 5}):
        with pytest.raises(CheckpointingException, match="extra has an entry 'state_values'"):
            local.save(1, state, {"state_values": {"a": 1}})
    local.save(2, {"w": torch.ones(2), "step": 5}, {"b": 2})
    assert local.load({"w": weight}) == (2, {"b": 2})
    # A record of before values had a place of their own: those of its caller, or of its state.
    [path] = tmp_path.glob("*.json")
    record = json.loads(path.read_text())
    assert record.pop("values") == {"step": 5}
    record["extra"]["state_values"] = {"step": 6}
    path.write_text(json.dumps(record))
    assert local.load({"w": weight}) == (2, {"b": 2, "state_values": {"step": 6}})
    state = {"w": weight, "step": 0}
    assert local.load(state) == (2, {"b": 2}) and state["step"] == 6


def check_asynchronous(folder):
    local, rank = opened(folder, keep=1, timeout_s=20), dist.get_rank()
    for step in (1, 2, 3):
        loaded, extra = state(float(step)), {"rank": rank, "deep": [step]}
        assert local.save(step, loaded, extra, asynchronous=True) is None
        # The step holds the values of the call, and training talks meanwhile.
        loaded["w"].data.zero_()
        loaded["same"].zero_()
        extra["deep"].append("later")
        for _ in range(50):
            dist.all_reduce(torch.ones(1))
    local.wait()
    assert {name[:13] for name in os.listdir(Path(folder) / node_of(rank))} == {"step_00000003"}
    dist.barrier()
    lose(folder, "node1")
    loaded = state()
    assert local.load(loaded) == (3, {"rank": rank, "deep": [3]}) and holds(loaded, 3.0)
    local.save(4, state(4.0), asynchronous=True)
    # A load waits for it.
    assert local.load(loaded)[0] == 4 and holds(loaded, 4.0)
    lose(folder, "node0")
    loaded = state()
    assert opened(folder).load(loaded)[0] == 4 and holds(loaded, 4.0)
    # Both kinds in turn, and the memory of the copy serves again.
    size = local._staging.num_bytes
    local.save(5, state(5.0))
    local.save(6, state(6.0), asynchronous=True)
    local.wait()
    assert opened(folder).load(loaded)[0] == 6 and holds(loaded, 6.0) and local._staging.num_bytes == size > 0


@pytest.mark.world(4)
def test_an_asynchronous_step_holds_the_values_of_the_call_on_both_nodes(world, tmp_path):
    world(check_asynchronous, folder=str(tmp_path))


def check_asynchronous_failures(folder):
    node, rank = node_of(dist.get_rank()), dist.get_rank()
    local = LocalCheckpoints(Full(Path(folder) / node), node=node, timeout_s=20)
    local.save(1, state(1.0), asynchronous=True)
    local.save(2, state(2.0), asynchronous=True)
    with pytest.raises(CheckpointingException, match="keeping step 2 on the nodes failed on rank 2: OSError: .*No space left"):
        local.save(3, state(3.0), asynchronous=True)
    loaded = state()
    assert local.load(loaded)[0] == 1 and holds(loaded, 1.0)
    # What one rank cannot copy, all hear of, when they ask.
    local.save(4, {"w": {"no tensor"}} if rank == 1 else state(4.0), asynchronous=True)
    with pytest.raises(CheckpointingException, match="keeping step 4 on the nodes failed on rank 1: .*w"):
        local.wait()
    local.wait()
    # A writer that is killed is one more failure.
    local = opened(folder, timeout_s=20)
    local.save(5, state(5.0), asynchronous=True)
    local.wait()
    if rank == 3:
        os.kill(local._worker.pid, signal.SIGKILL)
        local._worker.start = lambda: None
    local.save(6, state(6.0), asynchronous=True)
    with pytest.raises(CheckpointingException, match="keeping step 6 on the nodes failed on rank 3: .*was killed by SIGKILL"):
        local.wait()
    if rank == 3:
        del local._worker.start
    local.save(7, state(7.0), asynchronous=True)
    assert local.load(loaded)[0] == 7 and holds(loaded, 7.0)


@pytest.mark.journey
@pytest.mark.world(4)
def test_what_an_asynchronous_save_meets_is_raised_by_the_next_call_on_all_ranks(world, tmp_path):
    world(check_asynchronous_failures, folder=str(tmp_path))


def check_a_part_of_the_world(folder):
    rank = dist.get_rank()
    halves = [[0, 1], [2, 3]]
    half = [dist.new_group(ranks) for ranks in halves][rank // 2]
    own = [dist.new_group(ranks, backend="gloo") for ranks in halves][rank // 2]
    part = {"w": torch.full((3,), float(rank))}
    place = {"directory": f"{folder}/node{rank}", "node": f"node{rank}", "group": half}
    with pytest.raises(ValueError, match="group has 2 of 4 ranks; an asynchronous save needs background_group"):
        LocalCheckpoints(**place).save(1, part, asynchronous=True)
    with pytest.raises(ValueError, match="background_group has the ranks .* they must be the same"):
        LocalCheckpoints(**place, background_group=dist.group.WORLD).save(1, part, asynchronous=True)
    local = LocalCheckpoints(**place, background_group=own)
    local.save(1, part, asynchronous=True)
    part["w"].zero_()
    assert local.load(part)[0] == 1 and part["w"].tolist() == [float(rank)] * 3


@pytest.mark.world(4)
def test_a_part_of_the_world_brings_its_own_group(world, tmp_path):
    world(check_a_part_of_the_world, folder=str(tmp_path))


def test_only_the_copy_holds_training_up_and_one_copy_is_held_at_a_time(tmp_path):
    gate = threading.Event()

    class Slow(LocalFolder):
        def write(self, name, parts):
            assert gate.wait(20)
            super().write(name, parts)

    local, weight = LocalCheckpoints(Slow(tmp_path), copies=1), torch.ones(3)
    local.save(1, {"w": weight}, asynchronous=True)
    weight.fill_(2.0)
    # It has returned, and nothing is kept yet.
    assert not list(tmp_path.glob("*.json"))
    threading.Timer(0.2, gate.set).start()
    local.save(2, {"w": weight}, asynchronous=True)
    assert gate.is_set()
    weight.zero_()
    assert local.load({"w": weight})[0] == 2 and weight.tolist() == [2.0] * 3


KILLED = """
import json, os, signal, sys, tempfile
import torch
import torch.distributed as dist
from mcore_ckpt import CheckpointingException, LocalCheckpoints
from mcore_ckpt.storage import LocalFolder
from tests.support.kills import die_at

class Here(LocalFolder):
    # Written by a thread of this process, which can then be killed at each operation.
    pass

torch.set_num_threads(1)
os.fsync = lambda handle: None
root = sys.argv[1]

def world(folder, name, work):
    # The answers of two ranks on two nodes; None of one that was killed.
    pids = []
    for rank in (0, 1):
        pids.append(os.fork())
        if pids[-1] == 0:
            try:
                dist.init_process_group("gloo", init_method=f"file://{folder}/{name}", rank=rank, world_size=2)
                local = LocalCheckpoints(Here(f"{folder}/node{rank}"), node=str(rank), timeout_s=20)
                work(rank, local, {"w": torch.full((64,), float(rank)), "b": torch.full((3,), 2.0)})
                os._exit(0)
            except BaseException as error:
                print(repr(error), file=sys.stderr)
                os._exit(1)
    statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    assert all(status in (0, signal.SIGKILL) for status in statuses), statuses
    return [status == 0 for status in statuses]

def survives(kill_at, asynchronous):
    folder = tempfile.mkdtemp(dir=root)

    def lost(rank, local, state):
        local.save(1, state, {"step": 1})
        die_at(kill_at, ("open", "write", "fsync", "replace", "unlink") if rank else ())
        for value in state.values():
            value += 100
        try:
            local.save(2, state, {"step": 2}, asynchronous=asynchronous)
            for value in state.values():
                value.zero_()
            local.wait()
        except CheckpointingException as error:
            # The rank that is left hears of it.
            assert rank == 0 and ("lost contact" in str(error) or "rank 1" in str(error)), error

    def again(rank, local, state):
        wanted = {name: value.clone() for name, value in state.items()}
        step, extra = local.load(state)
        assert extra == {"step": step} and all(torch.equal(state[name], wanted[name] + 100 * (step - 1)) for name in state), (step, state)
        local.save(3, state, {"step": 3}, asynchronous=asynchronous)
        local.wait()
        dist.barrier()
        names = os.listdir(f"{folder}/node{rank}")
        assert len(names) == 4 and all(name.startswith("step_00000003") for name in names), names
        with open(f"{folder}/found{rank}", "w") as file:
            file.write(str(step))

    unhurt = all(world(folder, "first", lost))
    assert all(world(folder, "second", again))
    steps = {open(f"{folder}/found{rank}").read() for rank in (0, 1)}
    assert len(steps) == 1, steps
    return int(steps.pop()), unhurt

found = {}
for asynchronous in (False, True):
    found[str(asynchronous)], unhurt = [], False
    while not unhurt:
        step, unhurt = survives(5 * len(found[str(asynchronous)]), asynchronous)
        found[str(asynchronous)].append(step)
print(json.dumps(found))
"""


@pytest.mark.journey
def test_a_rank_killed_at_any_point_of_either_kind_of_save_leaves_a_whole_step(tmp_path):
    code, output, errors = run_script(KILLED, str(tmp_path))
    assert code == 0, errors
    for steps in json.loads(output).values():
        assert steps == sorted(steps) and set(steps) == {1, 2} and len(steps) >= 3, steps

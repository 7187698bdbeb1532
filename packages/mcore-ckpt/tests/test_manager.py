# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Numbered checkpoints: the newest, the kept, the unfinished."""

import pytest
import torch

from mcore_ckpt import CheckpointingException, CheckpointManager
from mcore_ckpt._core import _save_plan
from mcore_ckpt._core._save_plan import plan_layouts
from mcore_ckpt.manifest import is_checkpoint


def test_the_newest_committed_step_loads_and_older_ones_go(tmp_path):
    manager = CheckpointManager(tmp_path / "run", keep=2)
    assert manager.latest() is None and manager.steps() == []
    weight = torch.zeros(3)
    for step in (5, 10, 20, 100):
        manager.save(step, {"w": weight.fill_(step)}, {"lr": step / 2})
    assert manager.steps() == [20, 100] and manager.latest() == 100
    assert sorted(path.name for path in manager.directory.iterdir()) == ["step_00000020", "step_00000100"]
    weight.zero_()
    assert manager.load({"w": weight}) == (100, {"lr": 50.0})
    assert weight.tolist() == [100.0] * 3
    assert manager.load({"w": weight}, step=20) == (20, {"lr": 10.0})


def test_every_so_many_steps_one_stays(tmp_path):
    manager = CheckpointManager(tmp_path, keep=2, keep_every=4)
    for step in range(1, 11):
        manager.save(step, {"w": torch.ones(1)})
    assert manager.steps() == [4, 8, 9, 10]


def test_nothing_goes_before_the_new_step_is_committed(tmp_path):
    manager = CheckpointManager(tmp_path, keep=1)
    manager.save(1, {"w": torch.ones(1)})
    with pytest.raises(CheckpointingException):
        manager.save(2, {"w": object()})
    assert manager.steps() == [1]
    request = manager.save(3, {"w": torch.ones(1)}, asynchronous=True)
    assert request is not None and manager.steps() == [1]
    request.wait()
    assert manager.steps() == [3]


def test_pending_saves_appear_in_order(tmp_path):
    manager = CheckpointManager(tmp_path, keep=None)
    for step in (1, 2, 3):
        manager.save(step, {"w": torch.full((4,), step)}, asynchronous=True)
        assert manager.steps() == list(range(1, step))
    manager.wait()
    manager.wait()
    weight = torch.zeros(4, dtype=torch.long)
    assert manager.load({"w": weight})[0] == 3 and weight.tolist() == [3] * 4


def test_an_unfinished_step_is_invisible_and_goes_with_the_next_commit(tmp_path):
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"w": torch.ones(1)})
    for name in ("step_00000002", "step_00000009", "step_3", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "01234567-r00000-000.safetensors").write_text("half")
    assert manager.latest() == 1
    manager.save(4, {"w": torch.ones(1)})
    assert manager.steps() == [1, 4]
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["other", "step_00000001", "step_00000004", "step_00000009", "step_3"]


def test_unfinished_steps_go_also_where_all_steps_stay(tmp_path):
    manager = CheckpointManager(tmp_path, keep=None)
    manager.save(1, {"w": torch.ones(1)})
    (tmp_path / "step_00000002").mkdir()
    (tmp_path / "step_00000002" / "01234567-r00000-000.safetensors").write_text("half")
    manager.save(3, {"w": torch.ones(1)})
    assert manager.steps() == [1, 3] and not (tmp_path / "step_00000002").exists()


def test_retention_never_removes_through_a_link(tmp_path):
    CheckpointManager(tmp_path / "other").save(1, {"w": torch.full((1,), 7.0)})
    (tmp_path / "other" / "unfinished").mkdir()
    (tmp_path / "other" / "unfinished" / "file").write_text("half")
    manager = CheckpointManager(tmp_path / "run", keep=1)
    (tmp_path / "run").mkdir()
    links = {1: "../other/step_00000001", 2: "../other/unfinished", 3: "step_00000003", 4: "step_00000005"}
    for step, target in links.items():
        (tmp_path / "run" / f"step_{step:08d}").symlink_to(target)
    for step in (5, 6):
        manager.save(step, {"w": torch.ones(1)})
    assert manager.steps() == [1, 6]
    assert all((tmp_path / "run" / f"step_{step:08d}").is_symlink() for step in links)
    assert (tmp_path / "other" / "unfinished" / "file").exists()
    weight = torch.zeros(1)
    assert manager.load({"w": weight}, step=1)[0] == 1 and weight.tolist() == [7.0]


def test_an_existing_step_is_not_overwritten(tmp_path):
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"w": torch.ones(1)})
    with pytest.raises(CheckpointingException, match="step_00000001 already holds a checkpoint"):
        manager.save(1, {"w": torch.zeros(1)})


def test_a_step_that_cannot_be_removed_warns_and_is_no_checkpoint(tmp_path, monkeypatch):
    manager = CheckpointManager(tmp_path, keep=1)
    manager.save(1, {"w": torch.ones(1)})

    def refuse(path):
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr("shutil.rmtree", refuse)
    with pytest.warns(RuntimeWarning, match="could not remove old checkpoint .*step_00000001.*busy"):
        manager.save(2, {"w": torch.ones(1)})
    assert manager.steps() == [2] and not is_checkpoint(manager.path(1))


def test_wrong_arguments_name_field_and_remedy(tmp_path):
    with pytest.raises(ValueError, match="keep=0 must be at least 1, or None"):
        CheckpointManager(tmp_path, keep=0)
    with pytest.raises(ValueError, match="keep_every=0 must be at least 1, or None"):
        CheckpointManager(tmp_path, keep_every=0)
    with pytest.raises(ValueError, match="step=-1"):
        CheckpointManager(tmp_path).save(-1, {})
    with pytest.raises(CheckpointingException, match="holds no checkpoint"):
        CheckpointManager(tmp_path).load({})


@pytest.mark.parametrize("name", ["native", "torch_dist"])
def test_a_plan_serves_again_while_the_structure_stays(tmp_path, monkeypatch, name):
    plans = []
    monkeypatch.setattr(_save_plan, "plan_layouts", lambda *given: plans.append(1) or plan_layouts(*given))
    manager = CheckpointManager(tmp_path, keep=None, format=name)
    shapes = [(2, 3), (2, 3), (2, 3), (4, 3), (4, 3), (2, 3)]
    for step, shape in enumerate(shapes):
        manager.save(step, {"w": torch.full(shape, step), "b": torch.full((5,), step)}, asynchronous=step % 2 == 1)
    manager.wait()
    assert len(plans) == 3
    for step, shape in enumerate(shapes):
        state = {"w": torch.full(shape, -1), "b": torch.full((5,), -1)}
        manager.load(state, step)
        assert all(bool((value == step).all()) for value in state.values())

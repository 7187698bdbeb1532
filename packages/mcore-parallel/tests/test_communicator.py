# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""NCCL's choices for one communicator, and the files they come from."""

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mcore_parallel import CommunicatorOptions, Group, ParallelPlan, ProcessGroups, load_communicator_options
from mcore_parallel.comm import NCCL_ALLOCATOR, RegisteredMemory, all_gather
from mcore_parallel.groups._communicator import _nccl_options, connect, uses_nccl


def test_files_hold_one_table_a_group(tmp_path: Path) -> None:
    expected = {
        "dp_cp": CommunicatorOptions(min_ctas=2, max_ctas=16, net_name="IB"),
        "tp": CommunicatorOptions(is_high_priority_stream=True),
    }
    (tmp_path / "a.toml").write_text('[dp_cp]\nmin_ctas = 2\nmax_ctas = 16\nnet_name = "IB"\n[tp]\nis_high_priority_stream = true\n')
    (tmp_path / "a.json").write_text(
        '{"dp_cp": {"min_ctas": 2, "max_ctas": 16, "net_name": "IB"}, "tp": {"is_high_priority_stream": true}}'
    )
    assert load_communicator_options(tmp_path / "a.toml") == load_communicator_options(str(tmp_path / "a.json")) == expected


def test_bad_files_are_named(tmp_path: Path) -> None:
    for text, match in (
        ("[]", "a.json must hold a table of groups, found list"),
        ('{"tp": 3}', "tp in a.json must be a table of options, found 3"),
        ('{"tp": {"max_ctass": 3}}', r"tp in a.json has unknown options \['max_ctass'\]; known: \['cga_cluster_size'"),
        ('{"tp": {"max_ctas": 0}}', "tp in a.json: max_ctas=0 must be an integer of at least 1"),
    ):
        (tmp_path / "a.json").write_text(text)
        with pytest.raises(ValueError, match=match):
            load_communicator_options(tmp_path / "a.json")
    with pytest.raises(ValueError, match=r"a.yaml must end in .json or .toml"):
        load_communicator_options(tmp_path / "a.yaml")


def test_impossible_options_are_named() -> None:
    for options, match in (
        ({"min_ctas": 8, "max_ctas": 4}, "min_ctas=8 must not exceed max_ctas=4"),
        ({"cga_cluster_size": 9}, "cga_cluster_size=9 must be at most 8"),
        ({"cga_cluster_size": -1}, "cga_cluster_size=-1 must be an integer of at least 0"),
        ({"net_name": "wire"}, "net_name='wire' must be one of IB, Socket"),
        ({"min_ctas": "4"}, "min_ctas='4' must be an integer"),
    ):
        with pytest.raises(ValueError, match=match):
            CommunicatorOptions(**options)


class Nccl:
    """The part of torch's NCCL binding that options go through; the CPU build has none."""

    class Config:
        __slots__ = ("cga_cluster_size", "max_ctas", "min_ctas", "net_name")

    class Options:
        def __init__(self, is_high_priority_stream: bool) -> None:
            self.is_high_priority_stream, self.config = is_high_priority_stream, Nccl.Config()
            self._timeout = timedelta(minutes=10)


def test_nccl_gets_what_was_chosen_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    options = CommunicatorOptions(max_ctas=8, cga_cluster_size=0, net_name="Socket", is_high_priority_stream=True)
    made = _nccl_options(options, "cpu:gloo,cuda:nccl", timedelta(seconds=9))
    assert made.is_high_priority_stream and made._timeout == timedelta(seconds=9)
    assert (made.config.max_ctas, made.config.cga_cluster_size, made.config.net_name) == (8, 0, "Socket")
    assert not hasattr(made.config, "min_ctas")
    assert _nccl_options(CommunicatorOptions(), "nccl", None)._timeout == timedelta(minutes=10)
    assert _nccl_options(options, "gloo", None) is None


def test_sharp_is_chosen_where_the_binding_knows_it(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    made = _nccl_options(CommunicatorOptions(use_sharp=True, max_ctas=4), "nccl", None)
    assert made.config.max_ctas == 4 and "NCCL_COLLNET_ENABLE=1" in caplog.text
    caplog.clear()
    monkeypatch.setattr(Nccl, "Config", type("Config", (), {}))
    assert _nccl_options(CommunicatorOptions(use_sharp=True), "nccl", None).config.collnet_enable == 1
    assert not vars(_nccl_options(CommunicatorOptions(), "nccl", None).config) and not caplog.text


def check_sharp() -> None:
    """Where there is no such network all sums are as ever."""
    for plan, name in ((ParallelPlan(dp=4), None), (ParallelPlan(dp=4), "dp"), (ParallelPlan(dp=4, optimizer_instances=2), "dp_replica")):
        groups = ProcessGroups.build(plan, use_sharp=True, sharp_enabled_group=name)
        x = torch.full((3,), float(dist.get_rank()))
        dist.all_reduce(x, group=groups.dp_cp.pg)
        assert x.tolist() == [6.0] * 3
        groups.close()


@pytest.mark.world(4)
def test_groups_with_sharp_add_without_it_too(world) -> None:
    world(check_sharp)


def test_the_group_with_sharp_is_made_first(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, bool]] = []

    def pick(self: Any, name: str, enumeration: Any) -> Group:
        options = self._options.get(name)
        made.append((name, options is not None and options.use_sharp))
        return Group.single()

    monkeypatch.setattr("mcore_parallel.groups._groups._Maker.pick", pick)
    ProcessGroups.build(ParallelPlan(), use_sharp=True, options={"dp_cp": CommunicatorOptions(max_ctas=2), "cp": CommunicatorOptions()})
    assert made[0] == ("dp_cp", True) and made[1][0] == "cp" and not any(sharp for _, sharp in made[1:])


def test_groups_that_cannot_have_sharp_are_named() -> None:
    for options, match in (
        ({"sharp_enabled_group": "dp"}, "sharp_enabled_group='dp' needs use_sharp=True"),
        ({"use_sharp": True, "sharp_enabled_group": "tp"}, "sharp_enabled_group='tp' must be one of 'dp', 'dp_replica'"),
        ({"use_sharp": True, "sharp_enabled_group": "dp_replica"}, "needs optimizer_instances above 1"),
    ):
        with pytest.raises(ValueError, match=match):
            ProcessGroups.build(ParallelPlan(), **options)


def test_the_allocator_of_registered_memory_has_a_name() -> None:
    assert ("TORCH" if dist.is_nccl_available() else None) == NCCL_ALLOCATOR
    memory = RegisteredMemory(Group.single(), torch.device("cpu"))
    assert memory.allocator is None and not memory.active


def check_gloo_ignores_options() -> None:
    group = connect((0, 1), dist.get_rank(), options=CommunicatorOptions(max_ctas=1), name="a name", timeout_s=30.0)
    assert group.pg is not None and group.pg.group_desc == "a name" and group.timeout_s == 30.0
    assert group == Group((0, 1), dist.get_rank(), name=group.name)
    assert connect((1,), dist.get_rank()).pg is None


@pytest.mark.world(2)
def test_other_backends_take_no_options(world) -> None:
    world(check_gloo_ignores_options)


def gather(group: Group) -> torch.Tensor:
    return all_gather(torch.tensor([dist.get_rank()]), group)


def check_members_connect_again() -> list[str]:
    rank, names = dist.get_rank(), []

    def again(late: int) -> Group:
        """Who comes first must not find the addresses of a group before."""
        dist.barrier()
        if rank == late:
            time.sleep(0.2)
        group = connect((0, 1), rank, backend="gloo", timeout_s=20.0, name="again", local=True)
        assert dist.get_process_group_ranks(group.pg) == [0, 1] and group.rank == rank and group.pg.group_desc == "again"
        assert gather(group).tolist() == [0, 1]
        names.append(group.name)
        return group

    for late in (0, 1):
        dist.destroy_process_group(again(late).pg)
    first, second = again(0), again(0)
    dist.destroy_process_group(first.pg)
    third = again(1)
    assert gather(second).tolist() == [0, 1]
    if rank == 0:
        # Only this rank is in one more group.
        dist.new_group([0], use_local_synchronization=True)
    dist.destroy_process_group(second.pg)
    again(0)
    assert gather(third).tolist() == [0, 1]
    return names


@pytest.mark.journey
@pytest.mark.world(2)
def test_members_connect_again_under_new_names_whatever_other_groups_they_are_in(world) -> None:
    one, two = world(check_members_connect_again)
    assert one == two and len(set(one)) == len(one) == 6


def test_nccl_is_found_among_several_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    for config, expected in (("cuda:nccl", True), ("cpu:gloo,cuda:nccl", True), ("cpu:gloo", False)):
        monkeypatch.setattr(dist, "get_backend_config", lambda group=None, config=config: config)
        assert uses_nccl(None) is expected

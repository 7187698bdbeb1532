# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The pre-flight: differing fields and absent ranks are named on every rank."""

import dataclasses
import functools
import json
import threading
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_parallel.guard import ConfigMismatchError, MissingRanksError, config_fields, preflight


@dataclass(frozen=True, kw_only=True)
class Size:
    hidden: int = 64
    activation: object = torch.nn.functional.silu


@dataclass(frozen=True, kw_only=True)
class Run:
    size: Size = field(default_factory=Size)
    lr: float = 0.1
    output: str = "runs"
    stages: tuple[Size, ...] = ()


def together(worlds: list[Any], store: dist.Store, **options: Any) -> list[Any]:
    """Outcome of each rank (hash or error), each in a thread; None stands for a rank that does not come."""
    results: list[Any] = [None] * len(worlds)

    def come(rank: int) -> None:
        try:
            results[rank] = preflight({"run": worlds[rank]}, store, rank=rank, world_size=len(worlds), **options)
        except (ValueError, TimeoutError) as error:
            results[rank] = error

    ranks = [threading.Thread(target=come, args=(rank,)) for rank, config in enumerate(worlds) if config is not None]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(60)
    return results


def check_difference(odd: int) -> str:
    rank = dist.get_rank()
    config = Run(size=Size(hidden=128), lr=0.2) if rank == odd else Run()
    store = dist.distributed_c10d._get_default_store()
    with pytest.raises(ConfigMismatchError) as caught:
        preflight({"run": config}, store, rank=rank, world_size=dist.get_world_size(), timeout_s=30)
    return str(caught.value)


@pytest.mark.world(4)
@pytest.mark.parametrize("odd", [0, 3])
def test_every_rank_hears_which_fields_differ_and_who_holds_what(world, odd: int) -> None:
    messages = world(check_difference, odd=odd)
    assert len(set(messages)) == 1
    rest = {0: "ranks 1-3", 3: "ranks 0-2"}[odd]
    lines = messages[0].splitlines()
    assert {part.strip() for line in lines if "run.size.hidden" in line for part in line.split(": ")[1].split(", ")} == {
        f"64 on {rest}",
        f"128 on rank {odd}",
    }
    assert any("run.lr" in line and f"0.2 on rank {odd}" in line for line in lines)
    assert len(lines) == 3


def check_absence(absent: int) -> str:
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    if rank == absent:
        # Stays alive, as a rank that is stuck before the pre-flight does, until the others have given up.
        store.wait(["gave up 1", "gave up 2"], timedelta(seconds=30))
        return ""
    with pytest.raises(MissingRanksError) as caught:
        preflight({"run": Run()}, store, rank=rank, world_size=dist.get_world_size(), timeout_s=2)
    store.set(f"gave up {store.add('given up', 1)}", "")
    return str(caught.value)


@pytest.mark.journey
@pytest.mark.world(3)
@pytest.mark.parametrize("absent", [0, 2])
def test_a_rank_that_does_not_come_is_named_within_the_time_out(world, absent: int) -> None:
    messages = world(check_absence, absent=absent)
    for rank, message in enumerate(messages):
        if rank != absent:
            assert f"rank {absent} did not arrive within 2 s" in message


def test_equal_configurations_agree_on_one_hash() -> None:
    first, second = (together([Run()] * 3, dist.HashStore(), timeout_s=30) for _ in range(2))
    assert len(set(first + second)) == 1 and len(first[0]) == 64


def test_excluded_fields_may_differ() -> None:
    results = together([Run(output="a"), Run(output="b")], dist.HashStore(), timeout_s=30, exclude=["run.output"])
    assert results[0] == results[1]
    with pytest.raises(ValueError, match=r"exclude='run\.outptu' names no field"):
        preflight({"run": Run()}, dist.HashStore(), rank=0, world_size=1, exclude=["run.outptu"])


def test_a_late_rank_hears_the_same_verdict() -> None:
    store = dist.HashStore()
    early = together([Run(), None], store, timeout_s=1)
    with pytest.raises(MissingRanksError, match="rank 1 did not arrive within 1 s"):
        preflight({"run": Run()}, store, rank=1, world_size=2, timeout_s=1)
    assert early[0].ranks == (1,)


def test_three_variants_and_a_field_that_only_some_have() -> None:
    results = together([{"a": 1, "b": 1}, {"a": 2, "b": 1}, {"a": 3}, {"a": 2, "b": 1}], dist.HashStore(), timeout_s=30)
    expected = {"run.a": {"1": [0], "2": [1, 3], "3": [2]}, "run.b": {"1": [0, 1, 3], "absent": [2]}}
    assert [error.differences for error in results] == [expected] * 4


def test_versions_are_fields() -> None:
    store = dist.HashStore()
    room = dist.PrefixStore("mcore/preflight", store)
    thread = threading.Thread(target=together, args=([Run(), None], store), kwargs={"timeout_s": 30})
    thread.start()
    # The other rank runs an older torch.
    room.set("hash/1", "other")
    room.wait(["fields/0"], timedelta(seconds=30))
    fields = json.loads(room.get("fields/0"))
    room.set("fields/1", json.dumps(fields | {"versions.torch": "2.0"}))
    room.wait(["verdict"], timedelta(seconds=30))
    thread.join(30)
    verdict = json.loads(room.get("verdict"))
    assert verdict["differences"] == {"versions.torch": {torch.__version__: [0], "2.0": [1]}}
    assert {"versions.python", "versions.mcore-parallel"} <= set(fields)


def test_many_ranks_cost_one_small_entry_each() -> None:
    store = dist.HashStore()
    results = together([Run()] * 64, store, timeout_s=30)
    assert len(set(results)) == 1
    # A hash a rank, what the first rank asks for, and its verdict.
    assert store.num_keys() == 64 + 2


def test_fields_are_dotted_and_free_of_addresses() -> None:
    config = Run(stages=(Size(), Size(hidden=1, activation=functools.partial(torch.nn.functional.gelu, approximate="tanh"))))
    fields = config_fields({"run": config, "dtype": torch.bfloat16, "thing": object(), "none": {}})
    assert fields["run"] == "Run" and fields["run.size.hidden"] == "64" and fields["run.stages.1.hidden"] == "1"
    assert fields["run.size.activation"] == "torch.nn.functional.silu"
    assert "tanh" in fields["run.stages.1.activation"] and "0x" not in fields["run.stages.1.activation"]
    assert fields["thing"] == "<object object>" and fields["dtype"] == "torch.bfloat16" and fields["none"] == "empty"


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.text("ab", min_size=1, max_size=3), st.integers() | st.text(max_size=3) | st.sets(st.text(max_size=3))))
def test_the_order_of_a_mapping_does_not_count(values: dict[str, Any]) -> None:
    turned = dict(reversed(values.items()))
    assert config_fields({"c": values}) == config_fields({"c": turned})


def test_any_changed_field_changes_the_fields() -> None:
    base = config_fields({"run": Run()})
    for change in ({"lr": 0.2}, {"output": "x"}, {"size": Size(hidden=65)}, {"stages": (Size(),)}):
        assert config_fields({"run": dataclasses.replace(Run(), **change)}) != base

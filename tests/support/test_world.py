# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The harness of worlds: what it says of ranks that fail, die or crash."""

import os
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support import world
from tests.support.world import World, run


def add_up() -> float:
    x = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(x)
    return x.item()


def fail_on_one() -> None:
    assert dist.get_rank() != 1, "no luck"


def leave() -> None:
    os._exit(3)


def test_results_come_in_rank_order_and_failures_with_their_rank() -> None:
    assert run(add_up, 3) == [3.0] * 3
    with pytest.raises(AssertionError, match="rank 1:(.|\n)*no luck"):
        run(fail_on_one, 2)


def test_a_rank_that_leaves_is_a_failure_with_its_exit_code() -> None:
    with pytest.raises(AssertionError, match="died without a word, exit code 3"):
        run(leave, 2)


def finish_early() -> None:
    """Rank 0 is done at once, the others one after the other."""
    time.sleep(0.5 * dist.get_rank())


def test_ranks_that_are_done_stay_until_all_are(monkeypatch: pytest.MonkeyPatch) -> None:
    left = []
    collect = world._collect

    def watched(pending: Any, ranks: list[Any], *rest: Any) -> list[Any]:
        results = collect(pending, ranks, *rest)
        left.extend(process.exitcode for process in ranks)
        return results

    monkeypatch.setattr(world, "_collect", watched)
    run(finish_early, 3)
    assert left == [None] * 3


def has_the_wheels() -> bool:
    return "mcore_rl" in sys.modules


@pytest.mark.world(1)
def test_ranks_come_with_the_wheels_loaded_whoever_else_starts_ranks(world: Any) -> None:
    import_module("mcore_tools.launch")
    assert world(has_the_wheels) == [True]


def draw() -> tuple[int, float, float]:
    x = torch.randn(())
    dist.all_reduce(x)
    return os.getpid(), x.item(), torch.rand(()).item()


def hold_back() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)


def test_checks_of_one_world_draw_as_in_their_own_and_end_with_it() -> None:
    [(_, *alone), _] = run(draw, 2)
    several = World(2)
    try:
        [(one, *first), (other, *_)], [(again, *second), _] = several.run(draw), several.run(draw)
        assert one == again != other and first == second == alone
        with pytest.raises(AssertionError, match="rank 1:(.|\n)*no luck"):
            several.run(fail_on_one)
    finally:
        several.close()
    assert not Path(f"/proc/{one}").exists() and not Path(f"/proc/{other}").exists()


def test_a_rank_of_a_shared_world_that_gives_no_answer_is_named() -> None:
    several = World(2)
    try:
        with pytest.raises(TimeoutError, match=r"ranks \[1\] gave no answer"):
            several.run(hold_back, timeout_s=0.5)
    finally:
        several.close()


@pytest.mark.world(2, shared=True)
@pytest.mark.parametrize("number", range(3))
def test_cases_of_a_test_share_a_world_where_it_says_so(world: Any, number: int, seen: list[int]) -> None:
    seen += [pid for pid, *_ in world(draw)]
    assert len(set(seen)) == 2


@pytest.fixture(scope="module")
def seen() -> list[int]:
    return []

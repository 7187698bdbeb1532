# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Named streams of random numbers."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from mcore_parallel import ParallelPlan, ProcessGroups, RandomStreams
from mcore_parallel._rng import derive_seed

CPU = torch.device("cpu")


def streams(**seeds: int) -> RandomStreams:
    found = RandomStreams(CPU)
    for name, seed in seeds.items():
        found.add(name, seed)
    return found


def drawn(which: RandomStreams, name: str) -> Tensor:
    with which.fork(name):
        return torch.rand(3)


def test_streams_are_independent_of_each_other_and_of_the_default_one() -> None:
    which = streams(a=1, b=2)
    torch.manual_seed(9)
    outer = torch.rand(2)
    torch.manual_seed(9)
    first = drawn(which, "a")
    drawn(which, "b")
    assert torch.equal(torch.rand(2), outer)
    second = drawn(which, "a")
    torch.manual_seed(1)
    assert torch.equal(torch.cat([first, second]), torch.cat([torch.rand(3), torch.rand(3)]))


def test_forks_nest_and_survive_an_error() -> None:
    which, plain = streams(a=1, b=2), streams(a=1, b=2)
    with which.fork("a"):
        head = torch.rand(1)
        inner = drawn(which, "b")
        tail = torch.rand(1)
        with pytest.raises(KeyError, match=r"no free stream 'a'; free: \['b'\]"), which.fork("a"):
            pass
    with plain.fork("a"):
        assert torch.equal(torch.cat([head, tail]), torch.cat([torch.rand(1), torch.rand(1)]))
    assert torch.equal(inner, drawn(plain, "b"))
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), which.fork("a"):
        torch.rand(1)
        _ = 1 / 0
    assert torch.equal(torch.get_rng_state(), before) and which.names == ("a", "b")


def test_positions_are_saved_and_restored() -> None:
    which = streams(a=1, b=2)
    drawn(which, "a")
    saved = which.state()
    later = [drawn(which, name) for name in "aab"]
    for other in (which, streams(a=5, b=6)):
        other.load_state(saved)
        assert all(torch.equal(drawn(other, name), value) for name, value in zip("aab", later, strict=True))
    with pytest.raises(ValueError, match=r"positions of \['a', 'b'\] do not fit the streams \['c'\]"):
        streams(c=1).load_state(saved)


def test_a_taken_name_or_seed_is_refused() -> None:
    with pytest.raises(ValueError, match="stream 'a' exists already"):
        streams(a=1).add("a", 2)
    with pytest.raises(ValueError, match="seed=1 of stream 'b' is that of 'a'"):
        streams(a=1, b=1)


def test_a_repeated_pass_draws_the_same_numbers() -> None:
    def layer(which: RandomStreams, x: Tensor, masks: list[Tensor]) -> Tensor:
        with which.fork("a"):
            y = F.dropout(x, 0.5)
        with which.fork("b"):
            y = F.dropout(y, 0.5)
        masks.append(y.detach() != 0)
        return y.sin().sum()

    found = []
    for repeat in (False, True):
        which, masks = streams(a=1, b=2), []
        xs = [torch.randn(64, generator=torch.Generator().manual_seed(i), requires_grad=True) for i in range(2)]
        for x in xs:
            y = checkpoint(layer, which, x, masks, use_reentrant=False, context_fn=which.repeatable) if repeat else layer(which, x, masks)
            y.backward() if x is xs[0] else None
        if repeat:
            y.backward()  # the second layer's pass is repeated after all others ran
            assert torch.equal(masks[0], masks[1]) and torch.equal(masks[2], masks[3]) and not torch.equal(masks[0], masks[2])
        else:
            y.backward()
        found.append([x.grad for x in xs] + [drawn(which, "a")])
    assert all(torch.equal(plain, repeated) for plain, repeated in zip(*found, strict=True))


def test_streams_differ_over_model_ranks_and_agree_over_replicas() -> None:
    plan = ParallelPlan(tp=2, cp=2, dp=2, pp=2, ep=2, etp=2)
    for differ in (False, True):
        found: dict[int, tuple[ProcessGroups, dict[str, Tensor]]] = {}
        for rank in range(plan.world_size):
            dist.init_process_group("fake", rank=rank, world_size=plan.world_size, store=FakeStore())
            groups = ProcessGroups.build(plan)
            dist.destroy_process_group()
            which = RandomStreams.for_groups(3, groups, CPU, replicas_differ=differ)
            found[rank] = groups, {name: drawn(which, name) for name in which.names}
        for (one, ours), (two, theirs) in itertools.combinations(found.values(), 2):
            place = one.pp.rank == two.pp.rank and (not differ or one.dp.rank == two.dp.rank)
            assert torch.equal(ours["data-parallel"], theirs["data-parallel"]) == place
            same = place and one.tp.rank == two.tp.rank
            assert torch.equal(ours["model-parallel"], theirs["model-parallel"]) == same
            same = place and one.ep.rank == two.ep.rank and one.expt_tp.rank == two.expt_tp.rank
            assert torch.equal(ours["expert-parallel"], theirs["expert-parallel"]) == same


def test_seeds_of_large_worlds_do_not_meet() -> None:
    # Sums of ranks would: 2718 + tp = 1024 + 100 * ep + etp at tp 0, ep 16, etp 94.
    seeds = {derive_seed(1, "model-parallel", pp, 0, tp) for pp in range(64) for tp in range(128)}
    seeds |= {derive_seed(1, "expert-parallel", pp, 0, ep, etp) for pp in range(16) for ep in range(64) for etp in range(96)}
    assert len(seeds) == 64 * 128 + 16 * 64 * 96
    assert max(seeds) > 2**63
    assert derive_seed(1, "a", 0) == 0xC8B6AB1EF8E6E82  # a run continues with the numbers it began with

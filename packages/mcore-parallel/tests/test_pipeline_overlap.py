# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Pairs of a forward and a backward whose all-to-alls cross, on real ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mcore_parallel import Group
from mcore_parallel.comm import all_to_all_autograd
from mcore_parallel.pipeline import Overlap, combined_one_f_one_b, one_f_one_b, plan_pipeline, run_schedule

WIDTH, LAYERS, MICROBATCHES = 4, 3, 4


def check_exchanging_layers() -> None:
    """Each layer sends half of its rows to the other rank and gets them back, as experts do."""
    world = Group.of(dist.group.WORLD)
    grads = []
    for schedule, overlap in ((one_f_one_b, None), (combined_one_f_one_b, Overlap())):
        generator = torch.Generator().manual_seed(world.rank)
        weights = [nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64)) for _ in range(LAYERS)]
        order: list[str] = []

        def pause(name: str, overlap: Overlap | None = overlap, order: list[str] = order) -> None:
            order.append(name)
            if overlap is not None:
                overlap.pause()

        def forward(microbatch: int, hidden: Tensor | None, weights=weights, pause=pause) -> tuple[Tensor, None]:
            generator = torch.Generator().manual_seed(10 * microbatch + world.rank)
            x = torch.randn(6, WIDTH, generator=generator, dtype=torch.float64)
            for weight in weights:
                there = all_to_all_autograd(x, [2, 4] if world.rank == 0 else [4, 2], [2, 4] if world.rank == 0 else [4, 2], world,
                                            lambda: pause(str(microbatch)))  # fmt: skip
                x = torch.tanh(there @ weight)
            return x.square().sum(), None

        run_schedule(plan_pipeline(schedule, 1, MICROBATCHES), forward, Group.single(dist.get_rank()), overlap=overlap)
        grads.append([weight.grad for weight in weights])
        if overlap is not None:
            # The first input has no gradient, so its all-to-all is not run backwards.
            pairs = [str(ahead) + "0123"[ahead - 1] for ahead in range(1, MICROBATCHES)]
            turns = "".join(name * (LAYERS - 1) + name[0] for name in pairs)
            assert "".join(order) == "0" * LAYERS + turns + "3" * (LAYERS - 1)
    for serial, paired in zip(*grads, strict=True):
        torch.testing.assert_close(paired, serial, rtol=1e-12, atol=1e-14)


@pytest.mark.world(2)
def test_all_to_alls_of_a_pair_cross_in_one_order_on_all_ranks(world) -> None:
    world(check_exchanging_layers)

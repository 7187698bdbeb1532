# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The peer's attention to split sequences computes what one rank computes."""

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from tests.support.world import run
from tools.bench._sequences import whole_sequences
from tools.bench.fsdp import FsdpRun


def check_whole_sequences() -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    attend, share = whole_sequences(mesh)
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(2, heads, 8, 4, dtype=torch.float64, generator=generator) for heads in (4, 2, 2, 4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    exact = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    wanted = [exact, *torch.autograd.grad(exact, leaves, grad)]
    with share(q.detach(), k.detach(), v.detach(), grad, dims=(2, 2, 2, 2)) as (*parts, own):
        parts = [x.requires_grad_() for x in parts]
        out = attend(*parts)
        ours_and_gradients = [out, *torch.autograd.grad(out, parts, own)]
    for ours, theirs in zip(ours_and_gradients, wanted, strict=True):
        torch.testing.assert_close(ours, theirs.chunk(2, 2)[dist.get_rank()], rtol=1e-10, atol=1e-12)


@pytest.mark.world(2)
def test_all_to_all_of_the_peer_equals_one_rank() -> None:
    run(check_whole_sequences, 2)


@pytest.mark.parametrize(
    ("text", "reason"), [("moe-tiny:ours", "experts"), ("tiny:ours,cp2,heads", "splits sequences"), ("tiny:trunk,cp2", "heads or ring")]
)
def test_runs_that_there_are_not_are_refused(text: str, reason: str) -> None:
    with pytest.raises(SystemExit, match=reason):
        FsdpRun.parse(text)


def test_a_run_knows_its_ranks_and_its_shape() -> None:
    parsed = FsdpRun.parse("moe-tiny:trunk,dp2,cp2,ep2,ring,seq128,l3")
    assert (parsed.ranks, parsed.shape.seq_len, parsed.shape.num_layers, parsed.config().ffn_hidden_size) == (4, 128, 3, 64)

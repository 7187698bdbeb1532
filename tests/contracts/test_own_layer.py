# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The feed-forward layer of the guide "Add a layer": two tensor-parallel ranks compute what one does, and load its checkpoint."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mcore_ckpt import load, save
from mcore_parallel import ParallelPlan, ProcessGroups, named_shards
from mcore_parallel.models import GPTModel, Site, TransformerConfig
from mcore_parallel.nn import Step
from mcore_parallel.training import model_state
from tools.checks.codeblocks import blocks, script

PAGE = Path(__file__).parents[2] / "docs" / "add-a-layer.md"
CONFIG = TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=4, ffn_hidden_size=32, vocab_size=64, init_method_std=0.3)
STEP = Step.causal(1, 8)


def layer() -> Callable[[Site], nn.Module]:
    """The class of the page's first block."""
    names: dict[str, type[nn.Module]] = {}
    exec(script(blocks(PAGE.read_text(encoding="utf-8"))[:1]), names)
    return names["GainedFeedForward"]


def computed(groups: ProcessGroups, folder: Path, *, first: bool) -> dict[str, Tensor]:
    """The loss, and this rank's parts of the gradients, of the model in ``folder``; ``first`` writes it."""
    model = GPTModel(CONFIG, groups, feed_forward=layer(), dtype=torch.float64, seed=3 if first else None)
    if first:
        for shard in named_shards(model):
            if shard.name.endswith("gain"):
                torch.nn.init.uniform_(shard.parameter, generator=torch.Generator().manual_seed(1))
        save(model_state(model, groups), folder)
    else:
        load(model_state(model, groups), folder)
    output, _ = model(torch.arange(8), STEP)
    loss = output.loss_sum(torch.arange(1, 9), torch.ones(8, dtype=torch.float64))
    loss.backward()
    found = {"loss": loss.detach()}
    for shard in named_shards(model):
        grad = shard.parameter.grad
        assert grad is not None, shard.name
        if "tp" in shard.spec.partial:
            torch.distributed.all_reduce(grad, group=groups.tp.pg)
        found[shard.name] = grad
    return found


def check(folder: Path, whole: dict[str, Tensor], sequence_parallel: bool) -> None:
    groups = ProcessGroups.build(ParallelPlan(tp=2, sequence_parallel=sequence_parallel))
    parts = computed(groups, folder, first=False)
    specs = {shard.name: shard.spec for shard in named_shards(GPTModel(CONFIG, groups, feed_forward=layer()))}
    assert parts["layers.1.mlp.gain"].shape == (16,)
    for name, part in parts.items():
        expected = whole[name] if name == "loss" else whole[name][specs[name].slices(groups)]
        torch.testing.assert_close(part, expected, rtol=1e-10, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.world(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_two_ranks_compute_what_one_does_from_its_checkpoint(world, tmp_path: Path, sequence_parallel: bool) -> None:
    whole = computed(ProcessGroups.single(), tmp_path / "step", first=True)
    world(check, folder=tmp_path / "step", whole=whole, sequence_parallel=sequence_parallel)

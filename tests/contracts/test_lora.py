# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""LoraTarget: stacked experts take adapters from the trunk, beside weights in fp8 too; adapters of a checkpoint merge as in the model."""

from pathlib import Path

import pytest
import torch

from mcore_ckpt import save
from mcore_ckpt.hf import StoredAdapter
from mcore_moe import GroupedMLP, MoEConfig, SequentialMLP, moe_feed_forward
from mcore_parallel import ProcessGroups
from mcore_parallel.models import FeedForwardBuilder, GPTModel, TransformerConfig, dense_feed_forward
from mcore_parallel.tensor_parallel import LoraConfig, LoraTarget, QuantizableLoraTarget, add_lora, is_adapter, merge_lora
from mcore_parallel.training import model_state
from tests.contracts.conformance import mismatches

CONFIG = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2, ffn_hidden_size=12, vocab_size=16)
ONE = ProcessGroups.single()
FEED_FORWARDS: dict[str, tuple[FeedForwardBuilder, tuple[str, ...]]] = {
    "dense": (dense_feed_forward, ("qkv", "out", "up", "down")),
    "experts": (moe_feed_forward(MoEConfig(num_moe_experts=4, moe_router_topk=2)), ("qkv", "out", "experts")),
}


@pytest.mark.parametrize("kind", [GroupedMLP, SequentialMLP])
def test_stacked_experts_are_targets(kind: type[GroupedMLP | SequentialMLP]) -> None:
    experts = kind(4, 8, 12, ONE)
    for protocol in (LoraTarget, QuantizableLoraTarget):
        assert isinstance(experts, protocol) and mismatches(experts, protocol) == []


@pytest.mark.parametrize("name", FEED_FORWARDS)
def test_a_checkpoint_of_adapters_merges_as_the_model_does(tmp_path: Path, name: str) -> None:
    feed_forward, targets = FEED_FORWARDS[name]
    model = GPTModel(CONFIG, ONE, feed_forward=feed_forward)
    save(model_state(model, ONE), tmp_path / "base")
    lora = LoraConfig(rank=2, alpha=6.0, targets=targets)
    names = add_lora(model, lora, ONE)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter)
    adapters = {key: value for key, value in model_state(model, ONE).items() if is_adapter(key)}
    assert len(adapters) == (2 * len(names) if name == "dense" else 2 * len(names) + 2 * CONFIG.num_layers)
    save(adapters, tmp_path / "step", extra={"lora": {"rank": 2, "alpha": 6.0}, "lora_base": str(tmp_path / "base")})
    stored = StoredAdapter.of(tmp_path / "step")
    assert stored is not None
    merged = dict(stored.merged())
    merge_lora(model)
    expected = model.state_dict()
    assert merged.keys() == expected.keys()
    for key in expected:
        torch.testing.assert_close(merged[key], expected[key], rtol=1e-5, atol=1e-6)

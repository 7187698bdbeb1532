# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Activations inside experts wait in host memory for their backward."""

import pytest
import torch
from torch import Tensor

from mcore_moe import MoEConfig, moe_feed_forward
from mcore_parallel import ProcessGroups
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.nn import OffloadConfig, RecomputeConfig, Step
from tests.support.held_memory import held_and_results

CONFIG = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2, vocab_size=16, ffn_hidden_size=12)
EXPERTS = moe_feed_forward(MoEConfig(num_moe_experts=4, moe_router_topk=2))
TOKENS, TOPK, BYTES = 8, 2, 8


def trained(modules: tuple[str, ...], *, fraction: float = 1.0) -> tuple[list[Tensor], int]:
    """Loss and gradients of a step, and the bytes that lay on the host before the backward."""
    offload = (
        OffloadConfig(modules=modules, fraction=fraction, keep_last_layers=0, min_offloaded_tensor_size=1, on_cpu=True) if modules else None
    )
    model = GPTModel(CONFIG, ProcessGroups.single(), feed_forward=EXPERTS, offload=offload, dtype=torch.float64)
    output, _ = model(torch.arange(TOKENS), Step.causal(2, 4))
    loss = output.logits().logsumexp(-1).sum()
    out = 0 if model.memory.offloader is None else model.memory.offloader.bytes_out
    loss.backward()
    assert model.memory.offloader is None or model.memory.offloader.bytes_out == 0
    return [loss.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)], out


ROWS = CONFIG.num_layers * TOKENS * TOPK * BYTES
# With the rows go where those of each expert end, with the activation's input the rows' weights.
INPUT, ACTIVATION = ROWS * CONFIG.hidden_size + CONFIG.num_layers * 4 * 4, ROWS * (2 * CONFIG.ffn_size + 1)


@pytest.mark.parametrize(
    ("modules", "fraction", "expected"),
    [
        (("expert_fc1",), 1.0, INPUT),
        (("moe_act",), 1.0, ACTIVATION),
        (("moe_act",), 0.5, ACTIVATION // 2),
        (("expert_fc1", "moe_act"), 1.0, INPUT + ACTIVATION),
    ],
)
def test_the_bits_stay_and_the_bytes_go(modules: tuple[str, ...], fraction: float, expected: int) -> None:
    wanted, _ = trained(())
    offloaded, out = trained(modules, fraction=fraction)
    assert out == expected
    assert len(offloaded) == len(wanted) and all(torch.equal(a, b) for a, b in zip(offloaded, wanted, strict=True))


def test_parts_of_experts_that_cannot_be_offloaded_are_named() -> None:
    groups, offload = ProcessGroups.single(), OffloadConfig(modules=("moe_act",))
    with pytest.raises(ValueError, match=r"offload.modules holds \['moe_act'\], which lie inside experts; this model has none, name 'mlp'"):
        GPTModel(CONFIG, groups, offload=offload)
    with pytest.raises(ValueError, match=r"\['moe_act'\] is recomputed and offloaded"):
        GPTModel(CONFIG, groups, feed_forward=EXPERTS, offload=offload, recompute=RecomputeConfig(modules=("mlp",)))
    with pytest.raises(ValueError, match=r"modules holds 'mlp' and \['expert_fc1'\] inside it; drop one"):
        OffloadConfig(modules=("mlp", "expert_fc1"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_experts_on_a_gpu_keep_their_bits_and_free_its_memory() -> None:
    config = TransformerConfig(num_layers=3, hidden_size=256, num_attention_heads=4, vocab_size=128, ffn_hidden_size=512)
    results: list[list[Tensor]] = []
    held: list[int] = []
    for offload in (None, OffloadConfig(modules=("expert_fc1", "moe_act"), keep_last_layers=0, max_inflight=0)):
        model = GPTModel(config, ProcessGroups.single(), feed_forward=EXPERTS, offload=offload, dtype=torch.bfloat16, device="cuda")
        size, values = held_and_results(model)
        held.append(size)
        results.append(values)
        del model
    # The inputs of the activations of three layers: 2 picks of 2048 tokens, gate and value of width 512, two bytes each.
    assert held[0] - held[1] >= 3 * 2 * 2048 * 1024 * 2
    assert torch.equal(results[0][0], results[1][0])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)

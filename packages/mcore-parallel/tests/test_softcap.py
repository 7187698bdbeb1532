# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Soft caps of scores and logits: models that cannot have them refuse by name."""

import dataclasses
from typing import Any

import pytest
import torch

from mcore_parallel import ProcessGroups
from mcore_parallel.backends import TorchBackend
from mcore_parallel.models import BertModel, GPTModel, OutputLayer, T5Model, TransformerConfig
from mcore_parallel.models.eagle import EagleConfig, EagleHead
from mcore_parallel.nn import ContextParallelBuilder, LatentAttentionConfig, Step, causal_attention, soft_cap

ONE = ProcessGroups.single()
CONFIG = TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=4, vocab_size=32)
SCORES = dataclasses.replace(CONFIG, attn_logit_softcapping=5.0)
LOGITS = dataclasses.replace(CONFIG, final_logit_softcapping=3.0)
LATENT = LatentAttentionConfig(kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4)


def test_a_cap_bounds_and_leaves_small_numbers() -> None:
    x = torch.tensor([-1e6, -1e-3, 0.0, 2.0], dtype=torch.float64, requires_grad=True)
    capped = soft_cap(x, 30.0)
    capped.sum().backward()
    values = capped.detach()
    assert values[0] == -30 and abs(float(values[1]) + 1e-3) < 1e-12 and values[2] == 0
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 1 - (values / 30) ** 2)


def build_head(config: TransformerConfig) -> Any:
    return EagleHead(EagleConfig(transformer=config, aux_modules=("layers.0",)), ONE)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: GPTModel(SCORES, ONE, attention_core=causal_attention), "attn_logit_softcapping=5.0 of the config is nothing"),
        (
            lambda: GPTModel(dataclasses.replace(SCORES, latent_attention=LATENT), ONE),
            "attn_logit_softcapping=5.0 is not there with latent",
        ),
        (lambda: GPTModel(SCORES, ONE, backend=TorchBackend(batch_invariant=True)), "attn_logit_softcapping=5.0"),
        (lambda: GPTModel(SCORES, ONE, attention_core=ContextParallelBuilder()), "attn_logit_softcapping=5.0 is nothing that these cores"),
        (lambda: BertModel(SCORES, ONE), "attn_logit_softcapping=5.0 is not for BertModel"),
        (lambda: BertModel(LOGITS, ONE), "final_logit_softcapping=3.0 is not for BertModel"),
        (lambda: T5Model(SCORES, ONE), "attn_logit_softcapping=5.0 does not go with masks"),
        (lambda: build_head(SCORES), "attn_logit_softcapping=5.0"),
        (lambda: build_head(LOGITS), "final_logit_softcapping=3.0"),
        (lambda: OutputLayer(32, 16, ONE, softcap=3.0, loss=object()), "final_logit_softcapping=3.0 and the backend's own loss, object"),  # type: ignore[arg-type]
    ],
)
def test_what_caps_nothing_refuses_by_name(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_capped_logits_of_a_batch_invariant_model_are_those_of_each_sequence_alone() -> None:
    model = GPTModel(LOGITS, ONE, backend=TorchBackend(batch_invariant=True), dtype=torch.float32)
    tokens = torch.arange(24) % 32
    with torch.no_grad():
        both, alone = model(tokens, Step.causal(2, 12))[0], model(tokens[:12], Step.causal(1, 12))[0]
        assert torch.equal(both.logits()[:12], alone.logits()) and both.logits().abs().max() < 3
        assert torch.equal(both.log_probs(tokens)[:12], alone.log_probs(tokens[:12]))

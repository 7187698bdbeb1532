# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A published model that the engine serves gives the greedy tokens that transformers gives."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_inference import SamplingParams
from mcore_tools.serving import open_engine
from tests.support.published import write_published

pytest.importorskip("transformers")

PROMPTS = [[5, 9, 2, 17], [7], list(range(3, 80, 2)), [250, 11, 250, 11, 250], [31, 300, 4]]
SIZES: dict[str, Any] = {
    "vocab_size": 306, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 24, "max_position_embeddings": 256, "initializer_range": 0.2, "rope_theta": 1e6,
}  # fmt: skip


def write_qwen3(folder: Path, **fields: Any) -> Path:
    """A Qwen3 with random weights, norms included, beside a tokenizer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    write_published(folder)
    torch.manual_seed(1)
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES, **fields))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.3)
    model.save_pretrained(folder)
    return folder


def check_generation(folder: Path, theirs: Any) -> None:
    """Greedy tokens and their log-probabilities, by the engine and by transformers."""
    engine = open_engine(folder, "cpu", max_length=128, cache_gb=0.01)
    # The engine draws no id that the tokenizer lacks, and transformers would.
    assert engine.vocab_size == SIZES["vocab_size"]
    params = SamplingParams(temperature=0, num_tokens_to_generate=24, ignore_eos=True, return_log_probs=True)
    for prompt, record in zip(PROMPTS, engine.generate(PROMPTS, params), strict=True):
        tokens = torch.tensor([prompt])
        made = theirs.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=24)
        assert record.generated_tokens == made[0, len(prompt) :].tolist()
        with torch.no_grad():
            scores = theirs(made).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        values = scores.gather(1, made[0, len(prompt) :, None])[:, 0]
        torch.testing.assert_close(torch.tensor(record.generated_log_probs), values, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fields", [{"tie_word_embeddings": True}, {"tie_word_embeddings": False}], ids=["tied", "untied"])
def test_qwen3_generates_what_transformers_generates(fields: dict[str, Any], tmp_path: Path) -> None:
    from transformers import Qwen3ForCausalLM

    folder = write_qwen3(tmp_path / "qwen3", **fields)
    check_generation(folder, Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())


@pytest.mark.journey
def test_gemma2_generates_what_transformers_generates(tmp_path: Path) -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    write_published(folder := tmp_path / "gemma2")
    torch.manual_seed(2)
    caps = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 6.0, "query_pre_attn_scalar": 16, "sliding_window": 8}
    model = Gemma2ForCausalLM(Gemma2Config(**SIZES, **caps))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 0.0, 0.3)
    model.save_pretrained(folder)
    # Other kernels of theirs cap nothing.
    check_generation(folder, Gemma2ForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval())

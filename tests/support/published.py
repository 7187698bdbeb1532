# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A small model with its tokenizer and chat template, as a Hugging Face folder, and conversations to tune it on."""

import json
from pathlib import Path
from typing import Any

import torch

from mcore_parallel.data import train_bpe

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ANSWERS = {"red": "apple", "yellow": "banana", "green": "lime", "purple": "plum"}


def write_published(folder: Path, *, dtype: torch.dtype = torch.float32, **sizes: Any) -> Path:
    """A Llama with random weights in ``folder``; ``sizes`` are entries of its config.json."""
    from transformers import LlamaConfig, LlamaForCausalLM

    text = " ".join(f"{colour} {fruit} which fruit is?" for colour, fruit in ANSWERS.items())
    tokenizer = train_bpe([text * 20], 320, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    torch.manual_seed(0)
    config = {
        "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "initializer_range": 0.05,
        "bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eod, "pad_token_id": tokenizer.pad,
    }  # fmt: skip
    LlamaForCausalLM(LlamaConfig(**{**config, **sizes})).to(dtype).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.eod, "temperature": 0.6, "do_sample": True}))
    return folder


def write_chat(path: Path, num_conversations: int = 48) -> Path:
    """Questions with their answers, again and again, as JSON lines."""
    pairs = list(ANSWERS.items())
    with path.open("w", encoding="utf-8") as file:
        for number in range(num_conversations):
            colour, fruit = pairs[number % len(pairs)]
            turns = [{"role": "user", "content": f"which fruit is {colour}?"}, {"role": "assistant", "content": fruit}]
            file.write(json.dumps({"messages": turns}) + "\n")
    return path

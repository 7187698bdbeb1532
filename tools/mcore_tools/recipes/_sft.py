# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Supervised fine-tuning: which conversations are learnt, and how they are written."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class SFTConfig:
    """Conversations, of which the assistant's turns are learnt.

    Raises:
        ValueError: no data, or a number out of its range.
    """

    data: tuple[str, ...]
    """JSON lines or Parquet files, or folders of them; a line has ``messages`` or ``conversations``, and maybe ``tools``."""
    eval_data: tuple[str, ...] = ()
    """Conversations of the evaluation; empty for a share of ``data``, which is not trained on."""
    eval_share: float = 0.05
    """That share; at least one conversation."""
    epochs: float = 1.0
    """Times that the conversations are seen, where ``train.steps`` is not set."""
    template: str = ""
    """File with the chat template, or ``chatml`` or ``plain`` for a base model; empty for the tokenizer's own."""
    export: Literal["merged", "adapter"] = "merged"
    """With ``lora``: the whole model with the adapters added, in ``OUTPUT/hf``, or they alone in PEFT's format, in ``OUTPUT/adapter``."""

    def __post_init__(self) -> None:
        if not self.data:
            raise ValueError("sft.data is empty; name files of conversations with --data FILE")
        if not self.epochs > 0:
            raise ValueError(f"sft.epochs={self.epochs} must be above 0")
        if not 0 < self.eval_share < 1:
            raise ValueError(f"sft.eval_share={self.eval_share} must lie between 0 and 1, such as 0.05")

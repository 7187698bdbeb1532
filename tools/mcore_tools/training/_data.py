# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The corpus of a run: that there is one, its tokenizer, and the batches of an evaluation."""

import torch

from mcore_parallel import ProcessGroups
from mcore_parallel.data import HuggingFaceTokenizer
from mcore_parallel.training import Batch
from mcore_tools.assembly import Samples, step_batches
from mcore_tools.recipes import RunConfig


def check_data(config: RunConfig, owner: str = "") -> None:
    """Refuse a run without a corpus; ``owner`` stands before its fields where another config holds it."""
    for name in ("prefix", "tokenizer"):
        if not getattr(config.data, name):
            raise ValueError(f"{owner}data.{name} is empty; make the corpus with mcore-preprocess and pass --set {owner}data.{name}=PATH")


def open_tokenizer(path: str, vocab_size: int, owner: str = "") -> HuggingFaceTokenizer:
    """A tokenizer for whose tokens a model of ``vocab_size`` has room; ``owner`` stands before its field where another config holds it."""
    tokenizer = HuggingFaceTokenizer(path)
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"{owner}model.vocab_size={vocab_size} is smaller than the {tokenizer.vocab_size} tokens of {path}; "
            f"set {owner}model.vocab_size={tokenizer.vocab_size} or more"
        )
    return tokenizer


def validation_batches(config: RunConfig, dataset: Samples, groups: ProcessGroups, device: torch.device) -> list[Batch]:
    """The micro-batches of one evaluation."""
    stream = step_batches(config, dataset, groups, device)
    return [batch for _, step in zip(range(config.train.eval_batches), stream, strict=False) for batch in step]

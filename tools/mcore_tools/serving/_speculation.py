# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Who proposes tokens to an engine, by the words of a command line."""

import json
from pathlib import Path
from typing import Any

import torch

from mcore_inference import EagleSpeculation, ExecutionConfig, MtpSpeculation, NgramSpeculation, PagedAttention
from mcore_parallel import ProcessGroups
from mcore_parallel.models.eagle import EagleHead, load_published, published_architecture, published_vocabulary, read_published
from mcore_tools.assembly import DTYPES
from mcore_tools.recipes import RunConfig


def speculating(
    choice: str, num_tokens: int | None, config: RunConfig, groups: ProcessGroups, device: torch.device | str
) -> ExecutionConfig:
    """How an engine runs that verifies several tokens a step.

    Args:
        choice: ``ngram``, ``mtp``, or the folder of a draft head that `mcore eagle export` wrote.
        num_tokens: proposed for each request and step, at most; None for the default.
        config: of the served model.
        groups: over which it is split, and a head with it.
        device: of the engine.

    Raises:
        ValueError: neither of these, or a head of another model.
        OSError: a folder without its files.
    """
    more: dict[str, Any] = {} if num_tokens is None else {"num_tokens": num_tokens}
    if choice == "ngram":
        return ExecutionConfig(speculation=NgramSpeculation(**more))
    if choice == "mtp":
        return ExecutionConfig(speculation=MtpSpeculation(**more))
    if not (Path(choice) / "config.json").is_file():
        raise ValueError(f"--speculation {choice} is neither ngram, mtp, nor the folder of a draft head; `mcore eagle export` writes one")
    head = _open_head(Path(choice), config, groups, device)
    return ExecutionConfig(speculation=EagleSpeculation(head=head, **more))


def _open_head(folder: Path, config: RunConfig, groups: ProcessGroups, device: torch.device | str) -> EagleHead:
    weights = read_published(folder)
    try:
        description = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        architecture = published_architecture(description, weights)
        vocabulary = published_vocabulary(weights, architecture.transformer.vocab_size)
        options: dict[str, Any] = {"dtype": DTYPES[config.train.dtype], "device": device, "seed": None}
        head = EagleHead(architecture, groups, vocabulary=vocabulary, attention_core=PagedAttention(), **options)
        load_published(head, weights)
    except ValueError as error:
        raise ValueError(f"--speculation {folder}: {error}") from error
    return head.eval()

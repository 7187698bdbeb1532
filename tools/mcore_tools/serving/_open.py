# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""An engine with the model of a checkpoint."""

import tempfile
from pathlib import Path

import torch

from mcore_ckpt import CheckpointingException, load
from mcore_ckpt.assets import extract_assets
from mcore_ckpt.inspect import resolve_folder
from mcore_ckpt.manifest import read_manifest
from mcore_inference import DynamicInferenceEngine
from mcore_parallel.training import model_state
from mcore_tools.assembly import open_tokenizer
from mcore_tools.recipes import read_config
from mcore_tools.serving._engine import build_engine

_NEEDED = ("run.yaml", "tokenizer/tokenizer.json")


def open_engine(
    checkpoint: str | Path, device: torch.device | str, *, max_length: int | None = None, cache_gb: float = 1.0
) -> DynamicInferenceEngine:
    """An engine with the model, weights and tokenizer of a checkpoint, all on this process.

    Args:
        checkpoint: a checkpoint, or a folder of steps, whose newest is taken.
        device: where it runs.
        max_length: tokens of a prompt and its continuation; None for the length that the run trained on.
        cache_gb: memory for keys and values, in GB.

    Raises:
        CheckpointingException: no checkpoint, a damaged one, or one without the files that say what it is.
        ValueError: a model that generates nothing, or settings that it refuses.
    """
    folder = resolve_folder(checkpoint)
    missing = [name for name in _NEEDED if name not in read_manifest(folder).assets]
    if missing:
        raise CheckpointingException(
            f"{folder} keeps no {' and no '.join(missing)}; save it with assets= (`mcore train` does), or serve an export of it"
        )
    with tempfile.TemporaryDirectory() as place:
        extract_assets(folder, place)
        config = read_config(Path(place) / "run.yaml")
        if config.masked:
            raise ValueError(f"{folder} holds an encoder, which generates nothing")
        tokenizer = open_tokenizer(str(Path(place) / "tokenizer"), config.model.vocab_size)
    engine = build_engine(config, tokenizer, device, max_length=max_length or config.train.seq_len, cache_gb=cache_gb)
    load(model_state(engine.model, engine.model.groups), folder, strict=False)
    return engine

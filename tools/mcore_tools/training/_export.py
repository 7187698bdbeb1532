# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What each step says of its model, and the step as a Hugging Face folder."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mcore_ckpt import CheckpointingException
from mcore_ckpt.hf import StoredAdapter, export_adapter_hf, export_checkpoint_hf, families_of
from mcore_ckpt.inspect import resolve_checkpoint, resolve_folder
from mcore_ckpt.manifest import read_manifest
from mcore_ckpt.storage import Folder
from mcore_tools.assembly import open_tokenizer
from mcore_tools.recipes import RunConfig
from mcore_tools.training._pretrained import HuggingFaceFolder
from mcore_tools.training._stored import MOE_SIZES


def describe_model(config: RunConfig, origin: Folder | HuggingFaceFolder | None) -> dict[str, Any]:
    """Family, sizes and config.json entries of a run's model, under the names by which `export_checkpoint_hf` and ``mcore convert
    export-hf`` take them from a checkpoint; the sizes alone, which ``export-megatron`` reads, where no family can express it. Empty for an
    encoder with a decoder.

    Args:
        config: the run.
        origin: whose weights it began with, which name the family and the entries.
    """
    sizes: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config.model)))
    if config.moe is not None:
        sizes |= {name: value for name, value in dataclasses.asdict(config.moe).items() if name in MOE_SIZES}
        sizes["moe_ffn_hidden_size"] = config.moe.moe_ffn_hidden_size or config.model.ffn_size
    family, entries = _origin(origin)
    if config.spans:
        return {}
    families = families_of(sizes)
    if not families:
        return {"config": sizes}
    return {"family": family if family in families else families[0], "config": sizes, "hf_config": _entries(config, entries)}


def _origin(origin: Folder | HuggingFaceFolder | None) -> tuple[str, dict[str, Any]]:
    if origin is None:
        return "", {}
    if isinstance(origin, HuggingFaceFolder):
        return origin.family, origin.entries()
    extra = read_manifest(origin).extra
    entries = extra.get("hf_config")
    return str(extra.get("family", "")), dict(entries) if isinstance(entries, Mapping) else {}


def _entries(config: RunConfig, known: Mapping[str, Any]) -> dict[str, Any]:
    """Entries of config.json: those of the origin, with a context that holds the run's sequences; else those of the tokenizer."""
    entries = dict(known)
    if not entries and config.data.tokenizer:
        tokenizer = open_tokenizer(config.data.tokenizer, config.model.vocab_size)
        named = {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eod, "pad_token_id": tokenizer.pad}
        entries = {name: token for name, token in named.items() if token is not None}
    entries["max_position_embeddings"] = max(entries.get("max_position_embeddings", 0), config.train.seq_len)
    return entries


def export_run(checkpoints: str | Path, directory: str | Path) -> Path:
    """Write the newest step of a run as a Hugging Face folder: weights, config.json, tokenizer, chat template, generation_config.json.

    Adapters are added to the weights of their base model.

    Raises:
        CheckpointingException: no checkpoint, a damaged one, or a model that no family expresses.
        ValueError: the folder has content.
    """
    step = resolve_checkpoint(checkpoints)
    family, config, entries = _described(step)
    export_checkpoint_hf(step, directory, family=family, config=config, hf_config=entries)
    return Path(directory)


def export_adapter(checkpoints: str | Path, directory: str | Path) -> Path:
    """Write the adapters of a run's newest step as a folder of PEFT.

    Raises:
        CheckpointingException: no checkpoint, one without adapters, or a model that no family expresses.
        ValueError: the folder has content.
    """
    step = resolve_folder(checkpoints)
    family, config, _ = _described(step)
    stored = StoredAdapter.of(step)
    if stored is None:
        raise CheckpointingException(f"{step} holds a whole model and no adapters; export it whole")
    export_adapter_hf(stored.tensors(), directory, family=family, config=config, adapter=stored.adapter)
    return Path(directory)


def _described(step: str | Path | Folder) -> tuple[str, Mapping[str, Any], Mapping[str, Any] | None]:
    """Family, sizes and config.json entries that a step says of its model."""
    extra = read_manifest(step).extra
    if not isinstance(extra.get("config"), Mapping) or not extra.get("family"):
        raise CheckpointingException(f"{step} holds a model that no family of Hugging Face expresses; serve the checkpoint itself")
    return extra["family"], extra["config"], extra.get("hf_config")

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""An engine with the model of a checkpoint, of a run, or of a Hugging Face folder."""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from mcore_ckpt import CheckpointingException
from mcore_ckpt.assets import extract_assets
from mcore_ckpt.hf import StoredAdapter
from mcore_ckpt.inspect import resolve_folder
from mcore_ckpt.manifest import read_manifest
from mcore_ckpt.storage import Folder
from mcore_inference import DynamicInferenceEngine, ExecutionConfig, LoraLoadError, LoraSlots, LoraWeights
from mcore_inference.adapters import check_slots
from mcore_moe import MoEConfig
from mcore_parallel import ProcessGroups
from mcore_parallel.data import Tokenizer
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.training import model_state
from mcore_tools.assembly import build_model, open_tokenizer
from mcore_tools.chat import TemplateTokenizer, find_template
from mcore_tools.recipes import RunConfig, TrainConfig, read_model_config
from mcore_tools.serving._engine import build_engine
from mcore_tools.serving._loras import slots_for
from mcore_tools.training import HuggingFaceFolder, fill_model, is_huggingface, stored_model

_LONGEST = 4096


def open_engine(
    checkpoint: str | Path,
    device: torch.device | str,
    *,
    max_length: int | None = None,
    max_requests: int | None = None,
    cache_gb: float | None = None,
    kv_cache_dtype: Literal["fp8"] | None = None,
    weight_dtype: Literal["fp8", "fp8_weight_only"] | None = None,
    groups: Callable[[RunConfig], ProcessGroups] | None = None,
    execution: Callable[[RunConfig, ProcessGroups], ExecutionConfig] | None = None,
    sizes: Mapping[str, Any] | None = None,
    attention_backend: str | None = None,
    loras: Mapping[str, LoraWeights] | None = None,
) -> DynamicInferenceEngine:
    """An engine with the model, weights and tokenizer of a checkpoint.

    Args:
        checkpoint: a checkpoint, a folder of steps or of a run, whose newest is taken, or a Hugging Face folder.
        device: where it runs.
        max_length: tokens of a prompt and its continuation; None for the length that the run trained on, or the context of the
            published model, at most 4096.
        max_requests: served at a time; None for 256 on a GPU and 64 on a CPU.
        cache_gb: memory for keys and values, in GB; None for what a GPU has left, and 1 on a CPU.
        kv_cache_dtype: of keys and values, as of ``InferenceConfig``.
        weight_dtype: of the linear layers and experts, as of ``InferenceConfig``.
        groups: how the model of a run (``read_model_config``) is split over ranks, all of which call this; None for all of it on this
            process.
        execution: how the engine drives the device, by that run and the groups that split its model; None for the defaults.
        sizes: further fields of ``InferenceConfig``.
        attention_backend: as of ``PagedAttention``.
        loras: adapters that are loaded into it (``read_lora``), for which it has as many slots as they need, or those of
            ``sizes["lora"]``.

    Raises:
        LoraLoadError: an adapter does not fit the model or its slots.
        CheckpointingException: no checkpoint, a damaged one, or one without the files that say what it is.
        ValueError: a model that generates nothing, settings that it refuses, or more positions than a published model has.
    """
    if loras and "lora" not in (sizes or {}):
        sizes = {**(sizes or {}), "lora": slots_for(loras)}
    if is_huggingface(checkpoint):
        source: HuggingFaceFolder | Folder = HuggingFaceFolder(directory=Path(checkpoint))
        config, tokenizer = _read_huggingface(source, device, max_length)
    else:
        source, config, tokenizer = _read_assets(checkpoint)
    split = ProcessGroups.single() if groups is None else groups(config)
    adapter = None if isinstance(source, HuggingFaceFolder) else StoredAdapter.of(source)

    def fill(model: GPTModel) -> None:
        if adapter is None:
            fill_model(model_state(model, model.groups), source)

    engine = build_engine(
        config,
        tokenizer,
        device,
        max_length=max_length or config.train.seq_len,
        max_requests=max_requests,
        cache_gb=cache_gb,
        kv_cache_dtype=kv_cache_dtype,
        weight_dtype=weight_dtype,
        fill=fill,
        groups=split,
        execution=None if execution is None else execution(config, split),
        sizes=sizes,
        attention_backend=attention_backend,
    )
    if adapter is not None:
        engine.load_weights(adapter.merged())
    for name, weights in (loras or {}).items():
        try:
            engine.load_lora(name, weights)
        except LoraLoadError as error:
            raise LoraLoadError(f"the adapter {name}: {error}") from error
    return engine


def open_served_tokenizer(checkpoint: str | Path) -> Tokenizer | TemplateTokenizer:
    """The tokenizer that the engine of ``open_engine`` has, without the engine.

    Raises:
        CheckpointingException: as of ``open_engine``.
    """
    if is_huggingface(checkpoint):
        model = stored_model(HuggingFaceFolder(directory=Path(checkpoint)))
        assert model is not None, "a config.json says what model it is"
        return _open_tokenizer(Path(checkpoint), model[0].vocab_size)
    return _read_assets(checkpoint)[2]


def served_address(checkpoint: str | Path) -> str:
    """Where the weights of ``open_engine`` are: of a run its newest step.

    Raises:
        CheckpointingException: as of ``open_engine``.
    """
    if is_huggingface(checkpoint):
        return str(Path(checkpoint).resolve())
    folder = resolve_folder(checkpoint)
    return folder.address if "://" in str(checkpoint) else str(Path(folder.address).resolve())


def served_length(checkpoint: str | Path) -> int:
    """The ``max_length`` of ``open_engine`` where none is given; no weights are read.

    Raises:
        CheckpointingException: as of ``open_engine``.
    """
    if is_huggingface(checkpoint):
        return _published_length(HuggingFaceFolder(directory=Path(checkpoint)))
    return _read_assets(checkpoint)[1].train.seq_len


def served_model(checkpoint: str | Path) -> tuple[TransformerConfig, MoEConfig | None]:
    """The model of ``open_engine``, and its experts if it has some; no weights are read.

    Raises:
        CheckpointingException: as of ``open_engine``.
    """
    if is_huggingface(checkpoint):
        model = stored_model(HuggingFaceFolder(directory=Path(checkpoint)))
        assert model is not None, "a config.json says what model it is"
        return model
    config = _read_assets(checkpoint)[1]
    return config.model, config.moe


def check_lora_slots(checkpoint: str | Path, slots: LoraSlots) -> None:
    """See that the model of ``open_engine`` has the layers that adapters may change; no weights are read.

    Raises:
        CheckpointingException: as of ``open_engine``.
        ValueError: it has not.
    """
    model, moe = served_model(checkpoint)
    built = build_model(RunConfig(model=model, moe=moe), ProcessGroups.single(), "meta")
    assert isinstance(built, GPTModel), "a run without an encoder is one"
    check_slots(built, slots)


def _read_assets(checkpoint: str | Path) -> tuple[Folder, RunConfig, Tokenizer | TemplateTokenizer]:
    """The folder of a step, and the model's settings and the tokenizer that it keeps."""
    folder = resolve_folder(checkpoint)
    assets = read_manifest(folder).assets
    missing = [name for name in ("run.yaml", "tokenizer/") if not any(asset.startswith(name) for asset in assets)]
    if missing:
        raise CheckpointingException(
            f"{folder} keeps no {' and no '.join(missing)}; save it with assets= (`mcore train` does), or serve an export of it"
        )
    with tempfile.TemporaryDirectory() as place:
        extract_assets(folder, place)
        config = read_model_config(Path(place) / "run.yaml", f"{folder}: run.yaml")
        if config.encoder:
            raise ValueError(f"{folder} holds an encoder, with which nothing is generated; name a run with {config.encoder}=none")
        return folder, config, _open_tokenizer(Path(place) / "tokenizer", config.model.vocab_size)


def _read_huggingface(
    source: HuggingFaceFolder, device: torch.device | str, max_length: int | None
) -> tuple[RunConfig, Tokenizer | TemplateTokenizer]:
    """The settings of a run with the model of a folder, and its tokenizer."""
    model = stored_model(source)
    assert model is not None, "a config.json says what model it is"
    config, moe = model
    # Products of bfloat16 are for GPUs.
    dtype = "float32" if source.dtype == "float32" or torch.device(device).type == "cpu" else "bfloat16"
    positions = source.entries().get("max_position_embeddings")
    if max_length is not None and positions is not None and max_length > positions:
        raise ValueError(f"--max-length {max_length} exceeds max_position_embeddings={positions} of {source}; lower it")
    length = max_length or _published_length(source)
    run = RunConfig(model=config, moe=moe, train=TrainConfig(dtype=dtype, seq_len=length))
    return run, _open_tokenizer(source.directory, config.vocab_size)


def _published_length(source: HuggingFaceFolder) -> int:
    return min(source.entries().get("max_position_embeddings", _LONGEST), _LONGEST)


def _open_tokenizer(folder: Path, vocab_size: int) -> Tokenizer | TemplateTokenizer:
    """With its chat template, if it has one."""
    plain = open_tokenizer(str(folder), vocab_size)
    if find_template(folder) is None:
        return plain
    tokenizer = TemplateTokenizer(folder)
    # Read while the files are there.
    assert tokenizer.stop_token_ids is not None
    return tokenizer

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What a checkpoint says of its model, compared with the run that takes its weights."""

import dataclasses
import functools
import json
import math
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml

from mcore_ckpt import CheckpointingException, find_mismatches, load
from mcore_ckpt.assets import read_asset
from mcore_ckpt.inspect import resolve_folder
from mcore_ckpt.manifest import Manifest, read_manifest
from mcore_ckpt.storage import Folder
from mcore_moe import MoEConfig
from mcore_parallel.models import TransformerConfig
from mcore_parallel.nn import is_layer_window_attention
from mcore_tools.assembly import DTYPES
from mcore_tools.recipes import RunConfig
from mcore_tools.training._conversion import stored_dtypes
from mcore_tools.training._pretrained import HuggingFaceFolder, is_huggingface

RUN_FILE = "run.yaml"
# How numbers are computed, drawn at first, or weighed in a loss: not what a model with given weights computes.
_MODEL_FREE = ("attention_backend", "init_method_std", "mtp_detach")
# Sizes and choices of a mixture in the config of an import or an export, which are no fields of the model.
MOE_SIZES = (
    *("num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_layer_freq", "moe_shared_expert_intermediate_size"),
    *("moe_shared_expert_gate", "moe_latent_size", "moe_router_score_function", "moe_router_pre_softmax", "moe_router_topk_scaling_factor"),
    *("moe_router_num_groups", "moe_router_group_topk", "moe_router_enable_expert_bias", "moe_router_bias", "moe_apply_probs_on_input"),
)
_OTHERS = ("num_token_types", "add_binary_head")


def check_stored(config: RunConfig, folder: Folder | HuggingFaceFolder | None, *, is_own: bool = False) -> None:
    """Whether the model of a run is that of the checkpoint whose weights it takes, and its dtype holds them.

    A step keeps its whole run, an import the sizes that it read; a checkpoint with neither has nothing to compare but its dtype. Weights of
    a published model are rounded to that of the run.

    Args:
        config: the run; fields in its ``load.override`` may differ.
        folder: of the checkpoint; None for no weights.
        is_own: it is a step of the run itself, which goes on with the optimizer's state.

    Raises:
        ValueError: names each field that differs with both values.
        CheckpointingException: the checkpoint cannot be read.
    """
    if folder is None:
        return
    if isinstance(folder, Folder) and "lora" in read_manifest(folder).extra:
        raise ValueError(f"{folder} holds adapters alone; begin with an export of it, into which they are merged")
    try:
        encoder = stored_encoder(folder)
        stored = stored_model(folder, config)
    except CheckpointingException:
        raise
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{folder} keeps a configuration that cannot be compared with this run: {error}; name another checkpoint"
        ) from None
    if encoder is not None and encoder != config.encoder:
        there, here = (f"{name} is set" if name else "masked=none and spans=none" for name in (encoder, config.encoder))
        raise ValueError(f"{folder} holds the weights of another kind of model: {there} there, {here} here; set them alike")
    if stored is not None:
        if config.moe is not None and stored[1] is None:
            raise ValueError(
                f"{folder} holds a dense model, and moe is set here; set load.upcycle=true to make experts of its mlp, or moe=none"
            )
        check_model(config, *stored, str(folder))
    if isinstance(folder, Folder):
        _check_dtype(config, folder, goes_on=is_own or config.load.take == "all")


def weights_identity(weights: Folder | HuggingFaceFolder) -> str:
    """Which weights they are, in one line: their place, and the SHA-256 of a checkpoint's manifest or of what a folder's files begin with.

    Raises:
        CheckpointingException: they cannot be read.
    """
    if isinstance(weights, HuggingFaceFolder):
        return f"{weights} {weights.digest()}"
    return f"{weights} {json.loads(read_manifest(weights).encode())['sha256']}"


def absolute_place(place: str) -> str:
    """The one name of a folder here, of an object store as it is; empty for none."""
    return place if not place or "://" in place else os.path.abspath(place)


def open_weights(place: str | Path) -> Folder | HuggingFaceFolder:
    """A Hugging Face folder, or the checkpoint or newest step of another.

    Raises:
        CheckpointingException: there is none.
    """
    return HuggingFaceFolder(directory=Path(place)) if is_huggingface(place) else resolve_folder(place)


def fill_model(
    state: Mapping[str, Any],
    weights: Folder | HuggingFaceFolder,
    *,
    untrained: tuple[str, ...] = (),
    group: dist.ProcessGroup | None = None,
) -> None:
    """Load such weights into the state of a model, which holds their values in its own dtypes; what else they hold is left.

    Args:
        state: name -> `TensorShard`, or several of them, as of ``model_state``.
        weights: of ``open_weights``.
        untrained: beginnings of names that the weights may lack, as those of heads which are yet to be trained; they keep their values.
        group: ranks that load together; None for all.

    Raises:
        CheckpointingException: names what is missing, and what has another shape; or they cannot be read.
    """
    if isinstance(weights, HuggingFaceFolder):
        missing = weights.fill(state)
    else:
        missing = frozenset(find_mismatches(state, weights, group=group).missing)
    if lacking := sorted(name for name in missing if not name.startswith(untrained)):
        named = ", ".join(lacking[:8]) + (f" and {len(lacking) - 8} more" if len(lacking) > 8 else "")
        raise CheckpointingException(f"{weights} has no weights for {named}; name the weights of a whole model, or make model theirs")
    if isinstance(weights, Folder):
        with stored_dtypes({name: value for name, value in state.items() if name not in missing}, weights) as parts:
            load(parts, weights, strict=False, group=group)


def check_model(config: RunConfig, model: TransformerConfig, moe: MoEConfig | None, place: str) -> None:
    """Whether the model of a run is this one, of which ``place`` holds the weights.

    Raises:
        ValueError: names each field that differs with both values.
    """
    ours, theirs = _meaning(config.model, config.moe), _meaning(model, moe)
    differing = [
        name for name in dict.fromkeys((*ours, *theirs)) if not _same(ours.get(name), theirs.get(name)) and name not in config.load.override
    ]
    if differing:
        shown = "; ".join(f"{name}={theirs.get(name)!r} there, {ours.get(name)!r} here" for name in differing)
        raise ValueError(
            f"{place} holds the weights of another model: {shown}. Set what it was made with, or to change the model on purpose "
            f"load.override=[{','.join(differing)}]"
        )


def stored_dtype(folder: Folder) -> str:
    """``train.dtype`` of the run that wrote a checkpoint, by its weights; empty where they are no floating-point numbers.

    Raises:
        CheckpointingException: it cannot be read.
    """
    sizes: Counter[torch.dtype] = Counter()
    for name, record in read_manifest(folder).tensors.items():
        if not name.startswith("optimizer.") and record.torch_dtype.is_floating_point:
            # Some weights, such as biases of a router, are float32 in every run.
            sizes[record.torch_dtype] += math.prod(record.shape)
    return str(max(sizes, key=sizes.__getitem__)).removeprefix("torch.") if sizes else ""


def _check_dtype(config: RunConfig, folder: Folder, *, goes_on: bool) -> None:
    """Whether the run's dtype is that of the weights, or holds every value of theirs, or may round them."""
    theirs, ours = stored_dtype(folder), config.train.dtype
    if theirs not in DTYPES or theirs == ours:
        return
    both = f"{folder} holds train.dtype={theirs!r}, and train.dtype={ours!r} here"
    if goes_on:
        raise ValueError(
            f"{both}: a run goes on with its optimizer's state in its own dtype; set train.dtype={theirs}, or begin another output with "
            "load.take=weights"
        )
    if torch.promote_types(DTYPES[theirs], DTYPES[ours]) != DTYPES[ours] and "train.dtype" not in config.load.override:
        raise ValueError(f"{both} would round the weights; set train.dtype={theirs}, or to round them load.override=[train.dtype]")


def stored_model(folder: Folder | HuggingFaceFolder, config: RunConfig | None = None) -> tuple[TransformerConfig, MoEConfig | None] | None:
    """Of the run or the import that wrote the checkpoint, or of a config.json; None where there is none.

    Args:
        folder: of the checkpoint, or of the published model.
        config: a run that says what the checkpoint leaves out; None for defaults.

    Raises:
        ValueError: what is said is no model.
        CheckpointingException: it cannot be read.
    """
    if isinstance(folder, HuggingFaceFolder):
        return _from_sizes(folder.sizes(), None)
    manifest = read_manifest(folder)
    if RUN_FILE in manifest.assets:
        run = read_run(folder, manifest)
        if isinstance(run.get("model"), Mapping):
            return model_of_run(run)
    sizes = manifest.extra.get("config")
    if not isinstance(sizes, Mapping):
        return None
    # An import from Hugging Face leaves out defaults; others say what they know.
    return _from_sizes(sizes, None if "hf_config" in manifest.extra else config)


def stored_encoder(folder: Folder | HuggingFaceFolder) -> str | None:
    """``RunConfig.encoder`` of the run that wrote the checkpoint; None where no run says it.

    Raises:
        ValueError: what is said is no run.
        CheckpointingException: it cannot be read.
    """
    if isinstance(folder, HuggingFaceFolder):
        return None
    manifest = read_manifest(folder)
    run = read_run(folder, manifest) if RUN_FILE in manifest.assets else {}
    return next((name for name in ("masked", "spans") if run.get(name)), "") if isinstance(run.get("model"), Mapping) else None


def model_of_run(run: Mapping[str, Any]) -> tuple[TransformerConfig, MoEConfig | None]:
    """What a run as plain values says of its model.

    Raises:
        ValueError: it is none.
    """
    moe = run.get("moe")
    return TransformerConfig.from_dict(run["model"]), MoEConfig.from_dict(moe) if isinstance(moe, Mapping) else None


def _from_sizes(sizes: Mapping[str, Any], config: RunConfig | None) -> tuple[TransformerConfig, MoEConfig | None]:
    """Of sizes by our names, and what ``config`` says where they are silent."""
    stated = {name: value for name, value in sizes.items() if name not in (*MOE_SIZES, *_OTHERS)}
    silent = {} if config is None else dataclasses.asdict(config.model)
    experts = {name: sizes[name] for name in MOE_SIZES if sizes.get(name) is not None}
    if "num_moe_experts" not in experts:
        return TransformerConfig.from_dict({**silent, **stated}), None
    silent_moe = {} if config is None or config.moe is None else dataclasses.asdict(config.moe)
    # The width of the feed-forward is that of an expert there, where nothing else is said.
    return TransformerConfig.from_dict({**silent, **stated}), MoEConfig.from_dict({**silent_moe, "moe_ffn_hidden_size": None, **experts})


def read_run(folder: Folder, manifest: Manifest) -> Mapping[str, Any]:
    """The ``run.yaml`` of a checkpoint; not to be changed."""
    try:
        return _parsed(read_asset(folder, RUN_FILE, manifest).decode())
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{RUN_FILE} is no YAML: {' '.join(str(error).split())}") from None


@functools.lru_cache(maxsize=4)
def _parsed(text: str) -> Mapping[str, Any]:
    """A start of a run reads one file five times, and YAML takes 10 ms."""
    run = yaml.safe_load(text)
    return run if isinstance(run, Mapping) else {}


def _meaning(model: TransformerConfig, moe: MoEConfig | None) -> dict[str, Any]:
    """Every field that changes what given weights compute, spelled in one way, by its path in a run."""
    fields: dict[str, Any] = {name: value for name, value in dataclasses.asdict(model).items() if name not in _MODEL_FREE}
    fields |= {"num_query_groups": model.kv_heads, "kv_channels": model.head_dim, "ffn_hidden_size": model.ffn_size}
    if model.rotary_base_window == model.rotary_base:
        fields["rotary_base_window"] = None
    windows = [is_layer_window_attention(model.window_size, model.window_attn_skip_freq, 1 + n) for n in range(model.num_layers)]
    fields["window_attn_skip_freq"] = None if len(set(windows)) == 1 else tuple(map(int, windows))
    if model.hybrid_layer_pattern is not None:
        # Pipeline segments are of the layout.
        fields["hybrid_layer_pattern"] = model.hybrid_layer_pattern.replace("|", "")
    if model.latent_attention is not None:
        if model.latent_attention.norm_epsilon == model.norm_epsilon:
            fields["latent_attention"]["norm_epsilon"] = None
    elif _same(model.softmax_scale, model.head_dim**-0.5):
        fields["softmax_scale"] = None
    if model.mamba is not None and model.mamba.num_heads is None:
        fields["mamba"]["num_heads"] = model.mamba.expand * model.hidden_size // model.mamba.head_dim
    experts: dict[str, Any] = {}
    if moe is not None:
        experts = {name: value for name, value in dataclasses.asdict(moe).items() if name in MOE_SIZES}
        experts["moe_ffn_hidden_size"] = moe.moe_ffn_hidden_size or model.ffn_size
        experts["moe_router_bias"] = model.add_bias_linear if moe.moe_router_bias is None else moe.moe_router_bias
        flags = [moe.is_moe_layer(layer, model.num_layers) for layer in range(model.num_layers)]
        experts["moe_layer_freq"] = tuple(map(int, flags))
        has_dense = not all(flags) if model.hybrid_layer_pattern is None else "-" in model.hybrid_layer_pattern
        if not has_dense:
            # No layer is as wide as that.
            del fields["ffn_hidden_size"]
    return {f"model.{name}": value for name, value in fields.items()} | {f"moe.{name}": value for name, value in experts.items()}


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        return ours.keys() == theirs.keys() and all(_same(value, theirs[name]) for name, value in ours.items())
    if isinstance(ours, float) and isinstance(theirs, int | float):
        return math.isclose(ours, theirs, rel_tol=1e-9)
    return ours == theirs

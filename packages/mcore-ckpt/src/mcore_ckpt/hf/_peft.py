# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Adapters in the format of PEFT: adapter_config.json and adapter_model.safetensors."""

import json
import math
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mcore_ckpt._errors import CheckpointingException, list_names
from mcore_ckpt._storage import SafetensorsFile, dtype_code, write_file, write_safetensors
from mcore_ckpt.hf._adapter import HFAdapterConfig, Pair, adapted_sites, join_adapter, merge_adapter, split_adapter
from mcore_ckpt.hf._draft import drafted_folder
from mcore_ckpt.hf._export import export_hf
from mcore_ckpt.hf._families import find_family
from mcore_ckpt.hf._fields import Family
from mcore_ckpt.hf._import import import_hf, kept_entries

__all__ = ["HFAdapter", "export_adapter_hf", "import_adapter_hf", "merge_adapter_hf"]

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _THEIR_A, _THEIR_B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
# Entries with which the product of A and B is not all that is added to a weight, and the values that mean that it is.
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "use_dora": (False,),
    "use_qalora": (False,),
    "use_bdlora": (None, False),
    "lora_bias": (False,),
    "fan_in_fan_out": (False,),
    "modules_to_save": (None, []),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "target_parameters": (None, []),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, []),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "velora_config": (None,),
    "monteclora_config": (None,),
}
# Of which training changes the base weights at its beginning.
_OTHER_BASES = ("pissa", "corda", "olora", "loftq", "lora_ga")


class HFAdapter(NamedTuple):
    """An adapter read from a folder."""

    adapter: HFAdapterConfig
    tensors: dict[str, Tensor]
    """``lora.A`` and ``lora.B`` by our names, in host memory."""


def export_adapter_hf(
    tensors: Mapping[str, Tensor], directory: str | Path, *, family: str | Family, config: Mapping[str, Any], adapter: HFAdapterConfig
) -> None:
    """Write a folder that ``PeftModel.from_pretrained`` loads onto the base model. Not collective: call it on one rank.

    Args:
        tensors: ``lora.A`` and ``lora.B`` of each adapted weight, whole, by our names.
        directory: must not exist, or be empty.
        family: of the base model.
        config: its sizes in our field names.
        adapter: rank, scale and the base model's name.

    Raises:
        CheckpointingException: an adapter of another rank, of which a half is missing, or that does not fit the model.
        ValueError: no adapter, an unknown family, or a folder with content.
    """
    if not tensors:
        raise ValueError("tensors holds no adapter")
    described = find_family(family)
    theirs = split_adapter(tensors, described, config)
    for module, (A, _) in theirs.items():
        if A.shape[0] != adapter.rank:
            raise CheckpointingException(f"the adapter of {module} has rank {A.shape[0]}, adapter says {adapter.rank}")
    stored = {
        _PREFIX + module + half: tensor for module, pair in theirs.items() for half, tensor in zip((_THEIR_A, _THEIR_B), pair, strict=True)
    }
    alpha = int(adapter.alpha) if float(adapter.alpha).is_integer() else adapter.alpha
    text = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapter.base_model or None,
        "r": adapter.rank,
        "lora_alpha": alpha,
        "lora_dropout": adapter.dropout,
        "target_modules": _targets(theirs, described, config),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_rslora": False,
        "use_dora": False,
    }
    with drafted_folder(directory) as draft:
        entries = [
            (name, dtype_code(tensor.dtype), tuple(tensor.shape), partial(stored.__getitem__, name)) for name, tensor in stored.items()
        ]
        write_safetensors(draft / _WEIGHTS, entries, {"format": "pt"})
        write_file(draft / _CONFIG, [json.dumps(text, indent=2).encode()])


def import_adapter_hf(directory: str | Path, *, family: str | Family, config: Mapping[str, Any]) -> HFAdapter:
    """Read the folder of a LoRA adapter that PEFT, or `export_adapter_hf`, wrote.

    Adapters of the parts of one of our weights become one. Where they differ in A, as those of PEFT do, its rank is their sum, and that of
    all others too, filled up with zeros; alpha grows with it, so that the scale stays.

    Args:
        directory: the folder to read.
        family: of the base model.
        config: its sizes in our field names, as `import_hf` gives them.

    Raises:
        CheckpointingException: another kind of adapter, by the entry that says so; missing, unexpected or misshapen tensors, by name.
        ValueError: an unknown family.
    """
    folder, described = Path(directory), find_family(family)
    try:
        entries = json.loads((folder / _CONFIG).read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        lacking = f"{folder} has no {_CONFIG}" if folder.is_dir() else f"there is no folder {folder}"
        raise CheckpointingException(f"{lacking}; name the folder of an adapter of PEFT") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointingException(f"{folder / _CONFIG}: {error}") from error
    rank, scaling = _plain(folder / _CONFIG, entries)
    if not (folder / _WEIGHTS).is_file():
        raise CheckpointingException(f"{folder} has no {_WEIGHTS}; other formats (such as .bin) are not read")
    with SafetensorsFile(folder / _WEIGHTS) as file:
        theirs = dict(_modules(file, rank))
    tensors = join_adapter(theirs, described, config)
    joined = next(iter(tensors.values())).shape[0]
    name = entries.get("base_model_name_or_path") or ""
    adapter = HFAdapterConfig(rank=joined, alpha=scaling * joined, dropout=float(entries.get("lora_dropout") or 0.0), base_model=str(name))
    return HFAdapter(adapter, tensors)


def merge_adapter_hf(base: str | Path, adapter: str | Path, directory: str | Path, *, dtype: torch.dtype | None = None) -> None:
    """Write a Hugging Face folder of a base model with an adapter of PEFT added, its tokenizer beside it.

    Args:
        base: folder of the base model.
        adapter: folder of the adapter.
        directory: must not exist, or be empty.
        dtype: convert to this; None to keep.

    Raises:
        CheckpointingException: as `import_hf` and `import_adapter_hf`.
        ValueError: a folder with content.
    """
    model = import_hf(base)
    settings, ours = import_adapter_hf(adapter, family=model.family, config=model.config)
    merged = merge_adapter(model.tensors, ours, settings.scaling)
    more = {"hf_config": kept_entries(base), "dtype": dtype, "tokenizer": base}
    export_hf(merged, directory, family=model.family, config=model.config, **more)


def _plain(path: Path, entries: Any) -> tuple[int, float]:
    """Rank and scale of an adapter that is nothing but two matrices a weight."""
    if not isinstance(entries, dict) or entries.get("peft_type") != "LORA":
        kind = entries.get("peft_type") if isinstance(entries, dict) else entries
        raise CheckpointingException(f"{path}: peft_type={kind!r} is not supported; only 'LORA' is")
    for name, values in _PLAIN.items():
        value = entries.get(name, values[0])
        if value not in values:
            raise CheckpointingException(f"{path}: {name}={value!r} is not supported; only {values[0]!r} is")
    start = entries.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower().startswith(_OTHER_BASES):
        raise CheckpointingException(
            f"{path}: init_lora_weights={start!r} changes the base weights; convert the adapter to plain LoRA first"
        )
    rank, alpha = entries.get("r"), entries.get("lora_alpha")
    if type(rank) is not int or rank < 1 or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise CheckpointingException(f"{path}: r={rank!r} and lora_alpha={alpha!r} must be a positive int and a number")
    return rank, alpha / (math.sqrt(rank) if entries.get("use_rslora") else rank)


def _modules(file: SafetensorsFile, rank: int) -> Iterator[tuple[str, Pair]]:
    stems = {name.removesuffix(_THEIR_A).removesuffix(_THEIR_B) for name in file.slots}
    known = {stem + half for stem in stems for half in (_THEIR_A, _THEIR_B)}
    if unexpected := {name for name in file.slots if name not in known or not name.startswith(_PREFIX)}:
        raise CheckpointingException(f"{_WEIGHTS} holds {list_names(unexpected)}, which are no matrices of a LoRA adapter")
    if missing := known - file.slots.keys():
        raise CheckpointingException(f"{_WEIGHTS} lacks {list_names(missing)}")
    if not stems:
        raise CheckpointingException(f"{_WEIGHTS} holds no adapter")
    for stem in sorted(stems):
        A, B = file.tensor(stem + _THEIR_A).clone(), file.tensor(stem + _THEIR_B).clone()
        if A.dim() != 2 or B.dim() != 2 or A.shape[0] != rank or B.shape[1] != rank:
            raise CheckpointingException(f"{_WEIGHTS}: {stem} has {list(A.shape)} and {list(B.shape)}, {_CONFIG} says r={rank}")
        yield stem.removeprefix(_PREFIX), (A, B)


def _targets(theirs: Mapping[str, Pair], family: Family, config: Mapping[str, Any]) -> list[str]:
    """The last names of the modules, as PEFT writes them; full names where another module of that last name has no adapter."""
    everything = {
        weight.removesuffix(".weight") for site in adapted_sites(family, config).values() for weight, _ in site.parts(site.rule.forms[0])
    }
    partial_names = {module.rpartition(".")[2] for module in everything - theirs.keys()}
    last = {module: module.rpartition(".")[2] for module in theirs}
    return sorted({module if name in partial_names else name for module, name in last.items()})

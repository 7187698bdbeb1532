# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Tensors and values of a checkpoint of ours as Megatron-FSDP stores them."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mcore_ckpt._core import CheckpointReader, DeferredTensor
from mcore_ckpt._errors import CheckpointingException
from mcore_ckpt._formats import Place, write_objects
from mcore_ckpt._storage import Folder, dtype_of
from mcore_ckpt.chunks import Box
from mcore_ckpt.megatron._fsdp_names import META, STATE, WEIGHT, Piece, piece_box, piece_name, pieces_of
from mcore_ckpt.megatron._names import their_shape

__all__ = ["fsdp_groups", "fsdp_tensors", "precision_of", "write_values"]

_VALUES_FILE = "values.distcp"
_ENDS = ("embedding.word_embeddings.weight", "output_layer.weight")


def fsdp_tensors(
    reader: CheckpointReader, weights: Mapping[str, str], states: Mapping[tuple[str, str], str], step: int
) -> dict[str, DeferredTensor]:
    """What is stored of the model and its optimizer; a master, where there is one, in the place of its weight.

    Args:
        weights: our name by whole, per-layer key.
        states: our name by kind ("param" for masters, "exp_avg", "exp_avg_sq") and key.
        step: updates that the optimizer made, which is stored for each weight.

    Raises:
        CheckpointingException: optimizer state without its weight.
    """
    state: dict[str, DeferredTensor] = {}
    for key, name in weights.items():
        state |= _pieces(reader, key, states.get(("param", key), name), WEIGHT, "")
    for (kind, key), name in states.items():
        if key not in weights:
            raise CheckpointingException(f"{reader.folder}: {name} is there and its weight is not; drop it, or export the whole model")
        if kind != "param":
            state |= _pieces(reader, key, name, STATE, f".{kind}")
        if kind == "exp_avg":
            count = DeferredTensor(torch.float32, (), partial(torch.tensor, float(step)))
            state |= dict.fromkeys(_pieces(reader, key, name, STATE, ".step"), count)
    return state


def fsdp_groups(groups: Sequence[Mapping[str, Any]], weights: Mapping[str, tuple[int, ...]], step: int) -> dict[str, Any]:
    """The parameter group of each weight, an entry for each of its settings.

    Groups do not list their weights; which one is meant follows from what they differ in: biases and norms do not decay, experts are
    apart, and so may be the embedding and the output. Settings of one group there must be alike, also of its experts.

    Args:
        weights: our shape by whole, per-layer key.

    Raises:
        CheckpointingException: no group or several fit a weight.
    """
    found: dict[str, Any] = {}
    for key, shape in weights.items():
        fields = {**_group_of(groups, key, len(their_shape(key, shape))), "step": step}
        # Once sharded, a parameter of an expert is no longer marked as one.
        if "is_expert_parallel" in fields:
            fields["is_expert_parallel"] = False
        if "betas" in fields:
            fields["betas"] = tuple(fields["betas"])
        # A gate and its values are one parameter there; only their tensors are stored apart.
        for piece in pieces_of(key, shape, gated=False):
            found |= {f"{META}{piece_name(key, piece)}.{field}": value for field, value in fields.items()}
    return found


def _group_of(groups: Sequence[Mapping[str, Any]], key: str, num_dims: int) -> Mapping[str, Any]:
    traits = {"is_expert_parallel": ".mlp.experts." in key, "is_decoupled_lr": key in _ENDS}
    traits["wd_mult"] = num_dims > 1 and not key.endswith(".bias")
    found = list(groups)
    for trait, wanted in traits.items():
        if len({bool(group.get(trait)) for group in found}) > 1:
            found = [group for group in found if bool(group.get(trait)) == wanted]
    if len(found) != 1:
        raise CheckpointingException(
            f"optimizer_param_groups: {len(found)} of {len(groups)} groups fit {key}; give optimizer_config, which makes them anew"
        )
    return found[0]


def precision_of(reader: CheckpointReader, names: Sequence[str]) -> dict[str, bool]:
    """Their settings of the element type in which the weights of these names are used."""
    dtypes = {reader.record(name).dtype for name in names}
    return {"bf16": "BF16" in dtypes, "fp16": "F16" in dtypes and "BF16" not in dtypes}


def write_values(folder: Folder, values: Mapping[str, Any]) -> dict[str, Place]:
    """Write the entries that are no tensors into a file of the folder; returns where each lies.

    Equal values share their bytes.
    """
    places: dict[str, Place] = {}
    written: dict[bytes, Place] = {}
    end = 0
    for name, value in values.items():
        content = write_objects(value)
        if content not in written:
            written[content] = (_VALUES_FILE, end, len(content))
            end += len(content)
        places[name] = written[content]
    folder.write(_VALUES_FILE, [memoryview(content) for content in written])
    return places


def _pieces(reader: CheckpointReader, key: str, name: str, before: str, after: str) -> dict[str, DeferredTensor]:
    record = reader.record(name)
    # A gate and its values are one dim in their shape of the whole, and one above the other.
    gated = len(record.shape) > len(their_shape(name, record.shape)) and ".linear_fc1." in key
    whole = record.shape if gated else their_shape(name, record.shape)
    found = {}
    for piece in pieces_of(key, whole, gated=gated):
        box = piece_box(whole, piece)
        shape = tuple(box.shape[sum(place is not None for place in (piece.expert, piece.half)) :])
        read = partial(_read, reader, name, None if piece == Piece() else box, shape)
        found[f"{before}{piece_name(key, piece)}{after}"] = DeferredTensor(dtype_of(record.dtype), shape, read)
    return found


def _read(reader: CheckpointReader, name: str, box: Box | None, shape: tuple[int, ...]) -> Tensor:
    return reader.read(name, box).reshape(shape)

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Checkpoints of layers with attention and feed-forward, as stacks of one or the other, and back."""

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from mcore_ckpt._core import DeferredTensor, SaveOptions, asset_sources, check_files, read_manifest, read_tensor, run_save
from mcore_ckpt._errors import CheckpointingException, list_names
from mcore_ckpt._storage import dtype_of, open_folder

__all__ = ["to_hybrid", "to_uniform"]

_LAYER = re.compile(r"(?P<before>(?:^|.*\.)layers\.)(?P<number>\d+)\.(?P<part>[^.]+)(?P<after>\..*)")
_MIXER = ("attention", "attention_post_norm", "input_norm")
_FEED_FORWARD = ("ffn_norm", "mlp", "mlp_post_norm")


def to_hybrid(checkpoint: str | Path, output: str | Path) -> None:
    """Rewrite a checkpoint of L layers, each attention and feed-forward, as one of 2 L layers of the pattern "*-*-...".

    Names change, bytes do not: what layer i had is in the layers 2 i (attention) and 2 i + 1 (feed-forward), also in names of optimizer
    state. "config" in ``extra`` follows. Host memory holds one tensor at a time. Not collective: call it on one rank.

    Args:
        checkpoint: folder of one committed checkpoint.
        output: folder to write, as for `save`.

    Raises:
        CheckpointingException: a layer with other parts, by name; a damaged file.
    """
    _rename(checkpoint, output, _split, lambda layers: {"num_layers": 2 * layers, "hybrid_layer_pattern": "*-" * layers}, uniform=True)


def to_uniform(checkpoint: str | Path, output: str | Path) -> None:
    """Inverse of `to_hybrid`, for stacks of the pattern "*-*-...".

    Raises:
        CheckpointingException: a stack of another pattern, by the names that show it; a damaged file.
    """
    _rename(checkpoint, output, _merge, lambda layers: {"num_layers": layers // 2, "hybrid_layer_pattern": None}, uniform=False)


def _split(number: int, part: str) -> int | None:
    if part in _MIXER:
        return 2 * number
    return 2 * number + 1 if part in _FEED_FORWARD else None


def _merge(number: int, part: str) -> int | None:
    return number // 2 if part in (_FEED_FORWARD if number % 2 else _MIXER) else None


def _rename(
    checkpoint: str | Path,
    output: str | Path,
    place: Callable[[int, str], int | None],
    changes: Callable[[int], Mapping[str, Any]],
    *,
    uniform: bool,
) -> None:
    manifest = read_manifest(checkpoint)
    state, refused, layers = {}, [], 0
    for name, record in manifest.tensors.items():
        match = _LAYER.fullmatch(name)
        target: str | None = name
        if match is not None:
            layers = max(layers, int(match["number"]) + 1)
            number = place(int(match["number"]), match["part"])
            target = None if number is None else f"{match['before']}{number}.{match['part']}{match['after']}"
        if target is None:
            refused.append(name)
            continue
        state[target] = DeferredTensor(dtype_of(record.dtype), record.shape, partial(read_tensor, checkpoint, name, manifest))
    if refused or not layers:
        wanted = "layers of attention and feed-forward" if uniform else 'a stack of the pattern "*-*-..."'
        raise CheckpointingException(f"{checkpoint} does not hold {wanted}: {list_names(refused) if refused else 'it has no layers'}")
    check_files(Path(checkpoint), manifest, manifest.files)
    extra = dict(manifest.extra)
    if isinstance(extra.get("config"), Mapping):
        if not uniform and layers % 2:
            raise CheckpointingException(f"{checkpoint} holds {layers} layers; a stack of pairs has an even number")
        extra["config"] = {**extra["config"], **changes(layers)}
    run_save(state, open_folder(output), extra, None, SaveOptions(assets=asset_sources(checkpoint, manifest)))

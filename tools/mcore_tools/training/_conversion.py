# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Weights from elsewhere in the parts of a model, in its own dtype."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mcore_ckpt.manifest import read_manifest
from mcore_ckpt.storage import Folder
from mcore_parallel.training import TensorShard


@contextlib.contextmanager
def stored_dtypes(wanted: Mapping[str, Any], folder: Folder) -> Iterator[dict[str, Any]]:
    """What to read from a checkpoint for ``wanted``, whose parts have the values in their own dtype at the end.

    Parts of another dtype than the checkpoint's are read into host memory first.

    Args:
        wanted: name -> ``TensorShard``, or several of them, as of ``model_state``.
        folder: of the checkpoint.
    """
    tensors = read_manifest(folder).tensors
    dtypes = {name: tensors[name].torch_dtype for name in wanted.keys() & tensors.keys()}
    read = {
        name: [_like(part, dtype) for part in _parts(wanted[name])]
        for name, dtype in dtypes.items()
        if any(part.data.dtype != dtype for part in _parts(wanted[name]))
    }
    yield {**wanted, **read}
    with torch.no_grad():
        for name, parts in read.items():
            for part, stored in zip(_parts(wanted[name]), parts, strict=True):
                part.data.copy_(stored.data)


def fill_parts(value: TensorShard | Sequence[TensorShard], whole: Tensor) -> None:
    """Copy a whole tensor into the parts of it that a rank has; what lies beyond its shape keeps its values."""
    for part in _parts(value):
        ends = [min(begin + size, total) for begin, size, total in zip(part.offset, part.data.shape, whole.shape, strict=True)]
        source = whole[tuple(slice(begin, end) for begin, end in zip(part.offset, ends, strict=True))]
        part.data[tuple(slice(size) for size in source.shape)].copy_(source)


def _parts(value: TensorShard | Sequence[TensorShard]) -> Sequence[TensorShard]:
    return [value] if isinstance(value, TensorShard) else value


def _like(part: TensorShard, dtype: torch.dtype) -> TensorShard:
    return TensorShard(
        data=torch.empty(part.data.shape, dtype=dtype), global_shape=part.global_shape, offset=part.offset, replica=part.replica
    )

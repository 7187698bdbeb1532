# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Weights of a checkpoint in a model of another dtype."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

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


def _parts(value: TensorShard | Sequence[TensorShard]) -> Sequence[TensorShard]:
    return [value] if isinstance(value, TensorShard) else value


def _like(part: TensorShard, dtype: torch.dtype) -> TensorShard:
    return TensorShard(
        data=torch.empty(part.data.shape, dtype=dtype), global_shape=part.global_shape, offset=part.offset, replica=part.replica
    )

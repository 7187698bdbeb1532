# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Files and entries of other systems that hold Python objects, read as data: nothing in them can run."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from mcore_ckpt._core import check_json_value, save
from mcore_ckpt._errors import CheckpointingException, list_names
from mcore_ckpt._formats import Foreign, read_objects, read_places
from mcore_ckpt._storage import Folder, StoredFile, as_file, open_folder

__all__ = ["Foreign", "import_torch", "read_entry", "read_torch"]


def read_torch(path: str | Path | StoredFile) -> Any:
    """The value in a file that ``torch.save`` wrote (torch 1.6 or later).

    Plain values come as they are, namespaces and ordered dicts as dict, tensors as views of the file's pages, everything else as `Foreign`:
    the name of what would have been called, and its arguments.

    Raises:
        CheckpointingException: not such a file, or damaged.
    """
    return read_objects(as_file(Path(path) if isinstance(path, str) else path))


def read_entry(directory: str | Path | Folder, name: str) -> Any:
    """An entry that is no tensor, of a checkpoint that ``torch.distributed.checkpoint`` wrote; see `read_torch` for what comes.

    Args:
        directory: the checkpoint.
        name: one of ``read_manifest(directory).others``.

    Raises:
        CheckpointingException: no such entry, or damaged.
    """
    folder = open_folder(directory)
    try:
        places = read_places(folder)
    except (ValueError, OSError) as error:
        raise CheckpointingException(f"{folder}: {error}") from error
    if name not in places:
        raise CheckpointingException(f"{folder} has no entry {list_names([name], places)} that is no tensor")
    return read_objects(*places[name])


def import_torch(path: str | Path, output: str | Path | Folder, *, prefix: str = "") -> list[str]:
    """Make a checkpoint of one ``torch.save`` file: its tensors under their keys joined by dots, its plain values in ``extra``.

    The file is mapped, and written a tensor at a time. Not collective.

    Args:
        path: the file.
        output: where to write, as for `mcore_ckpt.save`.
        prefix: put before the names of tensors.

    Returns:
        Names of what was left out because it is neither a tensor nor a JSON value.

    Raises:
        CheckpointingException: not such a file; two tensors get one name; ``output`` holds a checkpoint.
    """
    tensors: dict[str, Tensor] = {}
    extra: dict[str, Any] = {}
    left: list[str] = []
    for name, value in _leaves(read_torch(path), ""):
        if isinstance(value, Tensor):
            if prefix + name in tensors:
                raise CheckpointingException(f"{path} holds two tensors that would be called {prefix + name}")
            tensors[prefix + name] = value
        else:
            try:
                check_json_value(value)
                extra[name] = value
            except (ValueError, RecursionError):
                left.append(name)
    save(tensors, output, extra=extra)
    return left


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Tensors, and what else is no container with a tensor in it, by name."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple) and any(isinstance(item, Tensor | Mapping | list | tuple) for item in value):
        for place, item in enumerate(value):
            yield from _leaves(item, f"{name}.{place}" if name else str(place))
    else:
        yield name, value

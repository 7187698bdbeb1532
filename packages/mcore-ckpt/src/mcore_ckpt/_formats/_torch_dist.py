# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The metadata file of ``torch.distributed.checkpoint``, written for it and read as data."""

import re
import reprlib
from collections.abc import Mapping
from typing import Any

import torch

from mcore_ckpt._formats._records import Call, Name, Table, decode_records, encode_records
from mcore_ckpt._storage import Folder, StoredFile, dtype_code, dtype_of
from mcore_ckpt.chunks import Box, check_tiling

__all__ = ["METADATA_NAME", "Place", "Stored", "read_metadata", "read_places", "write_metadata"]

METADATA_NAME = ".metadata"
_MODULE = "torch.distributed.checkpoint.metadata"
_STORAGE_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
_VERSION = "1.0.0"
_MAX_BYTES = 2**30
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}\.distcp")

Stored = tuple[str, tuple[int, ...], list[tuple[str, str, Box]]]
"""Of one tensor: element type, shape, and for each chunk its file, the place of its archive there, and its box."""

Place = tuple[str, int, int]
"""Of an entry that is no tensor: file, first byte and number of bytes."""


def write_metadata(tensors: Mapping[str, Stored], values: Mapping[str, Place]) -> bytes:
    """The file by which ``torch.distributed.checkpoint`` finds ``tensors``, and ``values``, which are none."""
    entries, places = {}, Table()
    for name, (code, shape, chunks) in tensors.items():
        layout = Call("torch.serialization._get_layout", ("torch.strided",))
        plain = Call(f"{_MODULE}._MEM_FORMAT_ENCODING", (0,))
        properties = Call(f"{_MODULE}.TensorProperties", (), (Name(str(dtype_of(code))), layout, False, plain, False), make=True)
        pieces = []
        for number, (file, place, box) in enumerate(chunks):
            begin, _, length = place.partition(":")
            pieces.append(Call(f"{_MODULE}.ChunkStorageMetadata", (), {"offsets": _size(box.offset), "sizes": _size(box.shape)}, make=True))
            index = Call(f"{_MODULE}.MetadataIndex", (), {"fqn": name, "offset": _size(box.offset), "index": number}, make=True)
            info = Call(_STORAGE_INFO, (), {"relative_path": file, "offset": int(begin), "length": int(length)}, make=True)
            places.pairs.append((index, info))
        fields = {"properties": properties, "size": _size(shape), "chunks": pieces}
        entries[name] = Call(f"{_MODULE}.TensorStorageMetadata", (), fields, make=True)
    for name, (file, begin, length) in values.items():
        entries[name] = Call(f"{_MODULE}.BytesStorageMetadata", make=True)
        index = Call(f"{_MODULE}.MetadataIndex", (), {"fqn": name, "offset": None, "index": None}, make=True)
        info = Call(_STORAGE_INFO, (), {"relative_path": file, "offset": begin, "length": length}, make=True)
        places.pairs.append((index, info))
    state = {
        "state_dict_metadata": entries,
        "planner_data": {name: (name,) for name in entries},
        "storage_data": places,
        "storage_meta": None,
        "version": _VERSION,
    }
    return encode_records(Call(f"{_MODULE}.Metadata", (), state, make=True))


def read_metadata(folder: Folder) -> tuple[dict[str, Stored], list[str]]:
    """The tensors of a checkpoint that ``torch.distributed.checkpoint`` wrote, and the names of its entries that are no tensors.

    Raises:
        ValueError: it is not one, or it contradicts itself.
        OSError: it cannot be read.
    """
    try:
        root = _root(folder)
        places: dict[tuple[str, tuple[int, ...]], tuple[str, str]] = {}
        for index, info in root["storage_data"].pairs:
            key, where = _fields(index, "MetadataIndex"), _fields(info, "_StorageInfo")
            if key.get("offset") is None:
                continue
            if where.get("transform_descriptors"):
                raise ValueError(f"{key['fqn']} went through {where['transform_descriptors']}, which is not undone here")
            if not _FILE.fullmatch(where["relative_path"]):
                raise ValueError(f"file name {where['relative_path']!r} does not stay inside the folder")
            places[key["fqn"], _numbers(key["offset"])] = (where["relative_path"], f"{int(where['offset'])}:{int(where['length'])}")
        tensors, others = {}, []
        for name, entry in root["state_dict_metadata"].by_text().items():
            if isinstance(entry, Call) and entry.name.endswith(".BytesStorageMetadata"):
                others.append(name)
                continue
            tensors[name] = _tensor(name, _fields(entry, "TensorStorageMetadata"), places)
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"malformed: {type(error).__name__} {error}") from error
    return tensors, others


def read_places(folder: Folder) -> dict[str, tuple[StoredFile, int, int]]:
    """Where the entries lie that are no tensors, by name: file, first byte and number of bytes.

    Raises:
        ValueError: the metadata contradict themselves.
        OSError: they cannot be read.
    """
    places = {}
    try:
        for index, info in _root(folder)["storage_data"].pairs:
            key, where = _fields(index, "MetadataIndex"), _fields(info, "_StorageInfo")
            if key.get("offset") is not None or where.get("transform_descriptors"):
                continue
            if not _FILE.fullmatch(where["relative_path"]):
                raise ValueError(f"file name {where['relative_path']!r} does not stay inside the folder")
            begin, length = _numbers((where["offset"], where["length"]))
            places[key["fqn"]] = (StoredFile(folder, where["relative_path"]), begin, length)
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"malformed: {type(error).__name__} {error}") from error
    return places


def _root(folder: Folder) -> dict[str, Any]:
    file = StoredFile(folder, METADATA_NAME)
    size = file.size()
    if size > _MAX_BYTES:
        raise ValueError(f"longer than {_MAX_BYTES} bytes")
    return _fields(decode_records(bytes(file.read(0, size))), "Metadata", "MCoreMetadata")


def _tensor(name: str, fields: dict[str, Any], places: Mapping[tuple[str, tuple[int, ...]], tuple[str, str]]) -> Stored:
    properties = fields["properties"].state
    dtype = properties[0] if isinstance(properties, tuple) else properties.by_text()["dtype"]
    torch_dtype = getattr(torch, dtype.text.removeprefix("torch."), None)
    if not isinstance(torch_dtype, torch.dtype):
        raise ValueError(f"tensor {name}: unknown element type {dtype.text}")
    shape, chunks = _numbers(fields["size"]), []
    for record in fields["chunks"]:
        chunk = _fields(record, "ChunkStorageMetadata")
        box = Box(_numbers(chunk["offsets"]), _numbers(chunk["sizes"]))
        if box.num_elements:
            if (name, box.offset) not in places:
                raise ValueError(f"tensor {name}: no file holds its part at {list(box.offset)}")
            chunks.append((*places[name, box.offset], box))
    try:
        check_tiling(shape, [box for _, _, box in chunks])
    except ValueError as error:
        raise ValueError(f"tensor {name}: {error}") from error
    return dtype_code(torch_dtype), shape, chunks


def _fields(record: Any, *kinds: str) -> dict[str, Any]:
    """Of an object of one of these classes; a class that adds fields to the first is named after it."""
    if not isinstance(record, Call) or record.name.rpartition(".")[2] not in kinds or not isinstance(record.state, Table):
        raise ValueError(f"{kinds[0]} expected, found {getattr(record, 'name', type(record).__name__)}")
    return record.state.by_text()


def _size(numbers: tuple[int, ...]) -> Call:
    return Call("torch.Size", (tuple(numbers),))


def _numbers(record: Any) -> tuple[int, ...]:
    """The numbers of a torch.Size."""
    (numbers,) = record.arguments if isinstance(record, Call) and record.name == "torch.Size" else (record,)
    if not isinstance(numbers, tuple | list) or len(numbers) > 64 or not all(type(n) is int and 0 <= n < 2**62 for n in numbers):
        raise ValueError(f"{reprlib.repr(numbers)} is no shape")
    return tuple(numbers)

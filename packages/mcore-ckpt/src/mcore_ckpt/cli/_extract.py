# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""``mcore-ckpt extract``."""

import argparse
import os
import secrets
from functools import partial
from pathlib import Path

from mcore_ckpt._core import CheckpointReader, check_files
from mcore_ckpt._storage import LocalFolder, StoredFile, WatchedFolder, sync_folder, write_safetensors
from mcore_ckpt.cli._parts import Commands, add_source, add_verify, choose
from mcore_ckpt.cli._progress import progress
from mcore_ckpt.inspect import resolve_folder

__all__ = ["add_to"]


def add_to(commands: Commands) -> None:
    """Add the verb."""
    command = commands.add_parser("extract", help="write some tensors, whole, as one safetensors file")
    add_source(command)
    command.add_argument("output", type=Path, help="file to create")
    command.add_argument("patterns", nargs="+", metavar="PATTERN", help="a tensor's name, or a pattern such as 'layers.0.*'")
    add_verify(command)
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    reader = CheckpointReader(resolve_folder(options.directory))
    chosen = sorted(choose(reader.manifest.tensors, options.patterns))
    if os.path.lexists(options.output):
        raise ValueError(f"{options.output} exists; name a file to create")
    files = sorted({chunk.file for name in chosen for chunk in reader.record(name).chunks})
    total = sum(reader.record(name).num_bytes for name in chosen)
    compared = sum(reader.manifest.files[file].bytes for file in files) if options.verify else 0
    draft = options.output.with_name(f"{options.output.name}.{secrets.token_hex(4)}.partial")
    with progress("extracting", total + compared) as on_bytes:
        if options.verify:
            check_files(WatchedFolder(reader.folder, on_bytes), reader.manifest, files)
        entries = [(name, reader.record(name).dtype, reader.record(name).shape, partial(reader.read, name)) for name in chosen]
        write_safetensors(StoredFile(WatchedFolder(LocalFolder(draft.parent), on_bytes), draft.name), entries)
    os.replace(draft, options.output)
    sync_folder(draft.parent)
    return 0

# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A folder that appears under its name only when it is complete."""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mcore_ckpt._storage import sync_folder

__all__ = ["drafted_folder"]


@contextmanager
def drafted_folder(directory: str | Path) -> Iterator[Path]:
    """A new folder to write into, which gets the name ``directory`` at the end of the block, and goes with an error.

    Raises:
        ValueError: ``directory`` exists and has content.
    """
    target = Path(directory)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} exists and is not an empty folder; choose another or remove it")
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.partial-{secrets.token_hex(4)}")
    draft.mkdir()
    try:
        yield draft
        sync_folder(draft)
        os.replace(draft, target)
        sync_folder(target.parent)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
